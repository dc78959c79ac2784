"""Ends of jobs that the database refuses each time: the job ends or waits for that, and never runs without bound."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from sqlalchemy import Engine, select

from models_db.claims import ClaimItem, claim
from models_db.deaths import ALONE_DEATHS, bury
from models_db.jobs import request_cancel
from models_db.session import make_engine
from models_db.tables import Attempt, AttemptOutcome, FleetLock, Job, JobState
from models_db.writer import DatabaseThread
from tests.db.helpers import add_jobs, add_workers, new_job
from tests.fleet.fleet import wait_until
from tests.fleet.rows import accept, refusing
from tests.fleet.table_world import TestWorker, World, answer
from tests.servers import migrate
from workers.spool import OutageBook, Spool

BAD = "b"
JOBS = ["a", BAD, "c", "d"]


@pytest.fixture
def engine(any_database_url: str) -> Iterator[Engine]:
    migrate(any_database_url)
    engine = make_engine(any_database_url)
    yield engine
    engine.dispose()


ANY_END = f"NEW.id = '{BAD}' AND NEW.state NOT IN ('queued', 'running')"


def all_done(worker: TestWorker) -> None:
    """Every job's answer arrives at once, so that their ends share transactions."""
    for job_id in JOBS:
        worker.backend.handles[job_id].finish(answer())


@contextmanager
def running(engine: Engine) -> Iterator[TestWorker]:
    """A worker with a real database thread, which runs all jobs."""
    world = World(engine)
    worker = world.worker("w", shutdown_grace_s=1)
    store = DatabaseThread(engine, "w", now=world.clock.now)
    worker.table._runs._store = worker.table._store = store
    store.start()
    try:
        for job_id in JOBS:
            worker.deliver(job_id)
        until(worker, lambda: len(worker.backend.submitted) == len(JOBS))
        yield worker
    finally:
        store.stop(drain=False, timeout_s=20)


def until(worker: TestWorker, true: Callable[[], object]) -> None:
    def stepped() -> object:
        worker.step()
        return true()

    wait_until(stepped, 20, "the worker to get there")


def ended(worker: TestWorker, but: str = "") -> bool:
    return all(worker.world.state(job_id).terminal for job_id in JOBS if job_id != but)


def attempts(engine: Engine, job_id: str) -> list[AttemptOutcome | None]:
    with engine.connect() as conn:
        return list(
            conn.scalars(select(Attempt.outcome).where(Attempt.job_id == job_id).order_by(Attempt.number))
        )


def test_a_result_that_is_refused_fails_its_job_alone_and_is_put_aside(
    engine: Engine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with running(engine) as worker, refusing(engine, f"NEW.job_id = '{BAD}'", "result", "INSERT"):
        book = OutageBook(Spool(tmp_path / "spool", "me", "w", 10**6))
        worker.table._runs._book = worker.table._runs._refused._book = book
        all_done(worker)
        until(worker, lambda: ended(worker) and worker.table.pending == 0)
        states = worker.world.states()
        assert states.pop(BAD) is JobState.FAILED
        assert set(states.values()) == {JobState.SUCCEEDED}
        status = worker.world.status(BAD)
        assert status.error_type.endswith("Error")
        assert status.error_message.isascii()
        assert "not this one" not in status.error_message
        assert "an answer" not in caplog.text
        (aside,) = (tmp_path / "spool").glob("*.refused")
        assert '"an answer"' in aside.read_text()
        assert worker.requests[1].log[-1] == "acknowledged"
        assert len(worker.backend.submitted) == len(JOBS)


def test_a_job_whose_every_end_is_refused_runs_once_and_ends_when_it_may(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    with running(engine) as worker:
        clock = worker.world.clock
        with refusing(engine, ANY_END):
            all_done(worker)
            until(worker, lambda: ended(worker, but=BAD) and worker.table.pending == 0)
            tries = len(told(caplog))
            assert tries == 1
            again = worker.deliver(BAD)
            until(worker, lambda: again.log)
            assert again.log == ["acknowledged"], "it would only wait here"
            for _ in range(5):
                clock.seconds += 10_000
                tries = len(told(caplog))
                until(worker, lambda tries=tries: len(told(caplog)) > tries)  # type: ignore[misc]
            assert worker.world.state(BAD) is JobState.RUNNING
            assert worker.world.published == []
        clock.seconds += 10_000
        until(worker, lambda: ended(worker))
        assert worker.world.state(BAD) is JobState.FAILED
        until(worker, lambda: worker.world.published == [BAD])  # a delivery tells Celery
        assert len(worker.backend.submitted) == len(JOBS), "nothing ran twice"
        assert attempts(engine, BAD) == [AttemptOutcome.FAILED]
        assert not worker.table.unfinished


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno == logging.CRITICAL and BAD in r.getMessage()]


def test_a_shutdown_waits_for_no_end_that_is_refused(engine: Engine) -> None:
    with running(engine) as worker, refusing(engine, ANY_END):
        all_done(worker)
        until(worker, lambda: ended(worker, but=BAD) and worker.table.pending == 0)
        worker.table.close()
        until(worker, lambda: not worker.table.unfinished)
        assert worker.world.state(BAD) is JobState.QUEUED
        assert worker.world.published == [BAD]
        assert attempts(engine, BAD) == [AttemptOutcome.RELEASED]


def test_an_end_that_is_refused_during_a_shutdown_goes_back(engine: Engine) -> None:
    with running(engine) as worker, refusing(engine, ANY_END):
        worker.table.close()
        all_done(worker)
        until(worker, lambda: not worker.table.unfinished)
        assert worker.world.state(BAD) is JobState.QUEUED
        assert worker.requests[1].log[-1] == "front"


@pytest.fixture
def sqlite(tmp_path: Path) -> Iterator[Engine]:
    url = f"sqlite:///{tmp_path / 'suspects.db'}"
    migrate(url)
    engine = make_engine(url)
    yield engine
    engine.dispose()


def test_a_suspect_whose_end_is_refused_holds_up_no_other(sqlite: Engine) -> None:
    world = World(sqlite)
    worker = world.worker("w")
    accept(sqlite, [BAD], deaths=ALONE_DEATHS)
    accept(sqlite, ["other"], deaths=ALONE_DEATHS)
    with refusing(sqlite, ANY_END):
        for _ in range(20):
            world.clock.seconds += 1.01
            world.run()
            for job_id in set(worker.backend.submitted):
                if not worker.backend.handles[job_id].done():
                    worker.backend.finish(job_id)
        assert world.state("other") is JobState.SUCCEEDED
        assert not world.state(BAD).terminal
        assert worker.backend.submitted.count(BAD) <= 2, "again only because the other had to be alone"
    with sqlite.connect() as conn:
        owners = set(conn.scalars(select(FleetLock.owner)))
    assert owners <= {None, "w"}


@pytest.mark.parametrize("how", ["cancelled", "died alone"])
def test_a_dead_worker_is_buried_although_one_end_is_refused(engine: Engine, how: str) -> None:
    add_workers(engine, "dead", "dead too")
    mine, others = ([BAD], ["c"]) if how == "died alone" else ([BAD, "a"], ["c"])
    add_jobs(engine, *mine, *others)
    with engine.begin() as conn:
        claim(conn, [ClaimItem(new_job(job_id)) for job_id in mine], "dead")
        if how == "cancelled":
            request_cancel(conn, [BAD])
        else:
            conn.execute(Job.__table__.update().where(Job.id == BAD).values(solo_deaths=1))  # type: ignore[attr-defined]
    with refusing(engine, ANY_END):
        with engine.begin() as conn:
            burial = bury(conn, "dead")
        assert burial.refused == [BAD]
        assert burial.queued == mine[1:]
        assert attempts(engine, BAD) == [None], "it runs nowhere again, and kills nobody"
    with engine.begin() as conn:
        burial = bury(conn, "dead")
    assert burial.ended == [BAD]
    assert burial.refused == []
