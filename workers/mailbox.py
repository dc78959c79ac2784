"""What other threads want done on the main thread, where Celery's requests live."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from celery.utils.log import get_logger

logger = get_logger(__name__)


class Mailbox:
    """Actions for the main thread, in order. The hub runs them, or ``run`` does while a shutdown drains.

    ``around`` makes a context for each round of them: what they acknowledge in it is sent together.
    """

    def __init__(self) -> None:
        self.around: Callable[[], AbstractContextManager[None]] = nullcontext
        self._actions: deque[Callable[[], None]] = deque()
        self._arrived = threading.Event()
        self._hub: Any = None
        self._scheduled = False

    def attach(self, hub: Any) -> None:
        """Let this event loop run the actions from now on."""
        self._hub = hub
        self._scheduled = False
        if self._actions:
            self._schedule()

    def detach(self) -> None:
        """From now on only ``run`` runs them."""
        self._hub = None

    def post(self, action: Callable[[], None]) -> None:
        """Leave an action; from any thread."""
        self._actions.append(action)
        self._arrived.set()
        self._schedule()

    def run(self, timeout_s: float = 0.0) -> int:
        """Run what is there, after waiting for it up to ``timeout_s``; returns how many actions."""
        if timeout_s and not self._actions:
            self._arrived.wait(timeout_s)
        self._arrived.clear()
        self._scheduled = False
        count = 0
        with self.around():
            while self._actions:
                action = self._actions.popleft()
                count += 1
                try:
                    action()
                except Exception as exc:
                    logger.error("A callback failed: %r", exc, exc_info=True)
        return count

    def _schedule(self) -> None:
        hub = self._hub
        if hub is not None and not self._scheduled:
            self._scheduled = True
            hub.call_soon(self.run)
