"""Decoder layers in a chain, with cuBLAS for some or all of their products."""

from __future__ import annotations

import functools
import itertools

import torch
from torch import Tensor

from backend.kernels.activation import silu_and_mul
from backend.kernels.norm import add_rms_norm
from backend.kernels.paged_decode import DecodeWorkspace, decode_config, paged_decode
from backend.kernels.rope_cache import rope_and_cache
from backend.kernels.skinny_linear import (
    MAX_ROWS,
    LinearConfig,
    LinearWorkspace,
    linear_config,
    partial_linear,
    skinny_linear,
)
from benchmarks.kernels.common import (
    BF16,
    BLOCK,
    HEADS,
    HIDDEN,
    KV_HEADS,
    LINEARS,
    PEAK_BYTES,
    SIZE,
    Bench,
    Cache,
    Report,
    random,
    relative_error,
    timed,
)


class Layers:
    """The kernels of decoder layers with weights of their own, in the order in which a model calls them."""

    def __init__(
        self, cache: Cache, rows: int, context: int, count: int, linears: dict[str, LinearConfig]
    ) -> None:
        self.linears = linears
        self.cache, self.rows, self.context, self.count = cache, rows, context, count
        self.weights = [
            {name: random(*LINEARS[name]) * 0.02 for name in list(LINEARS)[:4]} for _ in range(count)
        ]
        self.gain = torch.ones(HIDDEN, device="cuda", dtype=BF16)
        self.x = torch.randn(rows, HIDDEN, device="cuda", dtype=BF16)
        self.lengths = torch.full((rows,), context, device="cuda", dtype=torch.int32)
        self.positions = self.lengths - 1
        self.cos_sin = torch.randn(context, SIZE, device="cuda")
        self.tables = [cache.table(rows, context, turn) for turn in range(count)]
        self.slots = [
            (table[:, -1] * BLOCK + (context - 1) % BLOCK).int().contiguous() for table in self.tables
        ]
        self.configs = [
            decode_config(rows, context, num_kv_heads=KV_HEADS, head_size=SIZE, dtype=BF16, pdl=pdl)
            for pdl in (False, True)
        ]
        self.workspace = DecodeWorkspace(rows, HEADS, SIZE, self.configs[0].splits, torch.device("cuda"))
        self.sums = LinearWorkspace(torch.device("cuda"))

    def run(self, ours: tuple[str, ...], *, parts: bool, pdl: bool) -> Tensor:
        """The last layer's output; ``ours`` names the products that cuBLAS does not compute."""
        x, residual = self.x, self.x
        for turn, weights in enumerate(self.weights):

            def linear(value: Tensor, name: str, weights: dict[str, Tensor] = weights) -> Tensor:
                if name not in ours:
                    return torch.nn.functional.linear(value, weights[name])
                config = self.linears[name]
                if parts and name in ("o", "down"):
                    return partial_linear(value, weights[name], config=config, pdl=pdl)
                return skinny_linear(value, weights[name], workspace=self.sums, config=config, pdl=pdl)

            h, residual = add_rms_norm(x, residual, self.gain, 1e-5, pdl=pdl)
            qkv = linear(h, "qkv")
            query = rope_and_cache(
                qkv,
                self.positions,
                self.cos_sin,
                self.slots[turn],
                self.cache.keys,
                self.cache.values,
                num_heads=HEADS,
                pdl=pdl,
            )
            mixed = paged_decode(
                query,
                self.cache.keys,
                self.cache.values,
                self.tables[turn],
                self.lengths,
                scale=SIZE**-0.5,
                workspace=self.workspace,
                config=self.configs[pdl],
                pdl=pdl,
            )
            h, residual = add_rms_norm(linear(mixed.flatten(1), "o"), residual, self.gain, 1e-5, pdl=pdl)
            x = linear(silu_and_mul(linear(h, "gate-up"), pdl=pdl), "down")
        return add_rms_norm(x, residual, self.gain, 1e-5, pdl=pdl)[0]


def bench_chain(bench: Bench) -> None:
    """Chains of eight layers, with the launch constants that ``linear`` found in this run, or else the engine's."""
    report, cache, found = bench.report, bench.cache, bench.best_linears or engine_linears()
    report("chain of decoder layers, µs a layer (floor: weights and KV at 4.55 TB/s)")
    choices = [(), ("o",), ("o", "down"), ("o", "gate-up", "down"), ("qkv", "o", "gate-up", "down")]
    choices = [names for names in choices if found.keys() >= set(names)]
    for rows, context in ((32, 192), (32, 608), (32, 4096), (128, 608), (256, 608)):
        layers = Layers(cache, rows, context, 8, found)
        bench_layers(report, layers, choices if rows <= MAX_ROWS else choices[:1])


def engine_linears() -> dict[str, LinearConfig]:
    """What the engine uses at 32 rows in place of cuBLAS."""
    device = torch.device("cuda")
    configs = {name: linear_config(32, *shape, device) for name, shape in LINEARS.items()}
    return {name: config for name, config in configs.items() if config is not None}


def bench_layers(report: Report, layers: Layers, choices: list[tuple[str, ...]]) -> None:
    rows, context = layers.rows, layers.context
    weights = sum(n * k for n, k in list(LINEARS.values())[:4]) * 2
    floor = (weights + rows * context * KV_HEADS * SIZE * 4) / PEAK_BYTES
    report(f"  rows {rows} context {context}: floor {floor:.1f}")
    expected = layers.run((), parts=False, pdl=False)
    for ours in choices:
        times = {}
        for parts, pdl in itertools.product((False, True) if "o" in ours else (False,), (False, True)):
            call = functools.partial(layers.run, ours, parts=parts, pdl=pdl)
            difference = relative_error(call(), expected)
            if not difference < 5e-2:
                report(f"    WRONG {ours} parts={parts} pdl={pdl}: outputs differ by {difference:.1e}")
            times["parts" * parts + " pdl" * pdl or "plain"] = timed([call]) / layers.count
        line = ", ".join(f"{name.strip()} {micros:.1f}" for name, micros in times.items())
        report(f"    cuBLAS but {'+'.join(ours) or 'nothing'}: {line}")
