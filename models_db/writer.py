"""The one thread of a worker that talks to the database, in few large transactions.

When it is idle, an operation commits at once. While a transaction runs, others gather and go into the next one, so
the rows of a transaction grow with the load by themselves. Under load the thread also waits a few milliseconds
before a transaction, for as long as more arrives: a transaction costs as much as some dozens of its rows.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from datetime import datetime
from typing import Any, TypeVar

from sqlalchemy import Connection, Engine

from models_db import claims, workers
from models_db.claims import ClaimItem, ClaimOutcome, FinishItem, ReleaseItem
from models_db.clock import DatabaseClock
from models_db.errors import DatabaseUnavailableError, WriterStoppedError
from models_db.faults import Fault, classify, summary
from models_db.operations import Batch, Failure, Kind, Op
from models_db.tables import WorkerState
from models_db.workers import NewSample

T = TypeVar("T")

logger = logging.getLogger(__name__)

FIRST_DELAY_S = 0.05
LONGEST_DELAY_S = 2.0  # shorter than death: workers must find a database that returns before they are missed
MAX_BATCH_BYTES = 4_000_000  # of result text and tokens, roughly
BUSY_OPS = 8  # operations in about BUSY_S that make the next batch gather
BUSY_S = 0.1
GATHER_STEP_S = 0.003  # a batch is complete when nothing more has come for so long
LONGEST_GATHER_S = 0.03
LOSSES_TOGETHER = 3  # times that a batch may meet a lock or a limit before it is taken apart


class DatabaseThread:
    """Takes claims, results, heartbeats and samples from any thread and commits them in batches.

    Every method returns a ``Future`` at once; its callbacks run on this thread and must be quick. Operations that
    wait together have no order among each other: wait for the future of one that another depends on. An operation
    that the database refuses fails alone, with its own error. One that waits for a lock of somebody else's, or whose
    statement is cancelled, is tried again for as long as that takes, and others go on meanwhile, heartbeats first.
    While the database is away everything waits, and nothing is lost; ``healthy`` and ``on_health`` tell.

    Args:
        engine: from ``models_db.session.make_engine``; one of its connections stays in use.
        worker_id: the incarnation that claims, finishes and beats.
        dead_ids: asked before each claim for the incarnations whose jobs may be taken over; must be quick.
        now: the clock of all stored times; the database's own when unset.
        sleep: waits between tries while the database is away; by default until ``stop`` gives up.
        max_batch: operations in one transaction at most.
        pause: waits for a busy batch to grow.
        clock: monotonic seconds.
        on_health: called on this thread whenever ``healthy`` changes, with the error that made it false.
    """

    def __init__(
        self,
        engine: Engine,
        worker_id: str,
        *,
        dead_ids: Callable[[], Collection[str]] = frozenset,
        now: Callable[[], datetime] | None = None,
        sleep: Callable[[float], object] | None = None,
        max_batch: int = 512,
        pause: Callable[[float], object] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
        on_health: Callable[[bool, BaseException | None], None] | None = None,
    ) -> None:
        self._engine = engine
        self._worker_id = worker_id
        self._dead_ids = dead_ids
        self._database_clock = DatabaseClock()
        self._reads_clock = now is None
        self._now = now or self._database_clock
        self._given_up = threading.Event()
        self._sleep = sleep or self._given_up.wait
        self._max_batch = max_batch
        self._pause = pause
        self._clock = clock
        self._load = 0.0  # operations of late; what is BUSY_S old counts for a third
        self._load_at = 0.0
        self._on_health = on_health
        self._healthy = True
        self._connection: Connection | None = None
        self._changed = threading.Condition()
        self._urgent: deque[Op] = deque()
        self._waiting: deque[Op] = deque()
        self._alone: deque[Batch] = deque()  # what shared a batch with an operation that failed
        self._locked: list[Batch] = []  # what met a lock or a limit, until it is due again
        self._in_flight = 0
        self._stopping = False
        self._left_behind = False
        self._thread = threading.Thread(target=self._run, name="tokenmill-database", daemon=True)

    # ------------------------------------------------------------------------------------------ from any thread

    def start(self) -> None:
        """Start the thread. What was submitted before is taken then."""
        self._thread.start()

    def claim(self, item: ClaimItem) -> Future[ClaimOutcome]:
        """See ``models_db.claims.claim``."""
        return self._submit(Op(Kind.CLAIM, item))

    def finish(self, item: FinishItem) -> Future[bool]:
        """See ``models_db.claims.finish``; true once result and state are committed, false for a duplicate."""
        return self._submit(Op(Kind.FINISH, item))

    def release(self, item: ReleaseItem) -> Future[bool]:
        """See ``models_db.claims.release``."""
        return self._submit(Op(Kind.RELEASE, item))

    def heartbeat(self, counter: int) -> Future[WorkerState | None]:
        """See ``models_db.workers.heartbeat``. Goes before everything that waits; of several the last counts."""
        return self._submit(Op(Kind.HEARTBEAT, counter))

    def sample(self, sample: NewSample) -> Future[None]:
        """See ``models_db.workers.add_samples``."""
        return self._submit(Op(Kind.SAMPLE, sample))

    def call(self, work: Callable[[Connection], T]) -> Future[T]:
        """Run ``work`` inside a batch's transaction, which it must not end; it may run again after a rollback."""
        return self._submit(Op(Kind.CALL, work))

    def now(self) -> datetime:
        """The present by the clock of all stored times."""
        return self._now()

    @property
    def healthy(self) -> bool:
        """Whether the database answered last time."""
        return self._healthy

    @property
    def pending(self) -> int:
        """Operations not yet settled."""
        with self._changed:
            apart = sum(len(batch.ops) for batch in (*self._alone, *self._locked))
            return len(self._urgent) + len(self._waiting) + apart + self._in_flight

    def stop(self, drain: bool = True, timeout_s: float | None = None) -> bool:
        """Stop, and wait for the thread to end.

        With ``drain`` what waits is committed first, for as long as that takes or until ``timeout_s``. What is left
        then fails with ``WriterStoppedError``. Returns whether the thread has ended with nothing left behind.
        """
        with self._changed:
            self._stopping = True
            if not drain:
                self._given_up.set()
            self._changed.notify_all()
        if self._thread.ident is None:
            self._fail_waiting()
            return not self._left_behind
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self._given_up.set()
            # The statement that runs now ends by the driver's own timeout at the latest.
            self._thread.join(2 * LONGEST_DELAY_S)
        return not self._left_behind and not self._thread.is_alive()

    def _submit(self, op: Op) -> Future[Any]:
        with self._changed:
            if self._stopping:
                raise WriterStoppedError("the database thread has stopped and takes nothing more")
            (self._urgent if op.kind is Kind.HEARTBEAT else self._waiting).append(op)
            self._changed.notify()
        return op.future

    # ------------------------------------------------------------------------------------------ on the thread

    def _run(self) -> None:
        try:
            while (batch := self._next_batch()) is not None:
                self._commit(batch)
                with self._changed:
                    self._in_flight = 0
                self._note(len(batch.ops))
                if self._load >= BUSY_OPS:
                    self._gather()
        except BaseException:
            logger.exception("the database thread died")
            raise
        finally:
            with self._changed:
                self._stopping = True
            self._fail_waiting()
            self._disconnect()

    def _note(self, count: int) -> None:
        now = self._clock()
        self._load = self._load * math.exp((self._load_at - now) / BUSY_S) + count
        self._load_at = now

    def _gather(self) -> None:
        """Let a batch grow while more arrives. Looks now and then rather than wake up for each operation."""
        waiting, waited = -1, 0.0
        while waiting < len(self._waiting) < self._max_batch and waited < LONGEST_GATHER_S:
            if self._stopping or self._urgent or self._alone:
                return
            waiting = len(self._waiting)
            self._pause(GATHER_STEP_S)
            waited += GATHER_STEP_S

    def _next_batch(self) -> Batch | None:
        with self._changed:
            while True:
                self._wait_for_work()
                if self._given_up.is_set():
                    return None
                if not (self._urgent or self._waiting or self._alone):
                    if self._locked:
                        continue
                    return None
                one_alone = self._alone and not self._urgent
                batch = self._alone.popleft() if one_alone else Batch(self._take())
                self._in_flight = len(batch.ops)
                if batch.ops:
                    return batch

    def _wait_for_work(self) -> None:
        def found() -> bool:
            ended = self._given_up.is_set() or (self._stopping and not self._locked)
            return bool(self._urgent or self._waiting or self._alone or ended)

        left = max(0.0, min(batch.due for batch in self._locked) - self._clock()) if self._locked else None
        self._changed.wait_for(found, left)
        now = self._clock()
        self._alone.extend(batch for batch in self._locked if batch.due <= now)
        self._locked = [batch for batch in self._locked if batch.due > now]

    def _take(self) -> list[Op]:
        """The heartbeats, then what waits up to the limits, without what has been cancelled meanwhile."""
        ops = [op for op in self._urgent if op.future.set_running_or_notify_cancel()]
        self._urgent.clear()
        size = 0
        while self._waiting and not self._alone and len(ops) < self._max_batch and size < MAX_BATCH_BYTES:
            op = self._waiting.popleft()
            if op.future.set_running_or_notify_cancel():
                ops.append(op)
                size += op.size()
        return ops

    def _commit(self, batch: Batch) -> None:
        """Commit a batch and settle its futures, however often it takes."""
        delay = FIRST_DELAY_S
        while True:
            try:
                values = self._transact(batch)
            except Exception as exc:
                self._disconnect()  # back to the pool, which tests it before it is used again
                fault = classify(exc)
                if fault is Fault.AWAY:
                    if batch.to_blame():
                        fault = Fault.OTHER
                    else:
                        self._set_health(False, exc)
                if fault is Fault.OTHER:
                    self._set_health(True, None)
                    self._isolate(batch, exc)
                    return
                if self._given_up.is_set():
                    self._left_behind = True
                    self._settle(batch, [Failure(_stopped(exc))] * len(batch.ops))
                    return
                if fault is Fault.TRANSIENT:
                    self._put_off(batch, exc)
                    return
                self._sleep(delay)
                delay = min(2 * delay, LONGEST_DELAY_S)
            else:
                self._set_health(True, None)
                self._settle(batch, values)
                return

    def _transact(self, batch: Batch) -> list[Any]:
        conn = self._connect()
        try:
            transaction = conn.begin()
            try:
                if self._reads_clock and self._database_clock.due:
                    self._database_clock.read(conn)
                batch.now = batch.now or self._now()
                values = self._execute(conn, batch)
                batch.replay = True  # from here on nobody can tell until the answer is there
                transaction.commit()
            except BaseException:
                with suppress(Exception):
                    transaction.rollback()
                raise
        except DatabaseUnavailableError:
            batch.breaks += 1
            raise
        return values

    def _execute(self, conn: Connection, batch: Batch) -> list[Any]:
        """Every kind in one call; the value of each operation, in the batch's order."""
        values: dict[Op, Any] = {}
        when: dict[str, Any] = {"now": batch.now, "replay": batch.replay}

        def of(kind: Kind) -> tuple[list[Op], list[Any]]:
            ops = [op for op in batch.ops if op.kind is kind]
            return ops, [op.payload for op in ops]

        ops, counters = of(Kind.HEARTBEAT)
        if ops:
            state = workers.heartbeat(conn, self._worker_id, max(counters), at=batch.now)
            values.update(dict.fromkeys(ops, state))
        ops, items = of(Kind.FINISH)
        if ops:
            values.update(zip(ops, claims.finish(conn, items, self._worker_id, **when), strict=True))
        ops, items = of(Kind.RELEASE)
        if ops:
            values.update(zip(ops, claims.release(conn, items, self._worker_id, **when), strict=True))
        ops, items = of(Kind.CLAIM)
        if ops:
            outcomes = claims.claim(conn, items, self._worker_id, self._dead_ids(), **when)
            values.update(zip(ops, outcomes, strict=True))
        ops, items = of(Kind.SAMPLE)
        if ops:
            workers.add_samples(conn, items)
            values.update(dict.fromkeys(ops, None))
        for op in of(Kind.CALL)[0]:
            with _spared(conn, op, values):
                values[op] = op.payload(conn)
        return [values[op] for op in batch.ops]

    def _isolate(self, batch: Batch, error: Exception) -> None:
        """Run the batch in parts, and those that fail again in smaller ones, so that only the one to blame fails."""
        if len(batch.ops) == 1:
            self._settle(batch, [Failure(error)])
            return
        with self._changed:
            self._alone.extendleft(reversed(batch.parts()))

    def _put_off(self, batch: Batch, error: Exception) -> None:
        """Try a batch that met a lock or was cut short again a little later; after a few times in parts."""
        batch.losses += 1
        large = len(batch.ops) > 1
        if batch.losses == LOSSES_TOGETHER and large:
            logger.warning("%d operations cannot get through together: %s", len(batch.ops), summary(error))
        elif batch.losses > LOSSES_TOGETHER and not large and batch.losses & (batch.losses - 1) == 0:
            logger.warning(
                "%s has met a lock or a limit %d times; look for a long transaction in the database (%s)",
                batch.ops[0],
                batch.losses,
                summary(error),
            )
        beats = any(op.kind is Kind.HEARTBEAT for op in batch.ops)
        pieces = batch.parts() if large and (beats or batch.losses >= LOSSES_TOGETHER) else [batch]
        delay = min(FIRST_DELAY_S * 2 ** min(batch.losses - 1, 10), LONGEST_DELAY_S)
        with self._changed:
            for piece in pieces:
                beat = piece.ops[0].kind is Kind.HEARTBEAT
                piece.due = self._clock() + (FIRST_DELAY_S if beat else delay)
                self._locked.append(piece)

    def _settle(self, batch: Batch, values: list[Any]) -> None:
        for op, value in zip(batch.ops, values, strict=True):
            op.settle(value)

    def _fail_waiting(self) -> None:
        """Fail everything that has not been committed."""
        with self._changed:
            apart = [op for batch in (*self._alone, *self._locked) for op in batch.ops]
            ops = [*self._urgent, *apart, *self._waiting]
            self._urgent.clear()
            self._alone.clear()
            self._locked.clear()
            self._waiting.clear()
        for op in ops:
            if op.future.running() or op.future.set_running_or_notify_cancel():
                self._left_behind = True
                op.settle(Failure(_stopped(None)))

    def _connect(self) -> Connection:
        if self._connection is None:
            self._connection = self._engine.connect()
        return self._connection

    def _disconnect(self) -> None:
        if self._connection is not None:
            connection, self._connection = self._connection, None
            with suppress(Exception):
                connection.close()

    def _set_health(self, healthy: bool, error: BaseException | None) -> None:
        if healthy == self._healthy:
            return
        self._healthy = healthy
        if healthy:
            logger.warning("the database answers again")
        else:
            logger.warning(
                "the database is away, and what waits for it is kept: %s", error and summary(error)
            )
        if self._on_health is not None:
            try:
                self._on_health(healthy, error)
            except Exception:
                logger.exception("on_health failed")


def _stopped(cause: BaseException | None) -> WriterStoppedError:
    error = WriterStoppedError(
        "the database thread stopped before this was committed" + (f" ({summary(cause)})" if cause else "")
    )
    error.__cause__ = cause
    return error


@contextmanager
def _spared(conn: Connection, op: Op, values: dict[Op, Any]) -> Iterator[None]:
    """Run a caller's own work under a savepoint, so that its error costs its neighbours nothing."""
    savepoint = conn.begin_nested()
    try:
        yield
    except Exception as exc:
        if classify(exc) is not Fault.OTHER:
            raise
        savepoint.rollback()
        values[op] = Failure(exc)
    else:
        savepoint.commit()
