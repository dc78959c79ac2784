"""Backends that misbehave, for ``backend="tests.fleet.backends:…"``."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence

from backend.api import GenerationRequest
from backend.config import EngineConfig
from backend.echo import EchoBackend

POISON = "poison"


def aborts_of_poison(config: EngineConfig) -> EchoBackend:
    """Echo, until a prompt says the word, which ends the process as a fault in native code does."""

    def before_step(requests: Sequence[GenerationRequest]) -> None:
        if any(request.prompt.prompt == POISON for request in requests):
            os.abort()

    return EchoBackend(config, before_step=before_step)


def dies_of_poison(config: EngineConfig) -> EchoBackend:
    """Echo, until a prompt says the word."""

    def before_step(requests: Sequence[GenerationRequest]) -> None:
        if any(request.prompt.prompt == POISON for request in requests):
            raise RuntimeError("a sticky device error")

    return EchoBackend(config, before_step=before_step)


def hangs_of_poison(config: EngineConfig) -> EchoBackend:
    """Echo, until a prompt says the word: that step never ends, as with a driver that hangs."""

    def before_step(requests: Sequence[GenerationRequest]) -> None:
        if any(request.prompt.prompt == POISON for request in requests):
            threading.Event().wait()

    return EchoBackend(config, before_step=before_step)
