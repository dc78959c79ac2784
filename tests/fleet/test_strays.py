"""Jobs that the database says run here, and that nothing here runs: none stays so for ever."""

from __future__ import annotations

import pytest
from sqlalchemy import Engine, select

from models_db.claims import ClaimItem, claim
from models_db.deaths import ALONE_DEATHS, SUSPECT_DEATHS
from models_db.errors import WriterStoppedError
from models_db.tables import AttemptOutcome, FleetLock, Job, JobState
from tests.db.helpers import new_job
from tests.fleet.rows import accept
from tests.fleet.table_world import TestWorker, World, failing


def look(worker: TestWorker) -> None:
    """A second passes, and the worker looks at what it owns."""
    world = worker.world
    world.clock.seconds += 1.01
    with world.engine.connect() as conn:
        query = select(Job.id, Job.attempt).where(Job.owner == worker.name, Job.state == JobState.RUNNING)
        worker.table.reconcile({row.id: row.attempt for row in conn.execute(query)})
    world.run()


def test_a_job_that_is_owned_and_runs_nowhere_is_queued_again(engine: Engine) -> None:
    world = World(engine)
    worker = world.worker("a")
    accept(engine, ["lost"])
    running = worker.deliver("running")
    world.run()
    with engine.begin() as conn:
        claim(conn, [ClaimItem(new_job("lost"))], "a", now=world.clock.now())
    parked = worker.deliver("lost")
    world.run()
    look(worker)
    assert world.attempts("lost") == [None], "one look may be older than a claim"
    for _ in range(3):
        look(worker)
    assert world.published == ["lost"]
    assert worker.backend.submitted == ["running", "lost"], "the delivery that waited runs it"
    worker.backend.finish("lost")
    worker.backend.finish("running")
    world.run()
    assert (parked.ended, running.ended) == (True, True)
    assert world.attempts("lost") == [AttemptOutcome.RELEASED, AttemptOutcome.SUCCEEDED]
    assert world.attempts("running") == [AttemptOutcome.SUCCEEDED]


def test_looks_disturb_nothing_that_is_claimed_runs_or_ends(engine: Engine) -> None:
    world = World(engine)
    worker = world.worker("a")
    accept(engine, ["suspect"], deaths=SUSPECT_DEATHS)
    request = worker.deliver("j")
    world.run()
    for _ in range(4):
        look(worker)
    worker.store.away = True
    worker.backend.finish("j")
    worker.backend.finish("suspect")
    for _ in range(4):
        look(worker)
    worker.store.settle()
    world.run()
    assert request.ended
    assert (world.attempts("j"), world.attempts("suspect")) == ([AttemptOutcome.SUCCEEDED],) * 2


def test_a_release_that_fails_is_made_up_for(engine: Engine) -> None:
    world = World(engine)
    worker = world.worker("a")
    request = worker.deliver("j")
    world.run()
    real = worker.store.release
    worker.store.release = lambda item: failing(ValueError("nothing of it"))  # type: ignore[method-assign]
    request.abandon()
    world.run()
    look(worker)
    look(worker)
    assert world.state("j") is JobState.RUNNING
    worker.store.release = real  # type: ignore[method-assign]
    look(worker)
    assert world.state("j") is JobState.QUEUED


def test_what_is_not_committed_when_the_database_thread_stops_is_left_as_it_is(engine: Engine) -> None:
    world = World(engine)
    worker = world.worker("a")
    request = worker.deliver("j")
    world.run()
    worker.store.finish_error = WriterStoppedError("stopped")
    worker.backend.finish("j")
    world.run()
    assert request.log[-1] == "front"
    assert world.state("j") is JobState.RUNNING, "the spool or the next worker has it"


@pytest.mark.parametrize("deaths", [SUSPECT_DEATHS, ALONE_DEATHS], ids=["in a group", "alone"])
def test_a_shutdown_waits_for_suspects_and_keeps_the_lock_as_long(engine: Engine, deaths: int) -> None:
    world = World(engine)
    a, b = world.worker("a"), world.worker("b")
    accept(engine, ["j"], deaths=deaths)
    accept(engine, ["k"], deaths=deaths)
    if deaths == SUSPECT_DEATHS:  # a group takes both
        accept(engine, ["l"], deaths=deaths)
    world.run()
    running = list(a.backend.submitted)
    assert running
    a.table.close()
    for _ in range(4):
        world.clock.seconds += 1.01
        world.run()
    assert a.table.unfinished
    assert b.backend.submitted == [], "one worker at a time, also while it drains"
    for job_id in running:
        a.backend.finish(job_id)
    world.run()
    assert not a.table.unfinished
    assert {world.state(job_id) for job_id in running} == {JobState.SUCCEEDED}
    assert world.published == running, "a delivery will tell Celery"
    with engine.connect() as conn:
        assert conn.scalar(select(FleetLock.owner)) is None
    assert not a.paused
    world.clock.seconds += 1.01
    world.run()
    assert b.backend.submitted, "and then the next"
    assert a.backend.submitted == running


def test_a_suspect_whose_claim_is_on_its_way_at_the_shutdown_goes_back(engine: Engine) -> None:
    world = World(engine)
    worker = world.worker("a")
    world.run()
    accept(engine, ["j"], deaths=SUSPECT_DEATHS)
    worker.store.away = True
    world.clock.seconds += 1.01
    world.run()
    worker.store.away = False
    looking = worker.store._waiting.pop()
    looking()
    worker.store.away = True
    world.run()
    assert worker.table.unfinished, "the claim waits"
    worker.table.close()
    world.run()
    worker.store.settle()
    world.run()
    assert not worker.table.unfinished
    assert worker.backend.submitted == []
    assert world.state("j") is JobState.QUEUED
    assert world.attempts("j") == [AttemptOutcome.RELEASED]
    with engine.connect() as conn:
        assert conn.scalar(select(FleetLock.owner)) is None
