"""Decode attention over the paged cache."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import Tensor

from backend.kernels.paged_decode import (
    MAX_SPLITS,
    DecodeConfig,
    DecodeWorkspace,
    decode_config,
    paged_decode,
)
from benchmarks.kernels.common import BF16, HEADS, KV_HEADS, SIZE, Bench, Cache, rotations, timed

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


def bench_decode(bench: Bench) -> None:
    """Rows by contexts, with and without dependent launch."""
    report, cache, sweep = bench.report, bench.cache, bench.sweep
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
