"""Jobs as clients see them: insert, look up, cancel, retry.

Every function works inside the caller's transaction and never commits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, delete, insert, select, update
from sqlalchemy.exc import IntegrityError

from models_db.base import utcnow
from models_db.dialects import chunked, insert_or_ignore
from models_db.errors import (
    DuplicateCustomIdError,
    DuplicateJobIdError,
    IdempotencyConflictError,
    InvalidValueError,
    UnknownJobError,
)
from models_db.ids import uuid7
from models_db.tables import (
    TERMINAL_BATCH_STATES,
    Attempt,
    AttemptOutcome,
    Batch,
    BatchState,
    Job,
    JobState,
    Result,
    Worker,
)
from models_db.text import check_name


@dataclass(frozen=True, slots=True)
class NewJob:
    """A job to insert. ``params``, ``prompt`` and ``message`` are JSON-safe; ``message`` is the whole stored
    message, as it is published.

    Raises:
        InvalidValueError: a name is too long or holds text that a database refuses, or a number is out of range.
    """

    model: str
    queue: str
    params: Mapping[str, Any]
    prompt: Mapping[str, Any]
    message: Mapping[str, Any] | None = None
    id: str = field(default_factory=uuid7)
    batch_id: str | None = None
    position: int | None = None
    custom_id: str | None = None
    idempotency_key: str | None = None
    payload_hash: str | None = None
    tenant: str | None = None
    priority: int = 3
    created_at: datetime = field(default_factory=utcnow)
    published_at: datetime | None = None
    deadline_at: datetime | None = None

    def __post_init__(self) -> None:
        check_name("id", self.id, 155)
        check_name("batch_id", self.batch_id, 36)
        check_name("custom_id", self.custom_id, 255)
        check_name("idempotency_key", self.idempotency_key, 255)
        check_name("payload_hash", self.payload_hash, 64)
        check_name("tenant", self.tenant, 255)
        check_name("model", self.model, 255)
        check_name("queue", self.queue, 255)
        if not 0 <= self.priority <= 9:
            raise InvalidValueError(
                "priority", "must lie between 0 (most urgent) and 9", value=str(self.priority)
            )
        if self.idempotency_key is not None and self.payload_hash is None:
            raise InvalidValueError(
                "payload_hash",
                "is missing although an idempotency key is given",
                fix="Give the hash that tells whether two payloads are equal",
            )

    def row(self) -> dict[str, Any]:
        """The job as a row of the table, queued."""
        return {
            "id": self.id,
            "batch_id": self.batch_id,
            "position": self.position,
            "custom_id": self.custom_id,
            "idempotency_key": self.idempotency_key,
            "payload_hash": self.payload_hash,
            "tenant": self.tenant,
            "model": self.model,
            "queue": self.queue,
            "priority": self.priority,
            "state": JobState.QUEUED,
            "attempt": 0,
            "cancel_requested": False,
            "created_at": self.created_at,
            "published_at": self.published_at,
            "deadline_at": self.deadline_at,
            "params": dict(self.params),
            "prompt": dict(self.prompt),
            "message": None if self.message is None else dict(self.message),
        }


@dataclass(frozen=True, slots=True)
class InsertOutcome:
    """What became of one ``NewJob``: its own row, or the job that its idempotency key already had."""

    id: str
    created: bool
    state: JobState


@dataclass(frozen=True, slots=True)
class StoredResult:
    """One answer, as the table ``result`` holds it. Times are in seconds, counts in tokens."""

    text: str
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    token_ids: Sequence[int] | None = None
    logprobs: Sequence[Any] | None = None  # JSON-safe, one entry a token
    stop_reason: str | int | None = None
    seed: int | None = None
    queue_time_s: float = 0.0
    time_to_first_token_s: float | None = None
    latency_s: float = 0.0
    choice: int = 0


@dataclass(frozen=True, slots=True)
class JobStatus:
    """Everything about a job but its texts."""

    id: str
    state: JobState
    attempt: int
    owner: str | None
    cancel_requested: bool
    model: str
    queue: str
    priority: int
    batch_id: str | None
    position: int | None
    custom_id: str | None
    idempotency_key: str | None
    tenant: str | None
    error_type: str | None
    error_message: str | None
    created_at: datetime
    published_at: datetime | None
    started_at: datetime | None
    finished_at: datetime | None
    deadline_at: datetime | None
    callbacks_sent_at: datetime | None


@dataclass(frozen=True, slots=True)
class AttemptRecord:
    """One run of a job, with the name of the worker that ran it."""

    number: int
    worker_id: str
    worker_name: str
    started_at: datetime
    ended_at: datetime | None
    outcome: AttemptOutcome | None
    error: str | None


@dataclass(frozen=True, slots=True)
class StoredMessage:
    """What it takes to publish a job again."""

    id: str
    queue: str
    priority: int
    message: dict[str, Any] | None


# --------------------------------------------------------------------------------------------------------- insert


def insert_jobs(conn: Connection, jobs: Sequence[NewJob]) -> list[InsertOutcome]:
    """Insert jobs as ``queued``; one outcome a job, in their order.

    A job whose idempotency key is taken by an equal payload is not inserted: its outcome names the existing job.
    After an error the caller must roll back; nothing of the list is then stored.

    Raises:
        IdempotencyConflictError: the key belongs to a job with another payload.
        DuplicateCustomIdError: a custom id occurs twice in its batch.
        DuplicateJobIdError: a job with such an id exists already.
    """
    raise NotImplementedError


def mark_published(conn: Connection, ids: Sequence[str], *, at: datetime | None = None) -> None:
    """Note that the messages of these jobs have been handed to the broker."""
    raise NotImplementedError


def mark_callbacks_sent(conn: Connection, ids: Sequence[str], *, at: datetime | None = None) -> None:
    """Note that Celery's links, chords and result backend have been served for these terminal jobs."""
    raise NotImplementedError


# -------------------------------------------------------------------------------------------------------- look up


def job_status(conn: Connection, job_id: str) -> JobStatus | None:
    """The job, or ``None`` when there is none with this id."""
    raise NotImplementedError


def job_statuses(conn: Connection, ids: Sequence[str]) -> dict[str, JobStatus]:
    """The jobs with these ids, by id; unknown ids are absent."""
    raise NotImplementedError


def job_states(conn: Connection, ids: Sequence[str]) -> dict[str, JobState]:
    """The states of these jobs, by id; unknown ids are absent. The cheap way to wait for many."""
    raise NotImplementedError


def job_result(conn: Connection, job_id: str, choice: int = 0) -> StoredResult | None:
    """The stored answer, or ``None`` while there is none."""
    raise NotImplementedError


def job_results(conn: Connection, ids: Sequence[str]) -> dict[str, StoredResult]:
    """The first stored answer of each of these jobs, by id; jobs without one are absent."""
    raise NotImplementedError


def job_attempts(conn: Connection, job_id: str) -> list[AttemptRecord]:
    """Every run of the job, oldest first."""
    raise NotImplementedError


def stored_messages(conn: Connection, ids: Sequence[str]) -> dict[str, StoredMessage]:
    """The stored messages of these jobs, by id, to publish them (again)."""
    raise NotImplementedError


# --------------------------------------------------------------------------------------------------------- change


def request_cancel(
    conn: Connection, ids: Sequence[str], *, at: datetime | None = None
) -> dict[str, JobState]:
    """Cancel: a queued job ends at once, a running one is flagged for its worker, a terminal one stays.

    Returns:
        The state of each job afterwards, by id; unknown ids are absent.
    """
    raise NotImplementedError


def cancelled_running(conn: Connection, owner: str) -> list[str]:
    """Ids of the jobs that this worker runs and that someone wants cancelled."""
    raise NotImplementedError


def retry_failed(
    conn: Connection,
    *,
    ids: Sequence[str] | None = None,
    batch_id: str | None = None,
    states: Iterable[JobState] = (JobState.FAILED,),
) -> list[str]:
    """Queue terminal jobs again: the only way out of a terminal state. Give ``ids``, ``batch_id`` or both.

    Their results and errors are deleted, their attempts kept and counted on, a deadline that has passed is
    dropped, and a finished batch among them is in progress again. The caller publishes their stored messages.

    Returns:
        The ids that are queued now, in the order of their creation.
    """
    raise NotImplementedError


__all__ = [
    "TERMINAL_BATCH_STATES",
    "Attempt",
    "Batch",
    "BatchState",
    "DuplicateCustomIdError",
    "DuplicateJobIdError",
    "IdempotencyConflictError",
    "IntegrityError",
    "Job",
    "Result",
    "UnknownJobError",
    "Worker",
    "chunked",
    "delete",
    "insert",
    "insert_or_ignore",
    "select",
    "update",
]
