"""Notices an engine that hangs: one that has work and takes no step.

A step can hang in the driver or in a kernel for ever, and no thread of Python can end it. The worker looks well then:
it beats, renews its leases, and its jobs would run for as long as it lives. So it is held for dead and starts anew.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait

from backend.api import Backend, BackendStats, EngineDeadError
from workers.exits import EXIT_ENGINE_DEAD

_PERIOD_S = 1.0
_LONGEST_GAP_S = 10.0
_LAST_WORDS_S = 60.0  # for what the worker does before it ends


class EngineStalledError(EngineDeadError):
    """The engine has had work for long and has taken no step."""

    code = "engine_stalled"


class StallWatch:
    """Whether an engine hangs, from looks at its counters.

    After a gap between two looks it gets its full time again: the process stood still, so that the engine did, too.

    Args:
        stall_s: how long an engine that has work may take no step.
        longest_gap_s: between two looks.
    """

    def __init__(self, stall_s: float, longest_gap_s: float) -> None:
        self._stall_s = stall_s
        self._longest_gap_s = longest_gap_s
        self._seen: tuple[int, ...] | None = None
        self._since = 0.0
        self._last_look = float("-inf")

    def look(self, stats: BackendStats, now: float) -> bool:
        """Take note of the counters; ``now`` is monotonic seconds."""
        blind = now - self._last_look > self._longest_gap_s
        self._last_look = now
        # Nothing that a submission alone moves.
        seen = stats.steps, stats.generated_tokens, stats.requests_finished
        idle = not stats.running and not stats.waiting
        if blind or idle or seen != self._seen:
            self._seen, self._since = seen, now
        return now - self._since >= self._stall_s


class Watchdog:
    """Looks at the engine from a thread of its own, once it is loaded.

    Args:
        stats: the engine's.
        on_stall: called once, on the thread.
        stall_s: see ``StallWatch``.
    """

    def __init__(
        self,
        stats: Callable[[], BackendStats],
        on_stall: Callable[[EngineStalledError], None],
        stall_s: float,
    ) -> None:
        self._stats = stats
        self._on_stall = on_stall
        self._stall_s = stall_s
        self._period_s = min(_PERIOD_S, stall_s / 4)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self.stalled = False

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Look no more. What has been noticed already still ends the process."""
        self._stop.set()

    def _run(self) -> None:
        watch = StallWatch(self._stall_s, min(_LONGEST_GAP_S, self._stall_s / 2) + self._period_s)
        while not self._stop.wait(self._period_s):
            if watch.look(self._stats(), time.monotonic()):
                self.stalled = True
                self._on_stall(
                    EngineStalledError(
                        f"the engine has work and has taken no step for {self._stall_s:g}s (engine_stall_s)"
                    )
                )
                # Whatever else waits for the thread that hangs, the process ends.
                time.sleep(_LAST_WORDS_S)
                leave_at_once(EXIT_ENGINE_DEAD)


def stop_backend(backend: Backend, limit_s: float) -> bool:
    """Shut the backend down; false if that takes longer, as where its thread hangs: the process must then be ended by
    force."""
    stopped: Future[None] = Future()

    def stop() -> None:
        try:
            backend.shutdown(drain=False, timeout_s=0.0)
            stopped.set_result(None)
        except BaseException as error:
            stopped.set_exception(error)

    threading.Thread(target=stop, name="backend-stop", daemon=True).start()
    wait([stopped], limit_s)
    if not stopped.done():
        return False
    stopped.result()
    return True


def leave_at_once(code: int) -> None:
    """End the process without waiting for any thread."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
