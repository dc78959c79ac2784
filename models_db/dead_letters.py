"""Messages that no worker could read, kept for people.

Every function works inside the caller's transaction and never commits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime

from sqlalchemy import Connection, null, select

from models_db.base import utcnow
from models_db.clock import database_time
from models_db.dialects import insert_or_ignore
from models_db.jobs import lock_jobs
from models_db.tables import DeadLetter, JobState
from models_db.text import clean_text
from models_db.transitions import end_jobs

UNREADABLE = "UnreadableMessageError"


@dataclass(frozen=True, slots=True)
class NewDeadLetter:
    """One message with the reason. ``message`` is what Redis held, as text; ``job_id`` is who it says it is."""

    id: str
    queue: str
    worker_id: str
    reason: str
    message: str
    job_id: str | None = None
    received_at: datetime = field(default_factory=utcnow)


def store_dead_letters(conn: Connection, letters: Sequence[NewDeadLetter]) -> None:
    """Insert them; one that is there already is left alone. A job of theirs that waits for a worker fails."""
    rows = [
        {
            "id": letter.id,
            "queue": clean_text(letter.queue)[:255],
            "worker_id": letter.worker_id,
            "reason": clean_text(letter.reason),
            "message": clean_text(letter.message),
            "received_at": letter.received_at,
        }
        for letter in letters
    ]
    insert_or_ignore(conn, DeadLetter, rows, [DeadLetter.id])
    reasons = {letter.job_id: letter.reason for letter in letters if letter.job_id is not None}
    known = [job_id for job_id in reasons if len(job_id) <= 155 and clean_text(job_id) == job_id]
    for job in lock_jobs(conn, known).values():
        if job.state is JobState.QUEUED:
            end_jobs(
                conn, [job.id], JobState.FAILED, database_time(conn), UNREADABLE, clean_text(reasons[job.id])
            )


def list_dead_letters(conn: Connection, limit: int = 50) -> list[NewDeadLetter]:
    """The newest ones first."""
    columns = (
        DeadLetter.id,
        DeadLetter.queue,
        DeadLetter.worker_id,
        DeadLetter.reason,
        DeadLetter.message,
        null().label("job_id"),
        DeadLetter.received_at,
    )
    query = select(*columns).order_by(DeadLetter.received_at.desc(), DeadLetter.id).limit(limit)
    return [NewDeadLetter(*row) for row in conn.execute(query)]
