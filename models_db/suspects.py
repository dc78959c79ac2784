"""Suspects: queued jobs that too many workers died with. One worker of the fleet at a time runs some of them.

Every function works inside the caller's transaction and never commits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import Connection, func, or_, select, update

from models_db.base import utcnow
from models_db.deaths import ALONE_DEATHS, SUSPECT_DEATHS
from models_db.dialects import insert_or_ignore
from models_db.jobs import lock_jobs, mark_unpublished, stored_messages
from models_db.records import StoredMessage
from models_db.tables import TERMINAL_JOB_STATES, FleetLock, Job, JobState, Worker, WorkerState
from models_db.transitions import start_jobs


@dataclass(frozen=True, slots=True)
class Waiting:
    """How many suspects of a queue wait: for a group, and to run alone."""

    grouped: int
    alone: int


@dataclass(frozen=True, slots=True)
class ClaimedSuspect:
    """A suspect that this worker owns now."""

    job_id: str
    attempt: int
    created_at: datetime
    deadline_at: datetime | None
    stored: StoredMessage


def suspects_waiting(conn: Connection, queue: str) -> Waiting:
    """Count them; cheap when there are none."""
    alone = Job.deaths >= ALONE_DEATHS
    query = (
        select(alone, func.count())
        .where(Job.state == JobState.QUEUED, Job.queue == queue, Job.deaths >= SUSPECT_DEATHS)
        .group_by(alone)
    )
    counts = {bool(is_alone): count for is_alone, count in conn.execute(query)}
    return Waiting(counts.get(False, 0), counts.get(True, 0))


def untold_ends(conn: Connection, queue: str, limit: int) -> list[StoredMessage]:
    """The messages of suspects that were cancelled while they waited, so many at most, until ``mark_published``;
    and of those that have ended and could not be published then (``leave_untold``).

    No delivery waits for a suspect, so that none would tell Celery of its end.
    """
    query = (
        select(Job.id)
        .where(Job.state.in_(TERMINAL_JOB_STATES), Job.queue == queue, Job.deaths >= SUSPECT_DEATHS)
        .where(Job.published_at.is_(None), Job.callbacks_sent_at.is_(None))
        .limit(limit)
    )
    return list(stored_messages(conn, conn.scalars(query).all()).values())


def leave_untold(conn: Connection, ids: Sequence[str]) -> set[str]:
    """Have ``untold_ends`` find those of these jobs that are suspects and have ended; returns them."""
    query = select(Job.id).where(
        Job.id.in_(ids), Job.state.in_(TERMINAL_JOB_STATES), Job.deaths >= SUSPECT_DEATHS
    )
    found = set(conn.scalars(query))
    mark_unpublished(conn, sorted(found))
    return found


def take_lock(conn: Connection, name: str, worker_id: str, *, now: datetime | None = None) -> bool:
    """Take the lock unless a worker that lives holds it. Taking it again succeeds."""
    insert_or_ignore(conn, FleetLock, [{"name": name, "owner": None, "taken_at": None}], [FleetLock.name])
    living = select(Worker.id).where(Worker.state.not_in((WorkerState.STOPPED, WorkerState.DEAD)))
    free = or_(FleetLock.owner.is_(None), FleetLock.owner == worker_id, FleetLock.owner.not_in(living))
    statement = update(FleetLock).where(FleetLock.name == name, free)
    return conn.execute(statement.values(owner=worker_id, taken_at=now or utcnow())).rowcount == 1


def drop_lock(conn: Connection, name: str, worker_id: str) -> None:
    """Give the lock back; nothing happens when it is someone else's."""
    conn.execute(
        update(FleetLock)
        .where(FleetLock.name == name, FleetLock.owner == worker_id)
        .values(owner=None, taken_at=None)
    )


def claim_suspects(
    conn: Connection,
    queue: str,
    lock: str,
    worker_id: str,
    limit: int,
    *,
    alone: bool,
    now: datetime | None = None,
) -> list[ClaimedSuspect]:
    """Claim up to ``limit`` suspects, oldest first: those for a group, or those that run alone.

    Claims nothing when the lock is not this worker's. A job without a stored message is claimed, too: no delivery
    may start a suspect, so that only the caller can end it.

    Doing it again with the same ``now`` returns what an earlier commit with it has claimed, whose answer was lost:
    nobody else would ever know that the worker has these jobs.
    """
    now = now or utcnow()
    if claimed := _claimed_at(conn, queue, worker_id, now):
        return claimed
    held = select(FleetLock.owner).where(FleetLock.name == lock).with_for_update()
    if conn.scalar(held) != worker_id:
        return []
    deaths = Job.deaths >= ALONE_DEATHS if alone else Job.deaths.between(SUSPECT_DEATHS, ALONE_DEATHS - 1)
    ids = conn.scalars(
        select(Job.id)
        .where(Job.state == JobState.QUEUED, Job.queue == queue, deaths)
        .order_by(Job.created_at, Job.id)
        .limit(limit)
    ).all()
    locked = [job for job in lock_jobs(conn, ids).values() if job.state is JobState.QUEUED]
    start_jobs(conn, locked, worker_id, now)
    stored = stored_messages(conn, [job.id for job in locked])
    return [
        ClaimedSuspect(job.id, job.attempt + 1, job.created_at, job.deadline_at, stored[job.id])
        for job in locked
    ]


def _claimed_at(conn: Connection, queue: str, worker_id: str, at: datetime) -> list[ClaimedSuspect]:
    """The suspects that this worker has run since exactly then."""
    query = (
        select(Job.id, Job.attempt, Job.created_at, Job.deadline_at)
        .where(Job.owner == worker_id, Job.started_at == at, Job.queue == queue)
        .where(Job.state == JobState.RUNNING, Job.deaths >= SUSPECT_DEATHS)
        .order_by(Job.created_at, Job.id)
    )
    rows = conn.execute(query).all()
    stored = stored_messages(conn, [row.id for row in rows])
    return [ClaimedSuspect(*row, stored[row.id]) for row in rows]
