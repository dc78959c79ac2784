"""Celery's signals around a job: its own tracer, without what is announced elsewhere, at any moment."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from celery import signals
from celery.app import trace
from celery.backends.base import Backend
from celery.worker.consumer import Consumer

from models_db.records import StoredResult
from models_db.tables import JobState
from tests.unit.test_worker_parts import BODY, Message, request_of
from workers.app import make_app
from workers.consumer import TokenmillConsumer
from workers.finaliser import Finaliser, Threads
from workers.intake import Call, Delivery
from workers.settings import load_settings
from workers.tasks import Outcome
from workers.tracing import Beginning, build_tracer

NAMES = ("task_prerun", "task_postrun", "task_success", "task_failure", "task_revoked")
OUTCOMES = {
    "succeeded": Outcome("j", "m", JobState.SUCCEEDED, StoredResult("text", "stop", 1, 1)),
    "failed": Outcome("j", "m", JobState.FAILED, None, "RequestError", "bad"),
    "cancelled": Outcome("j", "m", JobState.CANCELLED),
    "expired": Outcome("j", "m", JobState.EXPIRED, None, "deadline", "late"),
}


@pytest.fixture
def heard() -> Iterator[list[str]]:
    """The names of signals, in the order in which they are sent."""
    heard: list[str] = []

    def listener(name: str) -> Callable[..., None]:
        return lambda **_: heard.append(name.removeprefix("task_"))

    listeners = {name: listener(name) for name in NAMES}
    for name, listen in listeners.items():
        getattr(signals, name).connect(listen, weak=False)
    yield heard
    for name, listen in listeners.items():
        getattr(signals, name).disconnect(listen)


class States(Backend):  # type: ignore[misc]
    """A result backend that keeps the states it is told."""

    def __init__(self, app: Any) -> None:
        super().__init__(app)
        self.states: list[str] = []

    def _store_result(self, task_id: str, result: Any, state: str, *_: Any, **__: Any) -> None:
        self.states.append(state)


def end(outcome: Outcome, *, begun: bool) -> list[str]:
    """Have Celery's tracer tell of the outcome; the states that its result had."""
    request, _ = request_of(Message(BODY))
    task = request.task
    task.app.conf.task_track_started = True
    task.backend = States(task.app)
    task.tracer = build_tracer(task, "here")
    threads = Threads(1)
    finaliser = Finaliser(task, threads, lambda action: None)
    call = Call(task.__trace__, (request.id, request.args, request.kwargs, request.request_dict), {})
    delivery = Delivery(request=request, call=call, accepted=begun)
    if begun:
        finaliser.started(delivery)
    finaliser.trace(delivery, outcome, 1.0, lambda: None)
    threads.start()
    threads.stop(timeout_s=20)
    states: list[str] = task.backend.states
    return states


@pytest.mark.parametrize(
    ("kind", "between", "state"),
    [
        ("succeeded", ["success"], "SUCCESS"),
        ("failed", ["failure"], "FAILURE"),
        ("expired", ["failure"], "FAILURE"),
        ("cancelled", ["revoked"], "REVOKED"),
    ],
)
def test_a_job_that_began_has_one_beginning_and_one_end(
    heard: list[str], kind: str, between: list[str], state: str
) -> None:
    assert end(OUTCOMES[kind], begun=True) == ["STARTED", state]
    assert heard == ["prerun", *between, "postrun"]


@pytest.mark.parametrize(
    ("kind", "only", "state"), [("expired", "failure", "FAILURE"), ("cancelled", "revoked", "REVOKED")]
)
def test_a_job_that_never_began_has_neither(heard: list[str], kind: str, only: str, state: str) -> None:
    assert end(OUTCOMES[kind], begun=False) == [state]
    assert heard == [only]


def test_signals_go_on_in_other_threads_while_a_tracer_is_built(
    heard: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new connection to Redis builds one in the middle of everything."""
    app = make_app(load_settings(model="m"))
    task = app.tasks["tokenmill.generate"]
    request, _ = request_of(Message(BODY))
    build = trace.build_tracer

    def building(*args: Any, **kwargs: Any) -> Any:
        def meanwhile() -> None:
            Beginning(request.task, request).begin()
            assert trace.signals.task_prerun is signals.task_prerun, "another's tracer is built with them"

        errors: list[BaseException] = []

        def run() -> None:
            try:
                meanwhile()
            except BaseException as exc:
                errors.append(exc)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join(20)
        assert errors == []
        return build(*args, **kwargs)

    monkeypatch.setattr(trace, "build_tracer", building)
    build_tracer(task, "here")
    assert heard == ["prerun", "prerun"], "one for each of the two tracers that are built"
    assert trace.signals is signals


def test_a_new_connection_never_shows_celerys_own_tracer(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would announce the beginning a second time, at the end."""
    app = make_app(load_settings(model="m"))
    task = app.tasks["tokenmill.generate"]
    consumer = object.__new__(TokenmillConsumer)
    consumer.app, consumer.hostname = app, "here"
    seen: list[Any] = []

    def update_strategies(_: Consumer) -> None:
        task.__trace__ = celerys
        seen.append(task.__trace__)

    def celerys() -> None: ...

    monkeypatch.setattr(Consumer, "update_strategies", update_strategies)
    consumer.update_strategies()
    ours = task.__trace__
    assert ours is not celerys
    consumer.update_strategies()
    assert seen == [celerys, ours], "the first is before any message"
    assert task.__trace__ not in (celerys, None)


def test_in_another_pool_the_task_has_celerys_tracer() -> None:
    task = make_app(load_settings(model="m")).tasks["tokenmill.generate"]
    assert task.__trace__ is None
    task.__trace__ = SimpleNamespace()
    assert isinstance(task.__trace__, SimpleNamespace)
