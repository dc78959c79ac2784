"""The smaller parts of a worker: application, task, request, mailbox, threads, actor."""

from __future__ import annotations

import base64
import json
import threading
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
import redis
from celery.backends.base import Backend
from celery.utils.saferepr import saferepr
from celery.worker import state
from kombu.exceptions import OperationalError
from kombu.utils.json import dumps

from backend.api import ConfigurationError, EngineDeadError, PromptTooLongError, RequestError
from models_db.base import utcnow
from models_db.errors import WriterStoppedError
from models_db.records import StoredResult
from models_db.tables import JobState
from tests.messages import build_message
from workers.actor import Actor
from workers.app import make_app
from workers.finaliser import Finaliser, Threads, run_call
from workers.intake import Call, Delivery, read_delivery
from workers.mailbox import Mailbox
from workers.payload import GeneratePayload
from workers.pool import EnginePool
from workers.request import GenerateRequest
from workers.settings import load_settings
from workers.stored import has_links, read_stored
from workers.tasks import JobExpiredError, JobFailedError, Outcome, ReturnValue, error_of

RESULT = StoredResult(text="a private answer", finish_reason="stop", prompt_tokens=3, completion_tokens=4)


def outcome(state: JobState = JobState.SUCCEEDED, **fields: Any) -> Outcome:
    return Outcome("j", "m", state, **fields)


def test_the_application_takes_json_only_and_acknowledges_late() -> None:
    app = make_app(load_settings(model="m", result_expires_s=0, engine={"max_num_seqs": 7}))
    conf = app.conf
    assert conf.accept_content == ["json"]
    assert conf.task_serializer == conf.result_serializer == "json"
    assert conf.task_acks_late
    assert conf.worker_concurrency == 7
    assert conf.worker_prefetch_multiplier == 1
    assert next(iter(conf.task_queues)).name == conf.task_default_queue == "tokenmill.m"
    assert conf.result_expires is None
    assert conf.broker_transport_options["unacked_restore_interval"] == 1
    assert conf.broker_transport_options["visibility_timeout"] == 8.0
    assert app.tasks["tokenmill.generate"].acks_late


def test_what_get_returns_is_json_and_its_representation_tells_nothing() -> None:
    value = ReturnValue(outcome(result=RESULT))
    assert json.loads(dumps(value))["text"] == "a private answer"
    assert value["completion_tokens"] == 4
    assert "token_ids" not in value
    assert "private" not in repr(value) + saferepr(value) + saferepr([value])


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"error_type": "RequestError", "error_message": "prompt: bad"}, RequestError),
        ({"error_type": "PromptTooLongError", "error_message": "long"}, PromptTooLongError),
        ({"error_type": "ValueError", "error_message": "odd"}, JobFailedError),
        ({"error_type": "logging", "error_message": "odd"}, JobFailedError),
        ({}, JobFailedError),
    ],
)
def test_stored_errors_come_back_as_their_own_class(
    fields: dict[str, str], expected: type[Exception]
) -> None:
    error = error_of(outcome(JobState.FAILED, **fields))
    assert type(error) is expected
    assert fields.get("error_message", "ended as failed") in str(error)


def test_an_expired_job_is_its_own_error() -> None:
    assert type(error_of(outcome(JobState.EXPIRED))) is JobExpiredError


def test_the_task_hands_over_only_what_its_own_thread_was_given() -> None:
    task = make_app(load_settings()).tasks["tokenmill.generate"]
    with task.outcome(outcome(result=RESULT)):
        assert task.run({"any": "payload"})["text"] == "a private answer"
        seen: list[BaseException] = []

        def other() -> None:
            try:
                task.run({})
            except ConfigurationError as exc:
                seen.append(exc)

        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        assert len(seen) == 1
    with pytest.raises(ConfigurationError, match="tokenmill worker"):
        task.run({})
    with task.outcome(outcome(JobState.FAILED, error_type="EngineDeadError")), pytest.raises(EngineDeadError):
        task.run({})


# ------------------------------------------------------------------------------------------------------- request


class Message:
    """What Celery's request needs of a delivered message."""

    def __init__(self, body: Any, **headers: Any) -> None:
        self.headers = {"id": "j", "task": "tokenmill.generate", "argsrepr": "a private prompt"} | headers
        self.properties = {"correlation_id": "j", "reply_to": ""}
        self.delivery_info = {"routing_key": "q", "exchange": ""}
        self.content_type, self.content_encoding = "application/json", "utf-8"
        self.body = json.dumps(body)
        self.payload = body
        self.acknowledged = 0
        self.channel: Any = None
        self.delivery_tag = ""

    def ack_log_error(self, logger: Any, errors: Any) -> None:
        self.acknowledged += 1


class Table:
    def __init__(self) -> None:
        self.revoked: list[tuple[str, JobState]] = []

    def revoke(self, request: GenerateRequest, state: JobState) -> None:
        self.revoked.append((request.id, state))


def request_of(message: Message) -> tuple[GenerateRequest, Table]:
    app = make_app(load_settings())
    task = app.tasks["tokenmill.generate"]
    task.deliveries = table = Table()
    return GenerateRequest(message, app=app, task=task), table


BODY = [[{"model": "m", "prompt": "a private prompt"}], {}, {}]


def test_a_request_shows_its_model_and_never_its_prompt() -> None:
    request, _ = request_of(Message(BODY))
    shown = f"{request!r} {request.info()} {request.argsrepr} {request.request_dict['argsrepr']}"
    assert "payload for m" in shown
    assert "private" not in shown


@pytest.mark.parametrize(
    "fields",
    [
        {"promt": "private words"},
        {"messages": "private words"},
        {"prompt": ["private words"]},
        {"version": "private words"},
    ],
)
def test_a_refused_payload_is_described_without_its_text(fields: dict[str, Any]) -> None:
    request, _ = request_of(Message([[{"model": "smollm2"} | fields], {}, {}]))
    delivery = Delivery(request=request)
    read_delivery(delivery, load_settings(), utcnow())
    assert isinstance(delivery.error, RequestError)
    assert next(iter(fields)) in str(delivery.error)
    assert "private" not in str(delivery.error)


def test_a_refused_number_or_model_is_still_shown() -> None:
    for fields, shown in (
        ({"prompt": "x", "top_p": 7}, "got 7"),
        ({"prompt": "x", "model": "other"}, "'other'"),
    ):
        request, _ = request_of(Message([[{"model": "smollm2"} | fields], {}, {}]))
        delivery = Delivery(request=request)
        read_delivery(delivery, load_settings(), utcnow())
        assert shown in str(delivery.error)


def test_the_pool_logs_no_arguments(caplog: pytest.LogCaptureFixture) -> None:
    pool = EnginePool(1, app=make_app(load_settings()))
    pool._does_debug = True
    pool._threads = Threads(1)
    with caplog.at_level("DEBUG"):
        pool.apply_async(print, ("another.task", "a private prompt"))
    assert "private" not in caplog.text


def test_an_acknowledgement_before_the_commit_is_only_a_wish() -> None:
    message = Message(BODY)
    request, table = request_of(message)
    request.acknowledge()
    assert (message.acknowledged, table.revoked) == (0, [("j", JobState.CANCELLED)])
    request.settle()
    request.acknowledge()
    request.acknowledge()
    assert message.acknowledged == 1


def test_a_message_past_its_expiry_asks_to_end_as_expired() -> None:
    message = Message(BODY, expires="2020-01-01T00:00:00+00:00")
    request, table = request_of(message)
    assert request.looks_revoked()
    request.acknowledge()
    assert table.revoked == [("j", JobState.EXPIRED)]


def test_a_stamp_revokes_by_its_value_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job with another value of the same stamp would be taken out of its place and never ended."""
    request, _ = request_of(
        Message(BODY, stamped_headers=["batch"], stamps={"batch": ["spring"]}, batch=["spring"])
    )
    assert request.stamps == {"batch": ["spring"]}
    monkeypatch.setattr(state, "revoked_stamps", {"batch": ["winter"]})
    assert not request.looks_revoked()
    monkeypatch.setattr(state, "revoked_stamps", {"batch": ["winter", "spring"]})
    assert request.looks_revoked()


def test_an_abandoned_request_is_never_acknowledged() -> None:
    message = Message(BODY)
    request, table = request_of(message)
    request.abandoned = True
    request.settle()
    request.acknowledge()
    request.reject(requeue=True)
    request.hand_back()
    assert message.acknowledged == 0
    assert table.revoked == []


class BackendAway(Backend):  # type: ignore[misc]
    """A result backend that does not answer."""

    def _store_result(self, *_: Any, **__: Any) -> None:
        raise redis.ConnectionError("away")


@pytest.mark.parametrize("end", ["revoked", "terminated while it waited", "hard limit"])
def test_an_end_that_the_result_backend_does_not_take_is_told_by_a_further_delivery(
    end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Celery would leave the message in flight for ever, and a revoked job in its place."""
    message = Message(BODY)
    request, table = request_of(message)
    request.task.backend = BackendAway(request.task.app)
    given_back: list[bool] = []
    qos = SimpleNamespace(give_back=lambda tag, *, front: given_back.append(front))
    message.channel, message.delivery_tag = SimpleNamespace(qos=qos), "tag"
    monkeypatch.setattr("celery.worker.request.revoked_tasks", {"j"})
    if end == "revoked":
        assert request.revoked()
        assert table.revoked == [("j", JobState.CANCELLED)], "its end is committed all the same"
        assert given_back == []
        request.end()
    elif end == "terminated while it waited":
        request._terminate_on_ack = (None, 15)
        request.end()
    else:
        request.settle()
        request.on_timeout(False, 1.0)
    assert given_back == [False]
    request.end()
    assert (given_back, message.acknowledged) == ([False], 0), "and is not acknowledged"


# -------------------------------------------------------------------------------------- mailbox, threads, actor


class Hub:
    def __init__(self) -> None:
        self.soon: list[Any] = []

    def call_soon(self, action: Any) -> None:
        self.soon.append(action)

    def run(self) -> None:
        soon, self.soon = self.soon, []
        for action in soon:
            action()


def test_mail_keeps_its_order_and_wakes_the_hub_once() -> None:
    mailbox, hub, seen = Mailbox(), Hub(), []
    mailbox.post(lambda: seen.append(0))
    mailbox.attach(hub)
    for number in range(1, 4):
        mailbox.post(lambda n=number: seen.append(n))  # type: ignore[misc]
    assert len(hub.soon) == 1
    hub.run()
    assert seen == [0, 1, 2, 3]
    mailbox.post(lambda: seen.append(4))
    assert len(hub.soon) == 1


def test_one_bad_letter_does_not_stop_the_mail(caplog: pytest.LogCaptureFixture) -> None:
    mailbox, seen = Mailbox(), []
    mailbox.post(lambda: 1 / 0)
    mailbox.post(lambda: seen.append(1))
    assert mailbox.run() == 2
    assert seen == [1]


def test_detached_mail_waits_for_run() -> None:
    mailbox, hub, seen = Mailbox(), Hub(), []
    mailbox.attach(hub)
    mailbox.detach()
    threading.Timer(0.01, lambda: mailbox.post(lambda: seen.append(1))).start()
    assert mailbox.run(timeout_s=20) == 1
    assert (seen, hub.soon) == ([1], [])


def test_threads_keep_going_after_a_failure() -> None:
    threads = Threads(2)
    threads.start()
    bad = threads.submit(lambda: 1 / 0)
    good = threads.submit(lambda: threading.current_thread().name)
    assert good.result(20).startswith("finaliser-")
    assert isinstance(bad.exception(20), ZeroDivisionError)
    threads.stop(timeout_s=20)


class ResultBackend:
    def __init__(self) -> None:
        self.stored: list[tuple[str, str]] = []

    def store_result(self, task_id: str, result: Any, state: str, request: Any) -> None:
        self.stored.append((task_id, state))


def test_started_is_stored_at_admission_and_never_after_the_outcome() -> None:
    message = Message(BODY)
    request, _ = request_of(message)
    task = request.task
    task.app.conf.task_track_started = True
    task.backend = ResultBackend()
    mailbox, threads, told = Mailbox(), Threads(2), []

    def tracer(*args: Any) -> tuple[int, str, float]:
        assert task.run().get("text") == "a private answer"
        task.backend.stored.append(("j", "SUCCESS"))
        return 0, "value", 0.1

    delivery = Delivery(request=request, call=Call(tracer, (), {}), callback=told.append, accepted=True)
    finaliser = Finaliser(task, threads, mailbox.post)
    finaliser.started(delivery)
    finaliser.trace(delivery, outcome(result=RESULT), 2.5, lambda: told.append("then"))
    threads.start()
    assert mailbox.run(timeout_s=20) == 1
    threads.stop(timeout_s=20)
    assert task.backend.stored == [("j", "STARTED"), ("j", "SUCCESS")]
    assert told == [(0, "value", 2.5), "then"], "with the runtime of the engine"
    assert request.settled


def test_what_the_tracer_raises_goes_to_the_error_callback() -> None:
    told: list[Any] = []
    run_call(Call(lambda: 1 / 0, (), {}), told.append, lambda info: told.append(info.type))[0]()
    assert told == [ZeroDivisionError]


def test_an_actor_runs_events_and_timers_and_survives_faults() -> None:
    faults: list[Exception] = []
    seen: list[str] = []
    done = threading.Event()
    actor = Actor("test", faults.append)
    actor.start()
    actor.send(lambda: seen.append("event"))
    actor.send(lambda: 1 / 0)
    actor.send(lambda: actor.after(0.01, lambda: (seen.append("timer"), done.set())))  # type: ignore[func-returns-value, arg-type, return-value]
    assert done.wait(20)
    actor.stop()
    assert seen == ["event", "timer"]
    assert [type(fault) for fault in faults] == [ZeroDivisionError]


def test_the_control_command_asks_the_pool() -> None:
    from workers.control import tokenmill_cancel

    asked: list[list[str]] = []
    pool = SimpleNamespace(cancel_jobs=asked.append)
    state = SimpleNamespace(consumer=SimpleNamespace(pool=pool))
    assert tokenmill_cancel(state, ids=["a", "b"]) == {"asked": 2}
    assert tokenmill_cancel(state, ids="c") == {"asked": 1}
    assert asked == [["a", "b"], ["c"]]
    other = SimpleNamespace(consumer=SimpleNamespace(pool=object()))
    assert tokenmill_cancel(other, ids=["a"]) == {"asked": 0}


def test_links_are_seen_in_stored_messages() -> None:
    plain = build_message("j", GeneratePayload.parse({"model": "m", "prompt": "p"}))
    assert not has_links(plain)
    args, kwargs, embed = json.loads(base64.b64decode(plain["body"]))
    body = json.dumps([args, kwargs, embed | {"callbacks": [{"task": "t"}]}])
    assert has_links(plain | {"body": base64.b64encode(body.encode()).decode()})
    assert not has_links(plain | {"body": "?"})
    assert not has_links(None)
    stored = read_stored(plain | {"headers": plain["headers"] | {"timelimit": [9.0, 3.0]}})
    assert stored.payload is not None
    assert (stored.payload.prompt, stored.hard_s, stored.soft_s, stored.error) == ("p", 9.0, 3.0, None)
    for broken in ({}, {"body": 5, "properties": {}}, plain | {"body": "e30="}):
        assert read_stored(broken).error is not None


def traced(
    tracer: Any,
    body: list[Any],
    mark_told: Any = None,
) -> tuple[GenerateRequest, list[Any], Mailbox]:
    """Run a tracer for a request with this body, until its actions are in the mailbox."""
    request, _ = request_of(Message(body))
    mailbox, threads, told = Mailbox(), Threads(1), []
    delivery = Delivery(request=request, call=Call(tracer, (), {}), callback=told.append, accepted=True)
    Finaliser(request.task, threads, mailbox.post, mark_told).trace(
        delivery, outcome(result=RESULT), 1.0, lambda: told.append("then")
    )
    threads.start()
    threads.stop(timeout_s=20)
    return request, told, mailbox


def test_links_are_marked_as_run_before_the_acknowledgement() -> None:
    marked: Future[None] = Future()
    linked = [*BODY[:2], {"callbacks": [{"task": "t"}], "chain": None}]
    _, told, mailbox = traced(lambda: (0, "value", 0.1), linked, lambda job_id: marked)
    assert (mailbox.run(), told) == (0, [])
    marked.set_exception(WriterStoppedError("stopped"))  # or a result: Celery has been told either way
    assert (mailbox.run(), told) == (1, [(0, "value", 1.0), "then"])

    def stopped(_: str) -> Future[None]:
        raise WriterStoppedError("stopped")

    _, told, mailbox = traced(lambda: (0, "value", 0.1), linked, stopped)
    assert (mailbox.run(), told) == (1, [(0, "value", 1.0), "then"])
    _, told, mailbox = traced(lambda: (0, "value", 0.1), BODY, stopped)
    assert mailbox.run() == 1, "without links there is nothing to mark"


def test_a_result_backend_that_is_away_makes_a_new_delivery(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = SimpleNamespace(exception=OperationalError("no connection"))
    handed: list[bool] = []
    monkeypatch.setattr(GenerateRequest, "hand_back", lambda self, *, front=True: handed.append(front))
    _, told, mailbox = traced(lambda: (1, failed, 0.1), BODY)
    mailbox.run()
    assert (handed, told) == ([False], ["then"])
    task_failed = SimpleNamespace(exception=RequestError("max_tokens: is too large"))
    _, told, mailbox = traced(lambda: (1, task_failed, 0.1), BODY)
    mailbox.run()
    assert told == [(1, task_failed, 1.0), "then"]
