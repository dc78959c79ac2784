"""Backends for chaos runs, named by their path: ``backend="tests.chaos.backends:aborts"``."""

from __future__ import annotations

import os
from collections.abc import Sequence

from backend.api import GenerationRequest
from backend.config import EngineConfig
from backend.echo import EchoBackend

POISON = "poison-that-aborts"


def aborts(config: EngineConfig) -> EchoBackend:
    """Echo, until a running prompt holds the word: then the process is gone, as after a fault in native code."""

    def before_step(requests: Sequence[GenerationRequest]) -> None:
        if any(POISON in (request.prompt.prompt or "") for request in requests):
            os.abort()

    return EchoBackend(config, before_step=before_step)
