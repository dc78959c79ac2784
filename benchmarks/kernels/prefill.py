"""Prefill attention over the paged cache, and FlashInfer's where the engine would take it."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from backend.attention.flashinfer_prefill import find_flashinfer
from backend.attention.interface import AttentionParams
from backend.kernels.paged_prefill import PrefillConfig, paged_prefill, prefill_config
from backend.slots import LONG_PREFILL_ROWS, StepShape, is_long_prefill
from benchmarks.kernels.common import BF16, BLOCK, HEADS, KV_HEADS, SIZE, Bench, Cache, random, timed

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


def bench_prefill(bench: Bench) -> None:
    """The works above, with each kernel that the engine may choose."""
    report, cache, sweep = bench.report, bench.cache, bench.sweep
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
