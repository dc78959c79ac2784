"""Deliveries that go back to the end of their queue after a while: at once, they would go round and round."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from celery.utils.log import get_logger

from models_db.faults import summary
from workers.actor import Actor
from workers.endings import Endings
from workers.intake import Delivery

logger = get_logger(__name__)

UNTOLD_S = 5.0  # until Celery's result backend is asked again to take an outcome
_REFUSED_S = 1.0  # doubling with each refusal of the job's claim here
_LONGEST_S = 15.0
_DOUBLINGS = 4
_REMEMBERED = 10_000  # jobs whose refusals are counted


class Later:
    """See the module. Owned by the delivery table's thread.

    Args:
        keeps: whether the worker may keep deliveries; else they go back at once.
    """

    def __init__(self, actor: Actor, endings: Endings, keeps: Callable[[], bool]) -> None:
        self._actor = actor
        self._endings = endings
        self._keeps = keeps
        self._held: dict[int, Delivery] = {}
        self._refusals: dict[str, int] = {}

    def hold(self, delivery: Delivery, delay_s: float) -> None:
        """Hand it back in so many seconds."""
        if delivery.abandoned or not self._keeps():
            self._return(delivery)
            return
        self._held[delivery.number] = delivery
        self._actor.after(delay_s, partial(self._on_due, delivery))

    def refused(self, delivery: Delivery, error: BaseException) -> None:
        """Hand back what the database refuses to let anyone claim, later with each refusal.

        Its job has not ended, so that Celery must not hear of an end.
        """
        count = self._refusals.pop(delivery.job_id, 0) + 1
        self._refusals[delivery.job_id] = count
        if len(self._refusals) > _REMEMBERED:
            del self._refusals[next(iter(self._refusals))]
        delay_s = min(_REFUSED_S * 2 ** min(count - 1, _DOUBLINGS), _LONGEST_S)
        if count & (count - 1) == 0:
            logger.error(
                "The database refuses the claim of job %s, which stays as it is; look for a trigger or a constraint. "
                "Tried %d times here, again in %gs: %s",
                delivery.job_id,
                count,
                delay_s,
                summary(error),
            )
        self.hold(delivery, delay_s)

    def claimed(self, job_id: str) -> None:
        """The database has answered a claim of this job."""
        self._refusals.pop(job_id, None)

    def take(self, delivery: Delivery) -> bool:
        """Stop holding it; false when it is not held."""
        return self._held.pop(delivery.number, None) is not None

    def hand_back_all(self) -> None:
        """Hand back now what is held."""
        while self._held:
            self._return(self._held.popitem()[1])

    def _on_due(self, delivery: Delivery) -> None:
        if self.take(delivery):
            self._return(delivery)

    def _return(self, delivery: Delivery) -> None:
        if delivery.abandoned:
            self._endings.leave(delivery)
        else:
            self._endings.hand_back(delivery, front=False)
