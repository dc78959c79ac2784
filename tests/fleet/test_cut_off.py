"""A worker that has lost its database, alone or with all others, holds no messages back that it cannot claim."""

from __future__ import annotations

import pytest

from models_db.tables import AttemptOutcome, JobState
from tests.fleet.table_world import TestWorker, World

DEAD_AFTER_S = 6.0  # as by default; a look each second


def live(world: World, seconds: float) -> None:
    """Let this much time pass, with a look each second."""
    for _ in range(round(seconds)):
        world.clock.seconds += 1
        world.run()


def lose_database(worker: TestWorker, *, on_the_way: bool) -> None:
    worker.store.away, worker.store.on_the_way = True, on_the_way


@pytest.mark.parametrize("on_the_way", [False, True])
def test_what_a_lonely_worker_cannot_claim_is_run_by_others(world: World, on_the_way: bool) -> None:
    a, b = world.worker("a"), world.worker("b")
    running = a.deliver("running")
    world.run()
    lose_database(a, on_the_way=on_the_way)
    waiting = [a.deliver(f"waiting-{n}") for n in range(3)]
    live(world, DEAD_AFTER_S)
    assert (a.paused, [it.log for it in waiting]) == (False, [[], [], []]), (
        "it may come back before it is missed"
    )
    live(world, 1)
    assert (a.paused, [it.log for it in waiting]) == (True, [["front"]] * 3)
    assert running.log == ["accepted"], "what runs goes on"
    late = a.deliver("late")  # was on its way when the channel was paused
    world.run()
    assert late.log == ["front"]
    world.bury("a")
    for job_id in [*(it.id for it in waiting), "late", *world.published]:
        b.deliver(job_id)
    world.run()
    for job_id in list(b.backend.handles):
        b.backend.finish(job_id)
    world.run()
    assert set(world.states().values()) == {JobState.SUCCEEDED}
    assert all(world.attempts(it.id) == [AttemptOutcome.SUCCEEDED] for it in [*waiting, late])
    assert world.attempts("running") == [AttemptOutcome.LOST, AttemptOutcome.SUCCEEDED]

    a.backend.finish("running")
    a.store.settle()
    live(world, 2)
    assert a.table.duplicates == 1
    assert all(world.attempts(it.id) == [AttemptOutcome.SUCCEEDED] for it in [*waiting, late])
    assert (a.paused, a.table.pending, a.table.running) == (False, 0, 0)


def test_a_claim_that_goes_through_after_its_message_has_gone_back_is_undone(world: World) -> None:
    worker = world.worker()
    lose_database(worker, on_the_way=True)
    worker.deliver("j")
    live(world, DEAD_AFTER_S + 1)
    worker.store.settle()
    live(world, 1)
    assert world.state("j") is JobState.QUEUED
    assert world.published == ["j"], "another worker may have dropped the message that went back"
    assert (worker.backend.submitted, worker.table.pending, worker.table.running) == ([], 0, 0)
    worker.deliver("j")
    world.run()
    worker.backend.finish("j")
    world.run()
    assert world.attempts("j") == [AttemptOutcome.RELEASED, AttemptOutcome.SUCCEEDED]


def test_claims_that_wait_are_called_back_with_their_messages(world: World) -> None:
    worker = world.worker()
    lose_database(worker, on_the_way=False)
    worker.deliver("j")
    live(world, DEAD_AFTER_S + 1)
    worker.store.settle()
    world.run()
    assert world.states() == {}, "its message is in Redis, and nothing else of it is anywhere"


def test_revoked_held_and_cancelled_deliveries_do_not_stay_either(world: World) -> None:
    a, b = world.worker("a"), world.worker("b")
    b.deliver("elsewhere")
    world.run()
    newer = a.deliver("newer", {"v": 99, "model": "echo", "prompt": "p"})
    world.run()
    lose_database(a, on_the_way=False)
    revoked, cancelled, flagged = a.deliver("revoked"), a.deliver("cancelled"), a.deliver("flagged")
    a.table.revoke(revoked, JobState.CANCELLED)  # type: ignore[arg-type]
    cancelled.abandon()
    live(world, DEAD_AFTER_S + 1)
    assert revoked.log == flagged.log == ["front"]
    assert newer.ended
    assert cancelled.log == [], "Celery wants no end of it"
    assert a.table.pending == 0


def test_a_short_outage_moves_nothing(world: World) -> None:
    worker = world.worker()
    lose_database(worker, on_the_way=False)
    waiting = worker.deliver("j")
    live(world, DEAD_AFTER_S - 1)
    worker.store.settle()
    live(world, 60)
    assert waiting.log == ["accepted"]
    assert not worker.paused


def test_a_database_that_comes_and_goes_makes_no_storm(world: World) -> None:
    worker = world.worker()
    turns, was = [], False
    for second in range(600):
        if second % 10 == 0:
            lose_database(worker, on_the_way=False)
        elif second % 10 == 8:
            worker.store.settle()
        live(world, 1)
        if worker.paused is not was:
            was = worker.paused
            turns.append(second)
    assert len(turns) <= 5, (
        "back at its first answer, then after a longer one, then after one that it never gives"
    )
    assert worker.paused
    worker.store.settle()
    live(world, 31)
    assert not worker.paused


def test_it_stays_paused_while_a_suspect_runs_alone(world: World) -> None:
    worker = world.worker()
    worker.table.isolate(True)
    lose_database(worker, on_the_way=False)
    live(world, DEAD_AFTER_S + 1)
    worker.store.settle()
    live(world, 2)
    assert worker.paused
    worker.table.isolate(False)
    world.run()
    assert not worker.paused
