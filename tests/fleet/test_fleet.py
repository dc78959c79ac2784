"""Jobs through Redis, Celery and the pool into SQL, with real worker processes."""

from __future__ import annotations

import os
import re
import signal
import sys
import urllib.request
import uuid
from pathlib import Path
from typing import Any

import pytest
from celery import chain, chord, group
from celery.exceptions import TaskRevokedError
from sqlalchemy import select

from backend.api import RequestError, UnknownModelError
from models_db.jobs import request_cancel
from models_db.rollup_tables import JobHour, ThroughputHour
from models_db.tables import AttemptOutcome, EngineSample, JobState
from tests.fleet.conftest import MakeFleet
from tests.fleet.fleet import PATIENCE_S, Fleet, WorkerProcess, wait_until
from tests.servers import free_port, fresh_database, private_server
from workers.control import CANCEL_COMMAND
from workers.exits import EXIT_CONFIGURATION

SLOW = {"engine": {"echo_tokens_per_s": 20, "max_num_seqs": 4}}
LONG = 2000  # words that nobody waits for at that pace: their job is there until something happens to it


def ids(count: int) -> list[str]:
    return [str(uuid.uuid4()) for _ in range(count)]


def test_submit_to_result_on_each_database(make_fleet: MakeFleet, any_database_url: str) -> None:
    fleet = make_fleet(any_database_url)
    worker = fleet.worker(metrics_port=(port := free_port()))
    for job_id in (jobs := ids(40)):
        fleet.submit(job_id, prompt="one two three", max_tokens=4, return_token_ids=True, temperature=0.5)
    assert set(fleet.wait_all(jobs).values()) == {JobState.SUCCEEDED}
    result = fleet.result(jobs[0])
    assert result is not None
    assert result.text == "one two three one"
    assert (result.finish_reason, result.prompt_tokens, result.completion_tokens) == ("length", 3, 4)
    assert len(result.token_ids or ()) == 4
    status = fleet.status(jobs[0])
    assert status is not None
    assert (status.attempt, status.owner, status.error_type) == (1, None, None)
    fleet.wait_drained()
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as metrics:
        assert re.search(r"^tokenmill_requests_finished_total\{.*\} 40.0$", metrics.read().decode(), re.M)
    assert worker.stop() == 0
    assert fleet.worker_states() == ["stopped"]
    with fleet.engine.connect() as conn:
        assert sum(conn.scalars(select(EngineSample.requests_finished))) == 40
        assert sum(conn.scalars(select(ThroughputHour.requests_finished))) == 40, "rolled up at the end, too"
        assert sum(conn.scalars(select(JobHour.succeeded))) == 40
    assert "one two three" not in worker.log, "prompts and answers stay out of logs"


@pytest.fixture
def fleet(make_fleet: MakeFleet) -> Fleet:
    return make_fleet()


def test_plain_send_task_and_get(fleet: Fleet) -> None:
    worker = fleet.worker()
    task = fleet.send(prompt="hello there", max_tokens=3)
    value = task.get(timeout=20)
    assert value["text"] == "hello there hello"
    assert value["finish_reason"] == "length"
    assert value["job_id"] == task.id
    assert "token_ids" not in value
    assert fleet.state(task.id) is JobState.SUCCEEDED
    many = group(signature(fleet, f"word{n} x", 2) for n in range(200)).apply_async()
    texts = [value["text"] for value in many.get(timeout=60)]
    assert texts == [f"word{n} x" for n in range(200)]

    # A bad payload fails by name, and nothing else is disturbed.
    for payload, error, text in (
        ({"model": "echo", "prompt": "x", "temperature": -1}, RequestError, "temperature"),
        ({"model": "nobody", "prompt": "x"}, UnknownModelError, "is not served here"),
        ({"model": "echo", "prompt": "   "}, RequestError, "holds no word"),
        ("not even an object", RequestError, "must be a JSON object"),
    ):
        bad = fleet.send_raw(payload)
        with pytest.raises(error, match=text):
            bad.get(timeout=20)
        assert fleet.state(bad.id) is JobState.FAILED
    assert fleet.send().get(timeout=20)["finish_reason"] == "length"

    # Celery's own tools show the pool and no secrets.
    inspect = fleet.app.control.inspect(timeout=2, limit=1)
    (stats,) = wait_until(inspect.stats, PATIENCE_S, "an answer").values()
    assert stats["pool"]["backend"] == "echo"
    assert stats["pool"]["max-concurrency"] == fleet.settings.engine.max_num_seqs
    assert stats["prefetch_count"] == 32 + 8 + 4
    fleet.wait_drained()
    assert worker.stop() == 0
    for text in ("hello there", "word7", "Traceback", "not even"):
        assert text not in worker.log


def signature(fleet: Fleet, prompt: str, tokens: int) -> Any:
    payload = {"model": "echo", "prompt": prompt, "max_tokens": tokens}
    return fleet.app.signature("tokenmill.generate", args=[payload], queue=fleet.queue, immutable=True)


def test_links_chains_and_chords_and_celerys_own_command(fleet: Fleet) -> None:
    command = [sys.executable, "-m", "celery", "-A", "tests.fleet.linked_app", "worker", "-l", "info"]
    worker = fleet.add(WorkerProcess(command, environment=fleet.environment()))
    collect = fleet.app.signature("tests.collect", queue=fleet.queue)
    linked = signature(fleet, "a b", 2).apply_async(link=collect.clone())
    assert linked.get(timeout=20)["text"] == "a b"
    (child,) = wait_until(lambda: linked.children, PATIENCE_S, "the link")
    assert child.get(timeout=20) == {"collected": "a b"}
    assert chain(signature(fleet, "c d", 1), collect.clone())().get(timeout=20) == {"collected": "c"}
    header = [signature(fleet, f"w{n} v", 1) for n in range(10)]
    assert chord(header)(collect.clone()).get(timeout=30) == {"collected": sorted(f"w{n}" for n in range(10))}
    fleet.wait_drained()
    assert worker.stop() == 0


def test_duplicates_of_one_job_run_once(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(**SLOW)
    fleet.worker()
    job_id = "the-same-id"
    for _ in range(5):
        fleet.send_raw({"model": "echo", "prompt": "x y", "max_tokens": 10}, task_id=job_id)
    fleet.wait_state(job_id, JobState.SUCCEEDED)
    fleet.wait_drained()
    assert fleet.attempts(job_id) == [AttemptOutcome.SUCCEEDED]
    fleet.send_raw({"model": "echo", "prompt": "x y", "max_tokens": 10}, task_id=job_id)
    fleet.wait_drained()
    assert fleet.attempts(job_id) == [AttemptOutcome.SUCCEEDED], "an ended job is not run again"


def test_cancel_and_revoke(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(
        prefetch_headroom=0, prefetch_reserve=1, engine={"echo_tokens_per_s": 20, "max_num_seqs": 1}
    )
    worker = fleet.worker()
    first, flagged, revoked, waiting, cancelled, last = jobs = ids(6)
    for job_id in jobs:
        fleet.submit(job_id, max_tokens=5 if job_id == last else 4000)
    fleet.wait_state(first, JobState.RUNNING)

    # Waiting in Redis: the row decides, and a revoke is remembered by the worker.
    with fleet.engine.begin() as conn:
        assert request_cancel(conn, [cancelled]) == {cancelled: JobState.CANCELLED}
    fleet.tell("revoke", task_id=waiting)

    # Running: by our own command, by the flag alone, by Celery's revoke.
    fleet.tell(CANCEL_COMMAND, ids=[first])
    fleet.wait_state(first, JobState.CANCELLED)
    result = fleet.result(first)
    assert result is not None
    assert result.finish_reason == "cancelled"
    with pytest.raises(TaskRevokedError):
        fleet.app.AsyncResult(first).get(timeout=20)
    fleet.wait_state(flagged, JobState.RUNNING)
    with fleet.engine.begin() as conn:
        request_cancel(conn, [flagged])
    fleet.wait_state(flagged, JobState.CANCELLED)
    fleet.wait_state(revoked, JobState.RUNNING)
    fleet.tell("revoke", task_id=revoked, terminate=True)
    fleet.wait_state(revoked, JobState.CANCELLED)
    fleet.wait_state(waiting, JobState.CANCELLED)
    fleet.wait_state(last, JobState.SUCCEEDED)
    fleet.wait_drained()
    assert fleet.attempts(cancelled) == []
    assert worker.stop() == 0


def test_expired_messages_end_as_expired(fleet: Fleet) -> None:
    task = fleet.send_raw({"model": "echo", "prompt": "x"}, expires=-1)
    fleet.worker()
    fleet.wait_state(task.id, JobState.EXPIRED)
    fleet.wait_drained()


def test_time_limits(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(**SLOW)
    fleet.worker()
    payload = {"model": "echo", "prompt": "x y", "max_tokens": 1000}
    soft = fleet.send_raw(payload, soft_time_limit=0.5)
    hard = fleet.send_raw(payload, time_limit=0.5)
    value = soft.get(timeout=20)
    assert value["finish_reason"] == "deadline"
    assert value["completion_tokens"] < 1000, "it was cut off"
    with pytest.raises(Exception, match=r"TimeLimitExceeded\(0.5"):
        hard.get(timeout=20)
    assert fleet.state(hard.id) is JobState.EXPIRED
    fleet.wait_drained()


@pytest.mark.parametrize("grace_s", [20.0, 0.0], ids=["with grace", "without grace"])
def test_a_warm_shutdown_under_load_leaves_nothing_unacknowledged(
    make_fleet: MakeFleet, grace_s: float
) -> None:
    fleet = make_fleet(shutdown_grace_s=grace_s, engine={"echo_tokens_per_s": 50, "max_num_seqs": 8})
    worker = fleet.worker()
    jobs = [fleet.submit(job_id, max_tokens=20) for job_id in ids(150)]
    wait_until(lambda: JobState.SUCCEEDED in fleet.states().values(), PATIENCE_S, "the first result")
    assert worker.stop() == 0
    assert fleet.redis.unacked() == 0
    states = fleet.states()
    unfinished = [job_id for job_id in jobs if states[job_id] is JobState.QUEUED]
    assert JobState.RUNNING not in states.values()
    assert len(unfinished) == fleet.queued() > 0, "every job that is not done has its message back"
    assert fleet.worker_states() == ["stopped"]
    fleet.worker(engine={})
    assert set(fleet.wait_all(jobs).values()) == {JobState.SUCCEEDED}
    fleet.wait_drained()
    if grace_s:
        assert all(fleet.attempts(job_id) == [AttemptOutcome.SUCCEEDED] for job_id in jobs), (
            "no work was thrown away"
        )


def test_a_cold_shutdown_hands_back_at_once(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(**SLOW)
    worker = fleet.worker()
    job_id = fleet.submit(ids(1)[0], max_tokens=LONG)
    fleet.wait_state(job_id, JobState.RUNNING)
    worker.signal(signal.SIGQUIT)
    worker.wait()
    assert fleet.state(job_id) is JobState.QUEUED
    fleet.worker(engine={})
    fleet.wait_state(job_id, JobState.SUCCEEDED)
    fleet.wait_drained()


def test_a_killed_workers_job_is_finished_by_another(make_fleet: MakeFleet, any_database_url: str) -> None:
    fleet = make_fleet(any_database_url, **SLOW)
    fleet.start_workers(2)
    jobs = [fleet.submit(job_id, max_tokens=40) for job_id in ids(3)]
    for job_id in jobs:
        fleet.wait_state(job_id, JobState.RUNNING)
    doomed = fleet.owner(jobs[0])
    theirs = [job_id for job_id in jobs if fleet.owner(job_id) is doomed]
    doomed.kill()
    for job_id in theirs:
        fleet.wait_attempt(job_id, 2)
    assert set(fleet.wait_all(jobs).values()) == {JobState.SUCCEEDED}
    for job_id in theirs:
        assert fleet.attempts(job_id) == [AttemptOutcome.LOST, AttemptOutcome.SUCCEEDED]
    fleet.wait_drained()
    assert sorted(fleet.worker_states()) == ["dead", "online"]


def test_a_job_may_outlast_the_visibility_timeout_many_times(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(dead_after_s=30, **SLOW)
    fleet.start_workers(2)
    job_id = fleet.submit(ids(1)[0], max_tokens=100)
    fleet.wait_state(job_id, JobState.SUCCEEDED)
    fleet.wait_drained()
    assert fleet.attempts(job_id) == [AttemptOutcome.SUCCEEDED]


def test_a_worker_that_was_frozen_past_its_death_loses_and_starts_anew(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(**SLOW)
    fleet.start_workers(2)
    job_id = fleet.submit(ids(1)[0], max_tokens=40)
    fleet.wait_state(job_id, JobState.RUNNING)
    frozen = fleet.owner(job_id)
    frozen.signal(signal.SIGSTOP)
    fleet.wait_attempt(job_id, 2)
    frozen.signal(signal.SIGCONT)
    assert frozen.wait() == 75
    assert "DeclaredDeadError" in frozen.log
    fleet.wait_state(job_id, JobState.SUCCEEDED)
    assert fleet.attempts(job_id) == [AttemptOutcome.LOST, AttemptOutcome.SUCCEEDED]
    fleet.wait_drained()


def test_an_engine_that_hangs_ends_its_worker_and_frees_its_jobs(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(backend="tests.fleet.backends:hangs_of_poison", engine_stall_s=2, **SLOW)
    worker = fleet.worker()
    fleet.submit("neighbour", max_tokens=LONG)
    fleet.wait_state("neighbour", JobState.RUNNING)
    fleet.submit("deadly", prompt="poison")
    assert worker.wait() == 70
    assert "EngineStalledError" in worker.log
    assert fleet.state("neighbour") is JobState.QUEUED
    assert fleet.state("deadly") is JobState.QUEUED
    assert [attempt for job in ("neighbour", "deadly") for attempt in fleet.attempts(job)] == [
        AttemptOutcome.LOST
    ] * 2


def test_a_dead_backend_hands_back_and_exits(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(backend="tests.fleet.backends:dies_of_poison", **SLOW)
    worker = fleet.worker()
    innocents = [fleet.submit(job_id, max_tokens=LONG) for job_id in ids(3)]
    for job_id in innocents:
        fleet.wait_state(job_id, JobState.RUNNING)
    poison = fleet.submit(ids(1)[0], prompt="poison", max_tokens=30)
    assert worker.wait() == 70
    assert "EngineDeadError" in worker.log
    jobs = [*innocents, poison]
    assert {fleet.state(job_id) for job_id in jobs} == {JobState.QUEUED}
    assert fleet.redis.unacked() == 0
    assert fleet.queued() == 4
    fleet.worker(backend="echo", engine={})
    assert set(fleet.wait_all(jobs).values()) == {JobState.SUCCEEDED}


def test_a_newer_payload_is_left_for_a_newer_worker(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(newer_payload_delay_s=0.2)
    worker = fleet.worker()
    newer = fleet.send_raw({"version": 2, "model": "echo", "novelty": True})
    worker.wait_for("goes back to its queue")
    assert fleet.send().get(timeout=20)["finish_reason"] == "length", "others are not held up"
    assert fleet.state(newer.id) is None
    assert newer.state == "PENDING"
    assert worker.stop() == 0
    assert fleet.queued() == 1
    assert fleet.redis.unacked() == 0


def test_results_wait_while_the_database_is_away(make_fleet: MakeFleet, tmp_path: Path) -> None:
    with private_server("postgresql") as server, fresh_database(server) as url:
        fleet = make_fleet(url, spool_dir=str(tmp_path / "spool"), **SLOW)
        worker = fleet.worker()
        jobs = [fleet.submit(job_id, max_tokens=60) for job_id in ids(4)]
        for job_id in jobs:
            fleet.wait_state(job_id, JobState.RUNNING)
        server.stop()
        worker.wait_for("The database is away")
        task = fleet.send(max_tokens=1)
        wait_until(
            lambda: sum(path.read_bytes().count(b"\n") for path in tmp_path.glob("spool/*.spool")) == 4,
            PATIENCE_S,
            "every job to end in the backend, none of which can be committed",
        )
        assert fleet.redis.unacked() > 0
        server.start()
        worker.wait_for("The database answers again")
        assert set(fleet.wait_all(jobs).values()) == {JobState.SUCCEEDED}
        assert task.get(timeout=20)["completion_tokens"] == 1
        fleet.wait_drained()
        assert worker.log.count("The database is away") == 1
        assert all(fleet.attempts(job_id) == [AttemptOutcome.SUCCEEDED] for job_id in jobs)
        assert worker.stop() == 0
        fleet.close()


def test_the_command_restarts_a_killed_worker_and_stops_on_sigterm(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(restart_backoff_s=0.2)
    command = [
        sys.executable,
        "-c",
        "import sys; from workers.cli import main; sys.argv = ['tokenmill', 'worker']; main()",
    ]
    supervisor = fleet.add(WorkerProcess(command, environment=fleet.environment()))
    # A worker says that it is ready just before it listens to what is asked of all.
    worker = wait_until(fleet.app.control.inspect(timeout=2, limit=1).stats, PATIENCE_S, "an answer")
    os.kill(next(iter(worker.values()))["pid"], signal.SIGKILL)
    supervisor.wait_for("was killed by SIGKILL; starting again in 0.2s")
    assert fleet.send().get(timeout=30)["finish_reason"] == "length"
    assert supervisor.stop() == 0
    assert fleet.worker_states()[-1] == "stopped"


def test_a_worker_without_a_migrated_database_says_so_and_is_not_restarted(make_fleet: MakeFleet) -> None:
    fleet = make_fleet()
    path = fleet.settings.database_url.removeprefix("sqlite:///") + ".empty"
    worker = fleet.worker(wait=False, database_url=f"sqlite:///{path}")
    assert worker.wait() == EXIT_CONFIGURATION
    assert "tokenmill db upgrade" in worker.log
    assert "Traceback" not in worker.log


BROKEN_IMPORTS = {
    "nowhere": (None, "ModuleNotFoundError: No module named 'nowhere'", "Install that module"),
    "no_syntax": ("def handler(:\n", "SyntaxError: invalid syntax (no_syntax.py, line 1)", "Mend it"),
    "no_dependency": (
        "\nimport nowhere",
        "ModuleNotFoundError: No module named 'nowhere' (at",
        "no_dependency.py:2)",
    ),
    "no_name": ("from celery import nobody", "ImportError: cannot import name 'nobody'", "no_name.py:1)"),
    "a_fault": ("x = 1\nx / 0", "ZeroDivisionError: division by zero (at", "a_fault.py:2)"),
    "leaves": ("import sys\nsys.exit(0)", "SystemExit: 0 (at", "leaves.py:2)"),
}


@pytest.mark.parametrize("module", BROKEN_IMPORTS)
def test_a_module_that_cannot_be_imported_is_named_and_the_worker_not_restarted(
    make_fleet: MakeFleet, tmp_path: Path, module: str
) -> None:
    source, *words = BROKEN_IMPORTS[module]
    if source is not None:
        (tmp_path / f"{module}.py").write_text(source)
    fleet = make_fleet(worker_imports=module)
    command = [sys.executable, "-m", "workers.cli", "worker"]
    environment = fleet.environment() | {"PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[2]}"}
    supervisor = fleet.add(WorkerProcess(command, environment=environment), wait=False)
    assert supervisor.wait() == EXIT_CONFIGURATION
    assert "starting again" not in supervisor.log
    assert "Traceback" not in supervisor.log
    (line,) = [line for line in supervisor.lines if "cannot start" in line]
    for word in (f"worker_imports (TOKENMILL_WORKER_IMPORTS): '{module}' cannot be imported", *words):
        assert word in line


def test_no_thread_for_each_job(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(engine={"echo_tokens_per_s": 20, "max_num_seqs": 64})
    worker = fleet.worker()
    jobs = [fleet.submit(job_id, max_tokens=LONG) for job_id in ids(64)]
    for job_id in jobs:
        fleet.wait_state(job_id, JobState.RUNNING)
    assert len(os.listdir(f"/proc/{worker.process.pid}/task")) < 20
