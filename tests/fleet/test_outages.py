"""The database or Redis away, with real servers of the test's own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from models_db.tables import AttemptOutcome, JobState
from tests.fleet.conftest import MakeFleet
from tests.fleet.fleet import wait_until
from tests.servers import fresh_database, private_server

SLOW = {"engine": {"echo_tokens_per_s": 20, "max_num_seqs": 4}}


def test_results_outlive_an_outage_of_the_database_and_the_death_of_their_worker(
    make_fleet: MakeFleet, tmp_path: Path
) -> None:
    with private_server("postgresql") as server, fresh_database(server) as url:
        fleet = make_fleet(url, spool_dir=str(tmp_path / "spool"), worker_name="the-worker", **SLOW)
        worker = fleet.worker()
        jobs = [fleet.submit(f"job-{n}", max_tokens=10) for n in range(4)]
        wait_until(lambda: set(fleet.states().values()) == {JobState.RUNNING}, 20, "all to run")
        server.stop()
        spooled = wait_until(
            lambda: [p for p in (tmp_path / "spool").glob("*.spool") if p.read_bytes().count(b"\n") == 4],
            40,
            "four results on disk",
        )
        assert os.stat(spooled[0]).st_mode & 0o077 == 0
        worker.kill()
        server.start()
        again = fleet.worker()
        again.wait_for("4 of 4 results that waited")
        assert set(fleet.wait_all(jobs).values()) == {JobState.SUCCEEDED}
        assert all(fleet.attempts(job_id) == [AttemptOutcome.SUCCEEDED] for job_id in jobs), (
            "nothing ran twice"
        )
        fleet.wait_drained(20)
        assert [p for p in (tmp_path / "spool").iterdir() if p.stat().st_size] == []
        assert again.stop() == 0
        fleet.close()


@pytest.mark.timeout(180)
def test_twenty_broken_connections_in_a_row_cost_nothing(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(engine={"echo_tokens_per_s": 5, "max_num_seqs": 16})
    worker = fleet.worker()
    jobs = [fleet.submit(f"job-{n:02}", max_tokens=30) for n in range(24)]
    wait_until(lambda: list(fleet.states().values()).count(JobState.RUNNING) >= 16, 20, "jobs to run")
    for _ in range(20):
        fleet.redis.client.client_kill_filter(_type="normal", skipme=True)
        wait_until(
            lambda: any(c["cmd"] == "brpop" for c in fleet.redis.client.client_list()), 30, "a reconnection"
        )
    assert set(fleet.wait_all(jobs, 60).values()) == {JobState.SUCCEEDED}
    assert all(fleet.attempts(job_id) == [AttemptOutcome.SUCCEEDED] for job_id in jobs)
    fleet.wait_drained(20)
    assert worker.stop() == 0
