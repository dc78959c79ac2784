"""Every way to stop a worker: nothing that has ended stays unacknowledged, nothing that runs is lost."""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from models_db.tables import AttemptOutcome, JobState
from tests.fleet.conftest import MakeFleet
from tests.fleet.fleet import PATIENCE_S, Fleet, RedisServer, WorkerProcess, wait_until
from tests.servers import free_port
from workers.app import make_app
from workers.control import CANCEL_COMMAND
from workers.late_commands import LATE, LateCommands
from workers.settings import load_settings


def soft(worker: WorkerProcess) -> None:
    worker.signal(signal.SIGQUIT)
    worker.wait_for("Soft shutdown")


def warm_then_cold(worker: WorkerProcess) -> None:
    worker.signal(signal.SIGTERM)
    worker.wait_for("Draining")
    worker.signal(signal.SIGTERM)  # says nothing new
    worker.signal(signal.SIGQUIT)


def cold_twice(worker: WorkerProcess) -> None:
    worker.signal(signal.SIGQUIT)
    worker.signal(signal.SIGQUIT)


def running(fleet: Fleet) -> int:
    return list(fleet.states().values()).count(JobState.RUNNING)


@pytest.mark.parametrize("how", [soft, warm_then_cold, cold_twice], ids=lambda how: how.__name__)
def test_stopping_a_worker_with_short_and_long_jobs(
    make_fleet: MakeFleet, how: Callable[[WorkerProcess], None]
) -> None:
    fleet = make_fleet(
        soft_shutdown_s=4.0 if how is soft else 0.0, engine={"echo_tokens_per_s": 10, "max_num_seqs": 8}
    )
    worker = fleet.worker()
    short = [fleet.submit(f"short-{n}", max_tokens=25) for n in range(4)]
    long = [fleet.submit(f"long-{n}", max_tokens=3000) for n in range(8)]
    wait_until(lambda: running(fleet) == 12, PATIENCE_S, "all to be claimed")
    how(worker)
    if how is soft:
        fleet.tell("ping")  # it still answers
    worker.wait(40)
    states = fleet.states()
    ended = [job_id for job_id in short if states[job_id] is JobState.SUCCEEDED]
    if how is soft:
        assert ended == short, "they had the time"
    assert {states[job_id] for job_id in {*short, *long} - {*ended}} == {JobState.QUEUED}
    assert fleet.redis.unacked() == 0
    assert fleet.queued() == 12 - len(ended), "what has not ended has its message back, and nothing else has"
    for job_id in ended:
        assert fleet.attempts(job_id) == [AttemptOutcome.SUCCEEDED]
        assert fleet.app.AsyncResult(job_id).get(timeout=20)["completion_tokens"] == 25
    assert set(fleet.attempts(long[0])) == {AttemptOutcome.RELEASED}
    assert fleet.worker_states() == ["stopped"]


def test_a_cold_stop_of_the_supervisor_is_one_of_its_worker(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(engine={"echo_tokens_per_s": 10, "max_num_seqs": 2}, shutdown_grace_s=600)
    supervisor = fleet.supervisor()
    job_id = fleet.submit("long", max_tokens=3000)
    fleet.wait_state(job_id, JobState.RUNNING)
    supervisor.signal(signal.SIGQUIT)
    assert supervisor.wait() != -signal.SIGQUIT, "it waits for its worker, and ends by itself"
    assert (fleet.state(job_id), fleet.attempts(job_id)) == (JobState.QUEUED, [AttemptOutcome.RELEASED])
    assert (fleet.redis.unacked(), fleet.queued()) == (0, 1)
    assert fleet.worker_states() == ["stopped"]


def test_a_worker_that_drains_answers_and_ends_what_is_revoked_for_good(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(
        engine={"echo_tokens_per_s": 10, "max_num_seqs": 2},
        prefetch_headroom=1,
        prefetch_reserve=1,
        shutdown_grace_s=600,
    )
    worker = fleet.worker()
    jobs = [fleet.submit(f"j{n}", max_tokens=100_000) for n in range(7)]
    wait_until(lambda: running(fleet) == 4, PATIENCE_S, "two to have a slot, and two to wait in the engine")
    revoked = fleet.app.control.revoke(jobs[-1], reply=True, timeout=PATIENCE_S, limit=1)
    assert "revoked" in str(revoked)
    fleet.wait_state(jobs[-1], JobState.CANCELLED)  # while its message waits in Redis
    worker.signal(signal.SIGTERM)
    worker.wait_for("Draining")

    def ask(command: str, **arguments: Any) -> Any:
        (reply,) = fleet.app.control.broadcast(
            command, arguments=arguments, reply=True, timeout=PATIENCE_S, limit=1
        )
        return next(iter(reply.values()))

    assert {request["id"] for request in ask("active")} == {*jobs[:2]}
    for command in ("shutdown", "add_consumer", "rate_limit"):
        assert ask(command) == {"error": LATE}
    assert "ok" in ask("revoke", task_id=jobs[:-2], terminate=True)
    assert worker.wait() == 0, "nothing is left to wait for"
    cancelled = dict.fromkeys(jobs, JobState.CANCELLED)
    assert fleet.states() == cancelled | {jobs[-2]: JobState.QUEUED}
    assert fleet.redis.client.pubsub_numpat() == 0, "it listens no more"
    later = fleet.worker()  # has heard of no revoke
    fleet.wait_state(jobs[-2], JobState.RUNNING)
    wait_until(lambda: fleet.queued() == 0, PATIENCE_S, "the messages of the others to be taken")
    assert fleet.states() == cancelled | {jobs[-2]: JobState.RUNNING}
    assert fleet.attempts(jobs[-1]) == []
    later.kill()


def test_commands_are_heard_again_after_a_lost_connection(redis_server: RedisServer) -> None:
    app = make_app(load_settings(broker_url=redis_server.url, backend="echo"))
    asked: list[list[str]] = []
    consumer = SimpleNamespace(app=app, hostname="late@host", pool=SimpleNamespace(cancel_jobs=asked.append))
    seconds = [0.0]
    late = LateCommands(consumer, clock=lambda: seconds[0])

    def tell(job_id: str) -> None:
        app.control.broadcast(CANCEL_COMMAND, arguments={"ids": [job_id]})

    def heard() -> list[list[str]]:
        late.run()
        return asked

    def listening() -> bool:
        late.run()
        return redis_server.client.pubsub_numpat() > 0

    try:
        wait_until(listening, PATIENCE_S, "a subscription")
        app.control.broadcast("nonsense")
        tell("first")
        wait_until(heard, PATIENCE_S, "the command")
        redis_server.client.client_kill_filter(_type="pubsub")
        wait_until(lambda: not listening(), PATIENCE_S, "the loss to be noticed")
        tell("meanwhile")
        late.run()
        assert not listening(), "it does not try all the time"
        seconds[0] = 10
        wait_until(listening, PATIENCE_S, "it to try again")
        tell("last")
        wait_until(lambda: len(heard()) == 2, PATIENCE_S, "the command")
        assert asked == [["first"], ["last"]]
    finally:
        late.close()
        app.close()
    wait_until(lambda: redis_server.client.pubsub_numpat() == 0, PATIENCE_S, "the end of the subscription")


def test_commands_need_no_redis_to_be_waited_for() -> None:
    app = make_app(load_settings(broker_url=f"redis://127.0.0.1:{free_port()}/0", backend="echo"))
    late = LateCommands(SimpleNamespace(app=app, hostname="late@host"))
    late.run()  # says so in the log, and returns
    assert not late.listening
    late.close()
