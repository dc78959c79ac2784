"""What of a batch waits beyond its deadline ends there, also where no worker comes to claim it."""

from __future__ import annotations

from datetime import datetime
from functools import partial

from sqlalchemy import Connection, Engine, select, update

from models_db.callbacks import announce_jobs
from models_db.claims import EXPIRED_BEFORE_START
from models_db.clock import database_time
from models_db.deaths import SUSPECT_DEATHS
from models_db.jobs import lock_jobs, mark_unpublished
from models_db.session import reading, transaction
from models_db.tables import Batch, Job, JobState

PIECE = 1000
"""Jobs that expire in one transaction, as many as a cancel takes."""


def expire_batch(engine: Engine, batch_id: str, *, piece: int = PIECE, at: datetime | None = None) -> int:
    """Expire the batch's queued jobs whose deadlines have passed, once its own has; returns how many they were.

    What runs is left to its worker. Jobs without a deadline, such as those that were queued again after theirs, stay.
    """
    with reading(engine) as conn:
        deadline_at = conn.scalar(select(Batch.deadline_at).where(Batch.id == batch_id))
        if deadline_at is None or deadline_at > (at or database_time(conn)):
            return 0
    expired = 0
    while count := transaction(engine, partial(_expire_some, batch_id=batch_id, limit=piece, at=at)):
        expired += count
    return expired


def _expire_some(conn: Connection, batch_id: str, limit: int, at: datetime | None) -> int:
    now = at or database_time(conn)
    query = (
        select(Job.id)
        .where(Job.batch_id == batch_id, Job.state == JobState.QUEUED, Job.deadline_at <= now)
        .order_by(Job.published_at)  # which the index has
        .limit(limit)
    )
    late = [
        job
        for job in lock_jobs(conn, conn.scalars(query).all()).values()
        if job.state is JobState.QUEUED and job.deadline_at is not None and job.deadline_at <= now
    ]
    ids = [job.id for job in late]
    if ids:
        conn.execute(
            update(Job)
            .where(Job.id.in_(ids))
            .values(
                state=JobState.EXPIRED,
                finished_at=now,
                error_type="deadline",
                error_message=EXPIRED_BEFORE_START,
            )
        )
        announce_jobs(conn, ids)
        # As at a cancel: a delivery tells Celery, and a suspect has none.
        mark_unpublished(conn, [job.id for job in late if job.deaths >= SUSPECT_DEATHS])
    return len(ids)
