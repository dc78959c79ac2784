"""The sweeper's questions: which queued jobs may have lost their delivery.

Every function works inside the caller's transaction and never commits.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime

from sqlalchemy import Connection, func, select, update

from models_db.base import utcnow
from models_db.deaths import SUSPECT_DEATHS
from models_db.dialects import chunked
from models_db.jobs import stored_messages
from models_db.records import StoredMessage
from models_db.tables import Job, JobState


def queued_count(conn: Connection, queue: str) -> int:
    """Jobs that a delivery has to bring: queued ones, without suspects, which come another way."""
    query = select(func.count()).where(
        Job.state == JobState.QUEUED, Job.queue == queue, Job.deaths < SUSPECT_DEATHS
    )
    return conn.scalar(query) or 0


def queued_page(conn: Connection, queue: str, after: str, limit: int) -> list[tuple[str, datetime | None]]:
    """The next queued jobs after this id, in the order of their ids, with when they were last published."""
    query = (
        select(Job.id, Job.published_at)
        .where(Job.state == JobState.QUEUED, Job.queue == queue, Job.deaths < SUSPECT_DEATHS, Job.id > after)
        .order_by(Job.id)
        .limit(limit)
    )
    return [(job_id, published_at) for job_id, published_at in conn.execute(query)]


def mark_republished(
    conn: Connection, seen: Mapping[str, datetime | None], *, now: datetime | None = None
) -> list[StoredMessage]:
    """Of the jobs seen as queued and last published then, those that still are, marked as published now.

    Of several sweepers only one gets each job. The caller publishes what this returns, after the commit. Doing it
    again with the same ``now`` returns what an earlier commit with it has marked, whose answer was lost.
    """
    now = now or utcnow()
    won: list[str] = []
    for some in chunked(sorted(seen)):
        rows = conn.execute(
            select(Job.id, Job.published_at)
            .where(Job.id.in_(some), Job.state == JobState.QUEUED, Job.deaths < SUSPECT_DEATHS)
            .order_by(Job.id)
            .with_for_update()
        ).all()
        ids = [row.id for row in rows if row.published_at in (seen[row.id], now)]
        if ids:
            conn.execute(update(Job).where(Job.id.in_(ids)).values(published_at=now))
        won.extend(ids)
    stored = stored_messages(conn, won)
    return [stored[job_id] for job_id in won]
