"""The delivery table, case by case: a delivery is claimed, run, committed and only then acknowledged."""

from __future__ import annotations

import pytest

from backend.api import EngineDeadError
from models_db.errors import WriterStoppedError
from models_db.tables import AttemptOutcome, JobState
from tests.fleet.table_world import World


def test_a_job_is_accepted_run_committed_and_only_then_acknowledged(world: World) -> None:
    worker = world.worker()
    request = worker.deliver("j")
    world.run()
    assert request.log == ["accepted"]
    assert world.state("j") is JobState.RUNNING
    worker.store.away = True
    worker.backend.finish("j")
    world.run()
    assert request.log == ["accepted"], "nothing is acknowledged while the commit is not through"
    worker.store.settle()
    world.run()
    assert request.log == ["accepted", "settled", "called back", "acknowledged"]
    assert world.state("j") is JobState.SUCCEEDED
    assert world.result("j").text == "an answer"
    assert worker.table.pending == 0


def test_a_bare_message_writes_its_own_row(world: World) -> None:
    worker = world.worker()
    worker.deliver(
        "j", {"model": "echo", "prompt": "p", "seed": 5, "tenant": "t", "priority": 1, "deadline_s": 60}
    )
    world.run()
    status = world.status("j")
    assert (status.tenant, status.priority, status.model) == ("t", 1, "echo")
    assert (status.deadline_at - world.clock.now()).total_seconds() == 60


def test_a_stale_message_of_a_job_that_was_stored_is_dropped_and_told(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    worker = world.worker()
    stale, revoked = worker.deliver("pruned", stored=True), worker.deliver("revoked", stored=True)
    worker.table.revoke(revoked, JobState.CANCELLED)  # type: ignore[arg-type]
    bare = worker.deliver("bare")
    world.run()
    assert world.states() == {"bare": JobState.RUNNING}
    assert (stale.log, bare.log) == (["acknowledged"], ["accepted"])
    assert revoked.log == ["acknowledged"]
    assert "Job pruned was stored before" in caplog.text
    assert worker.table.pending == 1


def test_a_second_delivery_joins_and_the_job_runs_once(world: World) -> None:
    worker = world.worker()
    first, second = worker.deliver("j"), worker.deliver("j")
    world.run()
    third = worker.deliver("j")
    world.run()
    assert worker.backend.submitted == ["j"]
    worker.backend.finish("j")
    world.run()
    assert worker.tracer.traced == ["j"], "links and chords are served once"
    assert all(request.log[-1] == "acknowledged" for request in (first, second, third))
    assert second.log == third.log == ["accepted", "acknowledged"]
    assert worker.table.pending == 0


def test_an_ended_job_is_not_run_again_but_celery_hears_of_it(world: World) -> None:
    worker = world.worker()
    worker.deliver("j")
    world.run()
    worker.backend.finish("j")
    world.run()
    again = world.worker("b").deliver("j")
    world.run()
    assert world.workers["b"].backend.submitted == []
    assert again.outcome is not None
    assert again.outcome.state is JobState.SUCCEEDED
    assert again.outcome.result is not None
    assert again.outcome.result.text == "an answer"


def test_a_delivery_of_a_job_that_runs_elsewhere_is_acknowledged(world: World) -> None:
    a, b = world.worker("a"), world.worker("b")
    mine = a.deliver("j")
    world.run()
    second = b.deliver("j")
    world.run()
    assert second.log == ["acknowledged"], "the sweeper makes another one if that worker dies"
    assert b.table.pending == 0
    a.backend.finish("j")
    world.run()
    assert mine.log[-1] == "acknowledged"
    assert b.tracer.traced == []


def test_a_job_of_a_dead_worker_is_taken_over_and_its_late_end_does_not_count(world: World) -> None:
    a, b = world.worker("a"), world.worker("b")
    late = a.deliver("j")
    world.run()
    world.bury("a")
    assert world.published == ["j"]
    taken = b.deliver("j")
    world.run()
    assert b.backend.submitted == ["j"]
    a.backend.finish("j")
    world.run()
    assert world.state("j") is JobState.RUNNING, "the late end is fenced off"
    assert a.table.duplicates == 1
    b.backend.finish("j")
    world.run()
    assert taken.log[-1] == "acknowledged"
    assert late.log == ["accepted", "acknowledged"], "the loser tells Celery nothing"
    assert b.tracer.traced == ["j"]
    assert world.attempts("j") == [AttemptOutcome.LOST, AttemptOutcome.SUCCEEDED]


def test_a_dead_backend_hands_everything_back_without_the_tracer(world: World) -> None:
    worker = world.worker()
    requests = [worker.deliver(name) for name in "abc"]
    world.run()
    worker.backend.handles["b"].fail(EngineDeadError("a fault"))
    world.run()
    late = worker.deliver("d")
    world.run()
    assert [str(error) for error in worker.fatal] == ["a fault"]
    assert [request.log for request in requests] == [["accepted", "front"]] * 3
    assert late.log == ["front"]
    assert {world.state(name) for name in "abc"} == {JobState.QUEUED}
    assert world.attempts("a") == [AttemptOutcome.LOST]
    assert worker.tracer.traced == []
    assert worker.table.pending == 0


def test_closing_lets_runs_go_on_and_hands_the_rest_back(world: World) -> None:
    a = world.worker("a")
    running = a.deliver("j")
    world.run()
    a.store.away = True
    unclaimed = a.deliver("k")
    a.table.run_pending()
    a.table.close()
    world.run()
    a.store.settle()
    world.run()
    assert unclaimed.log == ["front"]
    assert world.state("k") is JobState.QUEUED
    a.backend.finish("j")
    world.run()
    assert running.log[-1] == "acknowledged"
    assert a.table.pending == 0


def test_release_hands_back_what_runs_but_not_what_is_being_committed(world: World) -> None:
    worker = world.worker()
    done, running = worker.deliver("done"), worker.deliver("running")
    world.run()
    worker.store.away = True
    worker.backend.finish("done")
    world.run()
    worker.table.close()
    worker.table.release()
    world.run()
    assert done.log == running.log == ["accepted"]
    worker.store.settle()
    world.run()
    assert done.log[-1] == "acknowledged"
    assert running.log[-1] == "front"
    assert world.states() == {"done": JobState.SUCCEEDED, "running": JobState.QUEUED}


def test_an_end_that_cannot_be_committed_is_never_acknowledged(world: World) -> None:
    worker = world.worker()
    request = worker.deliver("j")
    world.run()
    worker.store.finish_error = WriterStoppedError("stopped")
    worker.backend.finish("j")
    world.run()
    assert request.log == ["accepted", "front"]
    assert worker.table.pending == 0
