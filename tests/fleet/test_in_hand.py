"""A message that Redis has given to a worker and would not note."""

from __future__ import annotations

from models_db.tables import AttemptOutcome, JobState
from tests.chaos.proxy import Proxy
from tests.fleet.conftest import MakeFleet


def test_a_job_whose_message_is_only_in_a_worker_outlives_it(make_fleet: MakeFleet) -> None:
    """A bare one, so that no row has it, popped from a Redis that becomes read-only before it notes that."""
    fleet = make_fleet()
    proxy = Proxy(fleet.redis.port)
    try:
        worker = fleet.worker(broker_url=f"redis://127.0.0.1:{proxy.port}/0")
        held = proxy.hold(b"HSET")
        job_id = fleet.send().id
        assert held.wait(15), "the worker has popped the message and is about to note it"
        fleet.redis.client.execute_command("REPLICAOF", "127.0.0.1", "1")
        proxy.release()
        fleet.wait_state(job_id, JobState.QUEUED)
        assert fleet.queued() == fleet.redis.unacked() == 0
        worker.kill()
        fleet.redis.client.execute_command("REPLICAOF", "NO", "ONE")
        fleet.worker()
        fleet.wait_state(job_id, JobState.SUCCEEDED)
        assert fleet.attempts(job_id) == [AttemptOutcome.SUCCEEDED]
        fleet.wait_drained(20)
    finally:
        fleet.redis.client.execute_command("REPLICAOF", "NO", "ONE")
        proxy.close()
