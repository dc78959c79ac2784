"""Short ways to make rows and to look at them."""

from __future__ import annotations

from dataclasses import fields as fields_of
from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import Connection, Engine, select

from models_db.claims import ClaimItem, ClaimOutcome, FinishItem, claim, finish
from models_db.jobs import NewJob, StoredResult, insert_jobs
from models_db.tables import Attempt, AttemptOutcome, Job, JobState, Result
from models_db.workers import NewSample, NewWorker, register_worker

T0 = datetime(2026, 3, 1, 12, 30, 0, 123456, tzinfo=UTC)


def at(seconds: float) -> datetime:
    """A time this long after the beginning of the test's world."""
    return T0 + timedelta(seconds=seconds)


def new_job(job_id: str, **fields: Any) -> NewJob:
    defaults: dict[str, Any] = {
        "model": "smollm2",
        "queue": "tokenmill.smollm2",
        "params": {"max_tokens": 8},
        "prompt": {"prompt": "Grüße, 世界 🌍"},
        "message": {"headers": {"id": job_id}, "body": "…"},
        "created_at": T0,
    }
    return NewJob(id=job_id, **(defaults | fields))


def new_result(text: str = "a fine answer", **fields: Any) -> StoredResult:
    defaults: dict[str, Any] = {"finish_reason": "stop", "prompt_tokens": 5, "completion_tokens": 3}
    return StoredResult(text=text, **(defaults | fields))


def new_sample(worker_id: str, **fields: Any) -> NewSample:
    zeros = {spec.name: 0 for spec in fields_of(NewSample)}
    return NewSample(**(zeros | {"worker_id": worker_id, "interval_s": 5.0, "sampled_at": T0} | fields))


def add_workers(engine: Engine, *ids: str, **fields: Any) -> None:
    defaults = {
        "host": "host",
        "pid": 1,
        "version": "0",
        "backend": "echo",
        "model": "smollm2",
        "started_at": T0,
    }
    with engine.begin() as conn:
        for worker_id in ids:
            register_worker(conn, NewWorker(id=worker_id, **({"name": worker_id} | defaults | fields)))


def add_jobs(engine: Engine, *ids: str, **fields: Any) -> None:
    with engine.begin() as conn:
        insert_jobs(conn, [new_job(job_id, **fields) for job_id in ids])


def claim_one(
    engine: Engine, job_id: str, worker: str, dead: tuple[str, ...] = (), **kw: Any
) -> ClaimOutcome:
    with engine.begin() as conn:
        return claim(conn, [ClaimItem(new_job(job_id))], worker, dead, **kw)[0]


def finish_one(
    engine: Engine,
    job_id: str,
    attempt: int,
    worker: str,
    state: JobState = JobState.SUCCEEDED,
    result: StoredResult | None = None,
    **kw: Any,
) -> bool:
    if state is JobState.SUCCEEDED and result is None:
        result = new_result()
    error_type = "boom" if state is JobState.FAILED else None
    with engine.begin() as conn:
        return finish(conn, [FinishItem(job_id, attempt, state, result, error_type)], worker, **kw)[0]


def job_row(conn: Connection, job_id: str) -> Any:
    return conn.execute(select(Job.__table__).where(Job.id == job_id)).one()


def attempts(conn: Connection, job_id: str) -> list[tuple[int, str, AttemptOutcome | None]]:
    query = select(Attempt.number, Attempt.worker_id, Attempt.outcome).where(Attempt.job_id == job_id)
    return [tuple(row) for row in conn.execute(query.order_by(Attempt.number))]


def snapshot(engine: Engine) -> dict[str, list[Any]]:
    """Every row of the tables that a claim or a finish may touch."""
    with engine.connect() as conn:
        return {
            table.__tablename__: sorted(map(repr, conn.execute(select(table.__table__))))
            for table in (Job, Attempt, Result)
        }
