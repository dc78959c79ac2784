"""``celery inspect``, ``celery control`` and ``celery status`` against a real worker."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

from models_db.tables import JobState
from tests.fleet.celery_fleet import CeleryFleet, assert_nothing_private, celery_fleet
from tests.fleet.fleet import PATIENCE_S, wait_until

TASK = "tokenmill.generate"
FOR_EVER = 100_000


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CeleryFleet]:
    with celery_fleet(tmp_path_factory.mktemp("inspect")) as fleet:
        fleet.observed_worker()
        yield fleet


def ask(fleet: CeleryFleet, question: str, *args: Any, **options: Any) -> Any:
    """The worker's answer to ``inspect``."""
    inspect = fleet.app.control.inspect(timeout=10, limit=1)
    (answer,) = getattr(inspect, question)(*args, **options).values()
    return answer


def control(fleet: CeleryFleet, command: str, **arguments: Any) -> Any:
    """The worker's answer to ``control``."""
    (reply,) = fleet.app.control.broadcast(command, arguments=arguments, reply=True, timeout=10, limit=1)
    return next(iter(reply.values()))


def ids(requests: list[dict[str, Any]]) -> set[str]:
    return {request["id"] for request in requests}


def test_inspect_tells_what_runs_from_what_waits_and_shows_nothing_private(fleet: CeleryFleet) -> None:
    before = time.time()
    running = [fleet.signature(FOR_EVER).apply_async() for _ in range(2)]
    for task in running:
        fleet.wait_state(task.id, JobState.RUNNING)
    waiting = fleet.signature(1).apply_async()
    later = fleet.signature(1).apply_async(countdown=3600)
    wait_until(lambda: ask(fleet, "scheduled"), PATIENCE_S, "the job with a countdown")
    wait_until(
        lambda: ids(ask(fleet, "reserved")) == {waiting.id}, PATIENCE_S, "the job that waits for a slot"
    )
    active = ask(fleet, "active")
    assert ids(active) == {task.id for task in running}
    for request in active:
        assert before <= request["time_start"] <= time.time()
        assert request["worker_pid"] == fleet.workers[0].process.pid
        assert not request["acknowledged"]
    (reserved,) = ask(fleet, "reserved")
    assert (reserved["time_start"], reserved["acknowledged"]) == (None, False)
    (scheduled,) = ask(fleet, "scheduled")
    assert scheduled["request"]["id"] == later.id
    states = {
        task_id: state
        for task_id, (state, _) in ask(fleet, "query_task", running[0].id, waiting.id, later.id).items()
    }
    assert states == {running[0].id: "active", waiting.id: "reserved", later.id: "scheduled"}

    stats = ask(fleet, "stats")
    assert (stats["pool"]["max-concurrency"], stats["pool"]["running"], stats["pool"]["waiting"]) == (2, 2, 1)
    assert stats["total"][TASK] == 2, "what waits is not counted as begun"
    assert TASK in ask(fleet, "registered")
    assert "tests.collect" in ask(fleet, "registered")
    assert [queue["name"] for queue in ask(fleet, "active_queues")] == [fleet.queue]
    assert ask(fleet, "ping") == {"ok": "pong"}

    # The same from a shell.
    commands = [
        fleet.celery(*words) for words in (["status"], ["inspect", "active", "-j"], ["control", "pool_grow"])
    ]
    status, shown, refused = printed = [command.communicate(timeout=60)[0] for command in commands]
    assert "1 node online" in status
    assert ids(next(iter(json.loads(shown).values()))) == ids(active)
    assert "ERROR" in refused
    assert "TOKENMILL_ENGINE_MAX_NUM_SEQS" in refused
    answers = [
        ask(fleet, question) for question in ("conf", "report", "active", "reserved", "scheduled", "stats")
    ]
    assert_nothing_private([*printed, *map(json.dumps, answers), json.dumps(states)])

    # Revoked: what waits at once, what runs with ``terminate``.
    assert "flagged as revoked" in control(fleet, "revoke", task_id=[waiting.id, later.id])["ok"]
    for task in (waiting, later):
        fleet.wait_state(task.id, JobState.CANCELLED)
    wait_until(  # the end is in the database before the worker has done with the request
        lambda: ask(fleet, "query_task", later.id) == {},
        PATIENCE_S,
        "the job with a countdown to be gone: its revoke outlives this worker",
    )
    assert {waiting.id, later.id} <= set(ask(fleet, "revoked"))
    assert "terminate" in control(fleet, "terminate", task_id=running[0].id, signal="KILL")["ok"]
    assert "terminate" in control(fleet, "revoke", task_id=[running[1].id], terminate=True)["ok"]
    for task in running:
        fleet.wait_state(task.id, JobState.CANCELLED)
    wait_until(lambda: ask(fleet, "active") == ask(fleet, "reserved") == [], PATIENCE_S, "an idle worker")


@pytest.mark.parametrize(
    ("command", "arguments", "reason"),
    [
        ("pool_grow", {"n": 1}, "TOKENMILL_ENGINE_MAX_NUM_SEQS"),
        ("pool_shrink", {"n": 1}, "fixed when the model is loaded"),
        ("autoscale", {"max": 4, "min": 1}, "fixed when the model is loaded"),
        ("pool_restart", {}, "loaded once a process"),
        ("add_consumer", {"queue": "tokenmill.another"}, "the queue of another model"),
        ("rate_limit", {"task_name": TASK, "rate_limit": "much"}, "Invalid rate limit"),
        ("time_limit", {"task_name": "nobody", "hard": 1}, "unknown task"),
    ],
)
def test_what_an_engine_cannot_follow_is_refused_with_the_reason(
    fleet: CeleryFleet, command: str, arguments: dict[str, Any], reason: str
) -> None:
    assert reason in control(fleet, command, **arguments)["error"]
    assert "Traceback" not in "\n".join(line for line in fleet.workers[0].lines if command in line)


def test_a_rate_limit_holds_jobs_back_until_it_is_lifted(fleet: CeleryFleet) -> None:
    assert "ok" in control(fleet, "rate_limit", task_name=TASK, rate_limit="1/h")
    first, held, revoked = tasks = [fleet.signature(1).apply_async() for _ in range(3)]
    first.get(timeout=20)
    wait_until(lambda: all(fleet.seen(task.id) for task in tasks), PATIENCE_S, "all to be received")
    assert (held.state, fleet.state(held.id)) == ("PENDING", None)
    control(fleet, "revoke", task_id=revoked.id)
    fleet.wait_state(revoked.id, JobState.CANCELLED)
    assert "ok" in control(fleet, "rate_limit", task_name=TASK, rate_limit=0)
    assert held.get(timeout=20)["completion_tokens"] == 1
    fleet.wait_drained()


def test_time_limits_take_effect_for_jobs_received_later(fleet: CeleryFleet) -> None:
    assert "ok" in control(fleet, "time_limit", task_name=TASK, soft=0.3, hard=20)
    value = fleet.signature(FOR_EVER).apply_async().get(timeout=20)
    assert value["finish_reason"] == "deadline"
    assert "ok" in control(fleet, "time_limit", task_name=TASK, soft=None, hard=None)
    assert fleet.signature(20).apply_async().get(timeout=20)["finish_reason"] == "length"


def test_a_worker_stops_to_consume_and_goes_on_and_takes_other_queues(fleet: CeleryFleet) -> None:
    control(fleet, "cancel_consumer", queue=fleet.queue)
    wait_until(lambda: ask(fleet, "active_queues") == [], PATIENCE_S, "the consumer to be cancelled")
    held = fleet.signature(1).apply_async()
    control(fleet, "add_consumer", queue="reports")
    report = fleet.app.send_task("tests.collect", args=[[{"text": "x"}]], queue="reports")
    assert report.get(timeout=20) == {"collected": ["x"]}
    assert (held.state, fleet.queued()) == ("PENDING", 1), "what the worker does not consume stays in Redis"
    control(fleet, "add_consumer", queue=fleet.queue)
    assert held.get(timeout=20)["completion_tokens"] == 1
    control(fleet, "cancel_consumer", queue="reports")


def test_a_remote_shutdown_lets_running_jobs_finish(fleet: CeleryFleet) -> None:
    (worker,) = fleet.workers
    task = fleet.signature(30).apply_async()
    fleet.wait_state(task.id, JobState.RUNNING)
    fleet.app.control.shutdown()
    assert worker.wait() == 0
    assert fleet.state(task.id) is JobState.SUCCEEDED
    assert task.get(timeout=20)["completion_tokens"] == 30
    fleet.wait_drained()
    assert_nothing_private([worker.log])
