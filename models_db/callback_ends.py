"""What a callback tells: how a job or a batch has ended, read when it is sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import Connection, and_, case, select

from models_db.callbacks import Callback
from models_db.dialects import chunked
from models_db.tables import (
    TERMINAL_BATCH_STATES,
    TERMINAL_JOB_STATES,
    Batch,
    BatchState,
    Job,
    JobState,
    Result,
)


@dataclass(frozen=True, slots=True)
class JobEnd:
    """How a job ended. What comes from its result is ``None`` where it has none; so is a text nobody asked for."""

    id: str
    state: JobState
    attempt: int
    model: str
    tenant: str | None
    custom_id: str | None
    batch_id: str | None
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime
    error_type: str | None
    error_message: str | None
    finish_reason: str | None
    prompt_tokens: int | None
    completion_tokens: int | None
    cached_tokens: int | None
    text: str | None


@dataclass(frozen=True, slots=True)
class BatchEnd:
    """How a batch ended, with the counts of its jobs."""

    id: str
    name: str
    state: BatchState
    total: int | None
    succeeded: int
    failed: int
    cancelled: int
    expired: int
    created_at: datetime
    finished_at: datetime
    error: str | None


_JOB = [getattr(Job, name) for name in JobEnd.__dataclass_fields__ if hasattr(Job, name)]
_RESULT = [
    Result.finish_reason,
    Result.prompt_tokens,
    Result.completion_tokens,
    Result.cached_tokens,
    case((Callback.include_output, Result.text), else_=None).label("text"),
]
_BATCH = [getattr(Batch, name) for name in BatchEnd.__dataclass_fields__]


def job_ends(conn: Connection, job_ids: Sequence[str]) -> dict[str, JobEnd]:
    """The ends of these jobs, by id, where they have ended and have a callback."""
    query = (
        select(*_JOB, *_RESULT)
        .join(Callback, Callback.job_id == Job.id)
        .outerjoin(Result, and_(Result.job_id == Job.id, Result.choice == 0))
        .where(Job.state.in_(TERMINAL_JOB_STATES))
    )
    return {
        row.id: JobEnd(*row)
        for some in chunked(job_ids)
        for row in conn.execute(query.where(Job.id.in_(some)))
    }


def batch_ends(conn: Connection, batch_ids: Sequence[str]) -> dict[str, BatchEnd]:
    """The ends of these batches, by id, where they have ended."""
    query = select(*_BATCH).where(Batch.state.in_(TERMINAL_BATCH_STATES))
    return {
        row.id: BatchEnd(*row)
        for some in chunked(batch_ids)
        for row in conn.execute(query.where(Batch.id.in_(some)))
    }
