"""Every way to stop a worker: nothing that has ended stays unacknowledged, nothing that runs is lost."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest

from models_db.tables import AttemptOutcome, JobState
from tests.fleet.conftest import MakeFleet
from tests.fleet.fleet import PATIENCE_S, Fleet, WorkerProcess, wait_until


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
