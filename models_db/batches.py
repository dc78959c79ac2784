"""Bulk submissions: create, watch, cancel.

Every function works inside the caller's transaction and never commits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, func, insert, literal, select, update

from models_db.callbacks import NewCallback, announce_batch, announce_jobs, insert_job_callbacks
from models_db.clock import database_time
from models_db.dialects import chunked
from models_db.errors import BatchClosedError, UnknownBatchError
from models_db.ids import uuid7
from models_db.jobs import request_cancel
from models_db.tables import Batch, BatchState, Job, JobState, Result
from models_db.text import check_name, clean_text


@dataclass(frozen=True, slots=True)
class BatchProgress:
    """A batch and how far it is. ``counts`` has every job state; ``total`` is unknown while it is validating.

    The tokens are those of the results so far, or 0 where they were not asked for.
    """

    id: str
    name: str
    state: BatchState
    source: str | None
    total: int | None
    counts: Mapping[JobState, int]
    prompt_tokens: int
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
    """Insert a batch and return its id.

    Raises:
        InvalidValueError: the name is empty, too long, or holds text that a database refuses.
    """
    check_name("name", name, 255)
    check_name("batch_id", batch_id, 36)
    new_id = batch_id or uuid7()
    conn.execute(
        insert(Batch).values(
            id=new_id,
            name=name,
            state=state,
            total=total,
            succeeded=0,
            failed=0,
            cancelled=0,
            expired=0,
            created_at=at or database_time(conn),
            deadline_at=deadline_at,
            source=None if source is None else clean_text(source),
        )
    )
    return new_id


@dataclass(frozen=True, slots=True)
class EndedLine:
    """A line of a batch that never becomes a job's work: it is bad, or came too late."""

    position: int
    custom_id: str | None
    state: JobState
    error_type: str
    error_message: str
    callback: NewCallback | None = None
    tenant: str | None = None


def insert_ended_lines(
    conn: Connection,
    batch_id: str,
    lines: Sequence[EndedLine],
    *,
    model: str,
    queue: str,
    at: datetime | None = None,
) -> None:
    """Insert lines that have ended before they began, so that the batch accounts for every line of its input.

    Those that are in already are left alone. Of two who insert the same, one waits for the other: many of these lines
    have no id by which the database could refuse them.

    Args:
        lines: in ascending order.

    Raises:
        BatchClosedError: the batch is being cancelled, or has ended.
    """
    if not lines:
        return
    state = _lock_batch(conn, batch_id)
    if state.terminal or state is BatchState.CANCELLING:
        raise BatchClosedError(batch_id, state)
    first, last = lines[0].position, lines[-1].position
    between = select(Job.position).where(
        Job.batch_id == batch_id, Job.position >= first, Job.position <= last
    )
    present = set(conn.scalars(between))
    lines = [line for line in lines if line.position not in present]
    now = at or database_time(conn)
    rows: list[dict[str, Any]] = [
        {
            "id": uuid7(),
            "batch_id": batch_id,
            "position": line.position,
            "custom_id": line.custom_id,
            "tenant": line.tenant,
            "model": model,
            "queue": queue,
            "priority": 0,
            "state": line.state,
            "attempt": 0,
            "cancel_requested": False,
            "created_at": now,
            "finished_at": now,
            "error_type": line.error_type,
            "error_message": clean_text(line.error_message),
            "params": {},
            "prompt": {},
        }
        for line in lines
    ]
    if rows:
        conn.execute(insert(Job), rows)
        wanted = [(row["id"], line.callback) for row, line in zip(rows, lines, strict=True)]
        announce_jobs(conn, insert_job_callbacks(conn, wanted, now))


def set_batch_state(
    conn: Connection,
    batch_id: str,
    state: BatchState,
    *,
    total: int | None = None,
    error: str | None = None,
    at: datetime | None = None,
) -> bool:
    """Move a batch on; ``False`` when it is terminal already, or is being cancelled and this is no end: then nothing
    changes. A terminal state stores its counts.

    Raises:
        UnknownBatchError: there is no such batch.
    """
    present = _lock_batch(conn, batch_id)
    if present.terminal or (present is BatchState.CANCELLING and not state.terminal and state is not present):
        return False
    values: dict[str, Any] = {}
    if total is not None:
        values["total"] = total
    if error is not None:
        values["error"] = clean_text(error)
    if state.terminal:
        _end(
            conn, batch_id, state, _job_counts(conn, [batch_id])[batch_id], at or database_time(conn), values
        )
    else:
        conn.execute(update(Batch).where(Batch.id == batch_id).values(state=state, **values))
    return True


def _end(
    conn: Connection,
    batch_id: str,
    state: BatchState,
    counts: Mapping[JobState, int],
    now: datetime,
    values: Mapping[str, Any],
) -> None:
    """Store a terminal state with what there was of each kind of end."""
    ends = {str(job_state): counts[job_state] for job_state in JobState if job_state.terminal}
    conn.execute(
        update(Batch).where(Batch.id == batch_id).values(**values, **ends, state=state, finished_at=now)
    )
    announce_batch(conn, batch_id)


def batch_progress(conn: Connection, batch_id: str) -> BatchProgress | None:
    """The batch with live counts, or ``None`` when there is none with this id."""
    found = batches_progress(conn, [batch_id])
    return found[0] if found else None


def open_jobs(conn: Connection, batch_id: str, most: int) -> tuple[BatchState, int]:
    """The batch's state, and how many of its jobs wait or run, counted no further than to ``most``.

    It costs as much as that is, however many lines the batch has: ask with 1 whether there is any.

    Raises:
        UnknownBatchError: there is no such batch.
    """
    state = conn.scalar(select(Batch.state).where(Batch.id == batch_id))
    if state is None:
        raise UnknownBatchError(batch_id)
    return state, _count_open(conn, batch_id, most)


def _count_open(conn: Connection, batch_id: str, most: int) -> int:
    count = 0
    # One state at a time, as the index has them: together they would be looked for among all of the batch.
    for state in (JobState.QUEUED, JobState.RUNNING):
        some = (
            select(literal(1).label("one"))
            .where(Job.batch_id == batch_id, Job.state == state)
            # Which the index has, so that no database looks through the table instead.
            .order_by(Job.published_at)
            .limit(most - count)
        )
        count += conn.scalar(select(func.count()).select_from(some.subquery())) or 0
        if count >= most:
            break
    return count


def unpublished(conn: Connection, batch_id: str, limit: int) -> list[str]:
    """Ids of queued jobs of the batch that have never reached the broker, so many at most.

    An index has them together, so that it costs nothing that a million others wait.
    """
    query = (
        select(Job.id)
        .where(Job.batch_id == batch_id, Job.state == JobState.QUEUED, Job.published_at.is_(None))
        .order_by(Job.published_at)  # says nothing of their order, and which index is meant
        .limit(limit)
    )
    return list(conn.scalars(query))


def list_batches(conn: Connection, *, limit: int = 20) -> list[BatchProgress]:
    """The latest batches, newest first."""
    query = select(Batch.id).order_by(Batch.created_at.desc(), Batch.id.desc()).limit(limit)
    return batches_progress(conn, list(conn.scalars(query).all()))


def finish_batch_if_done(conn: Connection, batch_id: str, *, at: datetime | None = None) -> BatchState | None:
    """End a batch all of whose jobs have ended; its state when it is terminal (now or before), else ``None``.

    The end is ``cancelled`` after a cancel, ``expired`` when its deadline has passed and a job expired, and
    otherwise ``completed``. A batch that is still validating never ends here.

    Raises:
        UnknownBatchError: there is no such batch.
    """
    now = at or database_time(conn)
    state = _lock_batch(conn, batch_id)
    if state.terminal:
        return state
    if state is BatchState.VALIDATING:
        return None
    # Asked before anything is counted: who looks too early must cost little, since the batch is locked.
    if _count_open(conn, batch_id, 1):
        return None
    counts = _job_counts(conn, [batch_id])[batch_id]
    if counts[JobState.QUEUED] or counts[JobState.RUNNING]:
        return None  # some have been queued again meanwhile
    total, deadline_at = conn.execute(
        select(Batch.total, Batch.deadline_at).where(Batch.id == batch_id)
    ).one()
    if state is BatchState.CANCELLING:
        end = BatchState.CANCELLED
    elif total is not None and sum(counts.values()) < total:
        return None  # lines that are still to be inserted
    elif counts[JobState.EXPIRED] and deadline_at is not None and deadline_at <= now:
        end = BatchState.EXPIRED
    else:
        end = BatchState.COMPLETED
    _end(conn, batch_id, end, counts, now, {})
    return end


def request_cancel_batch(
    conn: Connection, batch_id: str, *, at: datetime | None = None
) -> dict[JobState, int]:
    """Cancel a batch: queued jobs end at once, running ones are flagged, it is ``cancelling`` until all ended.

    All in one transaction, for a thousand jobs or so; ``models_db.batch_cancel`` takes any number.

    Returns:
        How many of its jobs are in which state afterwards.

    Raises:
        UnknownBatchError: there is no such batch.
    """
    if set_batch_state(conn, batch_id, BatchState.CANCELLING, at=at):
        # By id in chunks, so that rows are locked in the order that claims lock them in.
        open_jobs = select(Job.id).where(
            Job.batch_id == batch_id, Job.state.in_((JobState.QUEUED, JobState.RUNNING))
        )
        for some in chunked(sorted(conn.scalars(open_jobs).all())):
            request_cancel(conn, some, at=at)
        finish_batch_if_done(conn, batch_id, at=at)
    return dict(_job_counts(conn, [batch_id])[batch_id])


def positions_after(conn: Connection, batch_id: str, after: int, limit: int) -> list[int]:
    """Positions of the batch's jobs beyond ``after``, ascending, so many at most."""
    query = (
        select(Job.position)
        .where(Job.batch_id == batch_id, Job.position > after)
        .order_by(Job.position)
        .limit(limit)
    )
    return [position for position in conn.scalars(query) if position is not None]


def last_queued(conn: Connection, batch_id: str, lines: int) -> list[str]:
    """Ids of the jobs that wait for a worker among so many last lines of the batch."""
    last = (
        select(Job.id, Job.state).where(Job.batch_id == batch_id).order_by(Job.position.desc()).limit(lines)
    )
    return [row.id for row in conn.execute(last) if row.state is JobState.QUEUED]


def _lock_batch(conn: Connection, batch_id: str) -> BatchState:
    state = conn.scalar(select(Batch.state).where(Batch.id == batch_id).with_for_update())
    if state is None:
        raise UnknownBatchError(batch_id)
    return state


def batches_progress(
    conn: Connection, batch_ids: Sequence[str], *, tokens: bool = True
) -> list[BatchProgress]:
    """Those of these batches that there are, in the order given.

    Args:
        tokens: add up the tokens of all results, which is the dearest part of it.
    """
    batches = {row.id: row for row in conn.execute(select(*_BATCH_COLUMNS).where(Batch.id.in_(batch_ids)))}
    ended = {batch_id for batch_id, row in batches.items() if row.state in _COUNTED}
    counts = _job_counts(conn, [batch_id for batch_id in batch_ids if batch_id not in ended])
    added: dict[str | None, tuple[int, int]] = {}
    if tokens:
        token_query = (
            select(Job.batch_id, func.sum(Result.prompt_tokens), func.sum(Result.completion_tokens))
            .join(Result, Result.job_id == Job.id)
            .where(Job.batch_id.in_(batch_ids))
            .group_by(Job.batch_id)
        )
        added = {batch_id: (int(prompt), int(new)) for batch_id, prompt, new in conn.execute(token_query)}
    progress = []
    for batch_id in batch_ids:
        if (row := batches.get(batch_id)) is None:
            continue
        prompt_tokens, completion_tokens = added.get(batch_id, (0, 0))
        progress.append(
            BatchProgress(
                id=row.id,
                name=row.name,
                state=row.state,
                source=row.source,
                total=row.total,
                counts=_stored_counts(row) if batch_id in ended else counts[batch_id],
                prompt_tokens=prompt_tokens,
                completion_tokens=completion_tokens,
                created_at=row.created_at,
                finished_at=row.finished_at,
                deadline_at=row.deadline_at,
                error=row.error,
            )
        )
    return progress


_BATCH_COLUMNS = (
    Batch.id,
    Batch.name,
    Batch.state,
    Batch.source,
    Batch.total,
    Batch.succeeded,
    Batch.failed,
    Batch.cancelled,
    Batch.expired,
    Batch.created_at,
    Batch.finished_at,
    Batch.deadline_at,
    Batch.error,
)
# Ended with all their jobs: what the row says of these holds, also when retention has removed the jobs.
_COUNTED = (BatchState.COMPLETED, BatchState.CANCELLED, BatchState.EXPIRED)


def _stored_counts(row: Any) -> dict[JobState, int]:
    return {state: getattr(row, state) if state.terminal else 0 for state in JobState}


def _job_counts(conn: Connection, batch_ids: Sequence[str]) -> dict[str, dict[JobState, int]]:
    counts = {batch_id: dict.fromkeys(JobState, 0) for batch_id in batch_ids}
    if not counts:
        return counts
    query = (
        select(Job.batch_id, Job.state, func.count())
        .where(Job.batch_id.in_(batch_ids))
        .group_by(Job.batch_id, Job.state)
    )
    for batch_id, state, count in conn.execute(query):
        if batch_id is not None:
            counts[batch_id][state] = count
    return counts
