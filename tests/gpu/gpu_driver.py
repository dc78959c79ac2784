"""Runs the engine on a GPU: whole, with its thread, or its core alone, one step at a time."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from backend.api import GenerationHandle, GenerationRequest, Prompt, SamplingParams
from backend.assembly import EngineParts, build_engine
from backend.config import EngineConfig
from backend.core import EngineCore
from backend.engine import AsyncEngine
from backend.sequence import Sequence
from tests.engine.engine_driver import RecordingSink
from tests.gpu.gpu_models import DEVICE

_SETTINGS: dict[str, Any] = {
    "tokenizer": "none",
    "device": str(DEVICE),
    "dtype": "float32",
    "max_num_seqs": 12,
    "max_num_batched_tokens": 64,
    "num_kv_blocks": 240,
    "debug_poison": True,
}


def make_config(model: Path | str, **options: Any) -> EngineConfig:
    """The configuration of a test; ``options`` go before the defaults."""
    return EngineConfig(model=str(model), **{**_SETTINGS, **options})


def run_engine(
    model: Path | str, prompts: list[list[int]], sampling: list[dict[str, Any]], **options: Any
) -> tuple[list[list[int]], dict[str, Any]]:
    """Tokens of all requests, which are there before the first step, and the engine's details."""
    engine = AsyncEngine(make_config(model, **options))
    engine.start()
    submitted = threading.Event()

    def hold(_core: EngineCore) -> None:  # or the first requests would be done before the last are there
        submitted.wait()

    engine._inbox.put(hold)
    try:
        handles = [
            submit(engine, Prompt(token_ids=tuple(prompt)), **params)
            for prompt, params in zip(prompts, sampling, strict=True)
        ]
        submitted.set()
        tokens = [list(handle.result(timeout=120).token_ids) for handle in handles]
        stats = engine.stats()
        assert stats.kv_blocks_free == stats.kv_blocks_total
        return tokens, {**engine.info().details, "preemptions": stats.preemptions}
    finally:
        submitted.set()
        engine.shutdown(drain=True)


def submit(engine: AsyncEngine, prompt: Prompt, **sampling: Any) -> GenerationHandle:
    """Submit a request that no end token ends, unless ``sampling`` says otherwise."""
    params = SamplingParams(**{"ignore_eos": True, **sampling})
    return engine.submit(GenerationRequest(request_id="r", prompt=prompt, sampling=params))


class CoreDriver:
    """An engine without its thread: which step a request joins, and so what runs together, is the test's choice."""

    def __init__(self, model: Path | str, **options: Any) -> None:
        self.config = make_config(model, **options)
        self.sink = RecordingSink()
        self.parts: EngineParts = build_engine(self.config, lambda _loaded: self.sink, time.monotonic)
        self.core: EngineCore = self.parts.core
        self._numbers = itertools.count(1)

    def add(self, prompt: list[int], **sampling: Any) -> Sequence:
        """Queue a request for the next step."""
        params = SamplingParams(**{"ignore_eos": True, **sampling})
        request = GenerationRequest(request_id="r", prompt=Prompt(token_ids=tuple(prompt)), sampling=params)
        sequence = Sequence(
            request,
            GenerationHandle(request, lambda: None),
            list(prompt),
            number=next(self._numbers),
            seed=params.seed or 0,
            eos_ids=frozenset(),
            max_new_tokens=params.max_tokens,
            arrived_at=0.0,
        )
        self.core.add(sequence)
        return sequence

    def run(self) -> None:
        """Step until all work is done."""
        while self.core.has_work():
            self.core.step()
        self.core.check_idle()


def outcome(sequence: Sequence) -> tuple[Any, ...]:
    """All that a request got, log-probabilities to the bit."""
    return (sequence.output_ids, sequence.logprobs, sequence.finish_reason)


def count_flips(got: list[list[int]], wanted: list[list[int]]) -> tuple[int, int]:
    """Sequences that differ, and tokens up to each first difference (those after it follow from other text)."""
    flips = compared = 0
    for one, other in zip(got, wanted, strict=True):
        first = next((i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), None)
        flips += first is not None
        compared += len(one) if first is None else first + 1
    return flips, compared


@contextmanager
def skinny_products() -> Iterator[set[tuple[int, int, int]]]:
    """Those that kernels for few rows compute, or are captured to, from now on: padded rows, outputs, inputs."""
    from backend.kernels import skinny_linear

    found: set[tuple[int, int, int]] = set()
    original = skinny_linear._launch

    def launch(x: torch.Tensor, weight: torch.Tensor, *rest: Any, **options: Any) -> None:
        found.add((skinny_linear._rows_pad(len(x)), *weight.shape))
        original(x, weight, *rest, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(skinny_linear, "_launch", launch)
        yield found
