"""Answers that are known already: which job answered what, by a hash of all that decides the answer.

Every function works inside the caller's transaction and never commits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from sqlalchemy import Connection, ForeignKey, Index, String, delete, insert, select
from sqlalchemy.orm import Mapped, mapped_column

from models_db.base import MARIADB_TABLE, Base, UTCDateTime, utcnow
from models_db.callbacks import announce_jobs, insert_job_callbacks
from models_db.clock import database_time
from models_db.dialects import chunked, insert_rows
from models_db.jobs import job_results
from models_db.open_batches import require_open
from models_db.records import NewJob
from models_db.tables import Job, JobState, Result


class KnownAnswer(Base):
    """The latest job that was asked for something."""

    __tablename__ = "known_answer"

    content_hash: Mapped[str] = mapped_column(String(64), primary_key=True)
    job_id: Mapped[str] = mapped_column(ForeignKey("job.id", ondelete="CASCADE"))
    created_at: Mapped[datetime] = mapped_column(UTCDateTime)

    __table_args__ = (Index(None, "job_id"), MARIADB_TABLE)


@dataclass(frozen=True, slots=True)
class ReusedJob:
    """A job that takes over the answer of ``source``."""

    job: NewJob
    source: str


def find_answers(conn: Connection, hashes: Sequence[str], since: datetime) -> dict[str, str]:
    """The jobs that answered these, by hash, where they succeeded at ``since`` or later."""
    query = (
        select(KnownAnswer.content_hash, KnownAnswer.job_id)
        .join(Job, Job.id == KnownAnswer.job_id)
        .where(Job.state == JobState.SUCCEEDED, Job.finished_at >= since)
    )
    return {
        content: job_id
        for some in chunked(list(dict.fromkeys(hashes)))
        for content, job_id in conn.execute(query.where(KnownAnswer.content_hash.in_(some)))
    }


def remember(conn: Connection, asked: Mapping[str, str], at: datetime | None = None) -> None:
    """Note which job was asked for what; it counts once the job has succeeded."""
    now = at or utcnow()
    for some in chunked(sorted(asked)):
        conn.execute(delete(KnownAnswer).where(KnownAnswer.content_hash.in_(some)))
        rows = [{"content_hash": key, "job_id": asked[key], "created_at": now} for key in some]
        conn.execute(insert(KnownAnswer), rows)


def insert_reused(conn: Connection, jobs: Sequence[ReusedJob], at: datetime | None = None) -> set[str]:
    """Insert jobs that have succeeded before they began, with copies of the answers; no attempt is counted.

    Returns:
        The ids of those whose source is still there; the others are not inserted.

    Raises:
        BatchClosedError: their batch is being cancelled, or has ended.
    """
    require_open(conn, (reused.job.batch_id for reused in jobs))
    now = at or database_time(conn)
    answers = job_results(conn, [reused.source for reused in jobs])
    ready = [reused for reused in jobs if reused.source in answers]
    insert_rows(
        conn,
        Job,
        [
            reused.job.row() | {"state": JobState.SUCCEEDED, "finished_at": now, "message": None}
            for reused in ready
        ],
    )
    copies = [
        replace(answers[reused.source], queue_time_s=0.0, time_to_first_token_s=None, latency_s=0.0).row(
            reused.job.id, now
        )
        for reused in ready
    ]
    insert_rows(conn, Result, copies)
    announce_jobs(
        conn, insert_job_callbacks(conn, ((reused.job.id, reused.job.callback) for reused in ready), now)
    )
    return {reused.job.id for reused in ready}
