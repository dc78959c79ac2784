"""Worker incarnations: their rows, heartbeats and samples.

Every function works inside the caller's transaction and never commits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from sqlalchemy import Connection

from models_db.base import utcnow
from models_db.ids import uuid7
from models_db.tables import WorkerState


@dataclass(frozen=True, slots=True)
class NewWorker:
    """A worker process that starts. What only the loaded backend knows may be told later, see ``set_worker_state``."""

    name: str
    host: str
    pid: int
    version: str
    backend: str
    model: str
    device: str = ""
    dtype: str = ""
    slots: int = 0
    config: Mapping[str, Any] = field(default_factory=dict)
    id: str = field(default_factory=uuid7)
    started_at: datetime = field(default_factory=utcnow)


@dataclass(frozen=True, slots=True)
class WorkerDetails:
    """What a loaded backend says about itself."""

    device: str
    dtype: str
    slots: int
    config: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class WorkerRecord:
    """A worker incarnation as the table holds it."""

    id: str
    name: str
    host: str
    pid: int
    version: str
    backend: str
    model: str
    device: str
    dtype: str
    slots: int
    state: WorkerState
    heartbeat: int
    started_at: datetime
    heartbeat_at: datetime
    stopped_at: datetime | None


@dataclass(frozen=True, slots=True)
class NewSample:
    """One row of ``engine_sample``: counts of the interval, gauges at its end."""

    worker_id: str
    interval_s: float
    running: int
    waiting: int
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    steps: int
    requests_finished: int
    requests_failed: int
    preemptions: int
    busy_s: float
    prepare_s: float
    active_fraction: float
    kv_used_fraction: float
    sampled_at: datetime = field(default_factory=utcnow)


def register_worker(conn: Connection, worker: NewWorker) -> None:
    """Insert the row of a worker that starts, in state ``starting``. Registering the same id again is harmless."""
    raise NotImplementedError


def heartbeat(
    conn: Connection, worker_id: str, counter: int, *, at: datetime | None = None
) -> WorkerState | None:
    """Write the counter; returns the state others may have given this worker (``dead``!), ``None`` without a row."""
    raise NotImplementedError


def set_worker_state(
    conn: Connection,
    worker_id: str,
    state: WorkerState,
    *,
    details: WorkerDetails | None = None,
    at: datetime | None = None,
) -> bool:
    """Move a worker on, with what its loaded backend says; ``False`` when it is stopped or dead already."""
    raise NotImplementedError


def live_workers(conn: Connection) -> list[WorkerRecord]:
    """Every incarnation that has neither stopped nor been found dead, oldest first."""
    raise NotImplementedError


def list_workers(conn: Connection, *, limit: int = 50) -> list[WorkerRecord]:
    """The latest incarnations in any state, newest first."""
    raise NotImplementedError


def add_samples(conn: Connection, samples: Sequence[NewSample]) -> None:
    """Insert samples; one that exists already (same worker, same time) is left alone."""
    raise NotImplementedError
