"""Runs suspects: jobs that too many workers died with, a few at a time, and the worst of them alone.

Suspects come without a delivery: whoever holds the fleet's lock claims them from SQL and runs them from their
stored message. Those with fewer deaths run in a group beside other work, which clears most of them at once. The
others run one by one while the worker does nothing else: it takes no deliveries and waits until what it has has
ended. After each the message is published again, so that a delivery tells Celery about the end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import datetime
from functools import partial
from typing import Protocol

from celery.utils.log import get_logger
from sqlalchemy import Connection

from models_db.base import utcnow
from models_db.suspects import (
    ClaimedSuspect,
    Waiting,
    claim_suspects,
    drop_lock,
    suspects_waiting,
    take_lock,
)
from workers.actor import Actor
from workers.runs import Runs, Store

logger = get_logger(__name__)

_PATIENCE = 3  # looks that a busy worker leaves suspects to idle ones
_SESSION_S = 30.0  # of running suspects alone, before deliveries get their turn again
_CHECK_S = 0.05


class Host(Protocol):
    """The delivery table, as far as suspects need it."""

    @property
    def busy(self) -> bool:
        """Whether anything is claimed, running or being committed here."""

    def isolate(self, alone: bool) -> None:
        """Take no deliveries from now on, or take them again."""


class Suspects:
    """See the module. Owned by the delivery table's thread, as is everything in here."""

    def __init__(
        self,
        actor: Actor,
        store: Store,
        runs: Runs,
        host: Host,
        *,
        worker_id: str,
        queue: str,
        slots: int,
        period_s: float,
        clock: Callable[[], float],
        now: Callable[[], datetime] = utcnow,
    ) -> None:
        self._actor = actor
        self._store = store
        self._runs = runs
        self._host = host
        self._worker_id = worker_id
        self._queue = queue
        self._lock = f"suspects:{queue}"[:255]
        self._group = max(1, math.ceil(math.sqrt(slots)))
        self._period = period_s
        self._clock = clock
        self._now = now
        self._holding = False
        self._isolated = False
        self._alone_since: float | None = None  # isolated, and nothing else has run since then
        self._seen = 0  # looks in a row at suspects that wait to run alone
        self._going = 0  # suspects that run here
        self._claiming = False
        self._closed = False

    @property
    def claiming(self) -> bool:
        """Whether a claim is on its way, so that this worker may own jobs that nobody here knows of yet."""
        return self._claiming

    def start(self) -> None:
        """Look for suspects from now on."""
        self._actor.send(self._look)

    def close(self) -> None:
        """Start no more. What runs is the table's business; the lock is kept until it has ended."""
        self._closed = True
        self._leave_when_done()

    # ------------------------------------------------------------------------------------------------ internals

    def _look(self) -> None:
        if self._closed:
            return
        self._actor.when(self._store.call(partial(suspects_waiting, queue=self._queue)), self._on_waiting)

    def _again(self, delay_s: float | None = None) -> None:
        self._actor.after(self._period if delay_s is None else delay_s, self._look)

    def _on_waiting(self, future: Future[Waiting]) -> None:
        if self._closed:
            return
        if future.exception() is not None:
            self._again()
            return
        waiting = future.result()
        self._seen = self._seen + 1 if waiting.alone else 0
        if waiting.grouped and not self._isolated:
            self._claim(alone=False)
        elif waiting.alone and self._may_isolate():
            self._claim_alone()
        else:
            self._leave()
            self._again()

    def _may_isolate(self) -> bool:
        if self._isolated:
            return self._alone_since is None or self._clock() - self._alone_since < _SESSION_S
        return not self._host.busy or self._seen > _PATIENCE

    def _claim_alone(self) -> None:
        """Take the lock, wait until everything else has ended, then claim one."""
        if self._isolated:
            self._wait_until_alone()
            return

        def locked(future: Future[bool]) -> None:
            if future.exception() is not None or not future.result():
                self._again()
                return
            self._holding = True
            if self._closed:
                self._leave()
                return
            self._isolated = True
            self._host.isolate(True)
            self._wait_until_alone()

        work = partial(take_lock, name=self._lock, worker_id=self._worker_id)
        self._actor.when(self._store.call(work), locked)

    def _wait_until_alone(self) -> None:
        if self._closed:
            return  # close() has left
        if self._host.busy:
            self._actor.after(_CHECK_S, self._wait_until_alone)
        else:
            if self._alone_since is None:
                self._alone_since = self._clock()
            self._claim(alone=True)

    def _claim(self, *, alone: bool) -> None:
        limit = 1 if alone else self._group
        queue, lock, worker_id = self._queue, self._lock, self._worker_id
        now = self._now()  # the same whenever this is run again

        def work(conn: Connection) -> Sequence[ClaimedSuspect] | None:
            if not take_lock(conn, lock, worker_id):
                return None
            return claim_suspects(conn, queue, lock, worker_id, limit, alone=alone, now=now)

        self._claiming = True
        self._actor.when(self._store.call(work), partial(self._on_claimed, alone))

    def _on_claimed(self, alone: bool, future: Future[Sequence[ClaimedSuspect] | None]) -> None:
        self._claiming = False
        claimed = None if future.exception() is not None else future.result()
        if claimed is None:
            self._leave_when_done()
            self._again()
            return
        self._holding = True
        if claimed:
            how = "alone" if alone else "in a group"
            logger.warning("Running %d suspects %s: workers died while they ran", len(claimed), how)
        self._going += len(claimed)
        for suspect in claimed:
            self._runs.begin_suspect(suspect, self._on_ended)
        if not self._going:
            self._leave_when_done()
            self._again()

    def _on_ended(self) -> None:
        self._going -= 1
        if not self._going:
            self._leave_when_done()
            self._again(0.0)

    def _leave_when_done(self) -> None:
        if self._closed and not self._going and not self._claiming:
            self._leave()

    def _leave(self) -> None:
        if self._isolated:
            self._isolated, self._alone_since = False, None
            self._seen = 0
            self._host.isolate(False)
        if self._holding:
            self._holding = False
            self._store.call(partial(drop_lock, name=self._lock, worker_id=self._worker_id))
