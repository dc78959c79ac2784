"""Deleting old history in small transactions, so that a running fleet hardly notices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, Connection, Engine, and_, delete, exists, func, or_, select

from models_db.session import reading, transaction
from models_db.tables import TERMINAL_BATCH_STATES, Attempt, Batch, EngineSample, Job, Result, Worker


@dataclass(frozen=True, slots=True)
class PruneReport:
    """Rows deleted, or, after a dry run, rows that would be."""

    jobs: int
    attempts: int
    results: int
    batches: int
    samples: int
    workers: int
    dry_run: bool


def prune(engine: Engine, older_than: datetime, *, dry_run: bool = False, chunk: int = 500) -> PruneReport:
    """Delete what ended before ``older_than``.

    That is: terminal jobs with their attempts and results, but none of a batch that has not ended; terminal batches
    left without jobs; samples; and stopped or dead workers that nothing refers to any more. Each transaction
    deletes at most ``chunk`` jobs or rows. Takes an engine, because it commits by itself.
    """
    old_job = _old_job(older_than)
    if dry_run:
        return _count(engine, older_than)
    jobs = attempts = results = 0
    while True:
        counts = transaction(engine, lambda conn: _prune_jobs(conn, old_job, chunk))
        jobs, attempts, results = jobs + counts[0], attempts + counts[1], results + counts[2]
        if counts[0] < chunk:
            break
    old_sample = EngineSample.sampled_at < older_than
    samples = _repeat(engine, chunk, lambda conn: _prune_samples(conn, old_sample, chunk))
    batches = _repeat(engine, chunk, lambda conn: _prune_by_id(conn, Batch, _old_batch(older_than), chunk))
    workers = _repeat(engine, chunk, lambda conn: _prune_by_id(conn, Worker, _old_worker(older_than), chunk))
    return PruneReport(jobs, attempts, results, batches, samples, workers, dry_run=False)


def _old_job(older_than: datetime) -> ColumnElement[bool]:
    ended_batch = exists().where(Batch.id == Job.batch_id, Batch.state.in_(TERMINAL_BATCH_STATES))
    return and_(Job.finished_at < older_than, or_(Job.batch_id.is_(None), ended_batch))


def _old_batch(older_than: datetime) -> ColumnElement[bool]:
    return and_(Batch.finished_at < older_than, ~exists().where(Job.batch_id == Batch.id))


def _old_worker(older_than: datetime) -> ColumnElement[bool]:
    return and_(
        Worker.stopped_at < older_than,
        ~exists().where(Attempt.worker_id == Worker.id),
        ~exists().where(EngineSample.worker_id == Worker.id),
        ~exists().where(Job.owner == Worker.id),
    )


def _repeat(engine: Engine, chunk: int, step: Callable[[Connection], int]) -> int:
    total = 0
    while True:
        count = transaction(engine, step)
        total += count
        if count < chunk:
            return total


def _prune_jobs(conn: Connection, old: ColumnElement[bool], chunk: int) -> tuple[int, int, int]:
    # Locked before they are judged, so that a retry at the same moment keeps its job.
    ids = conn.scalars(select(Job.id).where(old).order_by(Job.id).limit(chunk).with_for_update()).all()
    if not ids:
        return 0, 0, 0
    results = conn.execute(delete(Result).where(Result.job_id.in_(ids))).rowcount
    attempts = conn.execute(delete(Attempt).where(Attempt.job_id.in_(ids))).rowcount
    return conn.execute(delete(Job).where(Job.id.in_(ids))).rowcount, attempts, results


def _prune_samples(conn: Connection, old: ColumnElement[bool], chunk: int) -> int:
    oldest = conn.execute(
        select(EngineSample.sampled_at).where(old).order_by(EngineSample.sampled_at).limit(chunk)
    ).all()
    if not oldest:
        return 0
    return conn.execute(delete(EngineSample).where(EngineSample.sampled_at <= oldest[-1].sampled_at)).rowcount


def _prune_by_id(conn: Connection, table: Any, old: ColumnElement[bool], chunk: int) -> int:
    ids = conn.scalars(select(table.id).where(old).limit(chunk)).all()
    return conn.execute(delete(table).where(table.id.in_(ids))).rowcount if ids else 0


def _count(engine: Engine, older_than: datetime) -> PruneReport:
    old_job = _old_job(older_than)
    old_ids = select(Job.id).where(old_job)
    with reading(engine) as conn:

        def count(table: Any, condition: ColumnElement[bool]) -> int:
            return conn.scalar(select(func.count()).select_from(table).where(condition)) or 0

        # What the deleted rows leave behind counts as if they were gone.
        kept_jobs = select(Job.batch_id).where(Job.batch_id.is_not(None), ~old_job)
        kept_attempts = select(Attempt.worker_id).where(Attempt.job_id.not_in(old_ids))
        kept_samples = select(EngineSample.worker_id).where(EngineSample.sampled_at >= older_than)
        owned = select(Job.owner).where(Job.owner.is_not(None))
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
                    Worker.id.not_in(kept_attempts),
                    Worker.id.not_in(kept_samples),
                    Worker.id.not_in(owned),
                ),
            ),
            dry_run=True,
        )
