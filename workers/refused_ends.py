"""Ends of jobs that the database refuses for a reason of its own, each time: a trigger, a constraint, a value.

The job must end all the same, and must not run again for that. Its result is put aside, and it fails with the least
that can be stored. Where even that is refused, its row stays ``running`` here, so that nobody runs it as long as this
worker lives; its message is acknowledged, and only the commit is tried again, more and more rarely. As soon as the
database takes it, the job has ended as any other. At a shutdown it is queued again, and runs once more elsewhere.
"""

from __future__ import annotations

from functools import partial
from typing import Protocol

from celery.utils.log import get_logger

from models_db.claims import FinishItem, refused_end
from models_db.faults import summary
from models_db.tables import AttemptOutcome
from workers.actor import Actor
from workers.intake import Run
from workers.spool import OutageBook

logger = get_logger(__name__)

END_REFUSED = "the database refused its end"
_AGAIN_S = 1.0  # doubling with each refusal
_LONGEST_S = 3600.0
_DOUBLINGS = 12


class Host(Protocol):
    """The runs, as far as this needs them."""

    closing: bool

    def get(self, job_id: str) -> Run | None:
        """The run of this job, unless it is being handed back."""

    def commit(self, run: Run, item: FinishItem) -> None:
        """Store this end of the run."""

    def hold(self, run: Run) -> None:
        """Let go of all that waits for the run's end."""

    def release(self, run: Run, outcome: AttemptOutcome, why: str) -> None:
        """Queue the job again."""


class RefusedEnds:
    """See the module. Owned by the delivery table's thread."""

    def __init__(self, actor: Actor, host: Host, book: OutageBook) -> None:
        self._actor = actor
        self._host = host
        self._book = book

    def handle(self, run: Run, item: FinishItem, error: BaseException) -> None:
        """The database has refused this end of the run."""
        run.refusals += 1
        if run.refusals == 1:
            logger.error("The database refuses how job %s ended, so it fails: %s", run.job_id, summary(error))
            self._book.refused(item)
            self._host.commit(run, refused_end(item, error))
        elif self._host.closing:
            self._host.release(run, AttemptOutcome.RELEASED, END_REFUSED)
        else:
            self._try_later(run, item, error)

    def _try_later(self, run: Run, item: FinishItem, error: BaseException) -> None:
        delay = min(_AGAIN_S * 2 ** min(run.refusals - 2, _DOUBLINGS), _LONGEST_S)
        if not run.held:
            self._host.hold(run)
        logger.critical(
            "The database refuses any end of job %s, whose row stays running here until it takes one; look for a "
            "trigger or a constraint. Tried %d times, again in %gs: %s",
            run.job_id,
            run.refusals,
            delay,
            summary(error),
        )
        self._actor.after(delay, partial(self._again, run, item))

    def _again(self, run: Run, item: FinishItem) -> None:
        if self._host.get(run.job_id) is run:
            self._host.commit(run, item)
