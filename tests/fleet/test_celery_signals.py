"""Celery's signals and OpenTelemetry's spans in a user's module: once a job, in order, as long as the job took."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import pytest
from opentelemetry.instrumentation.celery import CeleryInstrumentor
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from models_db.tables import JobState
from tests.fleet.celery_fleet import (
    PROMPT,
    SLOTS,
    TOKENS_PER_S,
    CeleryFleet,
    assert_nothing_private,
    celery_fleet,
)
from tests.fleet.fleet import PATIENCE_S, wait_until
from workers.control import CANCEL_COMMAND

TASK = "tokenmill.generate"
FOR_EVER = 100_000
GRAIN_S = 0.05  # of what echo takes for a word, and of clocks


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CeleryFleet]:
    with celery_fleet(tmp_path_factory.mktemp("signals")) as fleet:
        fleet.observed_worker(traced=True)
        yield fleet


def names(notes: list[dict[str, Any]]) -> list[str]:
    return [note["what"].removeprefix("task_") for note in notes]


def test_a_job_is_signalled_once_and_from_its_beginning_to_its_end(fleet: CeleryFleet) -> None:
    sent_at = time.monotonic()
    task = fleet.signature(20).apply_async()
    notes = fleet.wait_seen(task.id, "task_postrun")
    in_all = time.monotonic() - sent_at
    assert names(notes) == ["received", "prerun", "success", "postrun"]
    received, prerun, success, postrun = notes
    assert received["info"]["id"] == task.id
    for note in (prerun, success, postrun):
        assert (note["sender"], note["current"]) == (TASK, task.id), "task.request is the job's"
        assert note["mark"] == "left at the beginning", "what a handler put on task.request is there later"
    assert (prerun["args"], prerun["kwargs"]) == ([{"model": "echo", "prompt": PROMPT, "max_tokens": 20}], {})
    assert (postrun["state"], postrun["retval"]) == ("SUCCESS", "<20 tokens, length>")
    stored = fleet.result(task.id)
    assert stored is not None
    took = (stored.latency_s or 0) - (stored.queue_time_s or 0)
    assert took >= 20 / TOKENS_PER_S - GRAIN_S
    assert took - GRAIN_S <= success["runtime"] <= in_all
    assert sent_at < received["at"] <= prerun["at"] <= success["at"] <= postrun["at"]
    assert postrun["at"] - sent_at >= 20 / TOKENS_PER_S - GRAIN_S


def test_each_other_end_has_its_signals(fleet: CeleryFleet) -> None:
    bad = fleet.app.send_task(TASK, args=[{"model": "nobody", "prompt": "x"}], queue=fleet.queue)
    sent_at = time.monotonic()
    hard = fleet.signature(FOR_EVER).apply_async(time_limit=0.3)
    late = fleet.signature(1).apply_async(expires=-1)
    terminated = fleet.signature(FOR_EVER).apply_async()
    fleet.wait_seen(terminated.id, "task_prerun")
    terminated.revoke(terminate=True)
    unknown = fleet.app.send_task("tests.nobody", queue=fleet.queue)
    ends = {
        bad.id: ("task_postrun", ["failure", "postrun", "prerun", "received"]),
        hard.id: ("task_failure", ["failure", "postrun", "prerun", "received"]),
        late.id: ("task_revoked", ["revoked"]),
        terminated.id: ("task_postrun", ["postrun", "prerun", "received", "revoked"]),
        unknown.id: ("task_unknown", ["unknown"]),
    }
    for task_id, (last, _) in ends.items():
        fleet.wait_seen(task_id, last)
    wait_until(
        lambda: (
            {one: sorted(names(fleet.seen(one))) for one in ends}
            == {one: kinds for one, (_, kinds) in ends.items()}
        ),
        PATIENCE_S,
        f"{ends}, not {json.dumps({one: names(fleet.seen(one)) for one in ends})}",
    )
    said = {one: {note["what"]: note for note in fleet.seen(one)} for one in ends}
    assert "UnknownModelError" in said[bad.id]["task_failure"]["exception"]
    assert names(fleet.seen(hard.id)) == ["received", "prerun", "failure", "postrun"]
    assert said[hard.id]["task_postrun"]["state"] == "FAILURE"
    assert "TimeLimitExceeded" in said[hard.id]["task_failure"]["exception"]
    assert said[hard.id]["task_postrun"]["at"] - sent_at >= 0.3 - GRAIN_S
    assert said[late.id]["task_revoked"]["expired"] is True
    assert said[terminated.id]["task_revoked"]["terminated"] is True
    assert said[terminated.id]["task_postrun"]["state"] == "REVOKED"
    assert said[unknown.id]["task_unknown"]["name"] == "tests.nobody"


def test_what_ends_without_a_slot_is_never_said_to_start(fleet: CeleryFleet) -> None:
    running = [fleet.signature(FOR_EVER).apply_async() for _ in range(SLOTS)]
    for task in running:
        fleet.wait_seen(task.id, "task_prerun")
    payload = {"model": "echo", "prompt": PROMPT, "max_tokens": 2}
    late = fleet.app.send_task(TASK, args=[payload | {"deadline_s": 0.3}], queue=fleet.queue)
    assert names(fleet.wait_seen(late.id, "task_failure")) == ["received", "failure"]
    cancelled = fleet.signature(2).apply_async()
    fleet.wait_seen(cancelled.id, "task_received")
    fleet.wait_state(cancelled.id, JobState.RUNNING)  # claimed, in the backend's queue
    fleet.app.control.broadcast(CANCEL_COMMAND, arguments={"ids": [cancelled.id]})
    assert names(fleet.wait_seen(cancelled.id, "task_revoked")) == ["received", "revoked"]
    for task in running:
        task.revoke(terminate=True)
        fleet.wait_seen(task.id, "task_postrun")
    after = fleet.signature(2).apply_async()
    fleet.wait_seen(after.id, "task_postrun")
    for task in (late, cancelled):
        assert not {"task_prerun", "task_postrun"} & {note["what"] for note in fleet.seen(task.id)}
    assert "no existing span found" not in fleet.workers[0].log


def spans(fleet: CeleryFleet) -> list[dict[str, Any]]:
    lines = fleet.spans_file.read_text().splitlines() if fleet.spans_file.exists() else []
    return [json.loads(line) for line in lines]


def seconds(span: dict[str, Any]) -> float:
    ended, started = (datetime.fromisoformat(span[name]) for name in ("end_time", "start_time"))
    return (ended - started).total_seconds()


def test_spans_last_as_long_as_the_job_and_belong_to_who_submitted_it(fleet: CeleryFleet) -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    instrumentor = CeleryInstrumentor()
    instrumentor.instrument(tracer_provider=provider)
    try:
        with provider.get_tracer("web").start_as_current_span("request") as request:
            sent_at = time.monotonic()
            task = fleet.signature(20).apply_async(link=fleet.task("collect"))
            trace_id = f"0x{request.get_span_context().trace_id:032x}"
    finally:
        instrumentor.uninstrument()
    task.get(timeout=20)

    def ours() -> dict[str, dict[str, Any]] | None:
        found = {span["name"]: span for span in spans(fleet) if span["context"]["trace_id"] == trace_id}
        return found if {f"run/{TASK}", "run/tests.collect"} <= found.keys() else None

    found = wait_until(ours, PATIENCE_S, "the spans of the job and of its callback in the caller's trace")
    in_all = time.monotonic() - sent_at
    run = found[f"run/{TASK}"]
    (published,) = [span for span in exporter.get_finished_spans() if span.name == f"apply_async/{TASK}"]
    assert run["parent_id"] == f"0x{published.get_span_context().span_id:016x}"
    stored = fleet.result(task.id)
    assert stored is not None
    ran = (stored.latency_s or 0) - (stored.queue_time_s or 0)
    # A worker that is held up begins the span late: hence half.
    assert ran / 2 <= seconds(run) <= in_all
    assert found["apply_async/tests.collect"]["parent_id"] == run["context"]["span_id"], (
        "links are sent within it"
    )
    assert_nothing_private([json.dumps(spans(fleet))])
    assert "Failed to detach context" not in fleet.workers[0].log


def test_the_worker_tells_of_its_life(fleet: CeleryFleet) -> None:
    (worker,) = fleet.workers
    running = fleet.signature(20).apply_async()
    fleet.wait_state(running.id, JobState.RUNNING)
    fleet.wait_seen(running.id, "task_prerun")
    assert worker.stop() == 0
    life = [note["what"] for note in fleet.seen() if note["id"] is None]
    assert life == [
        "worker_init",
        "worker_process_init",
        "worker_ready",
        "worker_shutting_down",
        "worker_process_shutdown",
        "worker_shutdown",
    ]
    assert names(fleet.seen(running.id)) == ["received", "prerun", "success", "postrun"], "before it is gone"
    assert_nothing_private([worker.log])
