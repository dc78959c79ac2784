"""The one thread of a worker that talks to the database, in few large transactions."""

from __future__ import annotations

from collections.abc import Callable, Collection
from concurrent.futures import Future
from datetime import datetime
from typing import TypeVar

from sqlalchemy import Connection, Engine

from models_db.base import utcnow
from models_db.claims import ClaimItem, ClaimOutcome, FinishItem, ReleaseItem
from models_db.tables import WorkerState
from models_db.workers import NewSample

T = TypeVar("T")


class DatabaseThread:
    """Takes claims, results, heartbeats and samples from any thread and commits them in batches.

    Every method returns a ``Future`` at once; its callbacks run on this thread and must be quick.
    """

    def __init__(
        self,
        engine: Engine,
        worker_id: str,
        *,
        dead_ids: Callable[[], Collection[str]] = frozenset,
        now: Callable[[], datetime] = utcnow,
        sleep: Callable[[float], None] | None = None,
        max_batch: int = 256,
        on_health: Callable[[bool, BaseException | None], None] | None = None,
    ) -> None:
        raise NotImplementedError

    def start(self) -> None:
        """Start the thread."""
        raise NotImplementedError

    def claim(self, item: ClaimItem) -> Future[ClaimOutcome]:
        raise NotImplementedError

    def finish(self, item: FinishItem) -> Future[bool]:
        raise NotImplementedError

    def release(self, item: ReleaseItem) -> Future[bool]:
        raise NotImplementedError

    def heartbeat(self, counter: int) -> Future[WorkerState | None]:
        raise NotImplementedError

    def sample(self, sample: NewSample) -> Future[None]:
        raise NotImplementedError

    def call(self, work: Callable[[Connection], T]) -> Future[T]:
        """Run ``work`` inside a batch's transaction; it may run again after a rollback."""
        raise NotImplementedError

    @property
    def healthy(self) -> bool:
        """Whether the database answered last time."""
        raise NotImplementedError

    @property
    def pending(self) -> int:
        """Operations not yet committed."""
        raise NotImplementedError

    def stop(self, drain: bool = True, timeout_s: float | None = None) -> bool:
        """Stop; with ``drain`` what waits is committed first. Returns whether nothing was left behind."""
        raise NotImplementedError
