"""The delivery table: what a worker does with each delivery of a job, from the claim to the acknowledgement.

One thread owns the table and reacts to events, one at a time: a delivery arrives, a claim is answered, the
backend is done, a commit is answered, someone cancels. It never waits for any of them::

    deliver ─► claim ─┬─ claimed ───► submit ─► done ─► commit ─┬─► tracer ─► callback, ack
                      ├─ joined ────► (shares the run)          └─ fence lost: claim again
                      ├─ elsewhere ─► ack: the sweeper makes another delivery if its worker dies
                      ├─ suspect ───► ack: its turn comes without a delivery (workers.suspects)
                      ├─ gone ──────► ack: its row has been pruned
                      ├─ refused ───► back to its queue, after a while (workers.later)
                      └─ terminal ──► tracer with the stored outcome ─► callback, ack

Results are committed before anything is acknowledged, and count only while the attempt is the current one. What waits
for the claim's answer while the database is away goes back to its queue (``workers.cut_off``).
Everything that touches Celery's requests is posted to the main thread.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any, TypeVar

from celery.utils.log import get_logger

from backend.api import Backend, RequestError
from models_db.base import utcnow
from models_db.claims import ClaimItem, ClaimKind, ClaimOutcome
from models_db.errors import DatabaseError, WriterStoppedError
from models_db.faults import summary
from models_db.jobs import job_states, request_cancel
from models_db.tables import AttemptOutcome, JobState
from workers.actor import Actor
from workers.cut_off import CutOff
from workers.endings import Endings, Post, Tracer
from workers.intake import Delivery, read_delivery
from workers.later import UNTOLD_S, Later
from workers.payload import NewerPayloadError, queue_for
from workers.request import GenerateRequest
from workers.revokes import Revokes
from workers.runs import AT_SHUTDOWN, Runs, Store, StreamSink
from workers.settings import Settings
from workers.spool import OutageBook, Spool
from workers.strays import Strays
from workers.suspects import Suspects
from workers.tasks import Outcome

logger = get_logger(__name__)
T = TypeVar("T")

_REVOKES_S = 0.5


@dataclass(frozen=True, slots=True)
class _Asked:
    """A delivery that waits for the database's answer."""

    delivery: Delivery
    answer: Future[Any]


class DeliveryTable:
    """See the module. ``start`` runs it in a thread; tests call ``run_pending`` instead.

    Args:
        post: runs an action on the main thread, in order.
        on_fatal: called once, on the table's thread, when the worker cannot go on.
        announce: has messages of these jobs published; see ``workers.sweeper``.
        pause: called on the main thread to take nothing more from the queues, or to go on.
        worker_id: this incarnation.
        spool: keeps results while the database is away.
        silence_s: seconds since the database took a heartbeat of this worker.
    """

    def __init__(
        self,
        settings: Settings,
        store: Store,
        backend: Backend,
        tracer: Tracer,
        post: Post,
        on_fatal: Callable[[BaseException], None],
        *,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = utcnow,
        streams: StreamSink | None = None,
        announce: Callable[[Sequence[str]], None] = lambda job_ids: None,
        pause: Callable[[bool], None] = lambda paused: None,
        worker_id: str = "",
        spool: Spool | None = None,
        silence_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._settings = settings
        self._store = store
        self._tracer = tracer
        self._post = post
        self._on_fatal = on_fatal
        self._now = now
        self._actor = Actor("delivery-table", self._on_fault, clock)
        self._endings = Endings(tracer, post, self._actor.send, self._accept, self._on_untold)
        self._runs = Runs(
            self._actor,
            store,
            backend,
            self._endings,
            post,
            accept=self._accept,
            claim_again=self._claim,
            on_death=self._on_death,
            announce=announce,
            clock=clock,
            now=now,
            max_age_s=settings.max_queue_age_s,
            streams=streams,
            book=OutageBook(spool),
        )
        self.suspects = Suspects(
            self._actor,
            store,
            self._runs,
            self,
            worker_id=worker_id,
            queue=queue_for(settings.model),
            slots=backend.info().slots,
            period_s=settings.heartbeat_interval_s,
            clock=clock,
            now=now,
        )
        self._strays = Strays(self._actor, store, self._held_jobs, announce)
        self.outage = CutOff(
            self._actor,
            self,
            silence_s,
            limit_s=settings.dead_after_s,
            period_s=settings.heartbeat_interval_s,
            clock=clock,
        )
        self._asked: dict[int, _Asked] = {}
        self._pause = pause
        self._isolated = False
        self._numbers = itertools.count(1)
        self._parked: dict[int, Delivery] = {}  # their jobs are just being handed back by us
        self._later = Later(self._actor, self._endings, self._keeps)
        self._dead = False

    # -------------------------------------------------------------------------------------- called from anywhere

    @property
    def pending(self) -> int:
        """Deliveries neither acknowledged nor handed back yet."""
        return self._endings.pending

    @property
    def running(self) -> int:
        """Jobs that this worker owns."""
        return len(self._runs)

    @property
    def unfinished(self) -> bool:
        """Whether a delivery has not ended, or a job is here without one, as suspects are."""
        return bool(self.pending or self._runs or self.suspects.claiming)

    @property
    def duplicates(self) -> int:
        """Ends that were not counted, because another attempt had taken the job over."""
        return self._runs.duplicates

    @property
    def dead(self) -> bool:
        """Whether the worker cannot go on."""
        return self._dead

    def deliver(self, delivery: Delivery) -> None:
        """Take a delivery; returns at once."""
        self._endings.begin()
        delivery.number = next(self._numbers)
        delivery.terminated = partial(self._actor.send, partial(self._on_terminate, delivery))
        self._actor.send(partial(self._on_deliver, delivery))

    def revoke(self, request: GenerateRequest, state: JobState) -> None:
        """Celery has revoked or expired the request: commit ``state``, then acknowledge."""
        if request.delivery is None:
            delivery = request.delivery = Delivery(request=request, ending=state)
            self.deliver(delivery)
        else:
            self._actor.send(partial(self._on_revoke, request.delivery, state))

    def cancel(self, ids: Sequence[str]) -> None:
        """End these jobs early where they run here."""
        self._actor.send(partial(self._on_cancel, tuple(ids)))

    def terminate(self, revokes: Revokes) -> None:
        """Celery terminates these: end those that run here without a request of Celery's."""
        self._actor.send(partial(self._runs.terminate, revokes))

    def fail(self, error: BaseException) -> None:
        """The worker cannot go on: hand everything back."""
        self._actor.send(partial(self._on_death, error))

    def on_database(self, healthy: bool) -> None:
        """The database is away, or back."""
        self._actor.send(partial(self._runs.on_database, healthy))

    def reconcile(self, owned: Mapping[str, int]) -> None:
        """These jobs run here, with these attempts, as the database sees it: see ``workers.strays``."""
        self._actor.send(partial(self._on_owned, owned))

    def close(self) -> None:
        """Let nothing more into the backend; what has not entered it goes back, what runs goes on."""
        self._actor.send(self._on_close)

    def release(self) -> None:
        """Stop what runs and hand it back."""
        self._actor.send(partial(self._runs.release_all, AttemptOutcome.RELEASED, AT_SHUTDOWN))

    def start(self) -> None:
        """Run the table in a thread of its own."""
        self.suspects.start()
        self.outage.start()
        self.watch_revokes()
        self._actor.start()

    def watch_revokes(self) -> None:
        """From now on end what Celery revokes while it waits in the backend."""
        self._actor.send(partial(self._runs.watch_revokes, _REVOKES_S))

    @property
    def busy(self) -> bool:
        """Whether anything is claimed, running or being committed here; for ``workers.suspects``."""
        return bool(self._endings.pending or self._runs.busy)

    def isolate(self, alone: bool) -> None:
        """Take no deliveries, while a suspect runs alone; on the table's thread."""
        self._isolated = alone
        self._set_pause()
        if alone:
            self._hand_back_waiting()
            self._runs.release_held()  # they would be company

    def cut_off(self, away: bool) -> None:
        """See ``workers.cut_off``; on the table's thread."""
        self._set_pause()
        if away:
            self._hand_back_waiting()
            self._hand_back_asked()

    def _set_pause(self) -> None:
        self._post(partial(self._pause, self._isolated or self.outage.away))

    def stop(self) -> None:
        """End the thread, whatever is in the table."""
        self._actor.stop()

    def run_pending(self) -> int:
        """Handle what is due without waiting; returns how many events there were. For use without ``start``."""
        return self._actor.run_pending()

    # --------------------------------------------------------------------------------------------------- arrival

    def _on_deliver(self, delivery: Delivery) -> None:
        if not self._keeps():
            self._endings.hand_back(delivery)
            return
        read_delivery(delivery, self._settings, self._now())
        if isinstance(delivery.error, NewerPayloadError):
            self._hold(delivery, delivery.error)
        elif delivery.job is None:  # not even its id can be stored
            self._endings.fail(delivery, delivery.error or RequestError("cannot be read"))
        else:
            self._claim(delivery)

    def _hold(self, delivery: Delivery, error: NewerPayloadError) -> None:
        """Give workers of the newer version time to take it, rather than spin on it."""
        logger.warning("Job %s goes back to its queue: %s", delivery.job_id, error)
        self._later.hold(delivery, self._settings.newer_payload_delay_s)

    def _on_untold(self, delivery: Delivery) -> None:
        """Its job has ended in SQL, and Celery's result backend takes nothing."""
        self._later.hold(delivery, UNTOLD_S)

    def _keeps(self) -> bool:
        return not (self._runs.closing or self._isolated or self.outage.away)

    def _accept(self, delivery: Delivery) -> None:
        if delivery.accept is None or delivery.accepted:
            return
        delivery.accepted = True
        self._tracer.started(delivery)
        self._post(partial(delivery.accept, os.getpid(), time.monotonic()))

    # ----------------------------------------------------------------------------------------------------- claim

    def _claim(self, delivery: Delivery) -> None:
        assert delivery.job is not None
        item = ClaimItem(delivery.job, self._settings.max_queue_age_s, delivery.request.stored)
        self._ask(delivery, self._store.claim(item), self._on_claimed)

    def _ask(
        self, delivery: Delivery, answer: Future[T], answered: Callable[[Delivery, Future[T]], None]
    ) -> None:
        """Go on with the database's answer, unless the delivery has gone back by then."""
        self._asked[delivery.number] = _Asked(delivery, answer)
        self._actor.when(answer, partial(self._on_answer, delivery, answered))

    def _on_answer(
        self, delivery: Delivery, answered: Callable[[Delivery, Future[T]], None], future: Future[T]
    ) -> None:
        del self._asked[delivery.number]
        if not delivery.returned:
            answered(delivery, future)
        elif not future.cancelled() and future.exception() is None:
            claim = future.result()
            if isinstance(claim, ClaimOutcome) and claim.kind is ClaimKind.CLAIMED:
                self._runs.decline(claim, "claimed when its message had been handed back")

    def _hand_back_asked(self) -> None:
        """What the database cannot be asked for can be run by others. A claim may still go through, see above."""
        for asked in list(self._asked.values()):
            delivery = asked.delivery
            if asked.answer.done() or delivery.returned:
                continue  # its turn comes next
            delivery.returned = True
            if delivery.abandoned:
                self._endings.leave(delivery)
            else:
                self._endings.hand_back(delivery)
            asked.answer.cancel()

    def _on_claimed(self, delivery: Delivery, future: Future[ClaimOutcome]) -> None:
        if error := future.exception():
            self._on_unclaimable(delivery, error)
            return
        claim = future.result()
        self._later.claimed(claim.job_id)
        run = self._runs.get(claim.job_id)
        if claim.kind is ClaimKind.CLAIMED:
            self._runs.begin(delivery, claim)
        elif delivery.abandoned:
            self._endings.leave(delivery)
        elif run is not None:
            # Also when it reads as terminal: our own commit is on its way here.
            self._runs.join(delivery, run)
        elif claim.kind is ClaimKind.GONE:
            self._on_gone(delivery)
        elif claim.kind is ClaimKind.TERMINAL:
            self._on_ended_already(delivery, claim)
        elif delivery.ending is not None:
            self._flag_elsewhere(delivery)
        elif claim.kind is not ClaimKind.JOINED:
            self._endings.drop(delivery)
        elif self._runs.closing:
            self._endings.hand_back(delivery)
        else:
            self._park(delivery)

    def _on_unclaimable(self, delivery: Delivery, error: BaseException) -> None:
        if self._runs.closing or isinstance(error, WriterStoppedError):
            self._endings.hand_back(delivery)
        elif isinstance(error, DatabaseError):  # our own reason, such as a key that another job has
            answer = self._store.call(lambda conn: job_states(conn, [delivery.job_id]))
            self._ask(delivery, answer, partial(self._on_refused, error))
        else:
            self._later.refused(delivery, error)

    def _on_refused(
        self, error: BaseException, delivery: Delivery, states: Future[Mapping[str, JobState]]
    ) -> None:
        """Only a job that has no row, and gets none, has failed by this alone."""
        if delivery.abandoned:
            self._endings.leave(delivery)
        elif states.exception() is not None or states.result():
            self._later.refused(delivery, error)
        elif delivery.ending is not None:
            self._endings.acknowledge_ending(delivery)
        else:
            logger.error("Job %s cannot be accepted: %s", delivery.job_id, summary(error))
            self._endings.fail(delivery, error)

    def _on_gone(self, delivery: Delivery) -> None:
        """A stale message, such as one from a backup of Redis: to run it again would answer what has been answered."""
        logger.error(
            "Job %s was stored before this message was published, and has no row in this database: it has ended and "
            "was pruned, or client and worker use different databases. The message is dropped",
            delivery.job_id,
        )
        if delivery.ending is not None:
            self._endings.acknowledge_ending(delivery)
        else:
            self._endings.drop(delivery)

    def _on_ended_already(self, delivery: Delivery, claim: ClaimOutcome) -> None:
        stored = claim.outcome
        assert stored is not None
        if delivery.ending is not None:
            self._endings.acknowledge_ending(delivery)
        elif stored.callbacks_sent_at is not None:
            self._endings.drop(delivery)
        else:
            outcome = Outcome(
                delivery.job_id,
                delivery.model,
                stored.state,
                stored.result,
                stored.error_type,
                stored.error_message,
            )
            self._endings.trace(delivery, outcome)

    def _park(self, delivery: Delivery) -> None:
        """Its job is ours, and about to be queued again. Keep the delivery until that is committed."""
        self._parked[delivery.number] = delivery
        self._actor.after(self._settings.heartbeat_interval_s, partial(self._unpark, delivery))

    def _unpark(self, delivery: Delivery) -> None:
        if self._parked.pop(delivery.number, None) is not None:
            self._claim(delivery)

    def _flag_elsewhere(self, delivery: Delivery) -> None:
        """It is revoked and not ours: flag the row, so that whoever runs it ends it, then acknowledge."""
        answer = self._store.call(lambda conn: request_cancel(conn, [delivery.job_id]))
        self._ask(delivery, answer, self._on_flagged)

    def _on_flagged(self, delivery: Delivery, future: Future[Any]) -> None:
        if future.exception() is not None:
            self._endings.hand_back(delivery)
        else:
            self._endings.acknowledge_ending(delivery)

    def _held_jobs(self) -> set[str]:
        return self._runs.ids() | {asked.delivery.job_id for asked in self._asked.values()}

    def _on_owned(self, owned: Mapping[str, int]) -> None:
        if not self.suspects.claiming:  # nobody knows yet which they are
            self._strays.look(owned)

    # --------------------------------------------------------------------------------------- cancel, close, death

    def _on_cancel(self, ids: Sequence[str]) -> None:
        for job_id in ids:
            if run := self._runs.get(job_id):
                self._runs.end_early(run, None)

    def _on_revoke(self, delivery: Delivery, state: JobState) -> None:
        delivery.ending = delivery.ending or state
        if delivery.run is not None:
            self._runs.end_early(delivery.run, delivery.ending)
        elif self._parked.pop(delivery.number, None) is not None:
            self._claim(delivery)
        elif self._later.take(delivery):
            self._flag_elsewhere(delivery)
        # else its claim is on the way

    def _on_terminate(self, delivery: Delivery) -> None:
        """Celery terminates (revoke) or cancels (lost connection, cold shutdown) the request."""
        if not delivery.request.abandoned:
            self._on_revoke(delivery, JobState.CANCELLED)
            return
        delivery.abandoned = True
        if delivery.run is not None:
            self._runs.abandon(delivery.run)
        elif self._parked.pop(delivery.number, None) or self._later.take(delivery):
            self._endings.leave(delivery)
        # else its claim is on the way

    def _on_close(self) -> None:
        self._runs.closing = True
        self.suspects.close()
        self._hand_back_waiting()
        self._runs.release_held()

    def _hand_back_waiting(self) -> None:
        while self._parked:
            self._endings.hand_back(self._parked.popitem()[1])
        self._later.hand_back_all()

    def _on_death(self, error: BaseException) -> None:
        if self._dead:
            return
        self._dead = True
        self._on_fatal(error)
        self._on_close()
        self._runs.release_all(AttemptOutcome.LOST, str(error))

    def _on_fault(self, error: Exception) -> None:
        """A fault in here must not leave deliveries behind in a worker that looks alive."""
        logger.critical("Fault in the delivery table: %r", error, exc_info=error)
        self._on_death(error)
