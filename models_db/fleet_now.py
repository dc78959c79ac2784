"""What the fleet does at this moment, from a few small queries: for ``tokenmill top``."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy import Connection, and_, func, select, text

from models_db.base import UTCDateTime
from models_db.rollups import rolled_until
from models_db.tables import EngineSample, Job, JobState
from models_db.timesql import database_now
from models_db.workers import WorkerRecord, unended_workers

RECENT = timedelta(seconds=60)


@dataclass(frozen=True, slots=True)
class WorkerNow:
    """A worker that has not ended, with its latest sample, where it has one from the last minute."""

    worker: WorkerRecord
    silent: bool  # not heard of for longer than a live one would be
    running: int
    waiting: int
    tokens_per_s: float | None  # over the last minute's samples
    active: float | None  # share of the same time
    kv_used: float | None


@dataclass(frozen=True, slots=True)
class BatchNow:
    """A batch that has not ended, with its jobs by state."""

    name: str
    state: str
    total: int | None
    succeeded: int
    failed: int
    cancelled: int
    expired: int
    created_at: datetime


@dataclass(frozen=True, slots=True)
class FleetNow:
    """One look at the fleet."""

    at: datetime
    workers: list[WorkerNow]
    queued: list[tuple[str, int, datetime]]  # queue, jobs, creation of the oldest
    running: int  # jobs
    batches: list[BatchNow]  # that have not ended, newest first
    rolled_until: datetime | None

    @property
    def silent(self) -> int:
        """How many workers are silent."""
        return sum(worker.silent for worker in self.workers)

    @property
    def tokens_per_s(self) -> float:
        """Of all workers together."""
        return sum(worker.tokens_per_s or 0.0 for worker in self.workers)


def look(conn: Connection, dead_after_s: float, *, now: datetime | None = None, batches: int = 8) -> FleetNow:
    """What is going on; at most so many batches.

    Args:
        dead_after_s: a worker without a beat for so long is called silent.
        now: the database's present when unset.
    """
    now = now or conn.scalars(select(database_now())).one()
    recent = (
        select(
            EngineSample.worker_id,
            func.max(EngineSample.sampled_at).label("last"),
            func.sum(EngineSample.generated_tokens).label("tokens"),
            func.sum(EngineSample.interval_s).label("seconds"),
            func.sum(EngineSample.active_fraction * EngineSample.interval_s).label("active_s"),
        )
        .where(EngineSample.sampled_at >= now - RECENT)
        .group_by(EngineSample.worker_id)
        .subquery()
    )
    latest = select(recent, EngineSample.running, EngineSample.waiting, EngineSample.kv_used_fraction).join(
        EngineSample,
        and_(EngineSample.worker_id == recent.c.worker_id, EngineSample.sampled_at == recent.c.last),
    )
    samples = {row.worker_id: row for row in conn.execute(latest)}
    workers = []
    for worker in unended_workers(conn):
        row, silent = samples.get(worker.id), worker.silent(dead_after_s)
        if row is None:
            workers.append(WorkerNow(worker, silent, 0, 0, None, None, None))
        else:
            seconds = float(row.seconds)
            workers.append(
                WorkerNow(
                    worker,
                    silent,
                    row.running,
                    row.waiting,
                    float(row.tokens) / seconds,
                    float(row.active_s) / seconds,
                    row.kv_used_fraction,
                )
            )
    waiting = (
        select(Job.queue, func.count(), func.min(Job.created_at))
        .where(Job.state == JobState.QUEUED)
        .group_by(Job.queue)
        .order_by(Job.queue)
    )
    open_batches = text(
        "SELECT name, state, total, succeeded, failed, cancelled, expired, created_at FROM batch_progress "
        "WHERE finished_at IS NULL ORDER BY created_at DESC, id DESC LIMIT :batches"
    ).columns(created_at=UTCDateTime)
    return FleetNow(
        at=now,
        workers=workers,
        queued=[(queue, count, oldest) for queue, count, oldest in conn.execute(waiting)],
        running=conn.scalar(select(func.count()).select_from(Job).where(Job.state == JobState.RUNNING)) or 0,
        batches=[
            BatchNow(
                name=row.name,
                state=row.state,
                total=row.total,
                succeeded=int(row.succeeded),
                failed=int(row.failed),
                cancelled=int(row.cancelled),
                expired=int(row.expired),
                created_at=row.created_at,
            )
            for row in conn.execute(open_batches, {"batches": batches})
        ],
        rolled_until=rolled_until(conn),
    )
