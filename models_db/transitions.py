"""Moves of locked jobs from one state to another, with their attempts. Who may move is judged elsewhere.

Every function works inside the caller's transaction on rows that it has locked, and never commits.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, Update, bindparam, func, insert, select, update

from models_db.callbacks import announce_jobs
from models_db.dialects import among, chunked
from models_db.errors import DatabaseError
from models_db.jobs import LockedJob
from models_db.tables import Attempt, AttemptOutcome, Job, JobState

# Claims and ends come many times a second, so their statements are built once (see ``among``).
# The state is written so that no index answers it: PostgreSQL, until it has statistics of a table that a bulk run has
# just filled, expects few rows in a state, and would look through all that wait for each claim.
_ARE_OPEN = (among(Job.id), func.lower(Job.state).in_([JobState.QUEUED.value, JobState.RUNNING.value]))
_START = (
    update(Job)
    .where(*_ARE_OPEN)
    .values(
        state=JobState.RUNNING,
        attempt=Job.attempt + 1,
        owner=bindparam("worker"),
        started_at=bindparam("at"),
    )
)
_END = (
    update(Job)
    .where(*_ARE_OPEN)
    .values(
        state=bindparam("end"),
        owner=None,
        finished_at=bindparam("at"),
        error_type=bindparam("kind"),
        error_message=bindparam("why"),
    )
)
_ADD_ATTEMPTS = insert(Attempt).from_select(
    ["job_id", "number", "worker_id", "started_at"],
    select(Job.id, Job.attempt, Job.owner, Job.started_at).where(among(Job.id)),
)
_CLOSE_ATTEMPTS = (
    update(Attempt)
    .where(among(Attempt.job_id), Attempt.outcome.is_(None))
    .values(outcome=bindparam("end"), ended_at=bindparam("at"), error=bindparam("why"))
)


def update_jobs(conn: Connection, ids: Sequence[str], **values: Any) -> None:
    """Change rows that this transaction has locked and judged; their number is checked, not assumed."""
    _change(conn, update(Job).where(*_ARE_OPEN).values(**values), ids)


def _change(conn: Connection, statement: Update, ids: Sequence[str], **values: Any) -> None:
    for some in chunked(ids):
        if (changed := conn.execute(statement, values | {"ids": some}).rowcount) != len(some):
            raise DatabaseError(
                f"{len(some) - changed} of {len(some)} locked jobs were changed by someone else. "
                "Use an engine from models_db.session.make_engine, whose isolation level the claim relies on"
            )


def start_jobs(conn: Connection, jobs: Sequence[LockedJob], worker_id: str, now: datetime) -> None:
    """``running``, owned by ``worker_id``, with the next attempt open."""
    ids = [job.id for job in jobs]
    _change(conn, _START, ids, worker=worker_id, at=now)
    for some in chunked(ids):
        conn.execute(_ADD_ATTEMPTS, {"ids": some})


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
    *,
    announce: bool = True,
    **values: Any,
) -> None:
    """A terminal state; the attempts are closed by ``close_attempts``.

    Args:
        announce: makes the jobs' callbacks due; false where it is known that they have none.
    """
    statement = _END.values(**values) if values else _END
    _change(conn, statement, ids, end=state, at=now, kind=error_type, why=error_message)
    if announce:
        announce_jobs(conn, ids)


def close_attempts(
    conn: Connection, ids: Sequence[str], outcome: AttemptOutcome, now: datetime, error: str | None
) -> None:
    """Close the open attempt of each of these jobs."""
    for some in chunked(ids):
        conn.execute(_CLOSE_ATTEMPTS, {"ids": some, "end": outcome, "at": now, "why": error})
