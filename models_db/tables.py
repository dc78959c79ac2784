"""The tables. Columns with long text come last, so that SQLite's scans for statistics never touch them."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from enum import StrEnum
from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Double,
    ForeignKey,
    Index,
    Integer,
    SmallInteger,
    String,
    UniqueConstraint,
)
from sqlalchemy.orm import Mapped, mapped_column

from models_db.base import MARIADB_TABLE, Base, Id, JSONType, LongText, UTCDateTime, Uuid, enum_column


class JobState(StrEnum):
    """Where a job is. The last four are terminal; only ``jobs.retry_failed`` leads out of them."""

    QUEUED = "queued"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"

    @property
    def terminal(self) -> bool:
        return self not in (JobState.QUEUED, JobState.RUNNING)


# Deaths of workers that had a job in flight; from then on no delivery starts it (models_db.deaths).
SUSPECT_DEATHS = 2


class BatchState(StrEnum):
    """Where a bulk submission is. The last four are terminal."""

    VALIDATING = "validating"  # its lines are being read and inserted
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"  # all jobs are done, its output is being written
    CANCELLING = "cancelling"
    COMPLETED = "completed"  # every job is terminal; some may have failed
    FAILED = "failed"  # its input was refused
    EXPIRED = "expired"
    CANCELLED = "cancelled"

    @property
    def terminal(self) -> bool:
        return self in (BatchState.COMPLETED, BatchState.FAILED, BatchState.EXPIRED, BatchState.CANCELLED)


class AttemptOutcome(StrEnum):
    """How one run of a job ended."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    RELEASED = "released"  # handed back on purpose, at shutdown
    LOST = "lost"  # its worker or engine died


class WorkerState(StrEnum):
    """Where a worker incarnation is. The last two are terminal: a restarted worker is a new incarnation."""

    STARTING = "starting"
    ONLINE = "online"
    DRAINING = "draining"
    STOPPED = "stopped"
    DEAD = "dead"


TERMINAL_JOB_STATES = tuple(state for state in JobState if state.terminal)
TERMINAL_BATCH_STATES = tuple(state for state in BatchState if state.terminal)


def _sql_list(values: Iterable[str]) -> str:
    return ", ".join(f"'{value}'" for value in values)


class Batch(Base):
    """A bulk submission. The counts are written when it ends; until then ``batches.batch_progress`` counts."""

    __tablename__ = "batch"

    id: Mapped[str] = mapped_column(Uuid, primary_key=True)
    name: Mapped[str] = mapped_column(String(255))
    state: Mapped[BatchState] = mapped_column(enum_column(BatchState))
    total: Mapped[int | None] = mapped_column(Integer)  # lines of its input; unknown while validating
    succeeded: Mapped[int] = mapped_column(Integer)
    failed: Mapped[int] = mapped_column(Integer)
    cancelled: Mapped[int] = mapped_column(Integer)
    expired: Mapped[int] = mapped_column(Integer)
    created_at: Mapped[datetime] = mapped_column(UTCDateTime)
    finished_at: Mapped[datetime | None] = mapped_column(UTCDateTime)
    deadline_at: Mapped[datetime | None] = mapped_column(UTCDateTime)
    source: Mapped[str | None] = mapped_column(LongText)
    error: Mapped[str | None] = mapped_column(LongText)

    __table_args__ = (
        CheckConstraint(f"state IN ({_sql_list(BatchState)})", name="state"),
        CheckConstraint(
            f"(state IN ({_sql_list(TERMINAL_BATCH_STATES)})) = (finished_at IS NOT NULL)", name="finished"
        ),
        Index(None, "created_at"),
        MARIADB_TABLE,
    )


class Worker(Base):
    """One incarnation of a worker process, from its start to its end."""

    __tablename__ = "worker"

    id: Mapped[str] = mapped_column(Uuid, primary_key=True)
    name: Mapped[str] = mapped_column(String(255))
    host: Mapped[str] = mapped_column(String(255))
    pid: Mapped[int] = mapped_column(Integer)
    version: Mapped[str] = mapped_column(String(64))
    backend: Mapped[str] = mapped_column(String(64))
    device: Mapped[str] = mapped_column(String(255))
    model: Mapped[str] = mapped_column(String(255))
    dtype: Mapped[str] = mapped_column(String(32))
    slots: Mapped[int] = mapped_column(Integer)
    state: Mapped[WorkerState] = mapped_column(enum_column(WorkerState))
    heartbeat: Mapped[int] = mapped_column(BigInteger)  # only its movement counts, never a clock
    started_at: Mapped[datetime] = mapped_column(UTCDateTime)
    heartbeat_at: Mapped[datetime] = mapped_column(UTCDateTime)  # by the database's clock
    stopped_at: Mapped[datetime | None] = mapped_column(UTCDateTime)
    config: Mapped[dict[str, Any]] = mapped_column(JSONType)

    __table_args__ = (
        CheckConstraint(f"state IN ({_sql_list(WorkerState)})", name="state"),
        CheckConstraint("(state IN ('stopped', 'dead')) = (stopped_at IS NOT NULL)", name="stopped"),
        CheckConstraint("slots >= 0", name="slots"),
        Index(None, "state"),
        MARIADB_TABLE,
    )


class Job(Base):
    """One accepted request and the message that delivers it."""

    __tablename__ = "job"

    id: Mapped[str] = mapped_column(Id, primary_key=True)  # also the Celery task id
    batch_id: Mapped[str | None] = mapped_column(ForeignKey("batch.id"))
    position: Mapped[int | None] = mapped_column(Integer)  # line of its batch
    custom_id: Mapped[str | None] = mapped_column(String(255))
    idempotency_key: Mapped[str | None] = mapped_column(String(255))
    payload_hash: Mapped[str | None] = mapped_column(String(64))
    tenant: Mapped[str | None] = mapped_column(String(255))
    model: Mapped[str] = mapped_column(String(255))
    queue: Mapped[str] = mapped_column(String(255))
    priority: Mapped[int] = mapped_column(SmallInteger)
    state: Mapped[JobState] = mapped_column(enum_column(JobState))
    attempt: Mapped[int] = mapped_column(Integer)  # number of the latest attempt, 0 before the first
    owner: Mapped[str | None] = mapped_column(ForeignKey("worker.id"))  # who runs it now
    cancel_requested: Mapped[bool] = mapped_column(Boolean)
    deaths: Mapped[int] = mapped_column(SmallInteger, server_default="0")  # of workers that had it in flight
    solo_deaths: Mapped[int] = mapped_column(SmallInteger, server_default="0")  # those that ran nothing else
    created_at: Mapped[datetime] = mapped_column(UTCDateTime)
    published_at: Mapped[datetime | None] = mapped_column(UTCDateTime)
    started_at: Mapped[datetime | None] = mapped_column(UTCDateTime)  # of the latest attempt
    finished_at: Mapped[datetime | None] = mapped_column(UTCDateTime)
    deadline_at: Mapped[datetime | None] = mapped_column(UTCDateTime)
    callbacks_sent_at: Mapped[datetime | None] = mapped_column(UTCDateTime)
    error_type: Mapped[str | None] = mapped_column(String(128))
    error_message: Mapped[str | None] = mapped_column(LongText)
    params: Mapped[dict[str, Any]] = mapped_column(JSONType)
    prompt: Mapped[dict[str, Any]] = mapped_column(JSONType)
    message: Mapped[dict[str, Any] | None] = mapped_column(JSONType)

    __table_args__ = (
        UniqueConstraint("batch_id", "custom_id"),
        UniqueConstraint("idempotency_key"),
        CheckConstraint(f"state IN ({_sql_list(JobState)})", name="state"),
        CheckConstraint(
            f"(state IN ({_sql_list(TERMINAL_JOB_STATES)})) = (finished_at IS NOT NULL)", name="finished"
        ),
        CheckConstraint("(state = 'running') = (owner IS NOT NULL)", name="owner"),
        CheckConstraint("state <> 'running' OR (attempt >= 1 AND started_at IS NOT NULL)", name="started"),
        CheckConstraint("state <> 'succeeded' OR error_type IS NULL", name="error"),
        CheckConstraint("attempt >= 0", name="attempt"),
        CheckConstraint("priority BETWEEN 0 AND 9", name="priority"),
        Index(None, "batch_id", "position"),  # export in input order
        Index(None, "batch_id", "state", "published_at"),  # a batch's progress, and what is unpublished
        Index(None, "state", "queue", "deaths"),  # what waits: to compare with the lists, and the suspects
        Index(None, "owner"),  # what a worker runs: cancels, take-over from the dead
        Index(None, "finished_at"),  # throughput history, retention
        MARIADB_TABLE,
    )


class Attempt(Base):
    """One run of a job on one worker incarnation; open (no outcome) while it runs."""

    __tablename__ = "attempt"

    job_id: Mapped[str] = mapped_column(ForeignKey("job.id", ondelete="CASCADE"), primary_key=True)
    number: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    worker_id: Mapped[str] = mapped_column(ForeignKey("worker.id"))
    started_at: Mapped[datetime] = mapped_column(UTCDateTime)
    ended_at: Mapped[datetime | None] = mapped_column(UTCDateTime)
    outcome: Mapped[AttemptOutcome | None] = mapped_column(enum_column(AttemptOutcome))
    error: Mapped[str | None] = mapped_column(LongText)

    __table_args__ = (
        CheckConstraint(f"outcome IS NULL OR outcome IN ({_sql_list(AttemptOutcome)})", name="outcome"),
        CheckConstraint("(outcome IS NULL) = (ended_at IS NULL)", name="ended"),
        CheckConstraint("number >= 1", name="number"),
        Index(None, "worker_id", "outcome"),  # what died with a worker
        Index(None, "ended_at"),  # roll-ups
        MARIADB_TABLE,
    )


class Result(Base):
    """What a job produced: counts, times, and the text."""

    __tablename__ = "result"

    job_id: Mapped[str] = mapped_column(ForeignKey("job.id", ondelete="CASCADE"), primary_key=True)
    # The n-th answer to one prompt. Not called "index": that is a reserved word people would have to quote.
    choice: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    finish_reason: Mapped[str] = mapped_column(String(32))
    prompt_tokens: Mapped[int] = mapped_column(Integer)
    completion_tokens: Mapped[int] = mapped_column(Integer)
    cached_tokens: Mapped[int] = mapped_column(Integer)
    seed: Mapped[int | None] = mapped_column(BigInteger)
    queue_time_s: Mapped[float] = mapped_column(Double)
    time_to_first_token_s: Mapped[float | None] = mapped_column(Double)
    latency_s: Mapped[float] = mapped_column(Double)
    created_at: Mapped[datetime] = mapped_column(UTCDateTime)
    stop_reason: Mapped[str | int | None] = mapped_column(JSONType)  # JSON tells "5" from token 5
    text: Mapped[str] = mapped_column(LongText)
    token_ids: Mapped[list[int] | None] = mapped_column(JSONType)
    logprobs: Mapped[list[Any] | None] = mapped_column(JSONType)

    __table_args__ = (
        CheckConstraint(
            "choice >= 0 AND prompt_tokens >= 0 AND completion_tokens >= 0 AND cached_tokens >= 0",
            name="counts",
        ),
        MARIADB_TABLE,
    )


class FleetLock(Base):
    """Who of the fleet does what only one may do at a time. A lock of a dead worker may be taken."""

    __tablename__ = "fleet_lock"

    name: Mapped[str] = mapped_column(String(255), primary_key=True)
    owner: Mapped[str | None] = mapped_column(Uuid)  # a worker incarnation
    taken_at: Mapped[datetime | None] = mapped_column(UTCDateTime)

    __table_args__ = (MARIADB_TABLE,)


class DeadLetter(Base):
    """A message of a queue that no worker could read, kept with the reason instead of being dropped."""

    __tablename__ = "dead_letter"

    id: Mapped[str] = mapped_column(Uuid, primary_key=True)
    queue: Mapped[str] = mapped_column(String(255))
    received_at: Mapped[datetime] = mapped_column(UTCDateTime)
    worker_id: Mapped[str] = mapped_column(Uuid)
    reason: Mapped[str] = mapped_column(LongText)
    message: Mapped[str] = mapped_column(LongText)  # JSON as Redis held it: body, headers, properties

    __table_args__ = (
        Index(None, "received_at"),
        MARIADB_TABLE,
    )


class EngineSample(Base):
    """What one worker did in one interval. Counts are of the interval, gauges of its end."""

    __tablename__ = "engine_sample"

    worker_id: Mapped[str] = mapped_column(ForeignKey("worker.id", ondelete="CASCADE"), primary_key=True)
    sampled_at: Mapped[datetime] = mapped_column(UTCDateTime, primary_key=True)
    interval_s: Mapped[float] = mapped_column(Double)
    running: Mapped[int] = mapped_column(Integer)
    waiting: Mapped[int] = mapped_column(Integer)
    prompt_tokens: Mapped[int] = mapped_column(BigInteger)
    cached_tokens: Mapped[int] = mapped_column(BigInteger)
    generated_tokens: Mapped[int] = mapped_column(BigInteger)
    steps: Mapped[int] = mapped_column(BigInteger)
    requests_finished: Mapped[int] = mapped_column(Integer)
    requests_failed: Mapped[int] = mapped_column(Integer)
    preemptions: Mapped[int] = mapped_column(Integer)
    busy_s: Mapped[float] = mapped_column(Double)
    prepare_s: Mapped[float] = mapped_column(Double)
    active_fraction: Mapped[float] = mapped_column(Double)
    kv_used_fraction: Mapped[float] = mapped_column(Double)

    __table_args__ = (
        CheckConstraint("interval_s > 0", name="interval"),
        Index(None, "sampled_at"),  # throughput history, retention
        MARIADB_TABLE,
    )
