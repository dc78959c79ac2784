"""Deleting old history in small transactions, so that a running fleet hardly notices.

The roll-ups are brought up to date first and stay: what is deleted here is counted there for good.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from sqlalchemy import ColumnElement, Connection, Engine, and_, exists, func, or_, select
from sqlalchemy.orm import aliased

from models_db.archive import Archive, Keep, archived, move, open_archive
from models_db.callbacks import Callback, CallbackState
from models_db.clock import database_time
from models_db.door_tables import ApiBatch, StoredFile
from models_db.errors import InvalidValueError
from models_db.retention_files import old_file, prune_files, unwritten
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


@dataclass(frozen=True, slots=True)
class PruneReport:
    """Rows deleted, or, after a dry run, rows that would be."""

    jobs: int
    attempts: int
    results: int
    batches: int
    api_batches: int  # of these batches, those of ``/v1/batches``
    files: int  # of ``/v1/files``
    samples: int
    workers: int
    minutes: int  # rows of the roll-ups per minute
    dead_letters: int
    # Jobs and batches, old enough, whose callback is still to be sent, or output file to be written.
    kept: int
    dry_run: bool


def prune(
    engine: Engine,
    older_than: datetime,
    *,
    minutes_older_than: datetime | None = None,
    files_older_than: datetime | None = None,
    archive: Path | None = None,
    dry_run: bool = False,
    chunk: int = 500,
    now: datetime | None = None,
) -> PruneReport:
    """Delete what ended before ``older_than``, rounded down to the hour.

    That is: terminal jobs with their attempts and results, but none of a batch that has not ended; terminal batches
    left without jobs; samples; messages that no worker could read; stopped or dead workers that nothing refers to any
    more; and files made before ``files_older_than`` (``older_than`` unless given) that no batch needs. Roll-ups stay,
    but for those per minute that began before ``minutes_older_than``. Each transaction deletes at most ``chunk`` jobs,
    ten times as many samples, or a few megabytes of a file. Takes an engine, because it commits by itself.

    Jobs and batches whose callback is due stay, and so do the jobs of such a batch: a receiver that is told of an end
    should find what has ended. So do those of ``/v1/batches`` whose answers are not in their file yet. Callbacks that
    are settled go with what they told of, and into no archive, since their URLs may hold secrets.

    Args:
        archive: a new file, ``.jsonl`` or ``.jsonl.gz``, that gets each row as a line, or a new folder ``.parquet``
            with a file for each table (see ``models_db.archive``). A row is on disk before it goes.
            After a crash the last rows may be both there and here, never in neither.

    Raises:
        InvalidValueError: minutes are to go before what they are made of, or the archive exists or is named otherwise.
    """
    cut = floor_hour(older_than)
    files_cut = cut if files_older_than is None else floor_hour(files_older_than)
    minutes_cut = None if minutes_older_than is None else floor_hour(minutes_older_than)
    if minutes_cut is not None and minutes_cut > cut:
        raise InvalidValueError(
            "minutes_older_than", "must not lie after older_than", fix="Keep minutes at least as long as jobs"
        )
    if dry_run:
        return _count(engine, cut, minutes_cut, files_cut)
    if now is None:
        with reading(engine) as conn:
            now = database_time(conn)
    catch_up(engine, max(cut, now))
    transaction(engine, partial(close_before, moment=cut))
    with open_archive(archive) as into:
        jobs = attempts = results = 0
        while True:
            counts = archived(engine, into, partial(_prune_jobs, older_than=cut, chunk=chunk))
            jobs, attempts, results = jobs + counts.jobs, attempts + counts.attempts, results + counts.results
            if counts.looked_at < chunk:
                break
        rows = chunk * _ROWS_PER_JOB
        samples = _repeat(
            engine,
            into,
            rows,
            partial(_prune_by_time, time=EngineSample.sampled_at, before=cut, chunk=rows),
        )
        batches = api_batches = 0
        while True:
            looked_at, gone, served = archived(
                engine, into, partial(_prune_batches, older_than=cut, chunk=chunk)
            )
            batches, api_batches = batches + gone, api_batches + served
            if looked_at < chunk:
                break
        files = prune_files(engine, into, files_cut, chunk)
        letters = _repeat(
            engine, into, chunk, partial(_prune_by_id, table=DeadLetter, old=_old_letter(cut), chunk=chunk)
        )
        minutes = 0
        for time in _MINUTES if minutes_cut is not None else ():
            step = partial(_prune_by_time, time=time, before=minutes_cut, chunk=rows)
            minutes += _repeat(engine, into, rows, step)
        workers = _repeat(
            engine, into, chunk, partial(_prune_by_id, table=Worker, old=_old_worker(cut), chunk=chunk)
        )
    with reading(engine) as conn:
        kept = _count_kept(conn, cut)
    return PruneReport(
        jobs=jobs,
        attempts=attempts,
        results=results,
        batches=batches,
        api_batches=api_batches,
        files=files,
        samples=samples,
        workers=workers,
        minutes=minutes,
        dead_letters=letters,
        kept=kept,
        dry_run=False,
    )


def _aged_job(older_than: datetime) -> ColumnElement[bool]:
    ended_batch = exists().where(Batch.id == Job.batch_id, Batch.state.in_(TERMINAL_BATCH_STATES))
    return and_(Job.finished_at < older_than, or_(Job.batch_id.is_(None), ended_batch))


def _awaited_job() -> ColumnElement[bool]:
    untold = exists().where(Callback.job_id == Job.id, Callback.state == CallbackState.DUE)
    return or_(untold, _awaited(Job.batch_id))


def _awaited_batch() -> ColumnElement[bool]:
    return _awaited(Batch.id)


def _awaited(batch_id: Any) -> ColumnElement[bool]:
    """Whether a batch's end is still to be told, or its output file to be written."""
    served = aliased(Batch)
    return or_(
        exists().where(Callback.batch_id == batch_id, Callback.state == CallbackState.DUE),
        exists().where(ApiBatch.batch_id == batch_id, served.id == batch_id, unwritten(served)),
    )


def _old_job(older_than: datetime) -> ColumnElement[bool]:
    return and_(_aged_job(older_than), ~_awaited_job())


def _old_batch(older_than: datetime) -> ColumnElement[bool]:
    return and_(Batch.finished_at < older_than, ~exists().where(Job.batch_id == Batch.id), ~_awaited_batch())


def _count_kept(conn: Connection, older_than: datetime) -> int:
    jobs = select(func.count()).select_from(Job).where(_aged_job(older_than), _awaited_job())
    batches = select(func.count()).select_from(Batch).where(Batch.finished_at < older_than, _awaited_batch())
    return (conn.scalar(jobs) or 0) + (conn.scalar(batches) or 0)


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


def _repeat(
    engine: Engine, archive: Archive | None, chunk: int, step: Callable[[Connection, Keep], int]
) -> int:
    total = 0
    while True:
        count = archived(engine, archive, step)
        total += count
        if count < chunk:
            return total


@dataclass(frozen=True, slots=True)
class _Pruned:
    looked_at: int = 0
    jobs: int = 0
    attempts: int = 0
    results: int = 0


def _prune_jobs(conn: Connection, keep: Keep, *, older_than: datetime, chunk: int) -> _Pruned:
    # Locked before they are judged, so that a retry at the same moment keeps its job.
    query = select(Job.id).where(_old_job(older_than)).order_by(Job.id).limit(chunk)
    found = conn.scalars(query.with_for_update()).all()
    retried = _retried(conn, Callback.job_id, found)
    ids = [job_id for job_id in found if job_id not in retried]
    if not ids:
        return _Pruned(len(found))
    counts = [move(conn, keep, table, condition) for table, condition in _of_jobs(ids)]
    return _Pruned(len(found), counts[2], counts[1], counts[0])


def _prune_batches(conn: Connection, keep: Keep, *, older_than: datetime, chunk: int) -> tuple[int, int, int]:
    """How many were looked at, how many of them are gone, and how many of those were of ``/v1/batches``."""
    query = select(Batch.id).where(_old_batch(older_than)).order_by(Batch.id).limit(chunk)
    found = conn.scalars(query.with_for_update()).all()
    retried = _retried(conn, Callback.batch_id, found)
    ids = [batch_id for batch_id in found if batch_id not in retried]
    if not ids:
        return len(found), 0, 0
    served = move(conn, keep, ApiBatch, ApiBatch.batch_id.in_(ids))
    return len(found), move(conn, keep, Batch, Batch.id.in_(ids)), served


def _retried(conn: Connection, column: Any, ids: Sequence[str]) -> set[str]:
    """Those whose callback, given up before, is due again since they were chosen; the others' cannot become so now."""
    query = select(column, Callback.state).where(column.in_(ids)).order_by(Callback.id).with_for_update()
    if not ids:
        return set()
    return {subject for subject, state in conn.execute(query) if state is CallbackState.DUE}


def _of_jobs(ids: Sequence[str]) -> list[tuple[Any, ColumnElement[bool]]]:
    """What belongs to these jobs, in the order in which it can be deleted."""
    return [(Result, Result.job_id.in_(ids)), (Attempt, Attempt.job_id.in_(ids)), (Job, Job.id.in_(ids))]


def _prune_by_time(conn: Connection, keep: Keep, *, time: Any, before: datetime | None, chunk: int) -> int:
    """Delete about ``chunk`` rows, the oldest first: all that share the last one's time go with it."""
    oldest = conn.scalars(select(time).where(time < before).order_by(time).limit(chunk)).all()
    if not oldest:
        return 0
    return move(conn, keep, time.class_, time <= oldest[-1])


def _prune_by_id(conn: Connection, keep: Keep, *, table: Any, old: ColumnElement[bool], chunk: int) -> int:
    ids = conn.scalars(select(table.id).where(old).limit(chunk)).all()
    if not ids:
        return 0
    return move(conn, keep, table, table.id.in_(ids))


def _count(
    engine: Engine, older_than: datetime, minutes_before: datetime | None, files_before: datetime
) -> PruneReport:
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
        old_batch = and_(Batch.finished_at < older_than, ~_awaited_batch(), Batch.id.not_in(kept_jobs))
        return PruneReport(
            jobs=count(Job, old_job),
            attempts=count(Attempt, Attempt.job_id.in_(old_ids)),
            results=count(Result, Result.job_id.in_(old_ids)),
            batches=count(Batch, old_batch),
            api_batches=count(ApiBatch, ApiBatch.batch_id.in_(select(Batch.id).where(old_batch))),
            files=count(StoredFile, old_file(files_before)),
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
            kept=_count_kept(conn, older_than),
            dry_run=True,
        )
