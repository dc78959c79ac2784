"""Which kernels a decode step spends its time in: a profiler's trace of steps in which nothing but decoding happens."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from benchmarks.gpu_works import Work

if TYPE_CHECKING:  # the report needs no torch
    from benchmarks.gpu_engine import Measured

_SETTLE_S = 0.3
_RECORD_S = 0.35
_SHOWN = 16
_STEP_END = "Memcpy DtoH"  # one a step
_LONGEST_NAME = 58


@dataclass(frozen=True, slots=True)
class KernelTime:
    """All launches of one kernel in the traced steps."""

    name: str
    launches: float  # a step
    us: float  # a step


def record(measured: Measured, work: Work) -> str:
    """Trace a work's steady part, and tell what its steps consist of.

    Raises:
        RuntimeError: the work ended while it was traced.
    """
    from torch.profiler import ProfilerActivity, profile

    stats = measured.engine.stats
    prompts = stats().prompt_tokens + sum(prompt for prompt, _ in work.requests)
    handles = measured.submit(work)
    while stats().prompt_tokens < prompts and not handles[0].done():
        time.sleep(0.001)
    time.sleep(_SETTLE_S)  # the last prompt's step, and those under way
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        time.sleep(_RECORD_S)
        running = sum(not handle.future.done() for handle in handles)
    for handle in handles:
        handle.cancel()
    for handle in handles:
        handle.result()
    if running < len(handles):
        raise RuntimeError(f"{work.name} ended while it was traced; take a longer one")
    found = kernel_times(
        (event.key, event.count, event.self_device_time_total) for event in trace.key_averages()
    )
    return report(work, *found)


def kernel_times(events: Iterable[tuple[str, int, Any]]) -> tuple[int, list[KernelTime]]:
    """Steps in a trace, and its kernels a step, longest first; from names, launches and microseconds.

    Raises:
        RuntimeError: the trace holds no step.
    """
    launches: defaultdict[str, int] = defaultdict(int)
    spent: defaultdict[str, float] = defaultdict(float)
    for name, count, us in events:
        if us > 0:
            launches[name] += count
            spent[name] += us
    steps = sum(count for name, count in launches.items() if name.startswith(_STEP_END))
    if not steps:
        raise RuntimeError("the trace holds no step")
    times = [KernelTime(name, launches[name] / steps, spent[name] / steps) for name in spent]
    return steps, sorted(times, key=lambda each: -each.us)


def report(work: Work, steps: int, times: list[KernelTime]) -> str:
    """The longest kernels as lines."""
    whole = sum(each.us for each in times)
    lines = [
        f"kernels of a decode step, {work.slots} rows: {whole / 1e3:.3f} ms in kernels, mean of {steps} steps"
    ]
    for each in times[:_SHOWN]:
        name = each.name if len(each.name) <= _LONGEST_NAME else each.name[: _LONGEST_NAME - 1] + "…"
        lines.append(
            f"  {name:{_LONGEST_NAME}} {each.us:8.1f} µs {each.us / whole:6.1%}  {each.launches:6.1f} x "
            f"{each.us / each.launches:.2f}"
        )
    rest = times[_SHOWN:]
    if rest:
        us = sum(each.us for each in rest)
        lines.append(f"  {f'{len(rest)} others':{_LONGEST_NAME}} {us:8.1f} µs {us / whole:6.1%}")
    return "\n".join(lines)
