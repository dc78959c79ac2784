"""The echo backend, whose tokens say when they were handed over: ``backend="benchmarks.stamped_echo:create_backend"``.

The moment is of the machine's monotonic clock, which all processes of a host share.
"""

from __future__ import annotations

import time

from backend import echo
from backend.api import GenerationHandle, TokenChunk
from backend.config import EngineConfig


class StampedHandle(GenerationHandle):
    """Puts a moment in the place of each chunk's text."""

    def push(self, chunk: TokenChunk) -> None:
        """Hand a chunk over; see the class."""
        super().push(TokenChunk(f"{time.monotonic_ns()} ", chunk.token_ids))


def create_backend(config: EngineConfig) -> echo.EchoBackend:
    """The backend, in a process of which nothing else is wanted."""
    setattr(echo, "GenerationHandle", StampedHandle)  # noqa: B010 - a type, to the type checker
    return echo.EchoBackend(config)
