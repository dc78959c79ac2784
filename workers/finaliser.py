"""The few threads that run Celery's tracer, and whatever other tasks the worker is sent."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from contextvars import Context
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from billiard.einfo import ExceptionInfo
from celery.exceptions import Ignore
from celery.utils.log import get_logger

from backend.api import TokenmillError
from models_db.errors import WriterStoppedError
from models_db.faults import summary
from workers.breaker import Breaker
from workers.endings import Telling
from workers.intake import Call, Delivery
from workers.results import BACKEND_AWAY
from workers.tasks import GenerateTask, Outcome
from workers.tracing import Beginning, is_watched

logger = get_logger(__name__)

T = TypeVar("T")
Action = Callable[[], None]

MOST_TOGETHER = 32  # outcomes in one round of a thread


class Threads:
    """A fixed number of threads that take work in order. Unlike an executor's, they never hold up the exit."""

    def __init__(self, count: int, name: str = "finaliser") -> None:
        self._work: queue.SimpleQueue[Action | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._loop, name=f"{name}-{n}", daemon=True) for n in range(count)
        ]

    def __len__(self) -> int:
        return len(self._threads)

    def start(self) -> None:
        """Start them."""
        for thread in self._threads:
            thread.start()

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Run ``work`` in one of them."""
        future: Future[T] = Future()

        def run() -> None:
            try:
                value = work()
            except BaseException as exc:
                future.set_exception(exc)
            else:
                future.set_result(value)

        self._work.put(run)
        return future

    def stop(self, timeout_s: float) -> None:
        """End them after the work that waits; those that are still busy then are left behind."""
        for _ in self._threads:
            self._work.put(None)
        for thread in self._threads:
            thread.join(timeout_s)

    def _loop(self) -> None:
        while (run := self._work.get()) is not None:
            run()


@dataclass(frozen=True, slots=True)
class _Ended:
    """A delivery whose outcome is committed."""

    delivery: Delivery
    call: Call
    outcome: Outcome
    runtime_s: float | None
    then: Action

    @property
    def asks_backend(self) -> bool:
        """Whether Celery's result backend is needed to tell Celery."""
        request = self.delivery.request
        return not request.ignore_result or request.has_callbacks


@dataclass(frozen=True, slots=True)
class _Finish:
    """What the main thread has to do after the tracer, and the error that this ended with."""

    act: Action
    error: BaseException | None = None
    untold: bool = False


class Finaliser:
    """Runs the unmodified tracer on committed outcomes, then the callbacks on the main thread.

    Outcomes that wait together are traced together: their results reach Celery's backend in one write, and each
    callback follows only after that. What the backend does not take comes again later, and is not tried meanwhile.

    Args:
        post: runs an action on the main thread.
        mark_told: notes durably that the links and chords of this job have been run; the acknowledgement follows.
        breaker: knows whether the backend is away.
    """

    def __init__(
        self,
        task: GenerateTask,
        threads: Threads,
        post: Callable[[Action], None],
        mark_told: Callable[[str], Future[None]] | None = None,
        breaker: Breaker | None = None,
    ) -> None:
        self._task = task
        self._breaker = breaker or Breaker()
        self._mark_told = mark_told
        self._threads = threads
        self._post = post
        self._waiting: deque[_Ended] = deque()
        self._lock = threading.Lock()
        self._busy = 0  # rounds that have been asked for and not begun, or that go on

    def started(self, delivery: Delivery) -> None:
        """Announce the job's beginning when the backend begins it, rather than when it has ended."""
        if delivery.call is None or not is_watched(self._task):
            return
        request = delivery.request
        first = request if delivery.run is None else delivery.run.deliveries[0].request
        if first.beginning is None:
            first.beginning = Beginning(self._task, first)
            self._threads.submit(first.beginning.begin).add_done_callback(_report)
        request.beginning = first.beginning

    def ended(self, delivery: Delivery, state: str, error: BaseException | None = None) -> None:
        """Announce the end of a job that the tracer is not called for, here or in this delivery."""
        beginning = delivery.request.beginning
        if beginning is not None and beginning.claim_end():
            self._threads.submit(partial(beginning.end, state, error)).add_done_callback(_report)

    def trace(self, delivery: Delivery, outcome: Outcome, runtime_s: float | None, then: Action) -> None:
        """Run the tracer with this outcome; ``callback`` and ``then`` follow on the main thread."""
        assert delivery.call is not None
        with self._lock:
            self._waiting.append(_Ended(delivery, delivery.call, outcome, runtime_s, then))
            ask = self._busy == 0 or (self._busy < len(self._threads) and len(self._waiting) > MOST_TOGETHER)
            self._busy += ask
        if ask:
            self._threads.submit(self._round)

    def _round(self) -> None:
        """Trace what waits. What is left goes behind other work of the threads."""
        with self._lock:
            some = [self._waiting.popleft() for _ in range(min(len(self._waiting), MOST_TOGETHER))]
        try:
            self._trace(some)
        finally:
            with self._lock:
                again = bool(self._waiting)
                self._busy -= not again
            if again:
                self._threads.submit(self._round)

    def _trace(self, ended: Sequence[_Ended]) -> None:
        chosen = self._breaker.choose([one.delivery.job_id for one in ended if one.asks_backend])
        now: list[_Ended] = []
        for one in ended:
            if one.asks_backend and one.delivery.job_id not in chosen:
                self._tell(one, self._untold(one))
            else:
                now.append(one)
        finishes: list[_Finish] = []
        try:
            with self._gathered(now):
                for one in now:
                    gone = one.asks_backend and self._breaker.away and any(done.untold for done in finishes)
                    finishes.append(self._untold(one) if gone else self._call(one))
        except Exception as exc:
            # None of these results is known to be written.
            finishes = [self._untold(one, exc) for one in now]
        if any(one.asks_backend and not done.untold for one, done in zip(now, finishes, strict=True)):
            self._breaker.told()
        for one, finish in zip(now, finishes, strict=True):
            self._tell(one, finish)

    def _gathered(self, ended: Sequence[_Ended]) -> AbstractContextManager[None]:
        """Let the backend write the results of many at once, where it can."""
        wanted = [one.delivery.job_id for one in ended if not one.delivery.request.ignore_result]
        gathered = getattr(self._task.backend, "gathered", None)
        return nullcontext() if gathered is None or len(wanted) < 2 else gathered(wanted)

    def _call(self, one: _Ended) -> _Finish:
        delivery = one.delivery
        call = one.call
        if delivery.accepted:
            beginning = delivery.request.beginning
            if beginning is None or not beginning.claim_end():
                beginning = Beginning(self._task, delivery.request)
            call = Call(beginning.run, (partial(one.call.target, *one.call.args, **one.call.kwargs),), {})
        runtime_s = _stored_runtime_s(one.outcome) if one.runtime_s is None else one.runtime_s
        with self._task.outcome(one.outcome, runtime_s, begun=delivery.accepted):
            act, error = run_call(call, delivery.callback, delivery.error_callback, runtime_s)
        return self._untold(one, error) if isinstance(error, BACKEND_AWAY) else _Finish(act, error)

    def _untold(self, one: _Ended, error: BaseException | None = None) -> _Finish:
        if error is not None:
            job_id = one.delivery.job_id
            logger.warning(
                "Celery's result backend does not take job %s (%s); again later", job_id, summary(error)
            )
            self._breaker.failed(job_id)
        if isinstance(one.then, Telling):
            return _Finish(_nothing, error, untold=True)
        return _Finish(partial(one.delivery.request.hand_back, front=False), error, untold=True)

    def _tell(self, one: _Ended, finish: _Finish) -> None:
        then = one.then.later if finish.untold and isinstance(one.then, Telling) else one.then
        complete = partial(_complete, one, finish.act, then)
        # An error of the job itself is an end like any other, of which link_error and chords are told.
        told = not finish.untold and isinstance(finish.error, TokenmillError | Ignore | None)
        if self._mark_told is None or not told or not one.delivery.request.has_callbacks:
            self._post(complete)
            return
        try:
            # A delivery that comes after a crash between the two would run the links a second time.
            marked = self._mark_told(one.outcome.job_id)
        except WriterStoppedError:
            self._post(complete)
        else:
            marked.add_done_callback(lambda _: self._post(complete))


def _stored_runtime_s(outcome: Outcome) -> float | None:
    """How long a job ran that may have run elsewhere."""
    result = outcome.result
    if result is None or result.latency_s is None:
        return None
    return max(0.0, result.latency_s - (result.queue_time_s or 0.0))


def _report(announced: Future[None]) -> None:
    if error := announced.exception():
        logger.error("Celery's signals of a job were not sent: %r", error, exc_info=error)


def _complete(one: _Ended, finish: Action, then: Action) -> None:
    one.delivery.request.settle()
    try:
        if not one.delivery.abandoned:
            finish()
    finally:
        then()


def run_call(
    call: Call,
    callback: Callable[[Any], None] | None,
    error_callback: Callable[[Any], None] | None,
    runtime_s: float | None = None,
) -> tuple[Action, BaseException | None]:
    """Call the tracer now; the action returned tells Celery and belongs on the main thread.

    The tracer itself stores failures of tasks. What it raises all the same (a ``Reject``) goes to
    ``error_callback``. The second value is the error that the tracer ended with: the task's own, or one of Celery's
    when it could not do its work.
    """
    try:
        # What receivers of signals leave behind in the context must not be there for the thread's next task.
        failed, value, measured = Context().run(partial(call.target, *call.args, **call.kwargs))
    except BaseException as exc:
        info = ExceptionInfo()
        return (partial(error_callback, info) if error_callback is not None else _nothing), exc
    outcome = (failed, value, measured if runtime_s is None else runtime_s)
    error = getattr(value, "exception", None) if failed else None
    return (partial(callback, outcome) if callback is not None else _nothing), getattr(error, "exc", error)


def _nothing() -> None:
    return None
