"""Backends that misbehave on a GPU, for ``backend="tests.gpu.gpu_backends:…"``."""

from __future__ import annotations

import torch

from backend.api import GenerationHandle, GenerationRequest
from backend.config import EngineConfig
from backend.engine import AsyncEngine
from backend.runner import Runner
from backend.slots import Slot

POISON = 7
"""The first token of a prompt that hangs the GPU."""


class HangingRunner:
    """Computes steps, until one is to hang: a kernel that spins for centuries goes before it."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.hang = False

    def execute(self, slot: Slot, previous: Slot | None) -> None:
        """See ``Runner.execute``."""
        if self.hang:
            torch.cuda._sleep(2**62)
        self._runner.execute(slot, previous)


class HangingEngine(AsyncEngine):
    """The engine, until a prompt begins with the poison."""

    def start(self) -> None:
        """See ``Backend.start``."""
        super().start()
        assert self._parts is not None
        self._runner = HangingRunner(self._parts.core._runner)
        self._parts.core._runner = self._runner

    def submit(self, request: GenerationRequest) -> GenerationHandle:
        """See ``Backend.submit``."""
        handle = super().submit(request)
        if request.prompt.token_ids is not None and request.prompt.token_ids[0] == POISON:
            self._runner.hang = True
        return handle


def hangs_of_poison(config: EngineConfig) -> HangingEngine:
    """As a kernel or a driver that never comes back: the process can do nothing about it."""
    return HangingEngine(config)
