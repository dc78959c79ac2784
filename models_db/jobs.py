"""Jobs as clients see them: insert, look up, cancel, retry.

Every function works inside the caller's transaction and never commits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import datetime

from sqlalchemy import Connection, Row, bindparam, delete, select, true, update
from sqlalchemy.exc import IntegrityError

from models_db.base import utcnow
from models_db.callbacks import announce_jobs, insert_job_callbacks, recall_batches, recall_jobs
from models_db.clock import database_time
from models_db.dialects import among, chunked, insert_or_ignore, insert_rows
from models_db.door_tables import ApiBatch
from models_db.errors import (
    DuplicateCustomIdError,
    DuplicateJobIdError,
    IdempotencyConflictError,
    InvalidValueError,
    UnknownBatchError,
)
from models_db.open_batches import require_open
from models_db.records import (
    RESULT_COLUMNS,
    AttemptRecord,
    InsertOutcome,
    JobStatus,
    NewJob,
    StoredMessage,
    StoredResult,
)
from models_db.tables import (
    SUSPECT_DEATHS,
    TERMINAL_BATCH_STATES,
    TERMINAL_JOB_STATES,
    Attempt,
    Batch,
    BatchState,
    Job,
    JobState,
    Result,
    Worker,
)
from models_db.tenants import TenantLimit, admit

__all__ = [
    "RESULT_COLUMNS",
    "AttemptRecord",
    "InsertOutcome",
    "JobStatus",
    "LockedJob",
    "NewJob",
    "StoredMessage",
    "StoredResult",
    "cancelled_running",
    "insert_jobs",
    "job_attempts",
    "job_result",
    "job_results",
    "job_states",
    "job_status",
    "job_statuses",
    "lock_jobs",
    "mark_callbacks_sent",
    "mark_published",
    "mark_unpublished",
    "request_cancel",
    "request_revoke",
    "retry_failed",
    "stored_messages",
]

# -------------------------------------------------------------------------------------------------------- insert


def insert_jobs(
    conn: Connection,
    jobs: Sequence[NewJob],
    limits: Mapping[str, TenantLimit] | None = None,
    *,
    replay: bool = False,
) -> list[InsertOutcome]:
    """Insert jobs as ``queued``; one outcome a job, in their order.

    A job whose idempotency key is taken by an equal payload is not inserted: its outcome names the existing job.
    After an error the caller must roll back; nothing of the list is then stored. ``replay`` says that an earlier
    commit of this very call may have gone through: what is there under the same ids was inserted by it.

    Raises:
        IdempotencyConflictError: the key belongs to a job with another payload.
        DuplicateCustomIdError: a custom id occurs twice in its batch.
        DuplicateJobIdError: a job with such an id exists already.
        UnknownBatchError: a job names a batch that does not exist.
        BatchClosedError: a job names a batch that is being cancelled, or has ended.
        TenantLimitError: those that are new do not fit ``limits``, which are of the tenants that have one.
    """
    if replay and (stored := job_states(conn, [job.id for job in jobs])):
        others = iter(insert_jobs(conn, [job for job in jobs if job.id not in stored], limits))
        return [
            InsertOutcome(job.id, True, stored[job.id]) if job.id in stored else next(others) for job in jobs
        ]
    require_open(conn, (job.batch_id for job in jobs))
    first_by_key: dict[str, NewJob] = {}
    for job in jobs:
        if job.idempotency_key is not None:
            first = first_by_key.setdefault(job.idempotency_key, job)
            if first.payload_hash != job.payload_hash:
                raise IdempotencyConflictError(job.idempotency_key, first.id)
    holders = _holders(conn, list(first_by_key))
    # In the order of their keys, so that two transactions with the same keys cannot wait for each other.
    keyed = [first_by_key[key] for key in sorted(first_by_key) if key not in holders]
    plain = [job for job in jobs if job.idempotency_key is None]
    _refuse_duplicates([*plain, *keyed])
    try:
        with conn.begin_nested():
            # Where no key decides what is new, a full tenant is told before rows are written to be rolled back.
            if limits and not keyed:
                _admit(conn, plain, limits)
            insert_rows(conn, Job, [job.row() for job in plain])
            insert_or_ignore(conn, Job, [job.row() for job in keyed], [Job.idempotency_key])
    except IntegrityError as exc:
        if named := _named(conn, [*plain, *keyed]):
            raise named from exc
        raise
    if keyed:
        holders |= _holders(conn, [job.idempotency_key for job in keyed if job.idempotency_key is not None])
    outcomes = []
    for job in jobs:
        if job.idempotency_key is None:
            outcomes.append(InsertOutcome(job.id, True, JobState.QUEUED))
            continue
        holder = holders.get(job.idempotency_key)
        if holder is None:  # MariaDB ignored the row for the sake of another of its unique keys
            raise _named(conn, keyed) or DuplicateJobIdError([job.id])
        if holder.payload_hash != job.payload_hash:
            raise IdempotencyConflictError(job.idempotency_key, holder.id)
        outcomes.append(InsertOutcome(holder.id, holder.id == job.id, holder.state))
    created = [job for job, outcome in zip(jobs, outcomes, strict=True) if outcome.created]
    if limits and keyed:
        _admit(conn, created, limits)
    insert_job_callbacks(conn, ((job.id, job.callback) for job in created))
    return outcomes


def _admit(conn: Connection, created: Sequence[NewJob], limits: Mapping[str, TenantLimit]) -> None:
    wanted: dict[str, dict[str, int]] = {}
    for job in created:
        if job.tenant is not None:
            wanted.setdefault(job.tenant, {})[job.id] = job.tokens
    admit(conn, wanted, limits)


def _holders(conn: Connection, keys: Sequence[str]) -> dict[str, Row[str, str | None, str | None, JobState]]:
    query = select(Job.id, Job.idempotency_key, Job.payload_hash, Job.state)
    return {
        str(row.idempotency_key): row
        for some in chunked(keys)
        for row in conn.execute(query.where(Job.idempotency_key.in_(some)))
    }


def _refuse_duplicates(jobs: Sequence[NewJob]) -> None:
    ids: set[str] = set()
    lines: set[tuple[str, str]] = set()
    for job in jobs:
        if job.id in ids:
            raise DuplicateJobIdError([job.id])
        ids.add(job.id)
        if job.batch_id is not None and job.custom_id is not None:
            if (job.batch_id, job.custom_id) in lines:
                raise DuplicateCustomIdError(job.custom_id, job.batch_id)
            lines.add((job.batch_id, job.custom_id))


def _named(conn: Connection, jobs: Sequence[NewJob]) -> Exception | None:
    """Which rule these rows break, asked of the tables because each database words it differently."""
    for some in chunked(jobs):
        taken = conn.scalars(select(Job.id).where(Job.id.in_([job.id for job in some]))).all()
        if taken:
            return DuplicateJobIdError(list(taken))
        by_batch: dict[str, list[str]] = {}
        for job in some:
            if job.batch_id is not None:
                by_batch.setdefault(job.batch_id, []).extend([job.custom_id] if job.custom_id else [])
        for batch_id, custom_ids in by_batch.items():
            if conn.scalar(select(Batch.id).where(Batch.id == batch_id)) is None:
                return UnknownBatchError(batch_id)
            twice = select(Job.custom_id).where(Job.batch_id == batch_id, Job.custom_id.in_(custom_ids))
            if (custom_id := conn.scalar(twice.limit(1))) is not None:
                return DuplicateCustomIdError(custom_id, batch_id)
    return None


_PUBLISHED = update(Job).where(among(Job.id)).values(published_at=bindparam("at"))


def mark_published(conn: Connection, ids: Sequence[str], *, at: datetime | None = None) -> None:
    """Note that the messages of these jobs have been handed to the broker."""
    for some in chunked(ids):
        conn.execute(_PUBLISHED, {"ids": some, "at": at or utcnow()})


def mark_unpublished(conn: Connection, ids: Sequence[str], *, at: datetime | None = None) -> None:
    """Take back that these were published, or what was noted at ``at`` alone: the broker may not have them."""
    noted = true() if at is None else Job.published_at == at
    for some in chunked(sorted(ids)):
        conn.execute(update(Job).where(Job.id.in_(some), noted).values(published_at=None))


def mark_callbacks_sent(conn: Connection, ids: Sequence[str], *, at: datetime | None = None) -> None:
    """Note that Celery's links, chords and result backend have been served for these terminal jobs."""
    for some in chunked(ids):
        conn.execute(update(Job).where(Job.id.in_(some)).values(callbacks_sent_at=at or utcnow()))


# ------------------------------------------------------------------------------------------------------- look up

_STATUS_COLUMNS = tuple(getattr(Job, name.name) for name in fields(JobStatus))


def job_status(conn: Connection, job_id: str) -> JobStatus | None:
    """The job, or ``None`` when there is none with this id."""
    return job_statuses(conn, [job_id]).get(job_id)


def job_statuses(conn: Connection, ids: Sequence[str]) -> dict[str, JobStatus]:
    """The jobs with these ids, by id; unknown ids are absent."""
    return {
        row.id: JobStatus(*row)
        for some in chunked(ids)
        for row in conn.execute(select(*_STATUS_COLUMNS).where(Job.id.in_(some)))
    }


def job_states(conn: Connection, ids: Sequence[str]) -> dict[str, JobState]:
    """The states of these jobs, by id; unknown ids are absent. The cheap way to wait for many."""
    return {
        job_id: state
        for some in chunked(ids)
        for job_id, state in conn.execute(select(Job.id, Job.state).where(Job.id.in_(some)))
    }


def job_result(conn: Connection, job_id: str, choice: int = 0) -> StoredResult | None:
    """The stored answer, or ``None`` while there is none."""
    query = select(*RESULT_COLUMNS).where(Result.job_id == job_id, Result.choice == choice)
    row = conn.execute(query).one_or_none()
    return None if row is None else StoredResult.from_row(row)


def job_results(conn: Connection, ids: Sequence[str]) -> dict[str, StoredResult]:
    """The first stored answer of each of these jobs, by id; jobs without one are absent."""
    query = select(Result.job_id, *RESULT_COLUMNS).where(Result.choice == 0)
    return {
        row.job_id: StoredResult.from_row(row)
        for some in chunked(ids)
        for row in conn.execute(query.where(Result.job_id.in_(some)))
    }


def job_attempts(conn: Connection, job_id: str) -> list[AttemptRecord]:
    """Every run of the job, oldest first."""
    query = (
        select(
            Attempt.number,
            Attempt.worker_id,
            Worker.name,
            Attempt.started_at,
            Attempt.ended_at,
            Attempt.outcome,
            Attempt.error,
        )
        .join(Worker, Worker.id == Attempt.worker_id)
        .where(Attempt.job_id == job_id)
        .order_by(Attempt.number)
    )
    return [AttemptRecord(*row) for row in conn.execute(query)]


def stored_messages(conn: Connection, ids: Sequence[str]) -> dict[str, StoredMessage]:
    """The stored messages of these jobs, by id, to publish them (again)."""
    query = select(Job.id, Job.queue, Job.priority, Job.message)
    return {
        row.id: StoredMessage(*row)
        for some in chunked(ids)
        for row in conn.execute(query.where(Job.id.in_(some)))
    }


# -------------------------------------------------------------------------------------------------------- change


@dataclass(frozen=True, slots=True)
class LockedJob:
    """What decides about a job, read under its row's lock."""

    id: str
    state: JobState
    attempt: int
    owner: str | None
    cancel_requested: bool
    created_at: datetime
    started_at: datetime | None
    deadline_at: datetime | None
    error_type: str | None
    error_message: str | None
    callbacks_sent_at: datetime | None
    deaths: int
    solo_deaths: int


_LOCKED_COLUMNS = tuple(getattr(Job, name.name) for name in fields(LockedJob))
_LOCK = select(*_LOCKED_COLUMNS).where(among(Job.id)).order_by(Job.id).with_for_update()


def lock_jobs(conn: Connection, ids: Iterable[str]) -> dict[str, LockedJob]:
    """Lock these rows until the transaction ends and read them; unknown ids are absent.

    Always in the order of their ids, so that two transactions do not wait for each other. SQLite needs no row
    locks: the whole transaction holds its write lock.
    """
    return {
        row[0]: LockedJob(*row)
        for some in chunked(sorted(set(ids)))
        for row in conn.execute(_LOCK, {"ids": some})
    }


def request_cancel(
    conn: Connection, ids: Sequence[str], *, at: datetime | None = None
) -> dict[str, JobState]:
    """Cancel: a queued job ends at once, a running one is flagged for its worker, a terminal one stays.

    The delivery of a queued job tells Celery. A suspect has none: it is marked as not published, which has a worker's
    sweeper publish it (``models_db.suspects.untold_ends``).

    Returns:
        The state of each job afterwards, by id; unknown ids are absent.
    """
    locked = lock_jobs(conn, ids)
    queued = [job.id for job in locked.values() if job.state is JobState.QUEUED]
    running = [job.id for job in locked.values() if job.state is JobState.RUNNING]
    undelivered = [job_id for job_id in queued if locked[job_id].deaths >= SUSPECT_DEATHS]
    now = at or database_time(conn)
    for some in chunked(queued):
        conn.execute(
            update(Job)
            .where(Job.id.in_(some))
            .values(state=JobState.CANCELLED, cancel_requested=True, finished_at=now)
        )
        announce_jobs(conn, some)
    mark_unpublished(conn, undelivered)
    for some in chunked(running):
        conn.execute(update(Job).where(Job.id.in_(some)).values(cancel_requested=True))
    states = {job.id: job.state for job in locked.values()}
    return states | dict.fromkeys(queued, JobState.CANCELLED)


def request_revoke(
    conn: Connection, ids: Sequence[str], *, terminate: bool, at: datetime | None = None
) -> list[str]:
    """Cancel those of these jobs that are queued, with ``terminate`` also those that run; returns which they were.

    Many may do this at once with the same ids: rows that are in no need of it are not even locked.
    """
    wanted = Job.state == JobState.QUEUED
    if terminate:
        wanted |= (Job.state == JobState.RUNNING) & ~Job.cancel_requested
    found = [
        job_id
        for some in chunked(ids)
        for job_id in conn.scalars(select(Job.id).where(Job.id.in_(some), wanted))
    ]
    states = (JobState.QUEUED, JobState.RUNNING) if terminate else (JobState.QUEUED,)
    still = [job.id for job in lock_jobs(conn, found).values() if job.state in states]
    request_cancel(conn, still, at=at)
    return still


def cancelled_running(conn: Connection, owner: str) -> list[str]:
    """Ids of the jobs that this worker runs and that someone wants cancelled."""
    return list(conn.scalars(select(Job.id).where(Job.owner == owner, Job.cancel_requested)).all())


def retry_failed(
    conn: Connection,
    *,
    ids: Sequence[str] | None = None,
    batch_id: str | None = None,
    states: Iterable[JobState] = (JobState.FAILED,),
    at: datetime | None = None,
) -> list[str]:
    """Queue terminal jobs again: the only way out of a terminal state. Give ``ids``, ``batch_id`` or both.

    Their results and errors are deleted, their attempts kept and counted on, a deadline that has passed is
    dropped, and a finished batch among them is in progress again. Those that have never run count as created now, or
    what expired because it waited too long would expire again. The caller publishes their stored messages.

    Returns:
        The ids that are queued now, in the order of their creation.

    Raises:
        InvalidValueError: neither ids nor a batch are given, or a state is not terminal.
    """
    wanted = frozenset(states)
    if ids is None and batch_id is None:
        raise InvalidValueError("ids", "are missing", fix="Say which jobs to retry: by id or by batch")
    if not wanted or not wanted <= frozenset(TERMINAL_JOB_STATES):
        raise InvalidValueError("states", "must be terminal", value=", ".join(sorted(wanted)))
    # Lines that were bad have no message: there is nothing to run again.
    query = select(Job.id).where(Job.state.in_(wanted), Job.message.is_not(None))
    if batch_id is not None:
        query = query.where(Job.batch_id == batch_id)
    pieces = [query] if ids is None else [query.where(Job.id.in_(some)) for some in chunked(ids)]
    candidates = [job_id for piece in pieces for job_id in conn.scalars(piece)]
    now = at or database_time(conn)
    chosen = [job.id for job in lock_jobs(conn, candidates).values() if job.state in wanted]
    order: dict[str, datetime] = {}
    for some in chunked(chosen):
        batches = conn.execute(select(Job.id, Job.created_at, Job.batch_id).where(Job.id.in_(some))).all()
        order |= {row.id: row.created_at for row in batches}
        conn.execute(delete(Result).where(Result.job_id.in_(some)))
        conn.execute(update(Job).where(Job.id.in_(some), Job.attempt == 0).values(created_at=now))
        conn.execute(update(Job).where(Job.id.in_(some), Job.deadline_at <= now).values(deadline_at=None))
        conn.execute(
            update(Job)
            .where(Job.id.in_(some))
            .values(
                state=JobState.QUEUED,
                cancel_requested=False,
                published_at=None,
                started_at=None,
                finished_at=None,
                callbacks_sent_at=None,
                error_type=None,
                error_message=None,
                deaths=0,
                solo_deaths=0,
            )
        )
        recall_jobs(conn, some)
        _reopen(conn, {row.batch_id for row in batches if row.batch_id is not None})
    return sorted(order, key=lambda job_id: (order[job_id], job_id))


def _reopen(conn: Connection, batch_ids: Iterable[str]) -> None:
    conn.execute(
        update(Batch)
        .where(Batch.id.in_(sorted(batch_ids)), Batch.state.in_(TERMINAL_BATCH_STATES))
        .values(state=BatchState.IN_PROGRESS, finished_at=None, succeeded=0, failed=0, cancelled=0, expired=0)
    )
    # What came through /v1/batches is written anew when it has ended again.
    nothing = dict.fromkeys(("output_file_id", "error_file_id", "answered", "unanswered"))
    conn.execute(update(ApiBatch).where(ApiBatch.batch_id.in_(sorted(batch_ids))).values(nothing))
    recall_batches(conn, sorted(batch_ids))
