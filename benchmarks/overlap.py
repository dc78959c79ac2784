"""Where the time of some steps goes, on the CPU and on the three streams: recorded by a profiler, drawn as a picture.

    python -m benchmarks.gpu --parts overlap --trace FILE    records both loops on a GPU
    python -m benchmarks.overlap --record FILE               draws them, on any machine

The profiler's trace tells each kernel and copy. It is also the cross-check of the engine's own GPU-active figure, which
comes from two events a step.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from statistics import mean, median
from typing import TYPE_CHECKING, Any

from benchmarks.report import RESULTS

if TYPE_CHECKING:  # drawing needs no torch
    from benchmarks.gpu_engine import Measured
    from benchmarks.gpu_works import Work

Interval = tuple[float, float]  # microseconds

RECORD = RESULTS / "overlap-h200.json"
PICTURE = Path(__file__).resolve().parent.parent / "docs" / "images" / "overlap-h200.svg"
_SETTLE_S = 0.3  # after the profiler has started, which holds everything up
_RECORD_S = 0.35
_DRAWN_STEPS = 4
_PHASES = ("prepare", "launch", "wait", "retire")
_STREAMS = ("h2d", "compute", "d2h")


# ------------------------------------------------------------------------------------------------------- intervals


def union(intervals: Iterable[Interval], gap: float = 0.0) -> list[Interval]:
    """The intervals merged where they touch or are no more than ``gap`` apart, in order."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1] + gap:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def length(intervals: Iterable[Interval], window: Interval) -> float:
    """Time within the window that the intervals cover; they must not overlap."""
    return sum(max(0.0, min(end, window[1]) - max(start, window[0])) for start, end in intervals)


# -------------------------------------------------------------------------------------------------------- recording


@dataclass
class HostStep:
    """What the engine's thread did in one call of ``step``, in microseconds of the wall clock."""

    phases: dict[str, list[Interval]] = field(default_factory=lambda: {name: [] for name in _PHASES})
    busy_us: float = 0.0  # by its events, of the step that was retired


@contextmanager
def host_steps(core: Any) -> Iterator[list[HostStep]]:
    """Note when an ``EngineCore`` prepares, launches, waits and retires; for the length of the block."""
    steps: list[HostStep] = []
    step, launch, retire = core.step, core._launch, core._retire

    def now() -> float:
        return time.time_ns() / 1e3

    def timed_step() -> None:
        steps.append(HostStep())
        began = now()
        steps[-1].phases["prepare"].append((began, began))
        step()

    def timed_launch(slot: Any) -> None:
        if not steps:  # the step was under way when the wrapping began
            launch(slot)
            return
        began = now()
        prepare = steps[-1].phases["prepare"]
        prepare[-1] = (prepare[-1][0], began)
        launch(slot)
        steps[-1].phases["launch"].append((began, now()))

    def timed_retire(slot: Any) -> None:
        if not steps:
            retire(slot)
            return
        began = now()
        slot.output_ready.synchronize()
        ready = now()
        busy_us = 1e6 * slot.compute_end.seconds_since(slot.compute_start)
        retire(slot)
        steps[-1].phases["wait"].append((began, ready))
        steps[-1].phases["retire"].append((ready, now()))
        steps[-1].busy_us = busy_us

    core.step, core._launch, core._retire = timed_step, timed_launch, timed_retire
    try:
        yield steps
    finally:
        del core.step, core._launch, core._retire


def record(measured: Measured, work: Work) -> dict[str, Any]:
    """Run a work under the profiler for a moment of its steady part; see ``evaluate``."""
    from torch.profiler import ProfilerActivity, profile

    parts = measured.engine._parts
    assert parts is not None
    handles = measured.submit(work)
    with host_steps(parts.core) as steps, profile(activities=[ProfilerActivity.CUDA]) as profiler:
        time.sleep(_SETTLE_S + _RECORD_S)
        recorded = time.time_ns() / 1e3  # to stop it takes as long again
    running = sum(not handle.future.done() for handle in handles)
    for handle in handles:
        handle.cancel()
    for handle in handles:
        handle.result()
    if running < len(handles):
        raise RuntimeError(f"{work.name} ended while it was recorded; take a longer one")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        trace = json.loads(path.read_text(encoding="utf-8"))
    window = (recorded - 1e6 * _RECORD_S, recorded)
    return evaluate(trace, steps, window) | {"mode": measured.config.mode, "work": work.name}


def evaluate(trace: dict[str, Any], steps: Sequence[HostStep], window: Interval) -> dict[str, Any]:
    """The GPU-active share three ways over the whole steps within ``window``, and the intervals of a few of them.

    ``events``: the engine's own, from its two events a step. ``steps``: from each step's first kernel to its last.
    ``kernels``: the union of all kernels, so that gaps between two kernels of one graph count as idle.

    Args:
        trace: a Chrome trace of ``torch.profiler``.
        steps: from ``host_steps``.
        window: microseconds of the wall clock, in which the profiler was running.

    Raises:
        RuntimeError: the trace has no two steps in the window.
    """
    base = float(trace.get("baseTimeNanoseconds", 0)) / 1e3
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    launches = sorted(base + e["ts"] for e in events if e["name"].startswith("cudaGraphLaunch"))
    kernels: dict[int, list[Interval]] = {}
    copies: dict[str, list[Interval]] = {"h2d": [], "d2h": []}
    for event in events:
        start = base + event["ts"]
        interval = (start, start + event["dur"])
        if event.get("cat") == "kernel":
            kernels.setdefault(event["args"]["correlation"], []).append(interval)
        elif event.get("cat") == "gpu_memcpy":
            for name, direction in (("h2d", "HtoD"), ("d2h", "DtoH")):
                if direction in event["name"]:
                    copies[name].append(interval)
    spans = sorted(  # the kernels of one graph's replay share their correlation
        (min(start for start, _ in run), max(end for _, end in run))
        for run in kernels.values()
        if len(run) > 1
    )
    inside = [span for span in spans if window[0] <= span[0] and span[1] <= window[1]]
    if len(inside) < 2:
        raise RuntimeError(f"the trace has {len(spans)} steps, {len(inside)} of them within the window")
    # From a step's begin to another's: each step with the idle time after it.
    whole = (inside[0][0], inside[-1][0])
    wall = whole[1] - whole[0]
    computed = union(interval for run in kernels.values() for interval in run)
    begun = [step for step in steps if step.phases["launch"]]
    shift = _shift(begun, launches)
    count = len(inside) - 1
    busy = [step.busy_us for step in steps if step.busy_us and _within(step, whole)]
    drawn = inside[len(inside) // 2 : len(inside) // 2 + _DRAWN_STEPS + 1]
    frame = (drawn[0][0] - 0.12 * (drawn[1][0] - drawn[0][0]), drawn[-1][0])
    return {
        "steps": count,
        "step_us": wall / count,
        "active": {
            "events": mean(busy) * count / wall if busy else None,
            "steps": length(union(inside), whole) / wall,
            "kernels": length(computed, whole) / wall,
        },
        "clock_shift_us": shift,
        "frame_us": frame[1] - frame[0],
        "rows": {
            **{name: _clip([i for s in steps for i in s.phases[name]], frame, shift) for name in _PHASES},
            "h2d": _clip(copies["h2d"], frame),
            "compute": _clip(spans, frame),
            "d2h": _clip(copies["d2h"], frame),
        },
    }


def _within(step: HostStep, window: Interval) -> bool:
    return bool(step.phases["wait"]) and window[0] <= step.phases["wait"][0][1] <= window[1]


def _shift(steps: Sequence[HostStep], launches: Sequence[float]) -> float:
    """What to add to the host's times so that each graph's launch lies within the time that its step launched.

    Both clocks count from the same moment, up to what it takes to read them; a larger difference is corrected.
    """
    off = []
    for at in launches:
        spans = [interval for step in steps for interval in step.phases["launch"]]
        start, end = min(spans, key=lambda span: abs((span[0] + span[1]) / 2 - at))
        off.append(0.0 if start <= at <= end else at - (start + end) / 2)
    return median(off) if off else 0.0


def _clip(intervals: Iterable[Interval], frame: Interval, shift: float = 0.0) -> list[list[float]]:
    """What of the intervals lies in the frame, from its begin, in whole tenths of a microsecond."""
    moved = ((start + shift, end + shift) for start, end in intervals)
    cut = ((max(start, frame[0]), min(end, frame[1])) for start, end in moved)
    return [[round(start - frame[0], 1), round(end - frame[0], 1)] for start, end in cut if end > start]


# ---------------------------------------------------------------------------------------------------------- drawing

_WIDTH, _LEFT, _RIGHT = 960, 118, 16
_ROW, _BAR = 26, 16
_COLOURS = {
    "prepare": ("#4c78a8",),
    "launch": ("#9ecae9",),
    "wait": ("#e4e4e4",),
    "retire": ("#72b7b2",),
    "h2d": ("#f58518",),
    "compute": ("#54a24b", "#88c27e"),  # the two slots
    "d2h": ("#b279a2",),
}
_ROWS = (("CPU", _PHASES), ("copy to GPU", ("h2d",)), ("compute", ("compute",)), ("copy from GPU", ("d2h",)))
_LEGEND = {
    "prepare": "prepare the next step",
    "launch": "launch it",
    "wait": "wait",
    "retire": "retire the step before",
}


def draw(recorded: dict[str, Any]) -> str:
    """The picture as SVG: the asynchronous loop above the synchronous one, on one scale."""
    runs = recorded["runs"]
    scale = (_WIDTH - _LEFT - _RIGHT) / max(run["frame_us"] for run in runs)
    parts: list[str] = []
    top = 12.0
    for run in runs:
        title = (
            f"{run['mode']}: {run['step_us'] / 1e3:.2f} ms a step, GPU active {run['active']['steps']:.1%}"
        )
        parts.append(_text(_LEFT, top + 12, title, weight="bold"))
        top += 22
        for label, names in _ROWS:
            parts.append(_text(_LEFT - 8, top + 13, label, anchor="end"))
            parts.append(_rectangle(_LEFT, top, _WIDTH - _LEFT - _RIGHT, "#f7f7f7"))
            for name in names:
                for index, (start, end) in enumerate(run["rows"][name]):
                    width = max(0.8, (end - start) * scale)  # a copy of some microseconds must still be seen
                    shades = _COLOURS[name]
                    parts.append(_rectangle(_LEFT + start * scale, top, width, shades[index % len(shades)]))
            top += _ROW
        top += 12
    parts += list(_axis(top - 8, scale, max(run["frame_us"] for run in runs)))
    top += 26
    x = float(_LEFT)
    for name, words in _LEGEND.items():
        parts.append(_rectangle(x, top, 12, _COLOURS[name][0], 12))
        parts.append(_text(x + 17, top + 11, words))
        x += 40 + 6.6 * len(words)
    height = top + 26
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height:.0f}" width="{_WIDTH}" '
        f'height="{height:.0f}" font-family="sans-serif" font-size="12">'
    )
    return "\n".join(
        [head, f'<rect width="{_WIDTH}" height="{height:.0f}" fill="#fff"/>', *parts, "</svg>", ""]
    )


def _rectangle(x: float, top: float, width: float, colour: str, height: float = _BAR) -> str:
    return f'<rect x="{x:.2f}" y="{top:.0f}" width="{width:.2f}" height="{height:.0f}" fill="{colour}"/>'


def _axis(top: float, scale: float, end_us: float) -> Iterator[str]:
    yield f'<line x1="{_LEFT}" y1="{top:.0f}" x2="{_WIDTH - _RIGHT}" y2="{top:.0f}" stroke="#888"/>'
    every = 5000 if end_us > 12_000 else 1000
    for at in range(0, int(end_us) + 1, every):
        x = _LEFT + at * scale
        yield f'<line x1="{x:.1f}" y1="{top:.0f}" x2="{x:.1f}" y2="{top + 5:.0f}" stroke="#888"/>'
        yield _text(x, top + 18, f"{at // 1000} ms", anchor="middle")


def _text(x: float, y: float, words: str, *, anchor: str = "start", weight: str = "normal") -> str:
    style = f' text-anchor="{anchor}"' if anchor != "start" else ""
    style += f' font-weight="{weight}"' if weight != "normal" else ""
    return f'<text x="{x:.0f}" y="{y:.0f}" fill="#222"{style}>{escape(words)}</text>'


def main(arguments: list[str] | None = None) -> None:
    """Draw the picture from the committed record."""
    parser = argparse.ArgumentParser(prog="benchmarks.overlap", description="Draw the steps' overlap.")
    parser.add_argument("--record", type=Path, default=RECORD)
    parser.add_argument("--out", type=Path, default=PICTURE)
    options = parser.parse_args(arguments)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(draw(json.loads(options.record.read_text(encoding="utf-8"))), encoding="utf-8")
    print(options.out)


if __name__ == "__main__":
    main()
