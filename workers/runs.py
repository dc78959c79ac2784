"""The runs of this worker: each from a won claim to the commit of its end, or to its release."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial

from celery.utils.log import get_logger

from backend.api import (
    Backend,
    EngineDeadError,
    FinishReason,
    GenerationHandle,
    GenerationResult,
    QueueFullError,
    RequestError,
)
from models_db.claims import WAITED_TOO_LONG, ClaimOutcome, FinishItem, ReleaseItem
from models_db.errors import WriterStoppedError
from models_db.faults import summary
from models_db.suspects import ClaimedSuspect
from models_db.tables import AttemptOutcome, JobState
from workers.actor import Actor
from workers.endings import Endings, Post
from workers.intake import Delivery, Limit, Run, stored_result
from workers.refused_ends import END_REFUSED, RefusedEnds
from workers.revokes import Revokes, end_before_start
from workers.sinks import Store, StreamSink
from workers.spool import OutageBook
from workers.stored import read_stored
from workers.streams import StreamEnd
from workers.tasks import JobExpiredError, Outcome

logger = get_logger(__name__)

__all__ = ["AT_SHUTDOWN", "Runs", "Store", "StreamSink"]

AT_SHUTDOWN = "handed back at shutdown"
_QUEUE_FULL_RETRY_S = 0.5


class Runs:
    """Owned by the delivery table's thread, as is everything in here.

    Args:
        accept: tells Celery that the backend has begun a delivery's job.
        claim_again: takes the deliveries of a run that lost the fence.
        on_death: told when the backend has died.
        announce: has messages of these jobs published, so that a delivery tells Celery how they ended.
        max_age_s: a suspect that never ran and was created longer ago expires, as other jobs do when claimed.
        streams: where the tokens of jobs that ask for it go.
        book: keeps ends that the database has not taken yet.
    """

    def __init__(
        self,
        actor: Actor,
        store: Store,
        backend: Backend,
        endings: Endings,
        post: Post,
        *,
        accept: Callable[[Delivery], None],
        claim_again: Callable[[Delivery], None],
        on_death: Callable[[BaseException], None],
        announce: Callable[[Sequence[str]], None],
        clock: Callable[[], float],
        now: Callable[[], datetime],
        max_age_s: float | None = None,
        streams: StreamSink | None = None,
        book: OutageBook | None = None,
    ) -> None:
        self._actor = actor
        self._store = store
        self._backend = backend
        self._endings = endings
        self._post = post
        self._accept = accept
        self._claim_again = claim_again
        self._on_death = on_death
        self._announce = announce
        self._clock = clock
        self._now = now
        self._max_age_s = max_age_s
        self._streams = streams
        self._book = book or OutageBook(None)
        self._refused = RefusedEnds(actor, self, self._book)
        self._runs: dict[str, Run] = {}
        self.closing = False  # nothing new enters the backend
        self.duplicates = 0  # ends that lost the fence

    def __len__(self) -> int:
        return len(self._runs)

    @property
    def busy(self) -> bool:
        """Whether any is here that is more than an end which the database refuses."""
        return any(not run.held or run.releasing for run in self._runs.values())

    def ids(self) -> set[str]:
        """The jobs that this worker owns."""
        return set(self._runs)

    def get(self, job_id: str) -> Run | None:
        """The run of this job that a delivery can join."""
        run = self._runs.get(job_id)
        return None if run is None or run.releasing else run

    # ------------------------------------------------------------------------------------------------- beginning

    def begin(self, delivery: Delivery, claim: ClaimOutcome) -> None:
        """The delivery has won the claim."""
        run = Run(
            claim.job_id,
            claim.attempt,
            delivery.model,
            delivery.payload,
            claim.deadline_at,
            [delivery],
            delivery.soft_s,
            delivery.hard_s,
        )
        delivery.run = run
        self._runs[run.job_id] = run
        if self.closing or delivery.abandoned:
            self.release(run, AttemptOutcome.RELEASED, AT_SHUTDOWN)
        elif delivery.error is not None:
            self._finish(run, JobState.FAILED, error=delivery.error)
        elif delivery.ending is not None:
            self._finish(run, delivery.ending)
        elif delivery.request.looks_revoked():
            self._post(partial(self._ask_revoked, run, delivery))
        else:
            self._admit(run)

    def begin_suspect(self, claim: ClaimedSuspect, on_ended: Callable[[], None]) -> None:
        """Run a suspect from its stored message; ``on_ended`` is called when it has left this worker."""
        asked = read_stored(claim.stored.message)
        model = "" if asked.payload is None else asked.payload.model
        run = Run(
            claim.job_id,
            claim.attempt,
            model,
            asked.payload,
            claim.deadline_at,
            [],
            asked.soft_s,
            asked.hard_s,
        )
        run.asked, run.on_ended = asked, on_ended
        self._runs[run.job_id] = run
        if asked.error is not None and not self.closing:
            self._finish(run, JobState.FAILED, error=asked.error)
        elif (
            self._max_age_s is not None
            and claim.attempt == 1  # what has run before did not wait for a worker all the time
            and claim.created_at + timedelta(seconds=self._max_age_s) <= self._now()
        ):
            self._finish(run, JobState.EXPIRED, error=JobExpiredError(WAITED_TOO_LONG))
        elif end := end_before_start(run.job_id, asked, self._now()):
            self._finish(run, end)
        else:
            self._admit(run)

    def decline(self, claim: ClaimOutcome, why: str) -> None:
        """Release what was claimed for a delivery that is no longer here."""
        run = self._runs[claim.job_id] = Run(claim.job_id, claim.attempt, "", None)
        self.release(run, AttemptOutcome.RELEASED, why)

    def join(self, delivery: Delivery, run: Run) -> None:
        """Another delivery of a job that runs here shares the run."""
        if run.held:
            self._endings.drop(delivery)  # one is made when the end is committed
            return
        run.deliveries.append(delivery)
        delivery.run = run
        if run.started_at is not None:
            self._accept(delivery)
        if delivery.ending is not None:
            self.end_early(run, delivery.ending)

    def _ask_revoked(self, run: Run, delivery: Delivery) -> None:
        """On the main thread. ``revoked`` announces it, and asks for the run's end through ``acknowledge``."""
        if not delivery.request.revoked():
            self._actor.send(partial(self._admit, run))

    def _admit(self, run: Run) -> None:
        if run.finishing or run.releasing:
            return
        if self.closing:
            self.release(run, AttemptOutcome.RELEASED, AT_SHUTDOWN)
            return
        assert run.payload is not None
        left = None if run.deadline_at is None else (run.deadline_at - self._now()).total_seconds()
        if left is not None and left <= 0:
            error = JobExpiredError("the deadline passed before the job could start")
            self._finish(run, JobState.EXPIRED, error=error)
            return
        request = run.payload.to_request(run.job_id).model_copy(update={"deadline_s": left})
        try:
            handle = self._backend.submit(request)
        except QueueFullError:
            self._actor.after(_QUEUE_FULL_RETRY_S, partial(self._admit, run))
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
        run.handle = handle
        if request.stream and self._streams is not None:
            self._streams.begin(run.job_id, run.attempt, handle)
        # For Celery a job begins with its slot, not while it waits for one.
        handle.when_started(lambda: self._actor.send(partial(self._on_started, run, self._clock())))
        self._actor.when(handle.future, partial(self._on_done, run, handle))

    def _on_started(self, run: Run, at: float) -> None:
        run.started_at = at
        if run.releasing:
            return
        for delivery in run.deliveries:
            self._accept(delivery)
        for limit, seconds in ((Limit.SOFT, run.soft_s), (Limit.HARD, run.hard_s)):
            if seconds is not None:
                # From the slot on, as Celery counts from the start of a task: time spent waiting is not the job's.
                left = max(0.0, at + seconds - self._clock())
                self._actor.after(left, partial(self._on_limit, run.job_id, run.attempt, limit))

    def watch_revokes(self, period_s: float) -> None:
        """Celery looks at a revoke when a job starts; for us that is when it leaves the backend's queue."""
        self._actor.after(period_s, partial(self.watch_revokes, period_s))
        for run in self._runs.values():
            if run.handle is None or run.handle.started or run.finishing or run.releasing:
                continue
            if run.asked is not None and (end := end_before_start(run.job_id, run.asked, self._now())):
                self.end_early(run, end)
            for delivery in run.deliveries:
                if delivery.ending is None and not delivery.abandoned and delivery.request.looks_revoked():
                    self._post(delivery.request.revoked)

    # ---------------------------------------------------------------------------------------------------- ending

    def end_early(self, run: Run, state: JobState | None) -> None:
        """Cancel the run; with ``state``, the job ends as that."""
        run.cancel_wanted = True
        run.ending = run.ending or state
        if run.finishing or run.releasing or run.held:
            return
        if run.handle is not None:
            run.handle.cancel()
        else:
            self._finish(run, run.ending or JobState.CANCELLED)

    def terminate(self, revokes: Revokes) -> None:
        """End the suspects among these. The others have a request, which Celery terminates."""
        for run in list(self._runs.values()):
            if run.asked is not None and revokes.names(run.job_id, run.asked.stamps):
                self.end_early(run, JobState.CANCELLED)

    def _on_limit(self, job_id: str, attempt: int, limit: Limit) -> None:
        run = self.get(job_id)  # by its name: a timer of an hour must not keep what has ended long ago
        if run is None or run.attempt != attempt or run.limit_hit is not None or run.finishing or run.held:
            return
        assert run.handle is not None
        run.limit_hit = limit
        run.handle.cancel()

    def _on_done(self, run: Run, handle: GenerationHandle, future: Future[GenerationResult]) -> None:
        if run.finishing or run.releasing:
            return
        run.runtime_s = None if run.started_at is None else self._clock() - run.started_at
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
            if run.limit_hit is Limit.HARD:
                error = JobExpiredError("the hard time limit passed")
                self._finish(run, JobState.EXPIRED, result, error)
            elif run.limit_hit is Limit.SOFT and not run.cancel_wanted:
                self._announce_soft_limit(run)
                self._finish_late(
                    run, replace(result, finish_reason=FinishReason.DEADLINE), "soft time limit"
                )
            elif run.cancel_wanted or not self.closing:
                self._finish(run, run.ending or JobState.CANCELLED, result)
            else:  # the backend shuts down
                self.release(run, AttemptOutcome.RELEASED, AT_SHUTDOWN)
        elif reason is FinishReason.DEADLINE:
            self._finish_late(run, result, "deadline")
        else:
            self._finish(run, JobState.SUCCEEDED, result)

    def _finish_late(self, run: Run, result: GenerationResult, limit: str) -> None:
        """With the text so far, where there is any."""
        if result.completion_tokens:
            self._finish(run, JobState.SUCCEEDED, result)
        else:
            error = JobExpiredError(f"the {limit} passed before the first token")
            self._finish(run, JobState.EXPIRED, result, error)

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
        item = FinishItem(
            run.job_id,
            run.attempt,
            state,
            None if result is None else stored_result(result, run.payload),
            None if error is None else type(error).__name__,
            None if error is None else str(error),
            callback=run.payload is None or run.payload.callback_url is not None,
        )
        self.commit(run, item)

    def commit(self, run: Run, item: FinishItem) -> None:
        """Store this end of the run."""
        run.finishing = True
        self._book.waits(item)
        self._actor.when(self._store.finish(item), partial(self._on_committed, run, item))

    def on_database(self, healthy: bool) -> None:
        """The database is away, or back."""
        self._book.database(healthy)

    def _on_committed(self, run: Run, item: FinishItem, future: Future[bool]) -> None:
        error = future.exception()
        if not isinstance(error, WriterStoppedError):  # else it stays in the spool
            self._book.settled(item)
        if error is not None:
            self._on_refused(run, item, error)
            return
        if future.result():
            self._end_stream(run, item)
        self._forget(run)
        if not future.result():
            self.duplicates += 1
            logger.warning("Job %s was taken over; attempt %d does not count", run.job_id, run.attempt)
            for delivery in self._live(run):
                delivery.run = None
                self._claim_again(delivery)
            return
        outcome = Outcome(run.job_id, run.model, item.state, item.result, item.error_type, item.error_message)
        self._deliver(run, outcome)

    def _end_stream(self, run: Run, item: FinishItem) -> None:
        """Only now that the end is committed may a reader hear of it."""
        if self._streams is None or run.payload is None or not run.payload.stream:
            return
        result = item.result
        end = StreamEnd(
            state=str(item.state),
            finish_reason=None if result is None else result.finish_reason,
            prompt_tokens=0 if result is None else result.prompt_tokens,
            completion_tokens=0 if result is None else result.completion_tokens,
            cached_tokens=0 if result is None else result.cached_tokens,
            error_type=item.error_type,
            error_message=item.error_message,
        )
        self._streams.end(run.job_id, run.attempt, end)

    def _on_refused(self, run: Run, item: FinishItem, error: BaseException) -> None:
        """The database took no end of this run. Nothing of it is acknowledged as if it had."""
        if not isinstance(error, WriterStoppedError):
            run.finishing = False
            self._refused.handle(run, item, error)
            return
        logger.error("The end of job %s is not committed (%r); it is delivered again", run.job_id, error)
        self._forget(run)
        for delivery in self._live(run):
            self._endings.hand_back(delivery)

    def hold(self, run: Run) -> None:
        """Let go of all that waits for the run's end; see ``workers.refused_ends``."""
        run.held, run.handle = True, None
        deliveries, run.deliveries = self._live(run), []
        for delivery in deliveries:
            delivery.run = None
            self._endings.drop(delivery)
        if run.on_ended is not None:  # other suspects need not wait for this one
            on_ended = run.on_ended
            run.on_ended = None
            on_ended()

    def release_held(self) -> None:
        """Hand back what is here only because the database refuses its end."""
        for run in [run for run in self._runs.values() if run.held]:
            self.release(run, AttemptOutcome.RELEASED, END_REFUSED)

    def _deliver(self, run: Run, outcome: Outcome) -> None:
        if not run.deliveries:
            self._announce([run.job_id])
            return
        live = self._live(run)
        revoked = [delivery for delivery in live if delivery.ending is not None]
        waiting = [delivery for delivery in live if delivery.ending is None]
        if not waiting:
            for delivery in revoked:
                self._endings.acknowledge_ending(delivery)
            return
        # The run's end is signalled once, by the delivery that tells Celery of it; the others follow.
        first, *others = waiting
        if run.limit_hit is Limit.HARD and outcome.state is JobState.EXPIRED and first.timeout is not None:
            self._endings.time_out(first, [*others, *revoked])
        else:
            self._endings.trace(first, outcome, run.runtime_s, [*others, *revoked])

    # --------------------------------------------------------------------------------------------------- release

    def abandon(self, run: Run) -> None:
        """Celery wants no end of some of its deliveries; when of none of them, the job is handed back."""
        if all(delivery.abandoned for delivery in run.deliveries):
            self.release(run, AttemptOutcome.RELEASED, "cancelled by Celery")

    def release_all(self, outcome: AttemptOutcome, why: str) -> None:
        """Stop what runs and hand it back; ends that are being committed go on."""
        for run in list(self._runs.values()):
            self.release(run, outcome, why)

    def release(self, run: Run, outcome: AttemptOutcome, why: str) -> None:
        """Queue the job again, then hand its deliveries back."""
        if run.finishing or run.releasing:
            return
        run.releasing = True
        if run.handle is not None and not run.handle.done():
            run.handle.cancel()
        item = ReleaseItem(run.job_id, run.attempt, outcome, why)
        self._actor.when(self._store.release(item), partial(self._on_released, run))

    def _on_released(self, run: Run, future: Future[bool]) -> None:
        if error := future.exception():
            # It is queued again by workers.strays.
            logger.error("Job %s is not released yet: %s", run.job_id, summary(error))
        self._forget(run)
        if not run.deliveries:
            # It may have ended, as a suspect that was alone when the backend died.
            self._announce([run.job_id])
        for delivery in self._live(run):
            self._endings.hand_back(delivery)

    def _live(self, run: Run) -> Sequence[Delivery]:
        """The deliveries that still want an end; the others are left."""
        live = [delivery for delivery in run.deliveries if not delivery.abandoned]
        for delivery in run.deliveries:
            if not delivery.abandoned:
                continue
            if live:  # whose end is the run's, and is signalled as such
                self._endings.forget()
            else:
                self._endings.leave(delivery)
        return live

    def _forget(self, run: Run) -> None:
        if self._runs.get(run.job_id) is run:
            del self._runs[run.job_id]
            if run.on_ended is not None:
                run.on_ended()
        if self._streams is not None:
            self._streams.forget(run.job_id, run.attempt)
