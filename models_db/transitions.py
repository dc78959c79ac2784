"""Moves of locked jobs from one state to another, with their attempts. Who may move is judged elsewhere.

Every function works inside the caller's transaction on rows that it has locked, and never commits.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, insert, update

from models_db.dialects import chunked
from models_db.errors import DatabaseError
from models_db.jobs import LockedJob
from models_db.tables import Attempt, AttemptOutcome, Job, JobState


def update_jobs(conn: Connection, ids: Sequence[str], **values: Any) -> None:
    """Change rows that this transaction has locked and judged; their number is checked, not assumed."""
    for some in chunked(ids):
        open_states = (JobState.QUEUED, JobState.RUNNING)
        statement = update(Job).where(Job.id.in_(some), Job.state.in_(open_states)).values(**values)
        if (changed := conn.execute(statement).rowcount) != len(some):
            raise DatabaseError(
                f"{len(some) - changed} of {len(some)} locked jobs were changed by someone else. "
                "Use an engine from models_db.session.make_engine, whose isolation level the claim relies on"
            )


def start_jobs(conn: Connection, jobs: Sequence[LockedJob], worker_id: str, now: datetime) -> None:
    """``running``, owned by ``worker_id``, with the next attempt open."""
    update_jobs(
        conn,
        [job.id for job in jobs],
        state=JobState.RUNNING,
        attempt=Job.attempt + 1,
        owner=worker_id,
        started_at=now,
    )
    if jobs:
        conn.execute(
            insert(Attempt),
            [
                {"job_id": job.id, "number": job.attempt + 1, "worker_id": worker_id, "started_at": now}
                for job in jobs
            ],
        )


def queue_jobs(conn: Connection, ids: Sequence[str], **values: Any) -> None:
    """``queued`` again, owned by nobody."""
    update_jobs(conn, ids, state=JobState.QUEUED, owner=None, started_at=None, **values)


def end_jobs(
    conn: Connection,
    ids: Sequence[str],
    state: JobState,
    now: datetime,
    error_type: str | None = None,
    error_message: str | None = None,
    **values: Any,
) -> None:
    """A terminal state; the attempts are closed by ``close_attempts``."""
    update_jobs(
        conn,
        ids,
        state=state,
        owner=None,
        finished_at=now,
        error_type=error_type,
        error_message=error_message,
        **values,
    )


def close_attempts(
    conn: Connection, ids: Sequence[str], outcome: AttemptOutcome, now: datetime, error: str | None
) -> None:
    """Close the open attempt of each of these jobs."""
    for some in chunked(ids):
        conn.execute(
            update(Attempt)
            .where(Attempt.job_id.in_(some), Attempt.outcome.is_(None))
            .values(outcome=outcome, ended_at=now, error=error)
        )
