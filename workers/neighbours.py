"""How a worker that starts, or connects anew, asks the others what has been revoked: Celery's "mingle".

Celery waits a second for whoever may answer, also where nobody is there. Redis says how many heard a message, so that
the wait ends once all of those have answered, and is none for a worker that is alone.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

from celery.app.control import Control, Inspect

_NOBODY = "nobody@tokenmill"
"""No worker's name: all hear what is sent to it, and none acts on it."""


class NeighbourInspect(Inspect):  # type: ignore[misc]
    """Celery's questions to workers; ``hello`` is the one that a starting worker asks."""

    def hello(self, from_node: str, revoked: list[str] | None = None) -> dict[str, Any] | None:
        """As Celery's, until all that listen have answered, or the timeout; ``None`` where none listens."""
        listening = self._listening()
        if listening == 0:
            return None
        self.limit = listening
        answers: dict[str, Any] | None = super().hello(from_node, revoked)
        return answers

    def _listening(self) -> int | None:
        """How many workers hear control commands now; ``None`` where the transport does not count them."""
        if self.connection is None:
            return None
        mailbox = self.app.control.mailbox(self.connection)  # a copy
        mailbox.producer_pool = None  # so that it publishes on this connection, whose channel counts
        channel = self.connection.default_channel
        if not hasattr(channel, "heard"):
            return None
        channel.heard = 0
        mailbox.cast([_NOBODY], "ping")
        heard: int = self.connection.default_channel.heard  # another one, if it had to connect anew
        return heard


class NeighbourControl(Control):  # type: ignore[misc]
    """See the module."""

    @cached_property
    def inspect(self) -> Any:
        """The class of questions, bound to the application."""
        return self.app.subclass_with_self(NeighbourInspect, reverse="control.inspect")
