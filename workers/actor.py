"""A thread that owns some state and reacts to events, one at a time, in order."""

from __future__ import annotations

import heapq
import itertools
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

Action = Callable[[], None]
T = TypeVar("T")


class Actor:
    """Runs events and timers on one thread, so that what they touch needs no lock.

    Args:
        name: the thread's name.
        on_fault: told about an exception that an event raised; called on the thread, which goes on.
        clock: monotonic seconds.
    """

    def __init__(
        self, name: str, on_fault: Callable[[Exception], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._name = name
        self._on_fault = on_fault
        self._clock = clock
        self._events: queue.SimpleQueue[Action | None] = queue.SimpleQueue()
        self._timers: list[tuple[float, int, Action]] = []
        self._order = itertools.count()
        self._thread: threading.Thread | None = None

    def send(self, event: Action) -> None:
        """Have the thread run ``event``; from any thread."""
        self._events.put(event)

    def after(self, delay_s: float, event: Action) -> None:
        """Run ``event`` later; only from an event."""
        heapq.heappush(self._timers, (self._clock() + delay_s, next(self._order), event))

    def when(self, future: Future[T], event: Callable[[Future[T]], None]) -> None:
        """Run ``event`` with the future once that is done."""
        future.add_done_callback(lambda done: self.send(partial(event, done)))

    def start(self) -> None:
        """Start the thread."""
        self._thread = threading.Thread(target=self._loop, name=self._name, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread after the events sent so far; timers are dropped."""
        self._events.put(None)
        if self._thread is not None:
            self._thread.join()

    def run_pending(self) -> int:
        """Run what is due on the calling thread, for use without ``start``; returns how many events there were."""
        count = 0
        while True:
            try:
                event = self._events.get_nowait()
            except queue.Empty:
                event = self._due()
            if event is None:
                return count
            event()
            count += 1

    def _due(self) -> Action | None:
        if self._timers and self._timers[0][0] <= self._clock():
            return heapq.heappop(self._timers)[2]
        return None

    def _loop(self) -> None:
        while True:
            event = self._due()
            if event is None:
                # What is due later than a thread can wait for is looked at again then.
                left = self._timers[0][0] - self._clock() if self._timers else None
                timeout = None if left is None else min(max(0.0, left), threading.TIMEOUT_MAX)
                try:
                    event = self._events.get(timeout=timeout)
                except queue.Empty:
                    continue
                if event is None:
                    return
            try:
                event()
            except Exception as exc:
                self._on_fault(exc)
