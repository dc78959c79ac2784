"""Other tasks than generation jobs, such as the end of a chain: they run in a worker's few finaliser threads."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from workers.endings import Post
from workers.finaliser import Threads, run_call
from workers.intake import Call


class ForeignResult:
    """The apply result of another task: terminating it keeps its callbacks back."""

    def __init__(self) -> None:
        self.terminated = False

    def terminate(self, signal: Any = None) -> None:
        """Celery's way to end it. A thread cannot be stopped; what it returns is ignored."""
        self.terminated = True


class ForeignTasks:
    """Starts them, and counts those that run. Everything but the tasks is on the main thread.

    Args:
        post: runs an action on the main thread.
    """

    def __init__(self, post: Post) -> None:
        self._post = post
        self.running = 0

    def apply(
        self,
        threads: Threads,
        call: Call,
        callback: Callable[[Any], None] | None,
        error_callback: Callable[[Any], None] | None,
        accept_callback: Callable[[int, float], None] | None,
    ) -> ForeignResult:
        """Run one, and tell Celery of it."""
        self.running += 1
        result = ForeignResult()

        def work() -> None:
            if accept_callback is not None and not result.terminated:
                self._post(partial(accept_callback, os.getpid(), time.monotonic()))
            finish = None if result.terminated else run_call(call, callback, error_callback)[0]
            self._post(partial(self._end, result, finish))

        threads.submit(work)
        return result

    def _end(self, result: ForeignResult, finish: Callable[[], None] | None) -> None:
        self.running -= 1
        if finish is not None and not result.terminated:
            finish()
