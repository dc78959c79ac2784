"""Backends for chaos runs, named by their path: ``backend="tests.chaos.backends:aborts"``."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from backend.api import GenerationHandle, GenerationRequest
from backend.config import EngineConfig
from backend.echo import EchoBackend
from backend.engine import AsyncEngine
from backend.runner import Runner
from backend.slots import Slot
from models_db.writer import DatabaseThread

POISON = "poison-that-aborts"
HOLD_VARIABLE = "CHAOS_HOLD"  # a file, see ``waits_before_a_commit``
_GATHERS_S = 3.0


def _poisonous(request: GenerationRequest) -> bool:
    return POISON in (request.prompt.prompt or "")


def aborts(config: EngineConfig) -> EchoBackend:
    """Echo, until a running prompt holds the word: then the process is gone, as after a fault in native code."""

    def before_step(requests: Sequence[GenerationRequest]) -> None:
        if any(map(_poisonous, requests)):
            os.abort()

    return EchoBackend(config, before_step=before_step)


def aborts_in_company(config: EngineConfig) -> EchoBackend:
    """The same, after some seconds in which no job ends and the worker goes on to claim all that it can."""

    def before_step(requests: Sequence[GenerationRequest]) -> None:
        if any(map(_poisonous, requests)):
            time.sleep(_GATHERS_S)
            os.abort()

    return EchoBackend(config, before_step=before_step)


def waits_before_a_commit(config: EngineConfig) -> EchoBackend:
    """Echo in a worker that is about to commit ends of jobs, and holds no lock yet, for as long as a file is there.

    The file's name is in the environment; its content says ``held`` from then on.
    """
    commit = DatabaseThread._transact
    file = Path(os.environ[HOLD_VARIABLE])

    def transact(self: DatabaseThread, batch: Any) -> list[Any]:
        if any(op.kind.value == "finish" for op in batch.ops):
            while file.exists():
                file.write_text("held")
                time.sleep(0.02)
        return commit(self, batch)

    DatabaseThread._transact = transact  # type: ignore[method-assign]
    return EchoBackend(config)


class _PacedRunner:
    """Computes steps at the pace of the echo, and no step more once a poisonous prompt has come."""

    def __init__(self, runner: Runner, tokens_per_s: float | None) -> None:
        self._runner = runner
        self._step_s = 0.0 if tokens_per_s is None else 1 / tokens_per_s
        self.poisoned = False

    def execute(self, slot: Slot, previous: Slot | None) -> None:
        """See ``Runner.execute``."""
        if self.poisoned:
            os.abort()
        time.sleep(self._step_s)
        self._runner.execute(slot, previous)


class PacedEngine(AsyncEngine):
    """The asynchronous engine at ``echo_tokens_per_s``, that aborts as ``aborts`` does."""

    def start(self) -> None:
        """See ``Backend.start``."""
        super().start()
        assert self._parts is not None
        core = self._parts.core
        self._paced = _PacedRunner(core._runner, self._config.echo_tokens_per_s)
        core._runner = self._paced  # type: ignore[assignment]

    def submit(self, request: GenerationRequest) -> GenerationHandle:
        """See ``Backend.submit``."""
        handle = super().submit(request)
        self._paced.poisoned |= _poisonous(request)
        return handle


def paced_engine(config: EngineConfig) -> PacedEngine:
    """A real engine for ``tests.chaos.tiny``."""
    return PacedEngine(config)


class _LeakyEngine(PacedEngine):
    """One that has lost a block."""

    def start(self) -> None:
        """See ``Backend.start``."""
        super().start()
        assert self._parts is not None
        self._parts.core.allocator.allocate()


def leaky_engine(config: EngineConfig) -> PacedEngine:
    """To see whether a leak is noticed."""
    return _LeakyEngine(config)


class _LyingEngine(PacedEngine):
    """One that answers something else."""

    def submit(self, request: GenerationRequest) -> GenerationHandle:
        """See ``Backend.submit``."""
        other = request.sampling.model_copy(update={"max_tokens": request.sampling.max_tokens - 1})
        return super().submit(request.model_copy(update={"sampling": other}))


def lying_engine(config: EngineConfig) -> PacedEngine:
    """To see whether a wrong answer is noticed."""
    return _LyingEngine(config)
