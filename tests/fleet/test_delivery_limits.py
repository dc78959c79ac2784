"""Deadlines and the time limits of a message: from when they count, and what they leave of a job."""

from __future__ import annotations

import pytest

from backend.api import FinishReason
from models_db.tables import JobState
from tests.fleet.table_world import World


def test_time_limits_of_the_message(world: World) -> None:
    worker = world.worker()
    soft = worker.deliver("soft", soft_s=5.0)
    hard = worker.deliver("hard", hard_s=10.0)
    world.run()
    world.clock.seconds += 5
    world.run()
    assert soft.log == ["accepted", "soft limit", "settled", "called back", "acknowledged"]
    assert world.state("soft") is JobState.SUCCEEDED
    assert world.result("soft").finish_reason == "deadline"
    world.clock.seconds += 6
    world.run()
    assert worker.backend.cancelled == ["soft", "hard"]
    assert hard.log == ["accepted", "settled", "hard limit", "acknowledged"]
    assert world.state("hard") is JobState.EXPIRED


def test_time_limits_count_from_the_slot_and_the_first_one_counts(world: World) -> None:
    """As Celery's, which start with the task: a job that waits for a slot uses up neither."""
    worker = world.worker()
    worker.backend.starts = False
    limits = {"soft": {"soft_s": 5.0}, "hard": {"hard_s": 5.0}, "both": {"soft_s": 5.0, "hard_s": 6.0}}
    requests = {name: worker.deliver(name, **each) for name, each in limits.items()}
    deadline = worker.deliver("deadline", {"model": "echo", "prompt": "x", "deadline_s": 60}, soft_s=5.0)
    world.run()
    assert worker.backend.handles["deadline"].request.deadline_s == 60, "which counts from the submission"
    world.clock.seconds += 30
    world.run()
    assert worker.backend.cancelled == [], "they wait"
    for handle in worker.backend.handles.values():
        handle.started = True
    world.run()
    world.clock.seconds += 4.9
    world.run()
    assert worker.backend.cancelled == []
    world.clock.seconds += 2
    world.run()
    assert worker.backend.cancelled == ["soft", "hard", "both", "deadline"]
    for name in ("soft", "both", "deadline"):
        assert world.state(name) is JobState.SUCCEEDED
        assert world.result(name).finish_reason == "deadline"
    assert world.state("hard") is JobState.EXPIRED
    assert [log for log in requests["both"].log if "limit" in log] == ["soft limit"]
    assert "soft limit" in deadline.log
    assert "hard limit" in requests["hard"].log


def test_a_limit_of_an_earlier_run_does_not_end_a_later_one(world: World) -> None:
    worker = world.worker()
    worker.deliver("j", hard_s=5.0)
    world.run()
    worker.table.release()
    world.run()
    world.clock.seconds += 3
    worker.deliver("j", hard_s=5.0)
    world.run()
    world.clock.seconds += 3
    world.run()
    assert not worker.backend.handles["j"].done()
    world.clock.seconds += 3
    world.run()
    assert world.state("j") is JobState.EXPIRED


def test_a_soft_limit_before_the_first_token_expires(world: World) -> None:
    worker = world.worker()
    worker.backend.tokens_of_cancelled = 0
    worker.deliver("j", soft_s=5.0)
    world.run()
    world.clock.seconds += 5
    world.run()
    assert world.state("j") is JobState.EXPIRED
    assert "the soft time limit passed before the first token" in world.status("j").error_message


def test_after_a_hard_limit_the_failure_comes_first_and_then_the_end(world: World) -> None:
    worker = world.worker()
    requests = [worker.deliver("j", hard_s=5.0), worker.deliver("j", hard_s=5.0)]
    world.run()
    told: list[list[tuple[str, str]]] = []
    assert requests[0].delivery is not None
    on_timeout = requests[0].on_timeout
    requests[0].delivery.timeout = lambda *args: (
        told.append(list(worker.tracer.signalled)),
        on_timeout(*args),
    )[0]  # type: ignore[func-returns-value]
    world.clock.seconds += 5
    world.run()
    assert told == [[("j", "began")] * 2]
    assert worker.tracer.signalled[2:] == [("j", "FAILURE"), ("j", "IGNORED")]
    assert [request.log[-1] for request in requests] == ["acknowledged"] * 2
    assert worker.table.pending == 0


def test_deadlines_count_from_submission(world: World) -> None:
    worker = world.worker()
    worker.store.away = True
    worker.deliver("j", {"model": "echo", "prompt": "x", "deadline_s": 10})
    late = worker.deliver("k", {"model": "echo", "prompt": "x", "deadline_s": 2})
    world.run()
    world.clock.seconds += 4
    worker.store.settle()
    world.run()
    assert worker.backend.handles["j"].request.deadline_s == pytest.approx(6)
    assert world.state("k") is JobState.EXPIRED
    assert late.outcome is not None
    worker.backend.finish("j", FinishReason.DEADLINE, tokens=0)
    world.run()
    assert world.state("j") is JobState.EXPIRED, "nothing came of it in time"


@pytest.mark.parametrize("why", ["cancelled", "expired", "expired before the backend"])
def test_what_ends_before_it_gets_a_slot_has_not_started(world: World, why: str) -> None:
    worker = world.worker()
    worker.backend.starts = False
    worker.store.away = why == "expired before the backend"
    request = worker.deliver("j", {"model": "echo", "prompt": "x", "deadline_s": 5})
    world.run()
    if why == "cancelled":
        worker.table.cancel(["j"])
    elif why == "expired":
        worker.backend.finish("j", FinishReason.DEADLINE, tokens=0)
    else:
        world.clock.seconds += 6
        worker.store.settle()
    world.run()
    assert world.state("j") is (JobState.CANCELLED if why == "cancelled" else JobState.EXPIRED)
    assert worker.tracer.traced == ["j"], "Celery hears of the end all the same"
    assert request.log == ["settled", "called back", "acknowledged"], "and of no start"
    assert worker.tracer.signalled == []
    again = worker.deliver("j")
    world.run()
    assert (again.log[0], worker.tracer.signalled) == ("settled", [])
