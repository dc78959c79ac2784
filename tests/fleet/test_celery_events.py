"""Celery's events as its own receiver, ``celery events`` and Flower see them, with the times that jobs really took."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from urllib.error import URLError

import pytest
from celery.events.state import State
from kombu.exceptions import OperationalError

from backend.api import UnknownModelError
from models_db.tables import JobState
from tests.fleet.celery_fleet import TOKENS_PER_S, CeleryFleet, assert_nothing_private, celery_fleet
from tests.fleet.fleet import PATIENCE_S, wait_until
from tests.servers import free_port
from workers.control import CANCEL_COMMAND

TASK = "tokenmill.generate"
FOR_EVER = 100_000
GRAIN_S = 0.05  # of what echo takes for a word, and of clocks


class Watcher:
    """What Celery's own receiver of events hears, from a thread."""

    def __init__(self, app: Any) -> None:
        self.events: list[dict[str, Any]] = []
        self.state = State()
        self._connection = app.connection_for_read()
        self._receiver = app.events.Receiver(self._connection, handlers={"*": self._on_event})
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        wait_until(lambda: app.control.heartbeat() or self.events, PATIENCE_S, "a first event")

    def of(self, task_id: str) -> list[dict[str, Any]]:
        return [event for event in list(self.events) if event.get("uuid") == task_id]

    def types(self, task_id: str) -> list[str]:
        return [event["type"].removeprefix("task-") for event in self.of(task_id)]

    def wait(self, task_id: str, kind: str, timeout_s: float = PATIENCE_S) -> dict[str, Any]:
        """The event of this type, once it has come."""

        def found() -> dict[str, Any] | None:
            return next((event for event in self.of(task_id) if event["type"] == kind), None)

        return wait_until(found, timeout_s, f"{kind} of {task_id}")

    def wait_event(self, true: Callable[[dict[str, Any]], bool], what: str) -> dict[str, Any]:
        return wait_until(
            lambda: next((event for event in list(self.events) if true(event)), None), PATIENCE_S, what
        )

    def stop(self) -> None:
        self._receiver.should_stop = True
        self._thread.join(PATIENCE_S)
        self._connection.close()

    def _on_event(self, event: dict[str, Any]) -> None:
        self.events.append(event)
        self.state.event(event)

    def _run(self) -> None:
        with suppress(OperationalError, OSError):  # the server is gone, at the end
            self._receiver.capture(limit=None, timeout=None, wakeup=False)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CeleryFleet]:
    with celery_fleet(tmp_path_factory.mktemp("events")) as fleet:
        fleet.observed_worker()
        # A worker says that it is ready just before it listens to what is asked of all.
        enable = partial(fleet.app.control.broadcast, "enable_events", reply=True, timeout=3, limit=1)
        wait_until(lambda: "enabled" in json.dumps(enable()), PATIENCE_S, "events")
        yield fleet


@pytest.fixture(scope="module")
def watcher(fleet: CeleryFleet) -> Iterator[Watcher]:
    watcher = Watcher(fleet.app)
    yield watcher
    watcher.stop()
    assert_nothing_private([json.dumps(watcher.events, default=str)])


def test_a_job_is_received_started_and_succeeded_with_the_time_that_it_took(
    fleet: CeleryFleet, watcher: Watcher
) -> None:
    both = [fleet.signature(FOR_EVER).apply_async() for _ in range(2)]  # every slot
    for task in both:
        watcher.wait(task.id, "task-started")
    task = fleet.signature(20).apply_async()
    received = watcher.wait(task.id, "task-received")
    assert (received["name"], received["args"], received["retries"]) == (
        TASK,
        "(<tokenmill payload for echo>,)",
        0,
    )
    heartbeat = watcher.wait_event(
        lambda event: event["type"] == "worker-heartbeat" and event["timestamp"] > received["timestamp"],
        "a heartbeat while it waits",
    )
    assert (heartbeat["active"], heartbeat["processed"]) == (2, 2)
    assert watcher.types(task.id) == ["received"], "it has no slot yet"
    freed_at = time.monotonic()
    both[0].revoke(terminate=True)
    both[1].revoke(terminate=True)
    succeeded = watcher.wait(task.id, "task-succeeded")
    since = time.monotonic() - freed_at
    assert watcher.types(task.id) == ["received", "started", "succeeded"]
    stored = fleet.result(task.id)
    assert stored is not None
    assert stored.latency_s is not None
    assert stored.queue_time_s is not None
    took = stored.latency_s - stored.queue_time_s
    assert took - GRAIN_S <= succeeded["runtime"] <= since
    assert succeeded["runtime"] >= 20 / TOKENS_PER_S - GRAIN_S
    started = watcher.wait(task.id, "task-started")
    assert 0 < succeeded["timestamp"] - started["timestamp"] <= since
    assert started["timestamp"] > heartbeat["timestamp"], "it was received before and waited for a slot"
    assert succeeded["result"] == "<20 tokens, length>"
    seen = watcher.state.tasks[task.id]
    assert (seen.state, seen.runtime, seen.worker.hostname) == (
        "SUCCESS",
        succeeded["runtime"],
        heartbeat["hostname"],
    )


def test_every_other_end_is_told_too(fleet: CeleryFleet, watcher: Watcher) -> None:
    bad = fleet.app.send_task(TASK, args=[{"model": "nobody", "prompt": "x"}], queue=fleet.queue)
    failed = watcher.wait(bad.id, "task-failed")
    assert "UnknownModelError" in failed["exception"]
    with pytest.raises(UnknownModelError):
        bad.get(timeout=20)
    late = fleet.signature(1).apply_async(expires=-1)
    assert watcher.wait(late.id, "task-revoked")["expired"] is True
    hard = fleet.signature(FOR_EVER).apply_async(time_limit=0.3)
    assert "TimeLimitExceeded" in watcher.wait(hard.id, "task-failed")["traceback"]
    terminated = fleet.signature(FOR_EVER).apply_async()
    watcher.wait(terminated.id, "task-started")
    terminated.revoke(terminate=True)
    assert watcher.wait(terminated.id, "task-revoked")["terminated"] is True
    cancelled = fleet.signature(FOR_EVER).apply_async()
    watcher.wait(cancelled.id, "task-started")
    fleet.app.control.broadcast(CANCEL_COMMAND, arguments={"ids": [cancelled.id]})
    watcher.wait(cancelled.id, "task-revoked")
    again = fleet.task("flaky", 1).apply_async()
    watcher.wait(again.id, "task-succeeded")
    unknown = fleet.app.send_task("tests.nobody", queue=fleet.queue)
    assert "NotRegistered" in watcher.wait(unknown.id, "task-failed")["exception"]
    ends = {
        bad.id: ["received", "started", "failed"],
        late.id: ["revoked"],
        hard.id: ["received", "started", "failed"],
        terminated.id: ["received", "started", "revoked"],
        cancelled.id: ["received", "started", "revoked"],
    }
    assert {task_id: watcher.types(task_id) for task_id in ends} == ends
    assert sorted(watcher.types(again.id)) == sorted(
        ["received", "started", "retried", "received", "started", "succeeded"]
    )
    fleet.wait_drained()


def test_an_answer_is_in_no_event_of_a_callback(fleet: CeleryFleet, watcher: Watcher) -> None:
    task = fleet.signature(1).apply_async(link=fleet.task("collect"))
    task.get(timeout=20)
    (callback,) = wait_until(lambda: task.children, PATIENCE_S, "the link")
    assert watcher.wait(callback.id, "task-received")["args"] == "(...)"
    watcher.wait(callback.id, "task-succeeded")  # that nothing private is in it, the fixture looks at


def test_the_dump_of_celery_events_shows_them(fleet: CeleryFleet) -> None:
    command = fleet.celery("events", "--dump")
    lines: list[str] = []
    assert command.stdout is not None
    reader = threading.Thread(target=lambda: lines.extend(command.stdout or ()), daemon=True)
    reader.start()
    try:
        wait_until(lambda: any("HEARTBEAT" in line.upper() for line in lines), PATIENCE_S, "a heartbeat")
        task = fleet.signature(1).apply_async()
        wait_until(
            lambda: any("succeeded" in line and task.id in line for line in lines),
            PATIENCE_S,
            "the end in the dump",
        )
    finally:
        command.terminate()
        command.wait(PATIENCE_S)
    about = [line for line in lines if task.id in line]
    assert [
        word for line in about for word in ("received", "started", "succeeded") if f"task {word}" in line
    ] == [
        "received",
        "started",
        "succeeded",
    ]
    assert_nothing_private(lines)


class Flower:
    """A Flower of our own that watches the fleet."""

    def __init__(self, fleet: CeleryFleet, folder: Path) -> None:
        self.port = free_port()
        command = [sys.executable, "-m", "celery", "-A", "workers.celery_app", "flower"]
        self._log = (folder / "flower.log").open("wb")
        self.log = folder / "flower.log"
        self.process = subprocess.Popen(
            [*command, f"--port={self.port}", "--address=127.0.0.1"],
            env={**os.environ, **fleet.environment(), "FLOWER_UNAUTHENTICATED_API": "true"},
            stdout=self._log,
            stderr=self._log,
        )

    def get(self, path: str) -> str | None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=10) as answer:
                return str(answer.read().decode())
        except (URLError, OSError):
            return None

    def json(self, path: str) -> Any:
        return json.loads(self.get(path) or "{}")

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(PATIENCE_S)
        self._log.close()


@pytest.fixture(scope="module")
def flower(fleet: CeleryFleet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Flower]:
    flower = Flower(fleet, tmp_path_factory.mktemp("flower"))
    yield flower
    flower.stop()


def test_flower_sees_workers_and_tasks_with_their_runtimes(fleet: CeleryFleet, flower: Flower) -> None:
    worker = fleet.workers[0].process.pid
    name = f"tokenmill-{worker}@{fleet.settings.worker_name}"
    wait_until(lambda: name in flower.json("/api/workers"), 2 * PATIENCE_S, "Flower to see the worker")
    wait_until(
        lambda: "flower_worker_online" in (flower.get("/metrics") or ""), PATIENCE_S, "Flower to hear events"
    )
    begun = time.monotonic()
    task = fleet.signature(20).apply_async()
    task.get(timeout=20)
    elapsed = time.monotonic() - begun
    fleet.wait_state(task.id, JobState.SUCCEEDED)
    shown = wait_until(
        lambda: (seen := flower.json("/api/tasks").get(task.id)) and seen["state"] == "SUCCESS" and seen,
        PATIENCE_S,
        "Flower to see the job's end",
    )
    assert shown["name"] == TASK
    assert 20 / TOKENS_PER_S - GRAIN_S <= shown["runtime"] <= elapsed
    assert 0 <= shown["started"] - shown["received"] <= elapsed
    assert name in json.dumps(shown)
    answer = flower.json(f"/api/workers?refresh=1&workername={name}")[name]
    assert answer["stats"]["pool"]["backend"] == "echo"
    assert TASK in answer["registered"]
    assert [queue["name"] for queue in answer["active_queues"]] == [fleet.queue]

    # The same in the numbers that Flower, as any exporter that listens to events, has for Prometheus.
    metrics = flower.get("/metrics") or ""
    runtime = float(find(rf'flower_task_runtime_seconds_sum{{task="{TASK}",worker="{name}"}} (\S+)', metrics))
    assert runtime == pytest.approx(shown["runtime"])
    assert (
        find(rf'flower_events_total{{task="{TASK}",type="task-succeeded",worker="{name}"}} (\S+)', metrics)
        == "1.0"
    )
    assert_nothing_private(
        [
            metrics,
            flower.get("/api/tasks") or "",
            flower.get("/api/workers?refresh=1") or "",
            flower.log.read_text(),
        ]
    )


def find(pattern: str, text: str) -> str:
    found = re.search(pattern, text)
    assert found, f"no {pattern} in:\n{text}"
    return found[1]
