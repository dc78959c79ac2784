"""The database or Redis away, with real servers of the test's own."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from kombu import Queue
from redis.exceptions import OutOfMemoryError, ReadOnlyError, ResponseError

from models_db.tables import AttemptOutcome, JobState
from tests.fleet.conftest import MakeFleet
from tests.fleet.fleet import MODEL, PATIENCE_S, RedisServer, wait_until
from tests.servers import fresh_database, private_server
from workers.refusing_redis import RefusedError, refuses

SLOW = {"engine": {"echo_tokens_per_s": 20, "max_num_seqs": 4}}


def test_results_outlive_an_outage_of_the_database_and_the_death_of_their_worker(
    make_fleet: MakeFleet, tmp_path: Path
) -> None:
    with private_server("postgresql") as server, fresh_database(server) as url:
        fleet = make_fleet(url, spool_dir=str(tmp_path / "spool"), worker_name="the-worker", **SLOW)
        jobs = [fleet.submit(f"job-{n}", max_tokens=40) for n in range(4)]
        worker = fleet.worker()  # begins all four at once
        wait_until(lambda: set(fleet.states().values()) == {JobState.RUNNING}, PATIENCE_S, "all to run")
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
        fleet.wait_drained()
        assert [p for p in (tmp_path / "spool").iterdir() if p.stat().st_size] == []
        assert again.stop() == 0
        fleet.close()


@pytest.mark.timeout(180)
def test_twenty_broken_connections_in_a_row_cost_nothing(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(engine={"echo_tokens_per_s": 5, "max_num_seqs": 16})
    worker = fleet.worker()
    jobs = [fleet.submit(f"job-{n:02}", max_tokens=30) for n in range(24)]
    wait_until(lambda: list(fleet.states().values()).count(JobState.RUNNING) >= 16, PATIENCE_S, "jobs to run")
    for _ in range(20):
        fleet.redis.client.client_kill_filter(_type="normal", skipme=True)
        wait_until(
            lambda: any(c["cmd"] == "brpop" for c in fleet.redis.client.client_list()), 30, "a reconnection"
        )
    assert set(fleet.wait_all(jobs, 60).values()) == {JobState.SUCCEEDED}
    assert all(fleet.attempts(job_id) == [AttemptOutcome.SUCCEEDED] for job_id in jobs)
    fleet.wait_drained()
    assert worker.stop() == 0


def test_a_full_redis_neither_ends_a_worker_nor_loses_a_message(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(engine={"max_num_seqs": 2})
    redis, worker = fleet.redis.client, fleet.worker()
    worker.signal(signal.SIGSTOP)
    redis.set("ballast", "x" * 5_000_000)
    jobs = [f"bare-{n}" for n in range(6)]  # no row has their messages
    results = [fleet.send_raw({"model": MODEL, "prompt": "some words"}, task_id=job) for job in jobs]
    try:
        redis.config_set("maxmemory", 3_000_000)
        worker.signal(signal.SIGCONT)
        for job in jobs:
            fleet.wait_state(job, JobState.SUCCEEDED)
        assert worker.process.poll() is None
    finally:
        redis.config_set("maxmemory", 0)
        redis.delete("ballast")
    assert all(result.get(timeout=60)["text"] for result in results)
    fleet.wait_drained(30)
    assert worker.stop() == 0


def test_a_result_backend_that_takes_nothing_gets_the_result_later(
    make_fleet: MakeFleet, tmp_path: Path
) -> None:
    (tmp_path / "results").mkdir()
    results = RedisServer(tmp_path / "results")
    try:
        fleet = make_fleet(result_backend_url=results.url)
        fleet.worker()
        results.client.execute_command("REPLICAOF", "127.0.0.1", "1")  # as in a failover: it can be read
        result = fleet.send()
        fleet.wait_state(result.id, JobState.SUCCEEDED)
        assert fleet.redis.unacked(), "it is not acknowledged before Celery knows"
        results.client.execute_command("REPLICAOF", "NO", "ONE")
        assert result.get(timeout=60)["text"]
        fleet.wait_drained(30)
    finally:
        results.stop()


def test_a_message_that_redis_would_not_note_goes_back(make_fleet: MakeFleet) -> None:
    """Redis becomes read-only between the pop and the note."""
    fleet = make_fleet()
    connection = fleet.app.connection_for_read()
    channel = connection.channel()
    consumer = connection.Consumer([Queue(fleet.queue)], channel=channel, on_message=lambda message: None)
    consumer.consume()
    answers = channel._remember

    def turn(*args: Any, **options: Any) -> Any:
        answer = answers(*args, **options)
        if args[2] == "BRPOP" and answer:
            fleet.redis.client.execute_command("REPLICAOF", "127.0.0.1", "1")
        return answer

    channel.client.parse_response = partial(turn, channel.client.parse_response.args[0])
    fleet.send()
    try:
        with pytest.raises(RefusedError):
            connection.drain_events(timeout=20)
        assert fleet.queued() == 0
        fleet.redis.client.execute_command("REPLICAOF", "NO", "ONE")
        channel.qos.restore_visible()
        assert fleet.queued() == 1
    finally:
        fleet.redis.client.execute_command("REPLICAOF", "NO", "ONE")
        connection.close()


@pytest.mark.parametrize(
    ("answer", "refused"),
    [
        (OutOfMemoryError("command not allowed when used memory > 'maxmemory'."), True),
        (ReadOnlyError("You can't write against a read only replica."), True),
        (ResponseError("UNBLOCKED force unblock from blocking operation, instance state changed"), True),
        (ResponseError("MISCONF Redis is configured to save RDB snapshots"), True),
        (ResponseError("Error running script (call to f_1): @user_script:1: -OOM command not allowed"), True),
        (ResponseError("WRONGTYPE Operation against a key holding the wrong kind of value"), False),
        (ValueError("OOM"), False),
    ],
)
def test_refusals_are_told_from_faults_of_a_command(answer: Exception, refused: bool) -> None:
    assert refuses(answer) is refused
