"""A share of the sweeps' kernels compiled into Triton's disk cache, to be timed later."""

from __future__ import annotations

import functools
import itertools
import sys

import torch

from backend.kernels.paged_decode import DecodeConfig
from backend.kernels.paged_prefill import PrefillConfig
from backend.kernels.skinny_linear import LinearConfig, LinearWorkspace, skinny_linear
from benchmarks.kernels.common import HIDDEN, QKV, Cache, random
from benchmarks.kernels.decode import DECODE_SWEEP, decode_calls
from benchmarks.kernels.linear import LINEAR_SWEEP
from benchmarks.kernels.prefill import PREFILL_SWEEP, prefill_calls


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
