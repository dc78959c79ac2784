"""Celery's revokes and expiries, where Celery's own requests do not see to them.

Those are of jobs that run without a delivery, and so without a request: suspects. And of jobs that wait in their queue:
Celery knows of their revoke for as long as a process lives that has heard it, SQL for good.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from typing import Any

from celery.utils.log import get_logger
from celery.worker import state
from kombu.utils.functional import maybe_list
from sqlalchemy import Connection

from models_db.dialects import chunked
from models_db.errors import InvalidValueError, WriterStoppedError
from models_db.faults import summary
from models_db.jobs import request_revoke
from models_db.tables import JobState
from models_db.text import check_name
from workers.stored import StoredRequest

logger = get_logger(__name__)

_TOGETHER = 1000  # in a transaction, which must not outlast a worker's wait for a lock


@dataclass(frozen=True, slots=True)
class Revokes:
    """What is revoked: tasks by id, and those that were stamped with one of these values."""

    ids: Container[str] = ()
    stamps: Mapping[str, Any] = field(default_factory=dict)

    def names(self, job_id: str, stamps: Mapping[str, Any]) -> bool:
        """Whether a job with these stamps is one of them."""
        if job_id in self.ids:
            return True
        return any(
            value in (maybe_list(self.stamps[name]) or [])
            for name, values in stamps.items()
            if name in self.stamps
            for value in maybe_list(values) or []
        )


def revoked_here() -> Revokes:
    """What this process has been told to revoke so far; any thread may ask."""
    return Revokes(state.revoked, state.revoked_stamps)


def end_before_start(job_id: str, asked: StoredRequest, now: datetime) -> JobState | None:
    """How a job ends that must not start any more, as Celery's own request would decide it."""
    if asked.expires is not None and asked.expires < now:
        return JobState.EXPIRED
    if revoked_here().names(job_id, asked.stamps):
        return JobState.CANCELLED
    return None


def store_revokes(
    call: Callable[[Callable[[Connection], list[str]]], Future[list[str]]],
    ids: Collection[Any],
    *,
    terminate: bool,
) -> None:
    """Cancel in SQL what is revoked and has a row there: what is queued, with ``terminate`` also what runs.

    Every worker of the fleet hears the same revoke and does this; the first one has something to do.
    """
    for some in chunked(sorted(filter(_can_be_stored, ids)), _TOGETHER):
        with suppress(WriterStoppedError):
            call(partial(request_revoke, ids=some, terminate=terminate)).add_done_callback(_report)


def _can_be_stored(job_id: Any) -> bool:
    if not isinstance(job_id, str):
        return False
    try:
        check_name("id", job_id, 255)
    except InvalidValueError:
        return False
    return True


def _report(stored: Future[list[str]]) -> None:
    if not stored.cancelled() and (error := stored.exception()):
        logger.error("A revoke is not in SQL, and is forgotten when this worker ends: %s", summary(error))
