"""The ways in which a delivery ends: traced and acknowledged, only acknowledged, or handed back."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from celery import states
from celery.exceptions import TimeLimitExceeded

from backend.api import TokenmillError
from models_db.errors import DatabaseError
from models_db.faults import refusal
from models_db.tables import JobState
from workers.actor import Action
from workers.intake import Delivery
from workers.tasks import Outcome

Post = Callable[[Action], None]
_End = tuple[str, JobState]


@dataclass(frozen=True, slots=True)
class Telling:
    """What follows, on the main thread, once Celery knows of an end; or ``later``, when it cannot be told now."""

    told: Action
    later: Action

    def __call__(self) -> None:
        self.told()


class Tracer(Protocol):
    """Runs Celery's tracer somewhere else, see ``workers.finaliser``."""

    def started(self, delivery: Delivery) -> None:
        """The job has entered the backend."""

    def trace(self, delivery: Delivery, outcome: Outcome, runtime_s: float | None, then: Action) -> None:
        """Run the tracer; ``then`` follows the callback, on the main thread. It may be a ``Telling``."""

    def ended(self, delivery: Delivery, state: str, error: BaseException | None = None) -> None:
        """The delivery ends without the tracer; ``state`` is what Celery's signals shall call it."""


class Endings:
    """Ends deliveries on the main thread, and counts those that have not ended.

    Owned by the delivery table's thread, but for the actions that it posts.

    Args:
        post: runs an action on the main thread, in order.
        send: runs an action on the table's thread, in order.
        accept: tells Celery that the delivery has been accepted, where that has not happened.
        on_untold: given a delivery on the table's thread when Celery's result backend takes no outcome of it.
    """

    def __init__(
        self,
        tracer: Tracer,
        post: Post,
        send: Post,
        accept: Callable[[Delivery], None],
        on_untold: Callable[[Delivery], None],
    ) -> None:
        self._tracer = tracer
        self._post = post
        self._send = send
        self._accept = accept
        self._on_untold = on_untold
        self._lock = threading.Lock()
        self._pending = 0
        self._telling: dict[_End, list[Delivery]] = {}  # what Celery is being told, and what waits for that

    @property
    def pending(self) -> int:
        """Deliveries that have not ended."""
        return self._pending

    def begin(self) -> None:
        """Count one more; from any thread."""
        with self._lock:
            self._pending += 1

    def forget(self) -> None:
        """One less, without anything done for it."""
        with self._lock:
            self._pending -= 1

    def leave(self, delivery: Delivery) -> None:
        """Celery has cancelled it to have it delivered again: neither callback nor acknowledgement."""
        self._tracer.ended(delivery, states.RETRY)
        self.forget()

    def hand_back(self, delivery: Delivery, *, front: bool = True) -> None:
        """Back into its queue, without the tracer."""
        self._tracer.ended(delivery, states.REJECTED)
        self._last(partial(delivery.request.hand_back, front=front))

    def drop(self, delivery: Delivery) -> None:
        """Acknowledge without the tracer: another delivery has brought, or brings, the outcome to Celery."""
        self._tracer.ended(delivery, states.IGNORED)
        self._last(delivery.request.drop)

    def acknowledge_ending(self, delivery: Delivery) -> None:
        """Acknowledge what Celery has revoked or expired; its terminal row is committed."""
        self._tracer.ended(delivery, states.REVOKED)
        self._last(delivery.request.end)

    def time_out(self, delivery: Delivery, joined: Sequence[Delivery] = ()) -> None:
        """Celery's own path for a hard time limit: stores the failure, calls errbacks, acknowledges.

        The end follows the failure, as it does where the tracer tells of them; then the deliveries that joined.
        """

        def act() -> None:
            delivery.request.settle()
            try:
                if delivery.timeout is not None:
                    delivery.timeout(False, delivery.hard_s)
            finally:
                self._tracer.ended(delivery, states.FAILURE, TimeLimitExceeded(delivery.hard_s))
                self._end_joined(joined)

        self._last(act)

    def trace(
        self,
        delivery: Delivery,
        outcome: Outcome,
        runtime_s: float | None = None,
        joined: Sequence[Delivery] = (),
    ) -> None:
        """Tell Celery the outcome; the deliveries that joined it are acknowledged after it.

        So are those that come while Celery is told of the same job, or its links would run once for each of them.

        A job that was cancelled or expired before it got a slot here does not start in Celery's eyes either. A failed
        one does, so that the failure has a beginning and an end.
        """
        if delivery.call is None:  # revoked before the pool saw it
            self.acknowledge_ending(delivery)
            return

        end = delivery.job_id, outcome.state  # another one is of a job that has been retried meanwhile
        if end in self._telling:
            self._telling[end] += [delivery, *joined]
            return
        self._telling[end] = list(joined)

        def then() -> None:
            # By way of the table, which may just be handling a claim that was made before Celery had been told.
            self._send(partial(self._on_told, end))
            self.forget()

        def later() -> None:
            self._send(partial(self._put_off, delivery, end))

        if outcome.state not in (JobState.CANCELLED, JobState.EXPIRED):
            self._accept(delivery)
        self._tracer.trace(delivery, outcome, runtime_s, Telling(then, later))

    def _put_off(self, delivery: Delivery, end: _End) -> None:
        self._on_told(end)  # the others are not needed: this one comes again
        delivery.run = None
        self._on_untold(delivery)

    def _on_told(self, end: _End) -> None:
        self._end_joined(self._telling.pop(end))

    def fail(self, delivery: Delivery, error: BaseException) -> None:
        """Tell Celery about a failure that no row can hold."""
        name = type(error).__name__
        # A driver's message may quote the row.
        why = str(error) if isinstance(error, TokenmillError | DatabaseError) else refusal(error)
        self.trace(delivery, Outcome(delivery.job_id, delivery.model, JobState.FAILED, None, name, why))

    def _end_joined(self, joined: Sequence[Delivery]) -> None:
        for other in joined:
            if other.ending is not None:
                self.acknowledge_ending(other)
            else:
                self.drop(other)

    def _last(self, action: Action) -> None:
        def act() -> None:
            try:
                action()
            finally:
                self.forget()

        self._post(act)
