"""Messages that Celery holds until their time: a worker that ends meanwhile neither loses nor runs them early."""

from __future__ import annotations

import signal
import time

import pytest

from models_db.tables import AttemptOutcome, JobState
from tests.fleet.conftest import MakeFleet
from tests.fleet.fleet import MODEL, wait_until

COUNTDOWN_S = 8.0


@pytest.mark.parametrize(
    "how", [signal.SIGTERM, signal.SIGQUIT, signal.SIGKILL], ids=["warm", "cold", "killed"]
)
def test_what_waits_for_its_time_goes_back_and_runs_when_it_is_due(make_fleet: MakeFleet, how: int) -> None:
    fleet = make_fleet()
    worker = fleet.worker()
    payload = {"model": MODEL, "prompt": "some words"}
    began = time.time()
    due = fleet.send_raw(payload, countdown=COUNTDOWN_S).id
    later = fleet.send_raw(payload, countdown=3600).id
    wait_until(lambda: fleet.redis.client.hlen("unacked") == 2, 20, "the worker to hold both")
    worker.signal(how)
    worker.wait()
    if how is not signal.SIGKILL:
        assert (fleet.queued(), fleet.redis.unacked()) == (2, 0), "both are back at once"
    fleet.worker()
    fleet.wait_state(due, JobState.SUCCEEDED, 60)
    assert time.time() - began >= COUNTDOWN_S
    assert fleet.attempts(due) == [AttemptOutcome.SUCCEEDED]
    assert fleet.state(later) is None, "it waits on"
    wait_until(lambda: fleet.redis.client.hlen("unacked") == 1, 20, "the next worker to hold the other")
