"""Celery's revokes and expiries of jobs that run without a delivery, and so without a request of Celery's: suspects."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from celery.worker import state
from kombu.utils.functional import maybe_list

from models_db.tables import JobState
from workers.stored import StoredRequest


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
