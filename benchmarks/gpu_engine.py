"""One engine under measurement: its start, and what a work's steps cost the CPU and the GPU."""

from __future__ import annotations

import gc
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from backend.api import BackendStats, GenerationHandle, GenerationRequest, Prompt, SamplingParams
from backend.config import EngineConfig
from backend.engine import AsyncEngine
from backend.streams import make_streams
from benchmarks.gpu_works import PROMPT_TOKENS, Work

_EDGE_PAUSE_S = 0.0002  # between looks at the counters, right before an edge of the steady part
_PAUSE_S = 0.001
_LONG_PAUSE_S = 0.01
_SETTLE_STEPS = 4  # after the last prompt, before the steady part begins
_MARGIN_STEPS = 12  # before the first end, where the steady part ends


@dataclass(frozen=True)
class Steps:
    """What the steps of a stretch of time cost, on average, in milliseconds a step."""

    steps: int
    active: float  # share of the time in which the GPU computed
    prepare_ms: float  # CPU: plan and host buffers, up to the launch
    busy_ms: float  # GPU: from the end of the wait for the inputs to the end of sampling
    idle_ms: float  # GPU: the rest

    @classmethod
    def between(cls, before: Moment, after: Moment) -> Steps:
        """From two moments with at least one step in between."""
        count = after.stats.steps - before.stats.steps
        busy, wall = after.stats.busy_s - before.stats.busy_s, after.at - before.at
        prepare = after.stats.prepare_s - before.stats.prepare_s
        each = 1e3 / count
        return cls(count, busy / wall, prepare * each, busy * each, (wall - busy) * each)


@dataclass(frozen=True)
class Moment:
    """The engine's counters at one time on the monotonic clock."""

    at: float
    stats: BackendStats


@dataclass(frozen=True)
class Figures:
    """One run of one work. ``steady`` leaves out the prompts and the end, where a work has such a part."""

    name: str
    whole_s: float
    prefill_s: float  # until every request had its first token
    tokens: int
    tokens_per_s: float
    # Of uniform works (whole - prefill) / (new tokens - 1); of long prompts the steady part's.
    step_ms: float | None
    all: Steps
    steady: Steps | None

    def to_dict(self) -> dict[str, Any]:
        """As JSON-safe values."""
        return asdict(self)


def configuration(folder: Path, works: list[Work], **options: Any) -> EngineConfig:
    """For random weights of the shape in ``folder``, with the slots and the context that the works need."""
    slots = max(work.slots for work in works)
    options = {"max_num_batched_tokens": max(2048, slots)} | options
    return EngineConfig(
        model=str(folder),
        load_format="dummy",
        tokenizer="none",
        max_num_seqs=slots,
        max_model_len=max(work.context for work in works),
        prefix_cache=False,
        **options,
    )


def write_shape(folder: Path, shape: Mapping[str, Any]) -> Path:
    """Write the ``config.json`` that gives random weights of this shape."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(shape)), encoding="utf-8")
    return folder


class Measured:
    """A started engine, and what its start took.

    Args:
        began: on the monotonic clock, when the start began; now, if unset.
    """

    def __init__(self, config: EngineConfig, began: float | None = None) -> None:
        began = time.monotonic() if began is None else began
        kernels = _cached_kernels()
        self.config = config
        self.engine = AsyncEngine(config)
        self.engine.start()
        warm = Work("first tokens", ((PROMPT_TOKENS, 2),) * 2, 2)
        self.vocabulary = self.engine.info().vocab_size
        for handle in self.submit(warm):
            handle.result()
        self.start_s = time.monotonic() - began
        gc.collect()
        gc.freeze()  # as a worker does: a full collection stops every thread for a third of a second
        self.kernels_built = _cached_kernels() - kernels

    def describe(self) -> dict[str, Any]:
        """What was chosen at the start, JSON-safe."""
        details = self.engine.info().details
        names = "mode max_num_seqs max_model_len max_num_batched_tokens num_kv_blocks kv_cache_bytes"
        shown = f"{names} attention long_prefill layers graphs graph_bytes graph_shared_bytes".split()
        facts = {name: details[name] for name in shown if name in details}
        return facts | {"start_to_first_token_s": self.start_s, "kernels_built": self.kernels_built}

    def run(self, work: Work) -> Figures:
        """Submit all requests of a work at once and wait for all.

        Raises:
            RuntimeError: a request got another number of tokens than it asked for.
        """
        requests = self._requests(work)
        before = self._moment()
        handles = [self.engine.submit(request) for request in requests]
        edges = self._steady(work, before.stats, handles[0].future.done)
        results = [handle.result() for handle in handles]
        after = self._moment()
        counts = [result.completion_tokens for result in results]
        if counts != [new for _, new in work.requests]:
            raise RuntimeError(f"{work.name}: {sum(counts)} tokens came back instead of {work.new_tokens}")
        whole = after.at - before.at
        prefill = max(result.time_to_first_token_s or 0.0 for result in results)
        steady = Steps.between(*edges) if edges else None
        step_ms = 1e3 * (whole - prefill) / work.steps if work.steps else None
        if steady and sum(prompt for prompt, _ in work.requests) > 10 * self.config.max_num_batched_tokens:
            # Their prompts take so many steps that the first rows end long before the last ones.
            step_ms = steady.busy_ms + steady.idle_ms
        return Figures(
            name=work.name,
            whole_s=whole,
            prefill_s=prefill,
            tokens=work.new_tokens,
            tokens_per_s=work.new_tokens / whole,
            step_ms=step_ms,
            all=Steps.between(before, after),
            steady=steady,
        )

    def submit(self, work: Work) -> list[GenerationHandle]:
        """Submit all requests of a work at once, and do not wait."""
        return [self.engine.submit(request) for request in self._requests(work)]

    def close(self) -> None:
        """Stop the engine; its memory is free once nobody holds this object."""
        self.engine.shutdown(drain=True)

    def _requests(self, work: Work) -> list[GenerationRequest]:
        return [
            GenerationRequest(
                request_id=str(index),
                prompt=Prompt(token_ids=prompt),
                sampling=SamplingParams(max_tokens=new, ignore_eos=True),
            )
            for index, (prompt, (_, new)) in enumerate(
                zip(work.prompts(self.vocabulary), work.requests, strict=True)
            )
        ]

    def _moment(self) -> Moment:
        return Moment(time.monotonic(), self.engine.stats())

    def _steady(
        self, work: Work, before: BackendStats, ended: Callable[[], bool]
    ) -> tuple[Moment, Moment] | None:
        """Both edges of the steady part, each right after a step has been retired; ``None`` if there is none."""
        steps = work.steps
        if steps is None or steps < 4 * (_SETTLE_STEPS + _MARGIN_STEPS):
            return None
        stats = self.engine.stats
        prompts = before.prompt_tokens + sum(prompt for prompt, _ in work.requests)
        ending = before.steps + steps + 1 - _MARGIN_STEPS  # the first to start are the first to end

        def wait(reached: Callable[[], bool], pause_s: float) -> bool:
            while not reached():
                if ended():
                    return False
                time.sleep(pause_s)
            return True

        def edge() -> Moment | None:
            last = stats().generated_tokens
            return self._moment() if wait(lambda: stats().generated_tokens > last, _EDGE_PAUSE_S) else None

        if not wait(lambda: stats().prompt_tokens >= prompts, _PAUSE_S):
            return None
        settled = stats().steps + _SETTLE_STEPS
        if not wait(lambda: stats().steps >= settled, _PAUSE_S):
            return None
        first = edge()
        if first is None or not wait(lambda: stats().steps >= ending, _LONG_PAUSE_S):
            return None
        last = edge()
        return (first, last) if last is not None and last.stats.steps > first.stats.steps else None


@contextmanager
def measured(config: EngineConfig, began: float | None = None) -> Iterator[Measured]:
    """An engine for the length of a ``with`` block; its memory is given back after it."""
    import torch

    one = Measured(config, began)
    try:
        yield one
    finally:
        one.close()
        one.__dict__.clear()
        gc.unfreeze()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def read_rate(device: str) -> float:
    """Highest rate of plain reductions over a tensor far larger than any cache, bytes/s."""
    import torch

    streams = make_streams(torch.device(device))
    begin, end = streams.mark(timed=True), streams.mark(timed=True)
    data = torch.ones(2**31 if device != "cpu" else 2**26, dtype=torch.float32, device=device)
    data[-1].item()  # filled on another stream
    best = 0.0
    with streams.compute():
        for reduce in (torch.sum, torch.amax, torch.linalg.vector_norm) * 5:
            begin.record()
            reduce(data)
            end.record()
            end.synchronize()
            best = max(best, data.nbytes / end.seconds_since(begin))
    return best


def _cached_kernels() -> int:
    """Entries of Triton's cache: what is built beyond them makes a start a cold one."""
    folder = Path(os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache")
    return len(list(folder.iterdir())) if folder.is_dir() else 0
