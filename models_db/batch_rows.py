"""A batch's lines read back for export: in either order, in time that grows with their number, in bounded memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass

from sqlalchemy import Connection, and_, or_, select

from models_db.records import RESULT_COLUMNS, StoredResult
from models_db.scratch import scratch_file
from models_db.tables import Job, JobState, Result


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
    attempt: int = 1  # 0 with a result: the answer was taken over


def iter_batch_rows(
    conn: Connection, batch_id: str, *, chunk: int = 500, by_completion: bool = False
) -> Iterator[BatchRow]:
    """The batch's jobs with their results, in input order or as they ended, read ``chunk`` rows at a time.

    By completion, lines that have not ended come last, in input order.
    """
    ordered = _ids_by_completion(conn, batch_id, chunk) if by_completion else _ids(conn, batch_id, chunk)
    for ids in ordered:
        yield from _rows(conn, ids)


def cut_off(conn: Connection, batch_id: str) -> list[str]:
    """Ids of the batch's jobs whose answers a deadline cut off."""
    query = (
        select(Job.id)
        .join(Result, and_(Result.job_id == Job.id, Result.choice == 0))
        .where(Job.batch_id == batch_id, Job.state == JobState.SUCCEEDED, Result.finish_reason == "deadline")
    )
    return list(conn.scalars(query))


def _ids(conn: Connection, batch_id: str, chunk: int) -> Iterator[list[str]]:
    """The jobs' ids in input order, a page at a time."""
    for page in _keys(conn, batch_id, chunk):
        yield [job_id for job_id, _, _ in page]


def _keys(conn: Connection, batch_id: str, chunk: int) -> Iterator[list[tuple[str, int, str | None]]]:
    """Id, position, and time of the end, in input order."""
    query = (
        select(Job.id, Job.position, Job.finished_at)
        .where(Job.batch_id == batch_id)
        .order_by(Job.position, Job.id)
        .limit(chunk)
    )
    page = query
    while rows := conn.execute(page).all():
        yield [
            # All in UTC and of one length, so that text sorts as time.
            (row.id, row.position, row.finished_at and row.finished_at.isoformat(timespec="microseconds"))
            for row in rows
        ]
        last = rows[-1]
        # The first condition says nothing new, but it is what makes an index begin there instead of at the front.
        behind = and_(Job.position >= last.position, or_(Job.position > last.position, Job.id > last.id))
        page = query.where(behind)


def _ids_by_completion(conn: Connection, batch_id: str, chunk: int) -> Iterator[list[str]]:
    """The ids sorted once, in a private temporary SQLite file, which spills to disk by itself.

    No index has this order, so each page out of the database would read the whole batch.
    """
    with closing(scratch_file()) as kept:
        kept.execute("CREATE TABLE ended (open INTEGER, at TEXT, position INTEGER, id TEXT)")
        for page in _keys(conn, batch_id, 10_000):
            kept.executemany(
                "INSERT INTO ended VALUES (?, ?, ?, ?)",
                ((at is None, at or "", position, job_id) for job_id, position, at in page),
            )
        found = kept.execute("SELECT id FROM ended ORDER BY open, at, position, id")
        while rows := found.fetchmany(chunk):
            yield [job_id for (job_id,) in rows]


def _rows(conn: Connection, ids: Sequence[str]) -> Iterator[BatchRow]:
    query = (
        select(
            Job.position,
            Job.custom_id,
            Job.id,
            Job.state,
            Job.model,
            Job.error_type,
            Job.error_message,
            Job.attempt,
            Result.job_id.label("result_of"),
            *RESULT_COLUMNS,
        )
        .outerjoin(Result, and_(Result.job_id == Job.id, Result.choice == 0))
        .where(Job.id.in_(ids))
    )
    found = {row.id: row for row in conn.execute(query)}
    for job_id in ids:
        if (row := found.get(job_id)) is None:
            continue  # pruned meanwhile
        yield BatchRow(
            position=row.position,
            custom_id=row.custom_id,
            job_id=row.id,
            state=row.state,
            model=row.model,
            error_type=row.error_type,
            error_message=row.error_message,
            result=None if row.result_of is None else StoredResult.from_row(row),
            attempt=row.attempt,
        )
