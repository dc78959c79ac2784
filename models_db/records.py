"""Jobs, attempts and results as plain values, the way they go into the tables and come out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Self

from sqlalchemy import Row

from models_db.base import JsonText, utcnow
from models_db.callbacks import NewCallback
from models_db.errors import InvalidValueError
from models_db.ids import uuid7
from models_db.tables import AttemptOutcome, JobState, Result
from models_db.text import check_name, clean_text


@dataclass(frozen=True, slots=True)
class NewJob:
    """A job to insert. ``params``, ``prompt`` and ``message`` are JSON-safe; ``message`` is the whole stored
    message, as it is published, or that as text. A ``published_at`` says that it is going to be published at once:
    take it back with ``jobs.mark_unpublished`` where that fails.

    Raises:
        InvalidValueError: a name is too long or holds text that a database refuses, or a number is out of range.
    """

    model: str
    queue: str
    params: Mapping[str, Any]
    prompt: Mapping[str, Any]
    message: Mapping[str, Any] | JsonText | None = None
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
    callback: NewCallback | None = None
    tokens: int = 0  # what it counts for against a limit of its tenant

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
        if self.batch_id is not None and self.position is None:
            raise InvalidValueError(
                "position", "is missing although a batch is given", fix="Give the line number"
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
            "message": dict(self.message) if isinstance(self.message, Mapping) else self.message,
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

    def row(self, job_id: str, created_at: datetime) -> dict[str, Any]:
        """The answer as a row of the table, with its texts cleaned (see ``models_db.text``)."""
        stop = self.stop_reason
        return {
            "job_id": job_id,
            "choice": self.choice,
            "finish_reason": self.finish_reason,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "cached_tokens": self.cached_tokens,
            "seed": self.seed,
            "queue_time_s": self.queue_time_s,
            "time_to_first_token_s": self.time_to_first_token_s,
            "latency_s": self.latency_s,
            "created_at": created_at,
            "stop_reason": clean_text(stop) if isinstance(stop, str) else stop,
            "text": clean_text(self.text),
            "token_ids": None if self.token_ids is None else list(self.token_ids),
            "logprobs": None if self.logprobs is None else list(self.logprobs),
        }

    @classmethod
    def from_row(cls, row: Row[*tuple[Any, ...]]) -> Self:
        """The answer from a row that holds at least ``RESULT_COLUMNS``."""
        return cls(**{column.key: row._mapping[column.key] for column in RESULT_COLUMNS})


RESULT_COLUMNS = (
    Result.text,
    Result.finish_reason,
    Result.prompt_tokens,
    Result.completion_tokens,
    Result.cached_tokens,
    Result.token_ids,
    Result.logprobs,
    Result.stop_reason,
    Result.seed,
    Result.queue_time_s,
    Result.time_to_first_token_s,
    Result.latency_s,
    Result.choice,
)


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
