"""The delivery table: what a worker does with each delivery of a job, from the claim to the acknowledgement.

One thread owns the table and reacts to events, one at a time: a delivery arrives, a claim is answered, the
backend is done, a commit is answered, someone cancels. It never waits for any of them::

    deliver ─► claim ─┬─ claimed ───► submit ─► done ─► commit ─┬─► tracer ─► callback, ack
                      ├─ joined ────► (shares the run)          └─ fence lost: claim again
                      ├─ elsewhere ─► parked, claim again until it is terminal or its worker dead
                      └─ terminal ──► tracer with the stored outcome ─► callback, ack

Results are committed before anything is acknowledged, and count only while the attempt is the current one.
Everything that touches Celery's requests is posted to the main thread.
"""

from __future__ import annotations

import heapq
import itertools
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import datetime
from functools import partial
from typing import Any, Protocol, TypeVar

from celery.utils.log import get_logger
from sqlalchemy import Connection

from backend.api import (
    Backend,
    EngineDeadError,
    FinishReason,
    GenerationHandle,
    GenerationResult,
    QueueFullError,
    RequestError,
)
from models_db.base import utcnow
from models_db.claims import ClaimItem, ClaimKind, ClaimOutcome, FinishItem, ReleaseItem
from models_db.errors import WriterStoppedError
from models_db.jobs import request_cancel
from models_db.tables import AttemptOutcome, JobState
from workers.intake import Delivery, Run, read_delivery, stored_result
from workers.payload import NewerPayloadError
from workers.request import GenerateRequest
from workers.settings import Settings
from workers.tasks import JobExpiredError, Outcome

logger = get_logger(__name__)
T = TypeVar("T")

_QUEUE_FULL_RETRY_S = 0.5


class Store(Protocol):
    """The part of ``models_db.writer.DatabaseThread`` that the table uses."""

    def claim(self, item: ClaimItem) -> Future[ClaimOutcome]: ...

    def finish(self, item: FinishItem) -> Future[bool]: ...

    def release(self, item: ReleaseItem) -> Future[bool]: ...

    def call(self, work: Callable[[Connection], T]) -> Future[T]: ...


class Tracer(Protocol):
    """Runs Celery's tracer somewhere else, see ``workers.finaliser``."""

    def started(self, delivery: Delivery) -> None: ...

    def trace(self, delivery: Delivery, outcome: Outcome, runtime_s: float | None, then: Action) -> None: ...


Action = Callable[[], None]
Post = Callable[[Action], None]


class DeliveryTable:
    """See the module. ``start`` runs it in a thread; tests call ``run_pending`` instead.

    Args:
        post: runs an action on the main thread, in order.
        on_fatal: called once, on this thread, when the worker cannot go on.
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
    ) -> None:
        self._settings = settings
        self._store = store
        self._backend = backend
        self._tracer = tracer
        self._post = post
        self._on_fatal = on_fatal
        self._clock = clock
        self._now = now
        self._events: queue.SimpleQueue[Action | None] = queue.SimpleQueue()
        self._timers: list[tuple[float, int, Action]] = []
        self._numbers = itertools.count()
        self._runs: dict[str, Run] = {}
        self._parked: dict[int, Delivery] = {}  # run elsewhere
        self._held: dict[int, Delivery] = {}  # for a newer version
        self._closing = False
        self._dead = False
        self._lock = threading.Lock()
        self._pending = 0
        self._thread: threading.Thread | None = None
        self.duplicates = 0  # outcomes that lost the fence

    # ------------------------------------------------------------------------------------ called from anywhere

    @property
    def pending(self) -> int:
        """Deliveries neither acknowledged nor handed back yet."""
        return self._pending

    @property
    def dead(self) -> bool:
        """Whether the worker cannot go on."""
        return self._dead

    @property
    def running(self) -> int:
        """Jobs owned by this worker."""
        return len(self._runs)

    def deliver(self, delivery: Delivery) -> None:
        """Take a delivery; returns at once."""
        self._count(1)
        delivery.number = next(self._numbers)
        delivery.terminated = partial(self._send, partial(self._on_terminate, delivery))
        self._send(partial(self._on_deliver, delivery))

    def revoke(self, request: GenerateRequest, state: JobState) -> None:
        """Celery has revoked or expired the request: commit ``state``, then acknowledge."""
        delivery = request.delivery
        if delivery is None:
            delivery = request.delivery = Delivery(request=request)
            delivery.ending = state
            self.deliver(delivery)
        else:
            self._send(partial(self._on_revoke, delivery, state))

    def cancel(self, ids: Sequence[str]) -> None:
        """End these jobs early where they run here."""
        self._send(partial(self._on_cancel, tuple(ids)))

    def fail(self, error: BaseException) -> None:
        """The worker cannot go on: hand everything back."""
        self._send(partial(self._on_death, error))

    def close(self) -> None:
        """Claim nothing more; what has not been claimed goes back. What runs goes on."""
        self._send(self._on_close)

    def release(self) -> None:
        """Stop what runs and hand it back."""
        self._send(partial(self._release_all, AttemptOutcome.RELEASED, "handed back at shutdown"))

    def start(self) -> None:
        """Run the table in a thread of its own."""
        self._thread = threading.Thread(target=self._loop, name="delivery-table", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread, whatever is in the table."""
        self._events.put(None)
        if self._thread is not None:
            self._thread.join()

    def run_pending(self) -> int:
        """Handle what is due without waiting; returns how many events there were. For use without ``start``."""
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

    # --------------------------------------------------------------------------------------------- the thread

    def _send(self, event: Action) -> None:
        self._events.put(event)

    def _after(self, delay_s: float, event: Action) -> None:
        heapq.heappush(self._timers, (self._clock() + delay_s, next(self._numbers), event))

    def _due(self) -> Action | None:
        if self._timers and self._timers[0][0] <= self._clock():
            return heapq.heappop(self._timers)[2]
        return None

    def _loop(self) -> None:
        while True:
            timeout = max(0.0, self._timers[0][0] - self._clock()) if self._timers else None
            try:
                event = self._events.get(timeout=timeout)
                if event is None:
                    return
            except queue.Empty:
                event = self._due()
            if event is None:
                continue
            try:
                event()
            except Exception as exc:
                # A fault in here must not leave deliveries behind a worker that looks alive.
                logger.critical("Fault in the delivery table: %r", exc, exc_info=True)
                self._on_death(exc)

    def _count(self, change: int) -> None:
        with self._lock:
            self._pending += change

    def _post_last(self, action: Action) -> None:
        """Post the action that ends a delivery."""

        def act() -> None:
            try:
                action()
            finally:
                self._count(-1)

        self._post(act)

    def _when(self, future: Future[T], event: Callable[[Future[T]], None]) -> None:
        future.add_done_callback(lambda done: self._send(partial(event, done)))

    # ---------------------------------------------------------------------------------------- arrival and claim

    def _on_deliver(self, delivery: Delivery) -> None:
        if self._closing:
            self._hand_back(delivery)
            return
        read_delivery(delivery, self._settings, self._now())
        if isinstance(delivery.error, NewerPayloadError):
            self._hold(delivery, delivery.error)
        elif delivery.job is None:  # not even its id can be stored
            self._trace(delivery, _failed(delivery, delivery.error or RequestError("unreadable")))
        else:
            self._claim(delivery)

    def _claim(self, delivery: Delivery) -> None:
        assert delivery.job is not None
        self._when(self._store.claim(ClaimItem(delivery.job)), partial(self._on_claimed, delivery))

    def _on_claimed(self, delivery: Delivery, future: Future[ClaimOutcome]) -> None:
        if error := future.exception():
            if self._closing or isinstance(error, WriterStoppedError):
                self._hand_back(delivery)
            else:
                logger.error("Job %s cannot be claimed: %r", delivery.job_id, error)
                self._trace(delivery, _failed(delivery, error))
            return
        claim = future.result()
        run = self._runs.get(claim.job_id)
        if claim.kind is ClaimKind.CLAIMED:
            self._begin(delivery, claim)
        elif run is not None and not run.releasing:
            # Also when it reads as terminal: our own commit is on its way here.
            self._join(delivery, run)
        elif claim.kind is ClaimKind.TERMINAL:
            self._already_ended(delivery, claim)
        elif delivery.ending is not None:
            self._flag_elsewhere(delivery)
        elif self._closing:
            self._hand_back(delivery)
        else:
            self._park(delivery)

    def _already_ended(self, delivery: Delivery, claim: ClaimOutcome) -> None:
        stored = claim.outcome
        assert stored is not None
        if delivery.ending is not None:
            self._acknowledge_ending(delivery)
        elif stored.callbacks_sent_at is not None:
            self._drop(delivery)
        else:
            outcome = Outcome(
                delivery.job_id,
                delivery.model,
                stored.state,
                stored.result,
                stored.error_type,
                stored.error_message,
            )
            self._trace(delivery, outcome)

    def _join(self, delivery: Delivery, run: Run) -> None:
        run.deliveries.append(delivery)
        delivery.run = run
        self._accept(delivery)
        if delivery.ending is not None:
            self._end_early(run, delivery.ending)

    def _park(self, delivery: Delivery) -> None:
        """Its job runs on a live worker elsewhere. Keep the delivery: it may be the last one there is."""
        self._parked[delivery.number] = delivery
        self._after(self._settings.heartbeat_interval_s, partial(self._unpark, delivery))

    def _unpark(self, delivery: Delivery) -> None:
        if self._parked.pop(delivery.number, None) is not None:
            self._claim(delivery)

    def _hold(self, delivery: Delivery, error: NewerPayloadError) -> None:
        """Give workers of the newer version time to take it, rather than spin on it."""
        logger.warning("Job %s goes back to its queue: %s", delivery.job_id, error)
        self._held[delivery.number] = delivery
        self._after(self._settings.newer_payload_delay_s, partial(self._unhold, delivery))

    def _unhold(self, delivery: Delivery) -> None:
        if self._held.pop(delivery.number, None) is not None:
            self._hand_back(delivery, front=False)

    def _flag_elsewhere(self, delivery: Delivery) -> None:
        """It is revoked and not ours: flag the row, so that whoever runs it ends it, then acknowledge."""

        def flagged(future: Future[Any]) -> None:
            if future.exception() is not None:
                self._hand_back(delivery)
            else:
                self._acknowledge_ending(delivery)

        self._when(self._store.call(lambda conn: request_cancel(conn, [delivery.job_id])), flagged)

    # ------------------------------------------------------------------------------------------------- the run

    def _begin(self, delivery: Delivery, claim: ClaimOutcome) -> None:
        run = Run(claim.job_id, claim.attempt, delivery.model, delivery.payload, claim.deadline_at)
        run.deliveries.append(delivery)
        delivery.run = run
        self._runs[run.job_id] = run
        if self._closing:
            self._release(run, AttemptOutcome.RELEASED, "handed back at shutdown")
        elif delivery.error is not None:
            self._finish(run, JobState.FAILED, error=delivery.error)
        elif delivery.ending is not None:
            self._finish(run, delivery.ending)
        elif delivery.request.looks_revoked():
            self._post(partial(self._ask_revoked, run, delivery))
        else:
            self._admit(run, delivery)

    def _ask_revoked(self, run: Run, delivery: Delivery) -> None:
        """On the main thread. ``revoked`` announces it and asks for the end through ``revoke``."""
        if not delivery.request.revoked():
            self._send(partial(self._admit, run, delivery))

    def _admit(self, run: Run, delivery: Delivery) -> None:
        if run.finishing or run.releasing:
            return
        if self._closing:
            self._release(run, AttemptOutcome.RELEASED, "handed back at shutdown")
            return
        if run.cancel_wanted:
            self._finish(run, run.ending or JobState.CANCELLED)
            return
        assert run.payload is not None
        left = None if run.deadline_at is None else (run.deadline_at - self._now()).total_seconds()
        if left is not None and left <= 0:
            error = JobExpiredError("the deadline passed before the job could start")
            self._finish(run, JobState.EXPIRED, error=error)
            return
        limits = [limit for limit in (left, delivery.soft_s) if limit is not None]
        request = run.payload.to_request(run.job_id)
        request = request.model_copy(update={"deadline_s": min(limits, default=None)})
        run.soft_limited = delivery.soft_s is not None and request.deadline_s == delivery.soft_s
        try:
            run.handle = self._backend.submit(request)
        except QueueFullError:
            self._after(_QUEUE_FULL_RETRY_S, partial(self._admit, run, delivery))
            return
        except EngineDeadError as exc:
            self._on_death(exc)
            return
        except RequestError as exc:
            self._finish(run, JobState.FAILED, error=exc)
            return
        except Exception as exc:
            logger.error("Job %s could not be submitted: %r", run.job_id, exc, exc_info=True)
            self._finish(run, JobState.FAILED, error=exc)
            return
        run.started_at = self._clock()
        self._accept(delivery)
        if delivery.hard_s is not None:
            self._after(delivery.hard_s, partial(self._on_hard_limit, run))
        self._when(run.handle.future, partial(self._on_done, run, run.handle))

    def _accept(self, delivery: Delivery) -> None:
        accept = delivery.accept
        if accept is None or delivery.accepted:
            return
        delivery.accepted = True
        self._tracer.started(delivery)
        self._post(partial(accept, os.getpid(), time.monotonic()))

    def _on_done(self, run: Run, handle: GenerationHandle, future: Future[GenerationResult]) -> None:
        if run.finishing or run.releasing:
            return
        run.runtime_s = self._clock() - run.started_at
        error = future.exception()
        if isinstance(error, EngineDeadError):
            self._on_death(error)
        elif error is not None:
            if not isinstance(error, RequestError):
                logger.error("Job %s failed in the backend: %r", run.job_id, error, exc_info=error)
            self._finish(run, JobState.FAILED, error=error)
        else:
            self._finish_with(run, future.result())

    def _finish_with(self, run: Run, result: GenerationResult) -> None:
        reason = result.finish_reason
        if reason is FinishReason.CANCELLED:
            if run.hard_limit_hit:
                error = JobExpiredError("the hard time limit passed")
                self._finish(run, JobState.EXPIRED, result, error)
            elif run.cancel_wanted or not self._closing:
                self._finish(run, run.ending or JobState.CANCELLED, result)
            else:  # the backend shuts down
                self._release(run, AttemptOutcome.RELEASED, "cut short at shutdown")
        elif reason is FinishReason.DEADLINE and not result.completion_tokens:
            error = JobExpiredError("the deadline passed before the first token")
            self._finish(run, JobState.EXPIRED, result, error)
        else:
            if reason is FinishReason.DEADLINE and run.soft_limited:
                self._announce_soft_limit(run)
            self._finish(run, JobState.SUCCEEDED, result)

    def _announce_soft_limit(self, run: Run) -> None:
        for delivery in run.deliveries:
            if delivery.timeout is not None and delivery.soft_s is not None and not delivery.abandoned:
                self._post(partial(delivery.timeout, True, delivery.soft_s))

    def _finish(
        self,
        run: Run,
        state: JobState,
        result: GenerationResult | None = None,
        error: BaseException | None = None,
    ) -> None:
        run.finishing = True
        item = FinishItem(
            run.job_id,
            run.attempt,
            state,
            None if result is None else stored_result(result, run.payload),
            None if error is None else type(error).__name__,
            None if error is None else str(error),
        )
        self._when(self._store.finish(item), partial(self._on_committed, run, item))

    def _on_committed(self, run: Run, item: FinishItem, future: Future[bool]) -> None:
        if error := future.exception():
            if item.result is not None and not isinstance(error, WriterStoppedError):
                logger.error("The result of job %s cannot be stored: %r", run.job_id, error)
                self._finish(run, JobState.FAILED, error=error)
                return
            logger.error(
                "The end of job %s is not committed: %r; it will be delivered again", run.job_id, error
            )
            self._forget(run)
            for delivery in run.deliveries:
                self._post_last(partial(delivery.request.hand_back, front=True))
            return
        self._forget(run)
        if not future.result():
            self.duplicates += 1
            logger.warning("Job %s was taken over; attempt %d does not count", run.job_id, run.attempt)
            for delivery in run.deliveries:
                delivery.run = None
                if delivery.abandoned:
                    self._count(-1)
                else:
                    self._claim(delivery)
            return
        outcome = Outcome(run.job_id, run.model, item.state, item.result, item.error_type, item.error_message)
        self._deliver_outcome(run, outcome)

    def _deliver_outcome(self, run: Run, outcome: Outcome) -> None:
        waiting = []
        for delivery in run.deliveries:
            if delivery.abandoned:
                self._count(-1)
            elif delivery.ending is not None:
                self._acknowledge_ending(delivery)
            else:
                waiting.append(delivery)
        if not waiting:
            return
        first, *others = waiting
        if run.hard_limit_hit and outcome.state is JobState.EXPIRED and first.timeout is not None:
            self._post_last(partial(_time_out, first))
            for delivery in others:
                self._drop(delivery)
        else:
            self._trace(first, outcome, run.runtime_s, others)

    def _forget(self, run: Run) -> None:
        if self._runs.get(run.job_id) is run:
            del self._runs[run.job_id]

    # -------------------------------------------------------------------------------------------- early endings

    def _on_revoke(self, delivery: Delivery, state: JobState) -> None:
        delivery.ending = delivery.ending or state
        if delivery.run is not None:
            self._end_early(delivery.run, delivery.ending)
        elif self._parked.pop(delivery.number, None) is not None:
            self._claim(delivery)
        elif self._held.pop(delivery.number, None) is not None:
            self._flag_elsewhere(delivery)
        # else its claim is on the way

    def _on_terminate(self, delivery: Delivery) -> None:
        """Celery terminates (revoke) or cancels (lost connection, cold shutdown) the request."""
        if not delivery.request.abandoned:
            self._on_revoke(delivery, JobState.CANCELLED)
            return
        delivery.abandoned = True
        run = delivery.run
        if run is not None and all(other.abandoned for other in run.deliveries):
            self._release(run, AttemptOutcome.RELEASED, "cancelled by Celery")

    def _on_cancel(self, ids: Sequence[str]) -> None:
        for job_id in ids:
            if run := self._runs.get(job_id):
                self._end_early(run, None)

    def _on_hard_limit(self, run: Run) -> None:
        if not run.finishing and run.handle is not None:
            run.hard_limit_hit = True
            run.handle.cancel()

    def _end_early(self, run: Run, state: JobState | None) -> None:
        run.cancel_wanted = True
        run.ending = run.ending or state
        if run.finishing or run.releasing:
            return
        if run.handle is not None:
            run.handle.cancel()
        else:
            self._finish(run, run.ending or JobState.CANCELLED)

    # --------------------------------------------------------------------------------------- closing and death

    def _on_close(self) -> None:
        self._closing = True
        for waiting in (self._parked, self._held):
            while waiting:
                self._hand_back(waiting.popitem()[1])

    def _on_death(self, error: BaseException) -> None:
        if self._dead:
            return
        self._dead = True
        self._on_fatal(error)
        self._on_close()
        self._release_all(AttemptOutcome.LOST, str(error))

    def _release_all(self, outcome: AttemptOutcome, why: str) -> None:
        for run in list(self._runs.values()):
            self._release(run, outcome, why)

    def _release(self, run: Run, outcome: AttemptOutcome, why: str) -> None:
        if run.finishing or run.releasing:
            return
        run.releasing = True
        if run.handle is not None:
            run.handle.cancel()
        item = ReleaseItem(run.job_id, run.attempt, outcome, why)
        self._when(self._store.release(item), partial(self._on_released, run))

    def _on_released(self, run: Run, future: Future[bool]) -> None:
        if error := future.exception():
            logger.error("Job %s is not released: %r; it is taken over later", run.job_id, error)
        self._forget(run)
        for delivery in run.deliveries:
            self._hand_back(delivery)

    # ------------------------------------------------------------------------------------ the end of a delivery

    def _hand_back(self, delivery: Delivery, *, front: bool = True) -> None:
        self._post_last(partial(delivery.request.hand_back, front=front))

    def _drop(self, delivery: Delivery) -> None:
        self._post_last(delivery.request.drop)

    def _acknowledge_ending(self, delivery: Delivery) -> None:
        self._post_last(partial(delivery.request.end, delivery.accept))

    def _trace(
        self,
        delivery: Delivery,
        outcome: Outcome,
        runtime_s: float | None = None,
        joined: Sequence[Delivery] = (),
    ) -> None:
        def then() -> None:
            for other in joined:
                self._drop(other)
            self._count(-1)

        if delivery.call is None:  # revoked before it reached the pool
            self._acknowledge_ending(delivery)
        else:
            self._accept(delivery)
            self._tracer.trace(delivery, outcome, runtime_s, then)


def _time_out(delivery: Delivery) -> None:
    """Celery's own path for a hard time limit: stores the failure, calls errbacks, acknowledges."""
    assert delivery.timeout is not None
    delivery.request.settle()
    delivery.timeout(False, delivery.hard_s)


def _failed(delivery: Delivery, error: BaseException) -> Outcome:
    return Outcome(delivery.job_id, delivery.model, JobState.FAILED, None, type(error).__name__, str(error))
