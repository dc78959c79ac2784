"""The delivery table, case by case and then at random, without processes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, func, select
from sqlalchemy.exc import IntegrityError

from backend.api import EngineDeadError, FinishReason, QueueFullError, RequestError
from models_db.errors import DatabaseError
from models_db.jobs import request_cancel
from models_db.session import make_engine
from models_db.tables import AttemptOutcome, JobState, Result
from tests.fleet.table_world import World, failing
from tests.fleet.test_refused_ends import refusing
from tests.fleet.test_suspects import accept
from tests.servers import migrate


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    url = f"sqlite:///{tmp_path / 'table.db'}"
    migrate(url)
    engine = make_engine(url)
    yield engine
    engine.dispose()


@pytest.fixture
def world(engine: Engine) -> World:
    return World(engine)


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


def test_after_a_cancellation_by_celery_neither_callback_nor_acknowledgement(world: World) -> None:
    worker = world.worker()
    request = worker.deliver("j")
    world.run()
    request.abandoned = True
    assert request.delivery is not None
    request.delivery.terminate()
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
    abandoned.abandoned = True
    assert abandoned.delivery is not None
    abandoned.delivery.terminate()
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
    late.abandoned = True
    assert late.delivery is not None
    late.delivery.terminate()
    worker.table.run_pending()
    worker.store.settle()
    world.run()
    assert (late.log, late.outcome, worker.table.pending) == ([], None, 0)
    assert worker.tracer.traced == ["j"], "the first one"


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


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([{"model": "echo", "prompt": ""}], "prompt: must not be empty"),
        ([{"model": "echo", "prompt": "x", "max_tokens": 0}], "max_tokens"),
        ([{"model": "echo", "prompt": "x", "colour": "red"}], "colour: unknown field"),
        ([{"model": "nobody", "prompt": "x"}], "model: is not served here"),
        ([{"model": "other", "prompt": "x"}], "Send it to the queue tokenmill.other"),
        (["text"], "must be a JSON object"),
        ([], "takes exactly one positional argument"),
        ([{}, {}], "takes exactly one positional argument"),
    ],
)
def test_a_bad_payload_fails_its_own_job_and_no_other(world: World, args: list[Any], message: str) -> None:
    worker = world.worker()
    good = worker.deliver("good")
    bad = worker.deliver("bad", args=args)
    world.run()
    worker.backend.finish("good")
    world.run()
    assert world.state("bad") is JobState.FAILED
    status = world.status("bad")
    assert message in status.error_message
    assert status.error_type in ("RequestError", "UnknownModelError")
    assert bad.outcome is not None
    assert bad.outcome.error_type == status.error_type
    assert bad.log[-1] == good.log[-1] == "acknowledged"
    assert world.state("good") is JobState.SUCCEEDED


def test_an_id_that_no_row_can_hold_still_fails_for_celery(world: World) -> None:
    worker = world.worker()
    request = worker.deliver("x" * 200)
    world.run()
    assert request.outcome is not None
    assert request.outcome.state is JobState.FAILED
    assert request.log[-1] == "acknowledged"
    assert world.states() == {}


def test_a_claim_that_the_database_refuses_tells_celery_nothing_and_goes_back_later(
    world: World, engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    worker = world.worker()
    accept(engine, ["bad"])
    delays = []
    with refusing(engine, "NEW.id = 'bad' AND NEW.state = 'running'"):
        for number in range(6):
            request = worker.deliver("bad", stored=True)
            other = worker.deliver(f"good {number}")
            began = world.clock()
            world.run()
            assert request.log == []
            worker.backend.finish(f"good {number}")
            world.run()
            assert other.log[-1] == "acknowledged"
            while not request.ended:
                world.clock.seconds += 0.5
                world.run()
            delays.append(world.clock() - began)
            assert request.log == ["back"], "to the end of the queue, and nobody is told of an end"
    assert delays == [1, 2, 4, 8, 15, 15]
    assert caplog.text.count("refuses the claim of job bad") == 3, "more and more rarely"
    assert world.state("bad") is JobState.QUEUED
    assert "bad" not in worker.tracer.traced
    worker.deliver("bad", stored=True)
    world.run()
    worker.backend.finish("bad")
    world.run()
    assert world.state("bad") is JobState.SUCCEEDED
    assert worker.table.pending == 0


def test_a_refused_claim_is_told_only_of_a_job_that_has_no_row(
    world: World, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = world.worker()
    accept(engine, ["stored"])
    monkeypatch.setattr(
        worker.store, "claim", lambda _: failing(DatabaseError("id: another job has its key"))
    )
    stored, bare = worker.deliver("stored"), worker.deliver("bare")
    world.run()
    assert stored.log == []
    assert bare.outcome is not None
    assert bare.outcome.error_message == "id: another job has its key"
    assert bare.log[-1] == "acknowledged"
    worker.table.close()
    world.run()
    assert stored.log == ["back"], "a shutdown does not wait for it"


def test_no_row_of_the_database_is_quoted(
    world: World, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = world.worker()
    error = IntegrityError("INSERT", {}, Exception("no null here\nDETAIL:  Failing row contains (secret)."))
    monkeypatch.setattr(worker.store, "claim", lambda _: failing(error))
    request = worker.deliver("j")
    world.run()
    assert request.log == []
    assert "no null here" in caplog.text
    assert request.delivery is not None
    worker.table._endings.begin()
    worker.table._endings.fail(request.delivery, error)
    world.run()
    assert request.outcome is not None
    assert request.outcome.error_message == "IntegrityError Exception"
    assert "secret" not in caplog.text


def test_a_newer_payload_is_held_and_handed_back_untouched(world: World) -> None:
    worker = world.worker(newer_payload_delay_s=5)
    request = worker.deliver("j", {"version": 2, "model": "echo", "prompt": "x", "novel": 1})
    world.run()
    assert request.log == []
    assert world.states() == {}
    world.clock.seconds += 6
    world.run()
    assert request.log == ["back"], "to the end of the queue, so that others get their turn"
    assert worker.table.pending == 0


def test_a_request_that_the_backend_refuses_fails(world: World) -> None:
    worker = world.worker()
    worker.backend.refuse = RequestError("is too much", field="max_tokens")
    request = worker.deliver("j")
    world.run()
    assert world.state("j") is JobState.FAILED
    assert request.outcome is not None
    assert request.outcome.error_message == "max_tokens: is too much"


def test_a_full_backend_is_asked_again(world: World) -> None:
    worker = world.worker()
    worker.backend.refuse = QueueFullError("full")
    request = worker.deliver("j")
    world.run()
    assert request.log == []
    worker.backend.refuse = None
    world.clock.seconds += 1
    world.run()
    assert worker.backend.submitted == ["j"]


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


def test_a_result_that_the_database_refuses_fails_the_job_with_the_reason(world: World) -> None:
    worker = world.worker()
    request = worker.deliver("j")
    world.run()
    worker.store.finish_error = ValueError("no such text")
    worker.backend.finish("j")
    world.run()
    assert world.state("j") is JobState.FAILED
    assert world.status("j").error_type == "ValueError"
    assert "no such text" not in world.status("j").error_message, "an error may quote what it is about"
    assert request.log[-1] == "acknowledged"


def test_an_end_that_cannot_be_committed_is_never_acknowledged(world: World) -> None:
    from models_db.errors import WriterStoppedError

    worker = world.worker()
    request = worker.deliver("j")
    world.run()
    worker.store.finish_error = WriterStoppedError("stopped")
    worker.backend.finish("j")
    world.run()
    assert request.log == ["accepted", "front"]
    assert worker.table.pending == 0


@pytest.mark.parametrize("seed", range(16))
def test_whatever_happens_each_job_ends_once(world: World, engine: Engine, seed: int) -> None:
    """Random deliveries, doubled and repeated, kills, cancels, revokes, shutdowns and database outages."""
    dice = random.Random(seed)
    jobs = [f"job-{n}" for n in range(12)]
    queue = jobs * 2
    dice.shuffle(queue)
    names = iter(f"w{n}" for n in range(1000))

    def start() -> Any:
        return world.worker(next(names))

    live = [start(), start()]

    def sweep() -> None:
        """What no delivery brings any more is published again, as is what was announced."""
        queue.extend(world.published)
        world.published.clear()
        held = {request.id for worker in live for request in worker.requests if not request.ended}
        queued = {job for job, state in world.states().items() if state is JobState.QUEUED}
        queue.extend(queued - held - set(queue))

    def collect(worker: Any) -> None:
        """What was handed back is delivered again; count the terminal outcomes that Celery heard of."""
        for request in list(worker.requests):
            if request.ended:
                worker.requests.remove(request)
                if request.log[-1] in ("front", "back"):
                    queue.append(request.id)

    for _ in range(150):
        worker = dice.choice(live)
        action = dice.random()
        if action < 0.45 and queue:
            worker.deliver(queue.pop(0))
        elif action < 0.70:
            open_jobs = [job for job, handle in worker.backend.handles.items() if not handle.done()]
            if open_jobs:
                worker.backend.finish(dice.choice(open_jobs))
        elif action < 0.76:
            worker.table.cancel([dice.choice(jobs)])
        elif action < 0.80 and worker.requests:
            request = dice.choice(worker.requests)
            if not request.ended:
                worker.table.revoke(request, JobState.CANCELLED)
        elif action < 0.85:
            worker.store.away, worker.store.on_the_way = True, dice.random() < 0.5
        elif action < 0.92:
            worker.store.settle()
        elif action < 0.95:
            lost = [request.id for request in worker.kill()]
            rows = world.states()  # before it has a row, a bare message is Redis's alone
            queue += [job for job in lost if job not in rows or dice.random() < 0.5]
            live.remove(worker)
            world.bury(worker.name)
            live.append(start())
        elif action < 0.97:
            worker.store.settle()
            worker.table.close()
            worker.table.release()
            world.run()
            collect(worker)
            assert worker.table.pending == 0
            live.remove(worker)
            live.append(start())
        else:
            world.clock.seconds += dice.choice([0.5, 2, 7])
        if dice.random() < 0.7:
            world.run()
            for each in live:
                collect(each)

    for _ in range(200):
        world.clock.seconds += 2
        for worker in live:
            worker.store.settle()
            for job, handle in list(worker.backend.handles.items()):
                if not handle.done():
                    worker.backend.finish(job)
        world.run()
        for worker in live:
            collect(worker)
        sweep()
        while queue:
            dice.choice(live).deliver(queue.pop())
        ended = all(state.terminal for state in world.states().values())
        if ended and not queue and all(worker.table.pending == 0 for worker in live):
            break
    states = world.states()
    assert set(states) == set(jobs)
    assert all(state.terminal for state in states.values()), states
    for worker in live:
        assert worker.table.pending == 0
        assert worker.table.running == 0
        assert not worker.fatal
    with engine.connect() as conn:
        succeeded = [job for job, state in states.items() if state is JobState.SUCCEEDED]
        assert conn.scalar(
            select(func.count()).select_from(Result).where(Result.job_id.in_(succeeded))
        ) == len(succeeded)
    for job in jobs:
        terminal = [outcome for outcome in world.attempts(job) if outcome not in ("lost", "released", None)]
        assert len(terminal) <= 1, f"{job} was committed {len(terminal)} times"


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
