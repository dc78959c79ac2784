"""The kernels between the large ones, and what the memory yields at all."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from backend.kernels.activation import silu_and_mul
from backend.kernels.norm import add_rms_norm
from backend.kernels.rope_cache import rope_and_cache
from benchmarks.kernels.common import BF16, HEADS, HIDDEN, INNER, QKV, SIZE, Bench, Cache, random, timed


def bench_small(bench: Bench) -> None:
    """Norm, activation, and rotation with the write to the cache."""
    report, cache = bench.report, bench.cache
    report("small kernels, µs: plain, with dependent launch")
    for rows in (32, 256):
        for name, kernel in small_kernels(cache, rows).items():
            plain, dependent = (
                timed([functools.partial(kernel, turn, pdl) for turn in range(16)]) for pdl in (False, True)
            )
            report(f"  rows {rows:3} {name:12} {plain:6.1f} {dependent:6.1f}")


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


def bench_rates(bench: Bench) -> None:
    """Reading and copying large tensors."""
    report, cache = bench.report, bench.cache
    flat = cache.keys.flatten()
    size = flat.numel() * 2
    read = timed([lambda: flat.view(torch.int32).amax()])
    copied = cache.values.flatten()
    copy = timed([lambda: copied.copy_(flat)])
    report(
        f"memory: amax over a tensor reads {size / read / 1e6:.2f} TB/s, a copy moves {2 * size / copy / 1e6:.2f} TB/s"
    )
