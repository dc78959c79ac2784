"""Worker rows, heartbeats and samples, on every database."""

from __future__ import annotations

from datetime import timedelta

import pytest
from sqlalchemy import func, select

from models_db import workers
from models_db.errors import InvalidValueError
from models_db.fleet_now import look
from models_db.tables import EngineSample, Worker, WorkerState
from models_db.timesql import database_now
from models_db.workers import (
    NewWorker,
    WorkerDetails,
    add_samples,
    heartbeat,
    job_owners,
    list_workers,
    set_worker_state,
    unended_workers,
)
from tests.db.helpers import T0, add_jobs, add_workers, at, claim_one, new_sample


def test_a_worker_registers_tells_what_it_loaded_and_stops(db):
    add_workers(db, "w", name="gpu-a")
    with db.begin() as conn:
        worker = unended_workers(conn)[0]
        assert (worker.name, worker.state, worker.slots, worker.heartbeat) == (
            "gpu-a",
            WorkerState.STARTING,
            0,
            0,
        )
        details = WorkerDetails("cuda:0", "bfloat16", 256, {"mode": "async"})
        assert set_worker_state(conn, "w", WorkerState.ONLINE, details=details)
        assert heartbeat(conn, "w", 2**40, at=at(1)) is WorkerState.ONLINE
        worker = unended_workers(conn)[0]
        assert (worker.device, worker.dtype, worker.slots) == ("cuda:0", "bfloat16", 256)
        assert (worker.heartbeat, worker.heartbeat_at, worker.started_at) == (2**40, at(1), T0)
        assert conn.scalar(select(Worker.config)) == {"mode": "async"}
        assert set_worker_state(conn, "w", WorkerState.DRAINING)
        assert set_worker_state(conn, "w", WorkerState.STOPPED, at=at(2))
        assert unended_workers(conn) == []
        assert list_workers(conn)[0].stopped_at == at(2)


def test_a_worker_found_dead_stays_dead_and_learns_of_it(db):
    add_workers(db, "w")
    with db.begin() as conn:
        assert set_worker_state(conn, "w", WorkerState.DEAD)
        assert not set_worker_state(conn, "w", WorkerState.ONLINE)
        assert heartbeat(conn, "w", 5) is WorkerState.DEAD
        assert heartbeat(conn, "unknown", 5) is None


def test_registering_again_changes_nothing(db):
    add_workers(db, "w", name="first")
    add_workers(db, "w", name="second")
    with db.connect() as conn:
        assert [worker.name for worker in list_workers(conn)] == ["first"]


def test_samples_are_stored_once(db):
    add_workers(db, "w")
    for tokens in (7, 8):
        with db.begin() as conn:
            add_samples(conn, [new_sample("w", sampled_at=at(n), generated_tokens=tokens) for n in range(3)])
            add_samples(conn, [])
    with db.connect() as conn:
        assert conn.execute(
            select(
                func.count(), func.min(EngineSample.generated_tokens), func.max(EngineSample.generated_tokens)
            )
        ).one() == (3, 7, 7)


def test_a_name_that_no_column_holds_is_refused():
    fields = {"host": "h", "pid": 1, "version": "0", "backend": "echo", "model": "m"}
    with pytest.raises(InvalidValueError, match="name: has 256 characters"):
        NewWorker(name="n" * 256, **fields)


def test_a_worker_is_silent_by_the_databases_clock(db, monkeypatch):
    add_workers(db, "beats", "killed", "loads", "stopped")
    with db.begin() as conn:
        now = conn.scalars(select(database_now())).one()
        for worker_id in ("beats", "killed", "stopped"):
            set_worker_state(conn, worker_id, WorkerState.ONLINE)
            heartbeat(conn, worker_id, 1, at=now - timedelta(seconds=65))
        heartbeat(conn, "loads", 1, at=now - timedelta(seconds=65))
        heartbeat(conn, "beats", 2)
        set_worker_state(conn, "stopped", WorkerState.STOPPED)
        # Whoever asks may have a wrong clock.
        monkeypatch.setattr("models_db.workers.utcnow", lambda: now + timedelta(hours=1))
        found = {worker.id: worker for worker in list_workers(conn)}
        assert {worker.id for worker in unended_workers(conn)} == {"beats", "killed", "loads"}
        assert {worker_id for worker_id, worker in found.items() if worker.silent(6)} == {"killed"}
        assert 65 <= found["killed"].silent_s < 95
        assert 0 <= found["beats"].silent_s < 6
        heartbeat(conn, "loads", 1, at=now - timedelta(seconds=601))
        assert {worker.id for worker in unended_workers(conn) if worker.silent(6)} == {"killed", "loads"}
        seen = {each.worker.id: each.silent for each in look(conn, 6.0).workers}
        assert seen == {"beats": False, "killed": True, "loads": True}


def test_the_owners_of_jobs_are_each_found_without_reading_all_jobs(db, kind):
    assert job_owners_of(db) == set()
    add_workers(db, "a", "b", "c", "idle")
    add_jobs(db, *(f"{n:05}" for n in range(5000)))
    for number, owner in enumerate("bacab"):
        claim_one(db, f"{number:05}", owner)
    assert job_owners_of(db) == {"a", "b", "c"}
    # PostgreSQL shows a part of this plan only when it has been carried out.
    explain = {"sqlite": "EXPLAIN QUERY PLAN ", "postgresql": "EXPLAIN ANALYZE ", "mariadb": "EXPLAIN "}[kind]
    with db.connect() as conn:
        asked = conn.exec_driver_sql(explain + str(workers._JOB_OWNERS.compile(dialect=db.dialect)))
        plan = "\n".join(map(str, asked.fetchall()))
    if kind == "sqlite":
        steps = [line for line in plan.splitlines() if " job" in line]
        assert len(steps) == 2
        assert all("SEARCH job USING COVERING INDEX ix_job_owner" in step for step in steps)
    elif kind == "postgresql":
        assert plan.count("ix_job_owner") == 2
        assert "Seq Scan on job" not in plan
    else:
        assert plan.count("optimized away") + plan.count("ix_job_owner") >= 2


def job_owners_of(db):
    with db.connect() as conn:
        return job_owners(conn)
