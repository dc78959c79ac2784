"""Whether Celery's result backend is asked to take an outcome, which costs a thread many seconds while it is away."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence

from celery.utils.log import get_logger

logger = get_logger(__name__)

_FAILURES = 2  # jobs in a row: one alone may have a result that the backend never takes
_PAUSE_S = 5.0  # between two tries while it is away


class Breaker:
    """While the backend is away, one outcome at a time tries it, now and then. For any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._failed: set[str] = set()  # jobs, since the backend took something
        self._trying = False
        self._next_try = 0.0

    @property
    def away(self) -> bool:
        """Whether the backend has taken nothing of late."""
        return len(self._failed) >= _FAILURES

    def choose(self, job_ids: Sequence[str]) -> Collection[str]:
        """Those of which the backend may be told now; of each, ``failed`` or ``told`` must follow."""
        with self._lock:
            if not self.away:
                return job_ids
            if not job_ids or self._trying or self._clock() < self._next_try:
                return ()
            self._trying = True
            return (next((job_id for job_id in job_ids if job_id not in self._failed), job_ids[0]),)

    def failed(self, job_id: str) -> None:
        """The backend did not take the outcome of this job."""
        with self._lock:
            was_away = self.away
            self._failed.add(job_id)
            self._trying = False
            self._next_try = self._clock() + _PAUSE_S
            if self.away and not was_away:
                logger.error("Celery's result backend is away: outcomes are in SQL, and reach it later")

    def told(self) -> None:
        """The backend has answered."""
        with self._lock:
            if self.away:
                logger.warning("Celery's result backend answers again")
            self._failed.clear()
            self._trying = False
