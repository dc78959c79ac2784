"""Deleting old history in small transactions, so that a running fleet hardly notices.

The roll-ups are brought up to date first and stay: what is deleted here is counted there for good.
"""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date, datetime
from functools import partial
from pathlib import Path
from typing import IO, Any

from sqlalchemy import ColumnElement, Connection, Engine, and_, delete, exists, func, or_, select

from models_db.archive import SUFFIX as PARQUET
from models_db.archive import parquet_archive
from models_db.base import Base, utcnow
from models_db.errors import InvalidValueError
from models_db.rollup_tables import JobMinute, LatencyMinute, ThroughputHour, ThroughputMinute
from models_db.rollups import catch_up, close_before, floor_hour
from models_db.session import reading, transaction
from models_db.tables import (
    TERMINAL_BATCH_STATES,
    Attempt,
    Batch,
    DeadLetter,
    EngineSample,
    Job,
    Result,
    Worker,
)

_MINUTES = (ThroughputMinute.started_at, JobMinute.started_at, LatencyMinute.started_at)
_ROWS_PER_JOB = 10  # so many samples go into a transaction for one job with its text

Keep = Callable[[Connection, Any, ColumnElement[bool]], None]
"""Writes the rows of a table that are about to be deleted somewhere else."""


@dataclass(frozen=True, slots=True)
class PruneReport:
    """Rows deleted, or, after a dry run, rows that would be."""

    jobs: int
    attempts: int
    results: int
    batches: int
    samples: int
    workers: int
    minutes: int  # rows of the roll-ups per minute
    dead_letters: int
    dry_run: bool


def prune(
    engine: Engine,
    older_than: datetime,
    *,
    minutes_older_than: datetime | None = None,
    archive: Path | None = None,
    dry_run: bool = False,
    chunk: int = 500,
    now: datetime | None = None,
) -> PruneReport:
    """Delete what ended before ``older_than``, rounded down to the hour.

    That is: terminal jobs with their attempts and results, but none of a batch that has not ended; terminal batches
    left without jobs; samples; messages that no worker could read; and stopped or dead workers that nothing refers to
    any more. Roll-ups stay, but for those per minute that began before ``minutes_older_than``. Each transaction deletes
    at most ``chunk`` jobs, or ten times as many samples. Takes an engine, because it commits by itself.

    Args:
        archive: a new file, ``.jsonl`` or ``.jsonl.gz``, that gets each row as a line, or a new folder ``.parquet``
            with a file for each table (see ``models_db.archive``). A row is on disk before it goes.
            After a crash the last rows may be both there and here, never in neither.

    Raises:
        InvalidValueError: minutes are to go before what they are made of, or the archive exists or is named otherwise.
    """
    cut = floor_hour(older_than)
    minutes_cut = None if minutes_older_than is None else floor_hour(minutes_older_than)
    if minutes_cut is not None and minutes_cut > cut:
        raise InvalidValueError(
            "minutes_older_than", "must not lie after older_than", fix="Keep minutes at least as long as jobs"
        )
    if dry_run:
        return _count(engine, cut, minutes_cut)
    catch_up(engine, max(cut, now or utcnow()))
    transaction(engine, partial(close_before, moment=cut))
    with _archive(archive) as keep:
        jobs = attempts = results = 0
        while True:
            counts = transaction(engine, lambda conn: _prune_jobs(conn, _old_job(cut), chunk, keep))
            jobs, attempts, results = jobs + counts[0], attempts + counts[1], results + counts[2]
            if counts[0] < chunk:
                break
        rows = chunk * _ROWS_PER_JOB
        samples = _repeat(
            engine, rows, lambda conn: _prune_by_time(conn, EngineSample.sampled_at, cut, rows, keep)
        )
        batches = _repeat(engine, chunk, lambda conn: _prune_by_id(conn, Batch, _old_batch(cut), chunk, keep))
        letters = _repeat(
            engine, chunk, lambda conn: _prune_by_id(conn, DeadLetter, _old_letter(cut), chunk, keep)
        )
        minutes = 0
        for time in _MINUTES if minutes_cut is not None else ():
            step = partial(_prune_by_time, time=time, before=minutes_cut, chunk=rows, keep=keep)
            minutes += _repeat(engine, rows, step)
        workers = _repeat(
            engine, chunk, lambda conn: _prune_by_id(conn, Worker, _old_worker(cut), chunk, keep)
        )
    return PruneReport(jobs, attempts, results, batches, samples, workers, minutes, letters, dry_run=False)


@contextmanager
def _archive(path: Path | None) -> Iterator[Keep]:
    if path is None:
        yield lambda conn, table, condition: None
        return
    if path.suffix == PARQUET:
        with parquet_archive(path) as keep:
            yield keep
        return
    if not path.name.endswith((".jsonl", ".jsonl.gz")):
        raise InvalidValueError(
            "archive",
            "must be a .jsonl or .jsonl.gz file, or a .parquet folder",
            value=str(path),
            fix="For example old.jsonl.gz",
        )
    try:
        raw = path.open("xb")
    except OSError as exc:
        reason = (
            "exists already" if isinstance(exc, FileExistsError) else f"cannot be written ({exc.strerror})"
        )
        raise InvalidValueError("archive", reason, value=str(path), fix="Name a new file") from exc
    with raw, gzip.open(raw, "wb") if path.suffix == ".gz" else raw as lines:
        yield partial(_write, raw, lines)  # type: ignore[arg-type]


def _write(
    raw: IO[bytes], lines: IO[bytes], conn: Connection, table: type[Base], condition: ColumnElement[bool]
) -> None:
    for row in conn.execute(select(table.__table__).where(condition)).mappings():
        line = {"table": table.__tablename__} | dict(row)
        lines.write(json.dumps(line, ensure_ascii=True, default=_plain).encode() + b"\n")
    lines.flush()
    raw.flush()
    os.fsync(raw.fileno())


def _plain(value: object) -> str:
    if isinstance(value, date | datetime):
        return value.isoformat()
    raise TypeError(f"{type(value).__name__} has no place in an archive")


def _old_job(older_than: datetime) -> ColumnElement[bool]:
    ended_batch = exists().where(Batch.id == Job.batch_id, Batch.state.in_(TERMINAL_BATCH_STATES))
    return and_(Job.finished_at < older_than, or_(Job.batch_id.is_(None), ended_batch))


def _old_batch(older_than: datetime) -> ColumnElement[bool]:
    return and_(Batch.finished_at < older_than, ~exists().where(Job.batch_id == Batch.id))


def _old_letter(older_than: datetime) -> ColumnElement[bool]:
    return DeadLetter.received_at < older_than


def _old_worker(older_than: datetime) -> ColumnElement[bool]:
    return and_(
        Worker.stopped_at < older_than,
        ~exists().where(Attempt.worker_id == Worker.id),
        ~exists().where(EngineSample.worker_id == Worker.id),
        ~exists().where(ThroughputHour.worker_id == Worker.id),
        ~exists().where(ThroughputMinute.worker_id == Worker.id),
        ~exists().where(Job.owner == Worker.id),
    )


def _repeat(engine: Engine, chunk: int, step: Callable[[Connection], int]) -> int:
    total = 0
    while True:
        count = transaction(engine, step)
        total += count
        if count < chunk:
            return total


def _prune_jobs(conn: Connection, old: ColumnElement[bool], chunk: int, keep: Keep) -> tuple[int, int, int]:
    # Locked before they are judged, so that a retry at the same moment keeps its job.
    ids = conn.scalars(select(Job.id).where(old).order_by(Job.id).limit(chunk).with_for_update()).all()
    if not ids:
        return 0, 0, 0
    counts = []
    for table, condition in _of_jobs(ids):
        keep(conn, table, condition)
        counts.append(conn.execute(delete(table).where(condition)).rowcount)
    return counts[2], counts[1], counts[0]


def _of_jobs(ids: Sequence[str]) -> list[tuple[Any, ColumnElement[bool]]]:
    """What belongs to these jobs, in the order in which it can be deleted."""
    return [(Result, Result.job_id.in_(ids)), (Attempt, Attempt.job_id.in_(ids)), (Job, Job.id.in_(ids))]


def _prune_by_time(conn: Connection, time: Any, before: datetime | None, chunk: int, keep: Keep) -> int:
    """Delete about ``chunk`` rows, the oldest first: all that share the last one's time go with it."""
    oldest = conn.scalars(select(time).where(time < before).order_by(time).limit(chunk)).all()
    if not oldest:
        return 0
    table, condition = time.class_, time <= oldest[-1]
    keep(conn, table, condition)
    return conn.execute(delete(table).where(condition)).rowcount


def _prune_by_id(conn: Connection, table: Any, old: ColumnElement[bool], chunk: int, keep: Keep) -> int:
    ids = conn.scalars(select(table.id).where(old).limit(chunk)).all()
    if not ids:
        return 0
    keep(conn, table, table.id.in_(ids))
    return conn.execute(delete(table).where(table.id.in_(ids))).rowcount


def _count(engine: Engine, older_than: datetime, minutes_before: datetime | None) -> PruneReport:
    old_job = _old_job(older_than)
    old_ids = select(Job.id).where(old_job)
    with reading(engine) as conn:

        def count(table: Any, condition: ColumnElement[bool]) -> int:
            return conn.scalar(select(func.count()).select_from(table).where(condition)) or 0

        # What the deleted rows leave behind counts as if they were gone.
        kept_jobs = select(Job.batch_id).where(Job.batch_id.is_not(None), ~old_job)
        kept_attempts = select(Attempt.worker_id).where(Attempt.job_id.not_in(old_ids))
        owned = select(Job.owner).where(Job.owner.is_not(None))
        # A worker that was sampled has, or will have, rows in the roll-ups.
        sampled = [select(table.worker_id) for table in (EngineSample, ThroughputHour, ThroughputMinute)]
        return PruneReport(
            jobs=count(Job, old_job),
            attempts=count(Attempt, Attempt.job_id.in_(old_ids)),
            results=count(Result, Result.job_id.in_(old_ids)),
            batches=count(Batch, and_(Batch.finished_at < older_than, Batch.id.not_in(kept_jobs))),
            samples=count(EngineSample, EngineSample.sampled_at < older_than),
            workers=count(
                Worker,
                and_(
                    Worker.stopped_at < older_than,
                    *(Worker.id.not_in(kept) for kept in (kept_attempts, owned, *sampled)),
                ),
            ),
            minutes=0
            if minutes_before is None
            else sum(count(time.class_, time < minutes_before) for time in _MINUTES),
            dead_letters=count(DeadLetter, _old_letter(older_than)),
            dry_run=True,
        )
