"""Jobs that are cancelled, and deliveries that are revoked or that Celery gave up, at each moment of their life."""

from __future__ import annotations

import pytest
from sqlalchemy import Engine

from models_db.jobs import request_cancel
from models_db.tables import AttemptOutcome, JobState
from tests.fleet.table_world import World


def test_a_cancelled_running_job_keeps_what_it_has(world: World) -> None:
    worker = world.worker()
    request = worker.deliver("j")
    world.run()
    worker.table.cancel(["j", "unknown"])
    world.run()
    assert world.state("j") is JobState.CANCELLED
    assert world.result("j").finish_reason == "cancelled"
    assert request.outcome is not None
    assert request.outcome.state is JobState.CANCELLED


def test_a_job_cancelled_in_sql_before_its_claim_never_runs(world: World, engine: Engine) -> None:
    worker = world.worker()
    worker.store.away = True
    worker.deliver("j")
    world.run()
    worker.store.settle()
    world.run()
    worker.backend.finish("j")
    world.run()
    a = world.worker("c")
    a.deliver("k")
    a.kill()
    b = world.worker("b")
    b.deliver("k")
    world.run()
    with engine.begin() as conn:
        request_cancel(conn, ["k"])
    b.kill()
    c = world.worker("d")
    c.store.dead.add("b")
    request = c.deliver("k")
    world.run()
    assert c.backend.submitted == []
    assert world.state("k") is JobState.CANCELLED
    assert request.outcome is not None


@pytest.mark.parametrize(
    "moment", ["before the pool", "before the claim", "at admission", "running", "elsewhere"]
)
def test_a_revoke_commits_the_end_before_the_acknowledgement(world: World, moment: str) -> None:
    worker = world.worker()
    if moment == "elsewhere":
        other = world.worker("b")
        other.deliver("j")
        world.run()
    worker.store.away = moment in ("before the pool", "before the claim", "elsewhere")
    request = worker.deliver("j")
    request.is_revoked = moment == "at admission"
    if moment == "before the pool":
        assert request.delivery is not None
        request.delivery.call = request.delivery.accept = None
    if moment != "at admission":
        world.run()
        worker.table.revoke(request, JobState.CANCELLED)  # type: ignore[arg-type]
        worker.table.run_pending()
    if worker.store.away:
        assert request.log == []
        worker.store.settle()
    world.run()
    if moment == "elsewhere":
        assert world.status("j").cancel_requested
        assert world.state("j") is JobState.RUNNING
    else:
        assert world.state("j") is JobState.CANCELLED
        assert worker.table.pending == 0
    assert request.log[-1] == "acknowledged"
    assert worker.tracer.traced == [], "Celery has announced it already"
    assert worker.backend.submitted == (["j"] if moment == "running" else [])


def test_a_plain_revoke_ends_what_waits_in_the_backend_and_nothing_that_runs(world: World) -> None:
    worker = world.worker()
    worker.backend.starts = False
    waiting, running = worker.deliver("waiting"), worker.deliver("running")
    world.run()
    assert waiting.log == running.log == [], "what waits for a slot has not begun for Celery"
    worker.backend.handles["running"].started = True
    waiting.is_revoked = running.is_revoked = True
    worker.table.watch_revokes()
    world.run()
    assert running.log == ["accepted"]
    assert world.state("waiting") is JobState.CANCELLED
    assert world.state("running") is JobState.RUNNING
    assert waiting.log[-1] == "acknowledged"


def test_after_a_cancellation_by_celery_neither_callback_nor_acknowledgement(world: World) -> None:
    worker = world.worker()
    request = worker.deliver("j")
    world.run()
    request.abandon()
    world.run()
    assert request.log == ["accepted"]
    assert world.state("j") is JobState.QUEUED
    assert world.attempts("j") == [AttemptOutcome.RELEASED]
    assert worker.table.pending == 0
    assert worker.tracer.signalled == [("j", "began"), ("j", "RETRY")], "as Celery calls it"


def test_a_cancelled_delivery_leaves_the_end_to_those_that_share_its_run(world: World) -> None:
    worker = world.worker()
    abandoned, other = worker.deliver("j"), worker.deliver("j")
    world.run()
    abandoned.abandon()
    world.run()
    worker.backend.finish("j")
    world.run()
    assert (abandoned.log, other.log[-1]) == (["accepted"], "acknowledged")
    assert worker.tracer.signalled == [("j", "began"), ("j", "began"), ("j", "succeeded")]
    assert worker.table.pending == 0


def test_a_run_with_a_revoked_delivery_is_ended_by_the_other(world: World) -> None:
    """Both stand for one run, whose end is signalled once: as what it is, before that of the revoked one."""
    worker = world.worker()
    revoked, other = worker.deliver("j"), worker.deliver("j")
    world.run()
    worker.table.revoke(revoked, JobState.CANCELLED)  # type: ignore[arg-type]
    world.run()
    assert worker.tracer.signalled[2:] == [("j", "cancelled"), ("j", "REVOKED")]
    assert revoked.log[-1] == other.log[-1] == "acknowledged"
    assert worker.table.pending == 0


def test_a_delivery_that_is_cancelled_while_its_claim_is_on_the_way_is_left_alone(world: World) -> None:
    worker = world.worker()
    worker.deliver("j")
    world.run()
    worker.backend.finish("j")
    world.run()
    worker.store.away = True
    late = worker.deliver("j")
    world.run()
    late.abandon()
    worker.table.run_pending()
    worker.store.settle()
    world.run()
    assert (late.log, late.outcome, worker.table.pending) == ([], None, 0)
    assert worker.tracer.traced == ["j"], "the first one"
