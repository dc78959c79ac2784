"""Whatever a message holds, it ends its own job or becomes a dead letter; the worker goes on."""

from __future__ import annotations

import base64
import json
from datetime import UTC, datetime
from typing import Any

import pytest
from celery.exceptions import InvalidTaskError
from hypothesis import HealthCheck, example, given
from hypothesis import settings as examples
from hypothesis import strategies as st

from backend.api import MAX_DEADLINE_S, RequestError, TokenmillError
from models_db.records import NewJob
from models_db.tables import JobState
from tests.fleet.table_world import World
from tests.unit.test_worker_parts import Message, request_of
from workers.intake import Delivery, read_delivery
from workers.payload import GeneratePayload
from workers.settings import load_settings
from workers.stored import has_links, read_stored

HUGE = (1e300, -1e300, float("nan"), float("inf"), -0.0, 2**70, -(2**70), 10**400, 1e11, 253_402_300_800)
WORDS = st.sampled_from(["", "a", "tokenmill", "\ud800", "a\0b", "x" * 400, "1e300", "nan", "é\u2028"])
NUMBERS = st.one_of(st.sampled_from(HUGE), st.integers(), st.floats())
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, WORDS, st.text(max_size=5)),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(WORDS, inner, max_size=4)),
    max_leaves=8,
)
FIELDS = st.dictionaries(
    st.one_of(st.sampled_from([*GeneratePayload.model_fields]), WORDS), VALUES, max_size=5
)
GOOD = {"model": "smollm2", "prompt": "a"}
NOW = datetime(2026, 1, 1, tzinfo=UTC)


def nested(depth: int) -> Any:
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


def deep_in_objects(depth: int) -> Any:
    value: Any = {}
    for _ in range(depth):
        value = {"a": value}
    return value


DEEP = [nested(900), nested(50_000), deep_in_objects(900), deep_in_objects(50_000)]


def read(args: Any, kwargs: Any = None, embed: Any = None, **headers: Any) -> Delivery | None:
    """What the table has of a message; ``None`` where it is no task, which makes it a dead letter."""
    message = Message([[], {}, {}], **headers)
    message.payload = [args, {} if kwargs is None else kwargs, embed]
    try:
        request, _ = request_of(message)
    except Exception:  # the consumer puts it aside, whatever it is: see TokenmillConsumer
        return None
    delivery = Delivery(request=request)
    read_delivery(delivery, load_settings(), NOW)
    # What the table asks of a request later, on its own thread.
    request.looks_revoked()
    assert request.has_callbacks in (True, False)
    for limit in request.time_limits:
        assert limit is None or limit <= MAX_DEADLINE_S
    return delivery


def check(delivery: Delivery | None) -> None:
    if delivery is None:
        return
    if delivery.error is None:
        assert delivery.payload is not None
        assert delivery.job is not None
    else:
        assert isinstance(delivery.error, TokenmillError)
        assert delivery.payload is None
    if delivery.job is not None:
        assert isinstance(delivery.job, NewJob)


quick = examples(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))


@quick
@given(FIELDS)
@example({"deadline_s": 1e300})
@example({"deadline_s": 2.6e11})
@example({"deadline_s": 1e11})
@example({"seed": 10**400})
@example({"messages": [{"role": "\ud800", "content": "\udfff"}]})
@example({"\ud800": 1})
@example({"version": 10**400})
def test_no_payload_ends_more_than_its_job(fields: dict[str, Any]) -> None:
    check(read([GOOD | fields]))
    check(read([fields]))


@pytest.mark.parametrize("value", DEEP, ids=["list", "deeper list", "object", "deeper object"])
@pytest.mark.parametrize(
    "name", ["messages", "prompt", "token_ids", "logit_bias", "deadline_s", "no_field", "model"]
)
def test_no_nesting_ends_more_than_its_job(name: str, value: Any) -> None:
    delivery = read([GOOD | {name: value}])
    assert delivery is not None
    check(delivery)
    assert delivery.error is not None


@quick
@given(VALUES, VALUES, VALUES)
def test_no_body_ends_more_than_its_job(args: Any, kwargs: Any, embed: Any) -> None:
    check(read(args, kwargs, embed))


@pytest.mark.parametrize("value", DEEP, ids=["list", "deeper list", "object", "deeper object"])
def test_no_nested_body_ends_more_than_its_job(value: Any) -> None:
    check(read(value))
    check(read([GOOD], value, value))
    check(read([value], {}, value))


@quick
@given(
    st.dictionaries(
        st.sampled_from(
            [
                "id",
                "timelimit",
                "expires",
                "eta",
                "stamps",
                "stamped_headers",
                "retries",
                "shadow",
                "root_id",
                "lang",
            ]
        ),
        VALUES,
        max_size=4,
    )
)
@example({"timelimit": [1e300, float("inf")]})
@example({"timelimit": ["a", None]})
@example({"timelimit": 5})
@example({"id": 5})
@example({"id": {}})
@example({"id": "x" * 300})
@example({"id": "a\0b"})
@example({"stamped_headers": 5})
@example({"stamps": [1], "stamped_headers": ["a"]})
@example({"expires": "9999-12-31T23:59:59"})
def test_no_header_ends_more_than_its_job(headers: dict[str, Any]) -> None:
    check(read([GOOD], **headers))


@pytest.mark.parametrize("limits", [["a", None], 5, {"a": 1}, [1], [float("nan"), None], "ab"])
def test_time_limits_that_are_no_numbers_make_a_message_invalid(limits: Any) -> None:
    with pytest.raises(InvalidTaskError, match="timelimit"):
        request_of(Message([[GOOD], {}, {}], timelimit=limits))


@pytest.mark.parametrize("names", [5, "ab", [5]])
def test_stamps_that_have_no_names_make_a_message_invalid(names: Any) -> None:
    with pytest.raises(InvalidTaskError, match="stamp"):
        request_of(Message([[GOOD], {}, {}], stamped_headers=names))


@quick
@given(FIELDS, st.dictionaries(st.sampled_from(["timelimit", "expires", "stamps"]), VALUES, max_size=2))
@example({}, {"timelimit": "ab"})
@example({}, {"expires": "9999-12-31T23:59:59+14:00"})
def test_no_stored_message_ends_more_than_its_job(fields: dict[str, Any], headers: dict[str, Any]) -> None:
    body = json.dumps([[GOOD | fields], {}, {}]).encode()
    message = {
        "body": base64.b64encode(body).decode(),
        "headers": headers,
        "properties": {"body_encoding": "base64"},
    }
    stored = read_stored(message)
    assert (stored.payload is None) == (stored.error is not None)
    assert has_links(message) is False
    assert has_links(headers) is False


@quick
@given(FIELDS)
@example({"deadline_s": MAX_DEADLINE_S * 1.000001})
@example({"deadline_s": -0.0})
@example({"temperature": -0.0})
def test_a_request_is_taken_or_refused_with_the_field_named(fields: dict[str, Any]) -> None:
    try:
        made = GeneratePayload.parse(GOOD | fields)
    except TokenmillError as refused:
        error = refused
    else:
        json.dumps(made.to_dict(), allow_nan=False).encode()
        assert made.digest()
        return
    assert str(error)
    if isinstance(error, RequestError):
        json.dumps(error.to_dict())


def test_ten_years_are_the_most() -> None:
    assert GeneratePayload.parse(GOOD | {"deadline_s": MAX_DEADLINE_S}).deadline_s == MAX_DEADLINE_S
    with pytest.raises(RequestError, match=r"deadline_s: must be .*315360000 \(got 1e\+300\)"):
        GeneratePayload.parse(GOOD | {"deadline_s": 1e300})


def test_a_job_whose_payload_breaks_the_reader_fails_and_the_worker_goes_on(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise OverflowError("a fault of ours, quoting a private prompt")

    worker = world.worker()
    with monkeypatch.context() as patch:
        patch.setattr("workers.intake.wanted_callback", broken)
        request = worker.deliver("odd")
        world.run()
    assert world.state("odd") is JobState.FAILED
    assert "OverflowError" in world.status("odd").error_message
    assert "private" not in world.status("odd").error_message
    assert request.ended
    assert not worker.fatal
    worker.deliver("good")
    world.run()
    worker.backend.finish("good")
    world.run()
    assert world.state("good") is JobState.SUCCEEDED


@pytest.mark.parametrize("deadline_s", HUGE)
def test_no_deadline_ends_a_worker(world: World, deadline_s: float) -> None:
    worker = world.worker()
    worker.deliver("far", {"model": "echo", "prompt": "a", "deadline_s": deadline_s})
    world.run()
    assert world.state("far") is JobState.FAILED
    assert not worker.fatal


def test_a_time_limit_of_ever_leaves_the_table_running(world: World) -> None:
    worker = world.worker()
    worker.deliver("long", soft_s=float("inf"), hard_s=1e300)
    worker.table.start()
    try:
        world.run()
        worker.deliver("next")
        world.run()
    finally:
        worker.table.stop()
    assert not worker.fatal
