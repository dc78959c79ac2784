"""What all parts share: the shapes, the report, the clock, and buffers larger than the cache."""

from __future__ import annotations

import contextlib
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from backend.kernels.skinny_linear import LinearConfig

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
COMPILE_BUDGET = 150.0  # seconds that all compilations of ``layer_compile`` together may take
PEAK_BYTES = 4.55e6  # a microsecond, as this memory reads at best; floors are reckoned by it


class Report:
    """Prints lines and keeps them, and records for JSON beside them.

    Args:
        output: where the lines go as they come, so that a run cut short keeps what it has; records go to the same
            name ending in ``.json``.
    """

    def __init__(self, output: Path | None = None) -> None:
        self.lines: list[str] = []
        self.records: list[dict[str, Any]] = []
        self._output = output

    def __call__(self, line: str = "") -> None:
        print(line, flush=True)
        self.lines.append(line)
        if self._output is not None:
            self._output.write_text("\n".join(self.lines) + "\n", encoding="utf-8")

    def record(self, part: str, **values: Any) -> None:
        """Keep one JSON-safe record of a part's."""
        self.records.append({"part": part, **values})
        if self._output is not None:
            text = json.dumps({"about": self.lines[:2], "records": self.records}, indent=1)
            self._output.with_suffix(".json").write_text(text + "\n", encoding="utf-8")

    @contextlib.contextmanager
    def guarded(self, what: str) -> Iterator[None]:
        """A failure within becomes a line and a record: the rest of a run on a lent machine goes on."""
        try:
            yield
        except Exception as error:
            text = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            self(f"  FAILED {what}: {text}")
            self.record("failures", what=what, error=text)


@dataclass(slots=True)
class Bench:
    """One run: what was asked for, where it is told, and what the parts leave to each other."""

    report: Report
    sweep: bool = False
    compile_budget: float = COMPILE_BUDGET
    # As ``linear`` found them, for ``chain``.
    best_linears: dict[str, LinearConfig] = field(default_factory=dict)
    _cache: Cache | None = None

    @property
    def cache(self) -> Cache:
        """A cache that takes a quarter of the free memory, made when a part first asks."""
        if self._cache is None:
            free = torch.cuda.mem_get_info()[0]
            self._cache = Cache(min(4_000_000, free // 4 // (KV_HEADS * SIZE * 4)))
        return self._cache


def timed(calls: Sequence[Callable[[], object]], *, replays: int = 7) -> float:
    """Microseconds a call, of calls replayed in one graph."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):  # not torch.cuda.graph, which collects garbage each time
        graph.capture_begin()
        try:
            for call in calls:
                call()
        except BaseException:
            with contextlib.suppress(Exception):  # a stream left in capture would fail whatever follows
                graph.capture_end()
            raise
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


def wake(seconds: float = 0.5) -> None:
    """Multiply until the clocks are up: a GPU that was idle would run the first measurements slower."""
    x = random(4096, 4096)
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        torch.mm(x, x)
        torch.cuda.synchronize()


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


def relative_error(output: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm of ``expected``; not a number where ``output`` has one that is none."""
    return float((output.float() - expected.float()).norm() / expected.float().norm())
