"""The GPU kernels one by one and as a chain of layers, in CUDA graphs, over buffers that no cache can hold.

    python -m benchmarks.kernels [--only decode,linear,chain,prefill,small,sampling] [--sweep] [--output FILE]

Shapes are those of Llama-3.1-8B in bfloat16. Each time is the median of several replays of a graph that calls the
kernel on one buffer set after the other. Bytes are those that must be moved at least once.
``--sweep`` tries every launch configuration instead of the chosen ones; ``--warm I/N`` only compiles a share of them.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from backend.attention.flashinfer_prefill import find_flashinfer
from backend.attention.interface import AttentionParams
from backend.kernels.activation import silu_and_mul
from backend.kernels.norm import add_rms_norm
from backend.kernels.paged_decode import (
    MAX_SPLITS,
    DecodeConfig,
    DecodeWorkspace,
    decode_config,
    paged_decode,
)
from backend.kernels.paged_prefill import PrefillConfig, paged_prefill, prefill_config
from backend.kernels.rope_cache import rope_and_cache
from backend.kernels.skinny_linear import (
    MAX_ROWS,
    LinearConfig,
    LinearWorkspace,
    linear_config,
    partial_linear,
    skinny_linear,
)
from backend.slots import LONG_PREFILL_ROWS, StepShape, is_long_prefill
from benchmarks.kernels_sampling import sampling_kernels

HEADS, KV_HEADS, SIZE, BLOCK, HIDDEN, INNER, VOCAB = 32, 8, 128, 16, 4096, 14336, 128256
QKV = (HEADS + 2 * KV_HEADS) * SIZE
BF16 = torch.bfloat16
ROTATE_BYTES = 256 * 2**20  # several times the L2 cache
LINEARS = {
    "qkv": (QKV, HIDDEN),
    "o": (HIDDEN, HIDDEN),
    "gate-up": (2 * INNER, HIDDEN),
    "down": (HIDDEN, INNER),
    "head": (VOCAB, HIDDEN),
}
DECODE_SWEEP = [
    (32, 2, 3),
    (32, 2, 5),
    (32, 4, 4),
    (64, 2, 3),
    (64, 4, 2),
    (64, 4, 3),
    (64, 4, 4),
    (64, 8, 3),
]
LINEAR_SWEEP = {
    "qkv": [
        (64, 128, 2, 4, 4),
        (64, 128, 2, 4, 5),
        (64, 64, 4, 4, 5),
        (64, 64, 2, 4, 8),
        (64, 128, 3, 4, 3),
        (64, 128, 5, 4, 2),
        (128, 64, 4, 4, 4),
    ],
    "o": [
        (64, 128, 4, 4, 4),
        (64, 128, 4, 4, 3),
        (64, 64, 4, 4, 8),
        (64, 64, 8, 4, 4),
        (64, 128, 2, 4, 6),
        (64, 64, 6, 4, 5),
    ],
    "gate-up": [
        (64, 128, 1, 4, 2),
        (64, 64, 1, 4, 3),
        (64, 64, 1, 4, 4),
        (128, 64, 1, 4, 4),
        (128, 128, 1, 4, 2),
        (64, 128, 1, 8, 2),
    ],
    "down": [
        (64, 128, 4, 4, 4),
        (64, 128, 4, 8, 4),
        (64, 64, 4, 4, 8),
        (64, 64, 8, 4, 4),
        (64, 256, 4, 4, 2),
        (64, 64, 6, 4, 5),
    ],
    "head": [
        (64, 128, 1, 4, 2),
        (64, 64, 1, 4, 4),
        (64, 64, 1, 4, 3),
        (64, 128, 1, 4, 3),
        (128, 128, 1, 4, 2),
    ],
}
# (tokens to compute, tokens in the cache before them) of each row
PREFILL_WORKS: dict[str, list[tuple[int, int]]] = {
    "4 prompts of 60 to 140": [(60 + 20 * i, 0) for i in range(4)],
    "8 prompts of 60 to 200": [(60 + 20 * i, 0) for i in range(8)],
    "8 prompts of 60 to 200 among 256 rows": [(0, 600)] * 248 + [(60 + 20 * i, 0) for i in range(8)],
    "16 prompts of 60 to 195": [(60 + 9 * i, 0) for i in range(16)],
    "32 prompts of 64": [(64, 0)] * 32,
    "300 after 0": [(300, 0)],
    "256 after 8192": [(256, 8192)],
    "300 and 15 of 60": [(300, 0)] + [(60, 0)] * 15,
    "16 x 128 after 1024, the last 256": [(128, 1024)] * 15 + [(256, 1024)],
    "4 x 256 after 1024": [(256, 1024)] * 4,
    "2048 after 0": [(2048, 0)],
    "2048 after 8192": [(2048, 8192)],
    "4 x 512 after 3584": [(512, 3584)] * 4,
    "240 rows, then 1024 after 1024": [(0, 600)] * 240 + [(1024, 1024)],
}
PREFILL_SWEEP = [
    (128, 64, 8, 3),
    (128, 64, 8, 2),
    (64, 64, 4, 3),
    (64, 64, 4, 2),
    (128, 128, 8, 2),
    (64, 32, 4, 3),
]


class Report:
    """Prints lines and keeps them."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def __call__(self, line: str = "") -> None:
        print(line, flush=True)
        self.lines.append(line)


def timed(calls: Sequence[Callable[[], object]], *, replays: int = 7) -> float:
    """Microseconds a call, of calls replayed in one graph."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):  # not torch.cuda.graph, which collects garbage each time
        graph.capture_begin()
        for call in calls:
            call()
        graph.capture_end()
    torch.cuda.synchronize()
    graph.replay()
    times = []
    for _ in range(replays):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return float(statistics.median(times)) * 1000 / len(calls)


def random(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=BF16)


def rotations(bytes_each: int, least: int = 4, most: int = 64) -> int:
    """How many buffer sets are needed so that none is in the cache when its turn comes."""
    return min(max(-(-ROTATE_BYTES // bytes_each), least), most)


class Cache:
    """One large paged cache; tables take consecutive, shuffled blocks of it."""

    def __init__(self, tokens: int) -> None:
        self.blocks = tokens // BLOCK
        shape = (self.blocks + 1, BLOCK, KV_HEADS, SIZE)
        self.keys = torch.randn(shape, device="cuda", dtype=BF16)
        self.values = torch.randn(shape, device="cuda", dtype=BF16)
        self.order = torch.randperm(self.blocks, device="cuda").int()

    def table(self, rows: int, context: int, turn: int) -> Tensor:
        """i32[rows, blocks of a row]; different turns use different blocks as long as the cache allows."""
        width = -(-context // BLOCK)
        first = turn * rows * width % max(self.blocks - rows * width, 1)
        return self.order[first : first + rows * width].view(rows, width)


def decode_calls(
    cache: Cache, rows: int, context: int, config: DecodeConfig, pdl: bool = False
) -> list[Callable[[], object]]:
    count = rotations(rows * context * KV_HEADS * SIZE * 4)
    query = torch.randn(rows, HEADS, SIZE, device="cuda", dtype=BF16)
    output = torch.empty_like(query)
    lengths = torch.full((rows,), context, device="cuda", dtype=torch.int32)
    workspace = DecodeWorkspace(rows, HEADS, SIZE, config.splits, torch.device("cuda"))

    def call(table: Tensor) -> Callable[[], object]:
        return lambda: paged_decode(
            query,
            cache.keys,
            cache.values,
            table,
            lengths,
            scale=SIZE**-0.5,
            workspace=workspace,
            config=config,
            output=output,
            pdl=pdl,
        )

    return [call(cache.table(rows, context, turn)) for turn in range(count)]


def bench_decode(report: Report, cache: Cache, sweep: bool) -> None:
    report("decode attention with merge, µs a layer: plain, with dependent launch")
    contexts = (128, 192, 608, 1100, 2048, 4096, 8192)
    for rows, context in itertools.product((1, 8, 32, 128, 256), contexts):
        if rows * context > 1_100_000:
            continue
        bytes_moved = rows * context * KV_HEADS * SIZE * 4
        chosen, early = (
            decode_config(rows, context, num_kv_heads=KV_HEADS, head_size=SIZE, dtype=BF16, pdl=pdl)
            for pdl in (False, True)
        )
        configs = [chosen]
        if sweep:
            wanted = [
                s for s in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, MAX_SPLITS) if useful(rows, context, s)
            ]
            configs += [DecodeConfig(t, s, w, n) for (t, w, n), s in itertools.product(DECODE_SWEEP, wanted)]
        times = {}
        for config in configs:
            times[config] = timed(decode_calls(cache, rows, context, config), replays=5 if sweep else 9)
        dependent = timed(decode_calls(cache, rows, context, early, pdl=True))
        best = sorted(times, key=lambda config: times[config])[:4] if sweep else []
        rate = bytes_moved / times[chosen] / 1e6
        line = (
            f"  rows {rows:3} context {context:4}: {times[chosen]:7.1f} µs {rate:5.2f} TB/s, {dependent:7.1f}"
        )
        report(
            line
            + f"  {short(chosen)} or n{early.stages}"
            + "".join(f" | {times[c]:.1f} {short(c)}" for c in best)
        )


def useful(rows: int, context: int, splits: int) -> bool:
    programs = rows * KV_HEADS * splits
    return splits == 1 or (splits * 32 <= context and programs <= 4096)


def short(config: DecodeConfig) -> str:
    return f"t{config.tile} s{config.splits} w{config.warps} n{config.stages}"


def bench_linear(report: Report, sweep: bool) -> dict[str, LinearConfig]:
    """Times cuBLAS and ours; returns the best of ours by name for 32 rows."""
    report("linear layers, µs: cuBLAS, then ours, plain and with dependent launch; * where ours is used")
    best = {}
    for rows, name in itertools.product((1, 16, 64, 32), LINEARS):
        config = bench_one_linear(report, name, rows, sweep and rows >= 32)
        if rows == 32:
            best[name] = config
    return best


def bench_one_linear(report: Report, name: str, rows: int, sweep: bool) -> LinearConfig:
    outputs, inputs = LINEARS[name]
    workspace = LinearWorkspace(torch.device("cuda"))
    weights = [random(outputs, inputs) * 0.02 for _ in range(min(rotations(outputs * inputs * 2), 12))]
    x, y = random(rows, inputs), random(rows, outputs)
    rate = outputs * inputs * 2 / 1e6
    cublas = timed([functools.partial(torch.mm, x, w.T, out=y) for w in weights])
    expected = x.float() @ weights[0].float().T
    times = {}
    chosen = linear_config(rows, outputs, inputs, x.device)
    shapes = LINEAR_SWEEP[name] if sweep or chosen is None else []
    if not sweep:
        shapes = shapes[:1]
    if chosen is not None:
        shapes = [dataclasses.astuple(chosen), *shapes]
    for shape in dict.fromkeys(shapes):
        call = functools.partial(skinny_linear, x, workspace=workspace, config=LinearConfig(*shape), output=y)
        try:
            difference = float((call(weights[0]).float() - expected).norm() / expected.norm())
            if not difference < 1e-2:
                report(f"  WRONG {name} {shape}: relative error {difference}")
                continue
            for pdl in (False, True):
                times[shape, pdl] = timed([functools.partial(call, w, pdl=pdl) for w in weights])
        except Exception as error:  # a configuration that does not fit is an answer too
            report(f"  FAILED {name} {shape}: {type(error).__name__} {str(error)[:200]}")
    best = sorted(times, key=lambda key: times[key])
    mark = " " if chosen is None else "*"
    line = f"  rows {rows:2} {name:8}{mark}cuBLAS {cublas:6.1f} ({rate / cublas:4.2f} TB/s)"
    for shape, pdl in best[:5]:
        micros = times[shape, pdl]
        line += f" | {micros:.1f} ({rate / micros:4.2f}) {'-'.join(map(str, shape))}{' pdl' * pdl}"
    report(line)
    return LinearConfig(*best[0][0])


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


def bench_chain(report: Report, cache: Cache, found: dict[str, LinearConfig]) -> None:
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
    floor = (weights + rows * context * KV_HEADS * SIZE * 4) / 4.55e6
    report(f"  rows {rows} context {context}: floor {floor:.1f}")
    expected = layers.run((), parts=False, pdl=False).float()
    for ours in choices:
        times = {}
        for parts, pdl in itertools.product((False, True) if "o" in ours else (False,), (False, True)):
            call = functools.partial(layers.run, ours, parts=parts, pdl=pdl)
            difference = float((call().float() - expected).norm() / expected.norm())
            if not difference < 5e-2:
                report(f"    WRONG {ours} parts={parts} pdl={pdl}: outputs differ by {difference:.1e}")
            times["parts" * parts + " pdl" * pdl or "plain"] = timed([call]) / layers.count
        line = ", ".join(f"{name.strip()} {micros:.1f}" for name, micros in times.items())
        report(f"    cuBLAS but {'+'.join(ours) or 'nothing'}: {line}")


def bench_prefill(report: Report, cache: Cache, sweep: bool) -> None:
    report("prefill attention, µs a layer; * as the engine chooses")
    for name, chunks in PREFILL_WORKS.items():
        flops = sum(4 * HEADS * SIZE * (n * cached + n * (n + 1) / 2) for n, cached in chunks)
        configs = [prefill_config(HEADS // KV_HEADS, SIZE, BF16, long=long) for long in (False, True)]
        if sweep:
            configs += [PrefillConfig(*shape) for shape in PREFILL_SWEEP]
        parts = []
        for index, config in enumerate(configs):
            micros = timed(prefill_calls(cache, chunks, config))
            mark = "*" if index == int(is_long_prefill([n for n, _ in chunks if n])) else ""
            parts.append(
                f"{mark}{micros:.1f} ({flops / micros / 1e6:.0f} TFLOP/s) p{config.pairs} t{config.tile} "
                f"w{config.warps} n{config.stages}"
            )
        if planned := flashinfer_calls(cache, chunks):
            parts.append(f"FlashInfer FA3 {timed(planned):.1f}")
        report(f"  {name}: " + " | ".join(parts))


def flashinfer_calls(cache: Cache, chunks: list[tuple[int, int]]) -> list[Callable[[], object]]:
    """The kernel that the engine would take where it has been built, for steps that it would take it for."""
    rows = [(n, cached) for n, cached in chunks if n]
    if not is_long_prefill([n for n, _ in rows]):
        return []
    longest = max(map(sum, rows))
    found = find_flashinfer(
        "auto",
        params=[AttentionParams(scaling=SIZE**-0.5, window=None, softcap=None, sinks=None)],
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_size=SIZE,
        block_size=BLOCK,
        max_tokens=sum(n for n, _ in rows),
        max_blocks=-(-longest // BLOCK),
        dtype=BF16,
        device=torch.device("cuda", torch.cuda.current_device()),
    )
    if found is None:
        return []
    found.plan(0, StepShape(0, True, True, 0, [n for n, _ in rows], [sum(row) for row in rows]))
    query = random(sum(n for n, _ in rows), HEADS, SIZE)
    run = functools.partial(found.run, query, cache.keys, cache.values)
    tables = [cache.table(len(rows), longest, turn) for turn in range(4)]
    output = torch.empty_like(query)
    return [functools.partial(run, table, slot=0, scale=SIZE**-0.5, output=output) for table in tables]


def prefill_calls(
    cache: Cache, chunks: list[tuple[int, int]], config: PrefillConfig
) -> list[Callable[[], object]]:
    counts = torch.tensor([0] + [n for n, _ in chunks])
    starts = counts.cumsum(0).int().cuda()
    lengths = torch.tensor([sum(chunk) for chunk in chunks], device="cuda", dtype=torch.int32)
    query = random(int(counts.sum()), HEADS, SIZE)
    tables = [cache.table(len(chunks), int(lengths.max()), turn) for turn in range(4)]
    most = LONG_PREFILL_ROWS if is_long_prefill([n for n, _ in chunks if n]) else None

    def call(table: Tensor) -> object:
        return paged_prefill(
            query,
            cache.keys,
            cache.values,
            table,
            starts,
            lengths,
            scale=SIZE**-0.5,
            config=config,
            most_rows=most,
        )

    return [functools.partial(call, table) for table in tables]


def bench_small(report: Report, cache: Cache) -> None:
    report("small kernels, µs: plain, with dependent launch")
    for rows in (32, 256):
        for name, kernel in small_kernels(cache, rows).items():
            plain, dependent = (
                timed([functools.partial(kernel, turn, pdl) for turn in range(16)]) for pdl in (False, True)
            )
            report(f"  rows {rows:3} {name:12} {plain:6.1f} {dependent:6.1f}")


def bench_sampling(report: Report) -> None:
    report("sampling, µs: plain, with dependent launch; logits are normal numbers, or three times these")
    for rows in (32, 256):
        for scale in (1.0, 3.0):
            for name, kernel in sampling_kernels(rows, VOCAB, scale=scale).items():
                plain, dependent = (
                    timed([functools.partial(kernel, turn, pdl) for turn in range(8)])
                    for pdl in (False, True)
                )
                report(f"  rows {rows:3} x{scale:.0f} {name:12} {plain:6.1f} {dependent:6.1f}")


def small_kernels(cache: Cache, rows: int) -> dict[str, Callable[[int, bool], object]]:
    x, gate_up, qkv = ([random(rows, size) for _ in range(16)] for size in (HIDDEN, 2 * INNER, QKV))
    gain = torch.ones(HIDDEN, device="cuda", dtype=BF16)
    positions = torch.arange(rows, device="cuda", dtype=torch.int32)
    cos_sin = torch.randn(rows, SIZE, device="cuda")

    def rope(turn: int, pdl: bool) -> object:
        return rope_and_cache(
            qkv[turn], positions, cos_sin, positions, cache.keys, cache.values, num_heads=HEADS, pdl=pdl
        )

    return {
        "add+norm": lambda turn, pdl: add_rms_norm(x[turn], x[turn - 1], gain, 1e-5, pdl=pdl),
        "silu": lambda turn, pdl: silu_and_mul(gate_up[turn], pdl=pdl),
        "rope+cache": rope,
    }


def bench_rates(report: Report, cache: Cache) -> None:
    flat = cache.keys.flatten()
    size = flat.numel() * 2
    read = timed([lambda: flat.view(torch.int32).amax()])
    copied = cache.values.flatten()
    copy = timed([lambda: copied.copy_(flat)])
    report(
        f"memory: amax over a tensor reads {size / read / 1e6:.2f} TB/s, a copy moves {2 * size / copy / 1e6:.2f} TB/s"
    )


def warm(share: str, cache: Cache) -> None:
    """Compile this share of the sweeps' kernels into Triton's disk cache."""
    index, of = map(int, share.split("/"))
    jobs = [decode_calls(cache, 2, 64, DecodeConfig(t, 1, w, n))[0] for t, w, n in DECODE_SWEEP]
    jobs += [prefill_calls(cache, [(64, 0)] * 2, PrefillConfig(*shape))[0] for shape in PREFILL_SWEEP]
    workspace = LinearWorkspace(torch.device("cuda"))
    x, weight = random(32, HIDDEN), random(QKV, HIDDEN)
    shapes = sorted({shape for shapes in LINEAR_SWEEP.values() for shape in shapes})
    for shape, pdl in itertools.product(shapes, (False, True)):
        config = LinearConfig(*shape)
        jobs.append(functools.partial(skinny_linear, x, weight, workspace=workspace, config=config, pdl=pdl))
    for job in jobs[index::of]:
        try:
            job()
        except Exception as error:
            print(f"warm: {type(error).__name__} {str(error)[:300]}", file=sys.stderr)
    torch.cuda.synchronize()


def main() -> None:
    """Entry point; see the module's docstring."""
    parser = argparse.ArgumentParser(description="Time the GPU kernels")
    parser.add_argument("--only", default="rates,small,sampling,decode,linear,chain,prefill")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--warm")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    if options.warm:
        warm(options.warm, Cache(4096))
        return
    import triton

    report = Report()
    name, free = torch.cuda.get_device_name(), torch.cuda.mem_get_info()[0]
    report(f"{name}, torch {torch.__version__}, triton {triton.__version__}, CUDA {torch.version.cuda}")
    report(f"command: python -m benchmarks.kernels {' '.join(sys.argv[1:])}")
    cache = Cache(min(4_000_000, free // 4 // (KV_HEADS * SIZE * 4)))
    found: dict[str, LinearConfig] = {}
    for part in options.only.split(","):
        began = time.monotonic()
        if part == "rates":
            bench_rates(report, cache)
        elif part == "decode":
            bench_decode(report, cache, options.sweep)
        elif part == "linear":
            found = bench_linear(report, options.sweep)
        elif part == "chain":
            bench_chain(report, cache, found or engine_linears())
        elif part == "prefill":
            bench_prefill(report, cache, options.sweep)
        elif part == "small":
            bench_small(report, cache)
        elif part == "sampling":
            bench_sampling(report)
        print(f"({part}: {time.monotonic() - began:.0f} s)", flush=True)
        if options.output:
            options.output.write_text("\n".join(report.lines) + "\n")


if __name__ == "__main__":
    main()
