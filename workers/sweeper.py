"""The sweeper: makes a delivery for every job that has lost its own.

It runs in each worker, in a thread of its own, and only ever *creates deliveries*. Who runs a job is decided by
the claim, so sweepers of several workers may do the same at once.

* What a dead worker had is queued again in SQL (``models_db.deaths``) and published again.
* A message can be lost between Redis and the worker that took it, or with Redis itself. Then more rows are queued
  than messages wait. While that lasts, the one sweeper of the queue that Redis's lease names looks which queued
  jobs no list and no unacknowledged delivery holds; those it finds twice in a row it publishes again.
* Of a suspect that is cancelled while it waits no delivery is about, either, nor of one that ended while Redis was
  away: it is published once, which tells Celery.
* Unreadable messages that a consumer put aside go into the table ``dead_letter``.

What fails in one of these keeps the sweeper from none of the others.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from datetime import datetime
from functools import partial
from typing import Any, Protocol, TypeVar

from celery.utils.log import get_logger
from sqlalchemy import Connection, select

from models_db.base import utcnow
from models_db.clock import database_time
from models_db.dead_letters import store_dead_letters
from models_db.deaths import SUSPECT_DEATHS, Burial, bury
from models_db.errors import WriterStoppedError
from models_db.faults import Fault, classify, summary
from models_db.jobs import mark_published, stored_messages
from models_db.records import StoredMessage
from models_db.suspects import leave_untold, untold_ends
from models_db.sweeping import mark_republished, queued_count, queued_page
from models_db.tables import Job
from workers.actor import Action, Actor
from workers.letters import read_letter
from workers.queues import LOST, QueueView
from workers.stored import has_links

logger = get_logger(__name__)
T = TypeVar("T")

_PERIOD_S = 1.0
_LEASE_S = 3.0
_LONGEST_LOOK_S = 30.0  # until a worker whose long questions are not answered leaves sweeping to others
_COUNT_SHARE = 0.02  # of the time that counting may take
_LONGEST_PAUSE_S = 5.0
_SCAN_SHARE = 0.1  # of Redis's time that looking through the lists may take
_PAGE = 2000
_PUBLISH = 500
_AUDIT_S = 60.0  # between two looks at a queue whose counts say that nothing is missing
_AUDIT_LENGTH = 20_000  # longest queue that is looked at in that case
_DEAD_LETTERS = 100
_REFUSED_S = 60.0  # until something is tried again that the database has refused: a job's end, a dead letter


class Caller(Protocol):
    """The part of ``models_db.writer.DatabaseThread`` and ``models_db.upkeep.UpkeepThread`` that is needed."""

    def call(self, work: Callable[[Connection], T]) -> Future[T]: ...


class Sweeper:
    """See the module. ``start`` runs it in a thread; tests call ``run_pending`` instead.

    Args:
        worker_id: this incarnation.
        queue: the queue of this worker's model.
        looks: asked what takes the longer, the more jobs wait, and must keep no claim waiting; ``store`` when unset.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        store: Caller,
        view: QueueView,
        worker_id: str,
        queue: str,
        *,
        looks: Caller | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._looks = looks or store
        self._view = view
        self._worker_id = worker_id
        self._queue = queue
        self._clock = clock
        self._actor = Actor("sweeper", self._on_fault, clock)
        self._started = False
        self._fetching = 0  # reads of messages that are to be published
        self._idle: Action | None = None  # to be told when there are no more
        self._burying: set[str] = set()
        self._missing: dict[str, datetime | None] = {}  # found without a delivery at the last scan
        self._short_since = 0  # looks in a row at which messages were missing
        self._next_audit = clock() + _AUDIT_S
        self._counting = False
        self._keeping = False
        self._telling = False
        self._next_count = self._next_scan = self._next_keep = clock()
        self._redis_away = False
        self._asked: dict[int, float] = {}  # what the database has not answered yet, with when it should have
        self._questions = itertools.count()
        # Jobs whose publication failed, with whether only for their links.
        self._unpublished: dict[str, bool] = {}

    # -------------------------------------------------------------------------------------- called from anywhere

    def bury(self, worker_ids: Collection[str]) -> None:
        """These incarnations are dead, or have stopped and left jobs behind."""
        if worker_ids:
            self._actor.send(partial(self._on_gone, tuple(worker_ids)))

    def announce(self, job_ids: Sequence[str]) -> None:
        """Publish these jobs again, so that a delivery tells Celery how they ended."""
        self._actor.send(partial(self._fetch, list(job_ids)))

    def begin(self) -> None:
        """Look after the queue from now on."""
        self._actor.send(self._tick)

    def start(self) -> None:
        """Run in a thread of its own."""
        self.begin()
        self._actor.start()
        self._started = True

    def stop(self, timeout_s: float = 2.0) -> None:
        """End the thread after what has been asked so far. For messages to be published it waits for so long."""
        if self._started:
            done = threading.Event()
            self._actor.send(partial(self._when_idle, done.set))
            if not done.wait(timeout_s):
                logger.error("Some messages could not be published again in time")
        self._actor.stop()
        self._view.close()

    def run_pending(self) -> int:
        """Handle what is due without waiting; for use without ``start``."""
        return self._actor.run_pending()

    # ---------------------------------------------------------------------------------------------------- deaths

    def _on_gone(self, worker_ids: Sequence[str]) -> None:
        for worker_id in worker_ids:
            if worker_id not in self._burying:
                self._burying.add(worker_id)
                self._ask(_burial(worker_id), partial(self._on_buried, worker_id))

    def _on_buried(self, worker_id: str, future: Future[Burial]) -> None:
        error = future.exception()
        if error is not None or not future.result().refused:
            self._burying.discard(worker_id)
        if error is not None:
            logger.error("The jobs of worker %s are not taken over yet: %s", worker_id, summary(error))
            return
        burial = future.result()
        if burial.refused:  # its death is found again at each look
            self._actor.after(_REFUSED_S, partial(self._burying.discard, worker_id))
        logger.warning(
            "Worker %s is gone: %d of its jobs are queued again, %d wait as suspects, %d have ended",
            worker_id,
            len(burial.queued),
            len(burial.suspects),
            len(burial.ended),
        )
        for job_id in burial.ended:
            logger.error("Job %s ended with worker %s", job_id, worker_id)
        self._fetch([*burial.queued, *burial.ended])
        self._fetch(burial.untold, only_linked=True)

    def _fetch(self, job_ids: Sequence[str], *, only_linked: bool = False) -> None:
        for start in range(0, len(job_ids), _PUBLISH):
            self._fetching += 1
            ids = job_ids[start : start + _PUBLISH]
            work = partial(_messages_of, ids=ids, only_where_needed=only_linked)
            self._ask(work, partial(self._on_fetched, ids, only_linked))

    def _on_fetched(
        self, ids: Sequence[str], only_linked: bool, future: Future[Sequence[StoredMessage]]
    ) -> None:
        try:
            self._publish_fetched(ids, only_linked, future)
        finally:
            self._fetching -= 1
            if not self._fetching and self._idle is not None:
                self._idle()

    def _when_idle(self, tell: Action) -> None:
        if self._fetching:
            self._idle = tell
        else:
            tell()

    def _publish_fetched(
        self, ids: Sequence[str], only_linked: bool, future: Future[Sequence[StoredMessage]]
    ) -> None:
        error = future.exception()
        if error is not None:
            logger.error(
                "Messages cannot be read to be published again; tried again later: %s", summary(error)
            )
        if error is not None or not self._publish(future.result()):
            # Of jobs that have ended nobody else makes a delivery, and who waits for Celery's result waits for that.
            self._unpublished.update(dict.fromkeys(ids, only_linked))
            # This process may end before Redis is back. Deliveries that it lost itself Redis has, but for suspects.
            self._ask(partial(leave_untold, ids=ids), self._on_left)

    def _on_left(self, future: Future[set[str]]) -> None:
        if future.exception() is None:
            for job_id in future.result():
                self._unpublished.pop(job_id, None)

    def _publish_again(self) -> None:
        waiting, self._unpublished = self._unpublished, {}
        for only_linked in (False, True):
            self._fetch(
                [job_id for job_id, only in waiting.items() if only is only_linked], only_linked=only_linked
            )

    def _publish(self, stored: Sequence[StoredMessage]) -> bool:
        messages = [entry.message for entry in stored if entry.message is not None]
        return not messages or self._with_redis(partial(self._view.publish, messages), done=True) is not None

    def _tell_untold(self) -> None:
        """Publish suspects that have ended and that no delivery tells of, then note it: rather twice than never."""
        if not self._telling:
            self._telling = True
            self._ask(partial(untold_ends, queue=self._queue, limit=_PUBLISH), self._on_untold)

    def _on_untold(self, future: Future[list[StoredMessage]]) -> None:
        self._telling = False
        if future.exception() is not None or not future.result() or not self._publish(future.result()):
            return  # they are found again
        self._telling = True
        ids = [entry.id for entry in future.result()]
        self._ask(partial(mark_published, ids=ids, at=utcnow()), self._on_told)

    def _on_told(self, _future: Future[None]) -> None:
        self._telling = False

    # ------------------------------------------------------------------------------------------- lost deliveries

    def _tick(self) -> None:
        self._actor.after(_PERIOD_S, self._tick)
        if any(self._clock() > due for due in self._asked.values()):
            # Cut off from the database: let the lease go to a worker that can do something with it.
            self._forget()
            return
        if self._unpublished:
            self._chore(self._publish_again)
        if not self._with_redis(partial(self._view.elect, self._worker_id, _LEASE_S)):
            self._forget()
            return
        if not self._keeping and self._clock() >= self._next_keep:
            self._chore(self._keep_dead_letters)
        now = self._clock()
        if self._counting or now < self._next_count:
            return
        self._chore(self._tell_untold)
        self._counting = True
        self._look(partial(queued_count, queue=self._queue), partial(self._on_count, now))

    def _chore(self, chore: Action) -> None:
        """Do one of several things that have nothing to do with each other."""
        try:
            chore()
        except Exception as exc:
            logger.error("Fault in the sweeper, which goes on: %s", summary(exc), exc_info=exc)

    def _on_count(self, began: float, future: Future[int]) -> None:
        self._counting = False
        now = self._clock()
        self._next_count = now + min((now - began) / _COUNT_SHARE, _LONGEST_PAUSE_S)
        if future.exception() is not None:
            self._forget()
            return
        queued = future.result()
        waiting = self._with_redis(self._view.length)
        if waiting is None:
            self._forget()
            return
        audit = queued > 0 and waiting <= _AUDIT_LENGTH and (now >= self._next_audit or bool(self._missing))
        self._short_since = self._short_since + 1 if queued > waiting else 0
        # A job is queued before its message is published, so that one look alone says little.
        if (self._short_since >= 2 or audit) and now >= self._next_scan:
            self._next_audit = now + _AUDIT_S
            self._scan()
        elif not self._short_since:
            self._forget()

    def _scan(self) -> None:
        began = self._clock()
        held = self._with_redis(self._view.held_ids)
        if held is None:
            self._forget()
        else:
            self._next_scan = began + (self._clock() - began) / _SCAN_SHARE
            self._look(self._page(""), partial(self._on_page, held, {}))

    def _page(self, after: str) -> Callable[[Connection], list[tuple[str, datetime | None]]]:
        return partial(queued_page, queue=self._queue, after=after, limit=_PAGE)

    def _on_page(
        self,
        held: set[str],
        found: dict[str, datetime | None],
        future: Future[list[tuple[str, datetime | None]]],
    ) -> None:
        if future.exception() is not None:
            self._forget()
            return
        page = future.result()
        found |= {job_id: published_at for job_id, published_at in page if job_id not in held}
        if len(page) == _PAGE:
            self._look(self._page(page[-1][0]), partial(self._on_page, held, found))
            return
        unseen = object()
        lost = {job_id: at for job_id, at in found.items() if self._missing.get(job_id, unseen) == at}
        self._missing = found
        ids = sorted(lost)
        for start in range(0, len(ids), _PUBLISH):
            some = {job_id: lost[job_id] for job_id in ids[start : start + _PUBLISH]}
            # With the present as it is now, so that it can be done again after a commit whose answer was lost.
            self._ask(partial(mark_republished, seen=some, now=utcnow()), self._on_marked)

    def _on_marked(self, future: Future[list[StoredMessage]]) -> None:
        if future.exception() is None and future.result() and self._publish(future.result()):
            logger.warning("%d queued jobs had lost their message; published again", len(future.result()))

    def _forget(self) -> None:
        self._short_since = 0
        self._missing = {}

    # ---------------------------------------------------------------------------------------------- dead letters

    def _keep_dead_letters(self) -> None:
        raws = self._with_redis(partial(self._view.dead_letters, _DEAD_LETTERS))
        if raws:
            self._keep(raws)

    def _keep(self, raws: Sequence[bytes]) -> None:
        letters = [read_letter(raw, self._queue, self._worker_id) for raw in raws]
        self._ask(partial(store_dead_letters, letters=letters), partial(self._on_kept, raws))
        self._keeping = True

    def _on_kept(self, raws: Sequence[bytes], future: Future[None]) -> None:
        self._keeping = False
        error = future.exception()
        if error is None:
            for raw in raws:
                if self._with_redis(partial(self._view.remove_dead_letter, raw), done=True) is None:
                    return
        elif isinstance(error, WriterStoppedError) or classify(error) is not Fault.OTHER:
            return
        elif len(raws) > 1:
            for raw in raws:  # so that one which the database refuses keeps no other
                self._keep([raw])
        else:
            self._next_keep = self._clock() + _REFUSED_S
            logger.error("The database refuses a dead letter, which stays in Redis: %s", summary(error))

    # ------------------------------------------------------------------------------------------------- internals

    def _ask(self, work: Callable[[Connection], T], answered: Callable[[Future[T]], None]) -> None:
        """Have the database thread do this, and go on with what it says."""
        self._go_on(self._store.call(work), answered, _LEASE_S)

    def _look(self, work: Callable[[Connection], T], answered: Callable[[Future[T]], None]) -> None:
        """Ask something that may take long, beside the database thread."""
        self._go_on(self._looks.call(work), answered, _LONGEST_LOOK_S)

    def _go_on(self, asked: Future[T], answered: Callable[[Future[T]], None], within_s: float) -> None:
        number = next(self._questions)
        self._asked[number] = self._clock() + within_s

        def on_answer(future: Future[T]) -> None:
            del self._asked[number]
            answered(future)

        self._actor.when(asked, on_answer)

    def _with_redis(self, work: Callable[[], T], *, done: Any = None) -> T | Any | None:
        """What ``work`` returns (``done`` where that is nothing), or ``None`` while Redis is away."""
        try:
            value = work()
        except LOST as exc:
            self._view.close()
            if not self._redis_away:
                self._redis_away = True
                logger.warning("The sweeper waits for Redis (%s)", type(exc).__name__)
            return None
        self._redis_away = False
        return done if value is None else value

    def _on_fault(self, error: Exception) -> None:
        logger.error("Fault in the sweeper: %s", summary(error), exc_info=error)
        self._forget()
        self._counting = self._keeping = self._telling = False


def _burial(worker_id: str, at: datetime | None = None) -> Callable[[Connection], Burial]:
    """Buries a worker; run again after a commit whose answer was lost, it says what that has done."""
    now, tries = at, itertools.count()

    def work(conn: Connection) -> Burial:
        nonlocal now
        now = now or database_time(conn)
        return bury(conn, worker_id, now=now, replay=next(tries) > 0)

    return work


def _messages_of(conn: Connection, ids: Sequence[str], only_where_needed: bool) -> list[StoredMessage]:
    """The messages of these jobs. Where needed: to run links, or because the job ran without a delivery."""
    stored = stored_messages(conn, ids)
    if not only_where_needed:
        return list(stored.values())
    suspects = set(conn.scalars(select(Job.id).where(Job.id.in_(ids), Job.deaths >= SUSPECT_DEATHS)))
    return [entry for job_id, entry in stored.items() if job_id in suspects or has_links(entry.message)]
