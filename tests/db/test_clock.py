"""Deadlines and ages go by the database's clock, whatever a host's wall clock says."""

from __future__ import annotations

from contextlib import closing
from datetime import UTC, datetime, timedelta
from functools import partial

import pytest
from sqlalchemy import func, select

from backend.api import BackendStats
from models_db import writer
from models_db.base import utcnow
from models_db.batches import create_batch, finish_batch_if_done
from models_db.claims import ClaimItem, ClaimKind
from models_db.clock import MAX_AGE_S, DatabaseClock, database_time
from models_db.dead_letters import NewDeadLetter, store_dead_letters
from models_db.jobs import insert_jobs, job_status, request_cancel, retry_failed
from models_db.reuse import ReusedJob, insert_reused
from models_db.rollup_tables import JobMinute
from models_db.rollups import rolled_until
from models_db.tables import Attempt, Batch, BatchState, EngineSample, Job, JobState, Worker, WorkerState
from models_db.upkeep import UpkeepThread
from models_db.workers import set_worker_state
from models_db.writer import DatabaseThread
from tests.db.helpers import T0, add_jobs, add_workers, claim_one, finish_one, new_job
from workers.client import Client, sync
from workers.incarnation import Incarnation, Sampler, new_worker
from workers.settings import load_settings
from workers.sweeper import _burial

LIMIT_S = 20
WRONG = pytest.mark.parametrize("hours", [1, -1], ids=["an hour ahead", "an hour behind"])


def wrong_clock(hours):
    """A host's clock that is wrong, with which a database's clock begins."""
    return partial(DatabaseClock, wall=lambda: utcnow() + timedelta(hours=hours))


def close(one, other):
    """Where a wrong clock is an hour off."""
    return abs((one - other).total_seconds()) < 300


def test_the_databases_clock_is_read_in_utc(db):
    with db.connect() as conn:
        assert close(database_time(conn), utcnow())


class Hands:
    """A monotonic clock that a test moves."""

    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


def read_as(clock, at, monkeypatch):
    monkeypatch.setattr("models_db.clock.database_time", lambda _conn: at)
    clock.read(None)


def test_between_two_looks_it_goes_on_by_the_monotonic_clock_alone(monkeypatch):
    hands = Hands()
    clock = DatabaseClock(wall=lambda: T0 - timedelta(days=1), monotonic=hands)
    assert (clock(), clock.known, clock.due) == (T0 - timedelta(days=1), False, True)
    read_as(clock, T0, monkeypatch)
    assert (clock(), clock.known, clock.due) == (T0, True, False)
    hands.seconds += MAX_AGE_S
    assert (clock(), clock.due) == (T0 + timedelta(seconds=MAX_AGE_S), False)
    hands.seconds += 1
    assert clock.due
    clock.put_off()
    assert not clock.due


def test_it_steps_only_for_what_the_way_there_and_back_does_not_explain(monkeypatch):
    hands = Hands()
    clock = DatabaseClock(wall=utcnow, monotonic=hands)
    read_as(clock, T0, monkeypatch)

    def slow(_conn):
        hands.seconds += 2
        return T0 + timedelta(seconds=1.9)

    monkeypatch.setattr("models_db.clock.database_time", slow)
    clock.read(None)
    assert clock() == T0 + timedelta(seconds=2)
    read_as(clock, T0 + timedelta(hours=1), monkeypatch)
    assert clock() == T0 + timedelta(hours=1)


@WRONG
def test_a_worker_with_a_wrong_clock_expires_nothing_that_is_fresh_and_everything_that_is_late(
    db, hours, monkeypatch
):
    add_workers(db, "w")
    with db.begin() as conn:
        now = database_time(conn)
        long_ago = now - timedelta(seconds=1801)
        insert_jobs(
            conn,
            [
                new_job("due", created_at=now, deadline_at=now + timedelta(seconds=600)),
                new_job("young", created_at=now),
                new_job("late", created_at=now, deadline_at=now - timedelta(seconds=1)),
                new_job("old", created_at=long_ago),
            ],
        )
    monkeypatch.setattr(writer, "DatabaseClock", wrong_clock(hours))
    thread = DatabaseThread(db, "w")
    thread.start()
    try:
        kinds = {
            job_id: thread.claim(ClaimItem(new_job(job_id), 1800)).result(LIMIT_S).kind
            for job_id in ("due", "young", "late", "old")
        }
        assert close(thread.now(), utcnow())
    finally:
        thread.stop(drain=False, timeout_s=LIMIT_S)
    claimed, ended = ClaimKind.CLAIMED, ClaimKind.TERMINAL
    assert kinds == {"due": claimed, "young": claimed, "late": ended, "old": ended}
    with db.connect() as conn:
        assert all(close(at, utcnow()) for at in conn.scalars(select(Attempt.started_at)))


@WRONG
def test_a_client_with_a_wrong_clock_dates_its_jobs_by_the_databases(db, migrated_url, hours, monkeypatch):
    monkeypatch.setattr(sync, "DatabaseClock", wrong_clock(hours))
    settings = load_settings(model="echo", backend="echo", database_url=migrated_url)

    class Broker:
        def push(self, deliveries):
            list(deliveries)

        def close(self):
            pass

    with Client(settings, broker=Broker()) as client:
        job = client.submit("hello", deadline_s=600)
        with db.connect() as conn:
            row = conn.execute(select(Job.created_at, Job.published_at, Job.deadline_at)).one()
        client.cancel(job.id)
        status = client.status(job.id)
    assert close(row.created_at, utcnow())
    assert row.published_at == row.created_at
    assert row.deadline_at == row.created_at + timedelta(seconds=600)
    assert status.finished_at is not None
    assert close(status.finished_at, utcnow())


def test_a_retry_keeps_a_deadline_that_has_not_passed_on_the_database(db, monkeypatch):
    monkeypatch.setattr("models_db.jobs.utcnow", lambda: utcnow() + timedelta(hours=1))
    with db.begin() as conn:
        now = database_time(conn)
        insert_jobs(conn, [new_job("j", created_at=now, deadline_at=now + timedelta(seconds=600))])
        request_cancel(conn, ["j"])
        retry_failed(conn, ids=["j"], states=[JobState.CANCELLED])
        assert conn.scalar(select(Job.deadline_at)) is not None
        assert job_status(conn, "j").state is JobState.QUEUED


def set_host_clock(hours, monkeypatch):
    """The wall clock of this host is wrong from now on; the database's is not."""

    class HostTime(datetime):
        @classmethod
        def now(cls, tz=None):
            return datetime.now(tz) + timedelta(hours=hours)

    monkeypatch.setattr("models_db.base.datetime", HostTime)
    assert not close(utcnow(), datetime.now(UTC))


class Idle:
    """A backend that has done nothing."""

    def stats(self):
        return BackendStats()


@WRONG
def test_a_worker_with_a_wrong_clock_rolls_up_every_end_and_dates_its_samples_by_the_databases(
    db, hours, monkeypatch
):
    set_host_clock(hours, monkeypatch)
    settings = load_settings(model="echo", backend="echo", sample_interval_s=1)
    incarnation = Incarnation(
        settings, new_worker(settings), on_cancel=lambda ids: None, on_dead=lambda error: None
    )
    add_workers(db, incarnation.id)
    thread, upkeep = DatabaseThread(db, incarnation.id), UpkeepThread(db)
    incarnation._db, incarnation._upkeep = thread, upkeep
    incarnation._backend, incarnation._sampler = Idle(), Sampler(incarnation.id, 0.0, BackendStats())
    thread.start()
    upkeep.start()
    counted = []
    try:
        thread.heartbeat(1).result(LIMIT_S)  # with which the clock is read, long before the first sample
        for number in range(3):
            with db.begin() as conn:
                insert_jobs(conn, [new_job(f"j{number}", created_at=database_time(conn))])
                request_cancel(conn, [f"j{number}"])
            incarnation._sample()
            incarnation._roll_up()
            incarnation._rolling.result(LIMIT_S)
            incarnation._roll_up_present()
            thread.call(rolled_until).result(LIMIT_S)
            with db.connect() as conn:
                counted.append(conn.scalar(select(func.sum(JobMinute.cancelled))))
    finally:
        upkeep.stop(LIMIT_S)
        thread.stop(drain=True, timeout_s=LIMIT_S)
    assert counted == [1, 2, 3]
    with db.connect() as conn:
        assert all(close(at, datetime.now(UTC)) for at in conn.scalars(select(EngineSample.sampled_at)))
        assert conn.scalar(select(func.count()).select_from(EngineSample)) == 3


@WRONG
def test_whatever_ends_a_job_a_batch_or_a_worker_dates_it_by_the_databases_clock(db, hours, monkeypatch):
    set_host_clock(hours, monkeypatch)
    add_workers(db, "dies", "stops")
    add_jobs(db, "answered", "lost", "cancelled", "unreadable")
    claim_one(db, "answered", "stops")
    finish_one(db, "answered", 1, "stops", now=datetime.now(UTC))  # as the database thread does
    claim_one(db, "lost", "dies")
    bury = _burial("dies")
    with db.begin() as conn:
        bury(conn)
        set_worker_state(conn, "stops", WorkerState.STOPPED)
        request_cancel(conn, ["cancelled"])
        store_dead_letters(conn, [NewDeadLetter("letter", "q", "w", "no JSON", "{", job_id="unreadable")])
        create_batch(conn, name="n", batch_id="b", state=BatchState.IN_PROGRESS)
        insert_reused(conn, [ReusedJob(new_job("reused", batch_id="b", position=0), "answered")])
        assert finish_batch_if_done(conn, "b") is BatchState.COMPLETED
    with closing(db.connect()) as conn:
        ends = {row.id: row.finished_at for row in conn.execute(select(Job.id, Job.finished_at))}
        assert ends.pop("lost") is None, "it is queued again"
        assert ends.keys() == {"answered", "cancelled", "unreadable", "reused"}
        times = [
            *ends.values(),
            *conn.scalars(select(Attempt.ended_at)),
            *conn.scalars(select(Worker.stopped_at)),
            *conn.execute(select(Batch.created_at, Batch.finished_at)).one(),
        ]
    assert len(times) == 4 + 2 + 2 + 2
    assert [at for at in times if not close(at, datetime.now(UTC))] == []
