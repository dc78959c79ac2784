"""Bulk submissions: create, watch, cancel, export.

Every function works inside the caller's transaction and never commits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import Connection

from models_db.jobs import StoredResult
from models_db.tables import BatchState, JobState


@dataclass(frozen=True, slots=True)
class BatchProgress:
    """A batch and how far it is. ``counts`` has every job state; ``total`` is unknown while it is validating."""

    id: str
    name: str
    state: BatchState
    source: str | None
    total: int | None
    counts: Mapping[JobState, int]
    prompt_tokens: int  # of the results so far
    completion_tokens: int
    created_at: datetime
    finished_at: datetime | None
    deadline_at: datetime | None
    error: str | None

    @property
    def inserted(self) -> int:
        """Jobs that exist."""
        return sum(self.counts.values())

    @property
    def done(self) -> int:
        """Jobs that have ended, well or not."""
        return sum(count for state, count in self.counts.items() if state.terminal)


@dataclass(frozen=True, slots=True)
class BatchRow:
    """One line of a batch's output."""

    position: int
    custom_id: str | None
    job_id: str
    state: JobState
    model: str
    error_type: str | None
    error_message: str | None
    result: StoredResult | None


def create_batch(
    conn: Connection,
    *,
    name: str,
    source: str | None = None,
    total: int | None = None,
    deadline_at: datetime | None = None,
    batch_id: str | None = None,
    state: BatchState = BatchState.VALIDATING,
    at: datetime | None = None,
) -> str:
    """Insert a batch and return its id."""
    raise NotImplementedError


def set_batch_state(
    conn: Connection,
    batch_id: str,
    state: BatchState,
    *,
    total: int | None = None,
    error: str | None = None,
    at: datetime | None = None,
) -> bool:
    """Move a batch on; ``False`` when it is terminal already (nothing changes).

    Raises:
        UnknownBatchError: there is no such batch.
    """
    raise NotImplementedError


def batch_progress(conn: Connection, batch_id: str) -> BatchProgress | None:
    """The batch with live counts, or ``None`` when there is none with this id."""
    raise NotImplementedError


def list_batches(conn: Connection, *, limit: int = 20) -> list[BatchProgress]:
    """The latest batches, newest first."""
    raise NotImplementedError


def finish_batch_if_done(conn: Connection, batch_id: str, *, at: datetime | None = None) -> BatchState | None:
    """End a batch all of whose jobs have ended; its state when it is terminal (now or before), else ``None``.

    The end is ``cancelled`` after a cancel, ``expired`` when its deadline has passed and a job expired, and
    otherwise ``completed``. A batch that is still validating never ends here.
    """
    raise NotImplementedError


def request_cancel_batch(
    conn: Connection, batch_id: str, *, at: datetime | None = None
) -> dict[JobState, int]:
    """Cancel a batch: queued jobs end at once, running ones are flagged, the batch is cancelling until all ended.

    Returns:
        How many of its jobs are in which state afterwards.
    """
    raise NotImplementedError


def iter_batch_rows(conn: Connection, batch_id: str, *, chunk: int = 500) -> Iterator[BatchRow]:
    """The batch's jobs in input order with their results, read ``chunk`` rows at a time."""
    raise NotImplementedError
