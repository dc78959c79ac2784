"""Worker incarnations: their rows, heartbeats and samples.

Every function works inside the caller's transaction and never commits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, Select, func, select, update

from models_db.base import utcnow
from models_db.dialects import insert_or_ignore
from models_db.ids import uuid7
from models_db.rollups import note_samples
from models_db.tables import EngineSample, Job, Worker, WorkerState
from models_db.text import check_name
from models_db.timesql import database_now, seconds_between

LONGEST_START_S = 600.0
"""Loading a model may hold up everything in its process, its beats among them, for so long."""

_ENDED = (WorkerState.STOPPED, WorkerState.DEAD)


@dataclass(frozen=True, slots=True)
class NewWorker:
    """A worker process that starts. What only its loaded backend knows may follow in ``set_worker_state``.

    Raises:
        InvalidValueError: a name is too long or holds text that a database refuses.
    """

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

    def __post_init__(self) -> None:
        check_name("id", self.id, 36)
        check_name("name", self.name, 255)
        check_name("host", self.host, 255)
        check_name("version", self.version, 64)
        check_name("backend", self.backend, 64)
        check_name("model", self.model, 255)


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
    silent_s: float  # since the last beat, by the database's clock

    def silent(self, dead_after_s: float) -> bool:
        """Whether it has not been heard of for so long that it must be taken for dead, though no one has said so.

        Where every worker was killed there is none left to find the others dead: their rows stay ``online``.
        """
        allowed = max(LONGEST_START_S, dead_after_s) if self.state is WorkerState.STARTING else dead_after_s
        return self.state not in _ENDED and self.silent_s > allowed


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
    """Insert the row of a worker that starts, in state ``starting``. Doing it again for the same id is harmless."""
    row = {spec.name: getattr(worker, spec.name) for spec in fields(worker)} | {
        "config": dict(worker.config),
        "state": WorkerState.STARTING,
        "heartbeat": 0,
        "heartbeat_at": worker.started_at,
    }
    insert_or_ignore(conn, Worker, [row], [Worker.id])


def heartbeat(
    conn: Connection, worker_id: str, counter: int, *, at: datetime | None = None
) -> WorkerState | None:
    """Write the counter; the state that others may have given this worker (``dead``), or ``None`` without a row.

    Args:
        at: the present by the database's clock, which is asked when unset.
    """
    conn.execute(
        update(Worker)
        .where(Worker.id == worker_id)
        .values(heartbeat=counter, heartbeat_at=database_now() if at is None else at)
    )
    return conn.scalar(select(Worker.state).where(Worker.id == worker_id))


def set_worker_state(
    conn: Connection,
    worker_id: str,
    state: WorkerState,
    *,
    details: WorkerDetails | None = None,
    at: datetime | None = None,
) -> bool:
    """Move a worker on, with what its loaded backend says; ``False`` when it has stopped or is dead already."""
    values: dict[str, Any] = {"state": state}
    if details is not None:
        values |= {
            "device": details.device,
            "dtype": details.dtype,
            "slots": details.slots,
            "config": dict(details.config),
        }
    if state in _ENDED:
        values["stopped_at"] = database_now() if at is None else at
    statement = update(Worker).where(Worker.id == worker_id, Worker.state.not_in(_ENDED)).values(**values)
    return conn.execute(statement).rowcount == 1


_RECORD_COLUMNS = (
    *(getattr(Worker, spec.name) for spec in fields(WorkerRecord) if spec.name != "silent_s"),
    seconds_between(Worker.heartbeat_at, database_now()).label("silent_s"),
)


def unended_workers(conn: Connection) -> list[WorkerRecord]:
    """Every incarnation that has neither stopped nor been found dead, oldest first.

    Some may be silent and yet to be found dead: ask ``WorkerRecord.silent``.
    """
    query = select(*_RECORD_COLUMNS).where(Worker.state.not_in(_ENDED)).order_by(Worker.started_at, Worker.id)
    return [WorkerRecord(*row) for row in conn.execute(query)]


def job_owners(conn: Connection) -> set[str]:
    """The incarnations that jobs belong to.

    Asked each second by every worker, so it goes from one owner to the next in the index. Of ``DISTINCT`` databases
    think that it is quicker to read the whole table.
    """
    return set(conn.scalars(_JOB_OWNERS))


def _next_owners() -> Select[tuple[str]]:
    owners = select(func.min(Job.owner).label("owner")).cte("owners", recursive=True)
    following = select(func.min(Job.owner)).where(Job.owner > owners.c.owner).scalar_subquery()
    owners = owners.union_all(select(following).where(owners.c.owner.is_not(None)))
    return select(owners.c.owner).where(owners.c.owner.is_not(None))


_JOB_OWNERS = _next_owners()


def list_workers(conn: Connection, *, limit: int = 50) -> list[WorkerRecord]:
    """The latest incarnations in any state, newest first."""
    query = select(*_RECORD_COLUMNS).order_by(Worker.started_at.desc(), Worker.id.desc()).limit(limit)
    return [WorkerRecord(*row) for row in conn.execute(query)]


def add_samples(conn: Connection, samples: Sequence[NewSample]) -> None:
    """Insert samples; one that exists already (same worker, same time) is left alone."""
    rows = [asdict(sample) for sample in samples]
    insert_or_ignore(conn, EngineSample, rows, [EngineSample.worker_id, EngineSample.sampled_at])
    if samples:
        note_samples(conn, min(sample.sampled_at for sample in samples))
