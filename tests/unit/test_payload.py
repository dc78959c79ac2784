"""The payload: what is accepted, what is refused and how, and the message that carries it."""

from __future__ import annotations

import base64
import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.api import GenerationRequest, RequestError, SamplingParams, UnknownModelError
from tests.messages import build_message, publish
from workers.payload import (
    PAYLOAD_VERSION,
    STORED_HEADER,
    Forms,
    GeneratePayload,
    NewerPayloadError,
    describe,
    encode_message,
    push,
    queue_for,
    queue_key,
    seed_of,
    wire,
)
from workers.settings import load_settings


def payload(**fields: Any) -> GeneratePayload:
    return GeneratePayload.parse({"model": "smollm2", "prompt": "hello"} | fields)


def test_a_minimal_payload_has_every_default() -> None:
    made = payload()
    assert made.version == PAYLOAD_VERSION
    assert made.priority == 3
    assert made.sampling() == SamplingParams()
    assert made.to_dict() == {"version": 1, "model": "smollm2", "prompt": "hello"}


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"token_ids": [1]}, "prompt"),
        ({"prompt": "a\x00b"}, "prompt"),
        ({"prompt": "a\ud800b"}, "prompt"),
        ({"model": ""}, "model"),
        ({"priority": 10}, "priority"),
        ({"deadline_s": 0}, "deadline_s"),
        ({"deadline_s": float("nan")}, "deadline_s"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"min_tokens": 9, "max_tokens": 3}, "min_tokens"),
        ({"custom_id": "x" * 300}, "custom_id"),
        ({"tenant": "a\x00"}, "tenant"),
        ({"promt": "hello"}, "promt"),
        ({"version": 0}, "version"),
        ({"version": "1"}, "version"),
        ({"version": True}, "version"),
        ({"prompt": None, "token_ids": [-1]}, "token_ids.0"),
        ({"prompt": None, "messages": [{"role": "user", "content": "a\x00"}]}, "messages.content"),
    ],
)
def test_bad_fields_are_named(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(RequestError) as caught:
        payload(**fields)
    assert caught.value.field == named
    assert caught.value.fix


def test_an_error_for_an_answer_shows_a_value_only_where_there_is_one() -> None:
    with pytest.raises(RequestError) as nul:
        payload(prompt="a\x00b")
    assert nul.value.to_dict() == {
        "code": "invalid_request",
        "message": str(nul.value),
        "field": "prompt",
        "value": "",
        "fix": "Remove it: databases cannot store NUL in text",
    }
    with pytest.raises(RequestError) as low:
        payload(max_tokens=0)
    assert low.value.to_dict()["value"] == "0"


@pytest.mark.parametrize("data", [None, [], "text", 3])
def test_what_is_no_object_is_refused(data: object) -> None:
    with pytest.raises(RequestError, match="payload: must be a JSON object"):
        GeneratePayload.parse(data)


def test_a_newer_version_is_told_apart_even_with_fields_unknown_here() -> None:
    with pytest.raises(NewerPayloadError, match="version 2 is newer than 1"):
        GeneratePayload.parse({"version": 2, "model": "m", "brand_new": True})


def test_an_error_never_shows_a_whole_prompt() -> None:
    with pytest.raises(RequestError) as caught:
        payload(prompt="secret " * 200 + "\x00")
    assert len(str(caught.value)) < 300


def test_limits_of_the_settings() -> None:
    settings = load_settings(model="smollm2", models=("other",), max_prompt_chars=10)
    payload(model="other").check_limits(settings)
    with pytest.raises(UnknownModelError, match="Use one of: smollm2, other"):
        payload(model="gone").check_limits(settings)
    with pytest.raises(RequestError, match=r"max_prompt_chars \(10\)"):
        payload(prompt="x" * 11).check_limits(settings)


def test_the_request_is_valid_and_complete() -> None:
    made = payload(
        temperature=0.5, stop=["a", "b"], logit_bias={"5": 1.5}, priority=0, deadline_s=9, stream=True
    )
    request = made.to_request("job-1")
    assert GenerationRequest.model_validate(request.model_dump()) == request
    assert request.request_id == "job-1"
    assert request.sampling.stop == ("a", "b")
    assert request.sampling.logit_bias == {5: 1.5}
    assert (request.priority, request.deadline_s, request.stream) == (0, 9.0, True)


def test_every_attempt_at_a_job_draws_from_the_same_seed() -> None:
    made = payload(temperature=1.0)
    assert made.to_request("a").sampling.seed == made.to_request("a").sampling.seed == seed_of("a")
    assert made.to_request("a").sampling.seed != made.to_request("b").sampling.seed
    assert payload(temperature=1.0, seed=5).to_request("a").sampling.seed == 5
    assert payload().to_request("a").sampling.seed is None


def test_job_columns() -> None:
    made = payload(temperature=0.25, seed=7, logit_bias={3: 1.0}, stop="x", priority=1)
    assert made.params() == {"temperature": 0.25, "seed": 7, "logit_bias": {"3": 1.0}, "stop": ["x"]}
    assert made.prompt_json() == {"prompt": "hello"}
    chat = payload(prompt=None, messages=[{"role": "user", "content": "hi"}])
    assert chat.prompt_json() == {"messages": [{"role": "user", "content": "hi"}]}
    json.dumps([made.params(), chat.prompt_json()])


@given(
    prompt=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"), min_size=1),
    priority=st.integers(0, 9),
    temperature=st.floats(0, 2),
    seed=st.none() | st.integers(0, 2**63 - 1),
    bias=st.dictionaries(st.integers(0, 9999), st.floats(-100, 100), max_size=4),
)
def test_wire_form_round_trips(
    prompt: str, priority: int, temperature: float, seed: int | None, bias: dict[int, float]
) -> None:
    made = payload(prompt=prompt, priority=priority, temperature=temperature, seed=seed, logit_bias=bias)
    assert GeneratePayload.parse(json.loads(json.dumps(made.to_dict()))) == made


def test_digest_ignores_spelling_and_sees_content() -> None:
    assert payload(max_tokens=256).digest() == payload().digest()
    assert payload(stop="x").digest() == payload(stop=["x"]).digest()
    assert payload(prompt="hullo").digest() != payload().digest()


def test_queue_names_are_plain_and_distinct() -> None:
    assert queue_for("smollm2") == "tokenmill.smollm2"
    names = ["a/b", "a-b", "A-b", "a b", "/", "ÄÖ", "a" * 300]
    queues = {queue_for(name) for name in names}
    assert len(queues) == len(names)
    assert all(queue.startswith("tokenmill.") and queue.isascii() and len(queue) < 120 for queue in queues)


def test_priorities_go_to_the_lists_of_the_redis_transport() -> None:
    from kombu.transport.redis import PRIORITY_STEPS, Channel

    class Names(Channel):  # type: ignore[misc]
        def __init__(self) -> None: ...

    channel = Names()
    assert [queue_key("q", p) for p in range(10)] == [
        channel._q_for_pri("q", channel.priority(p)) for p in range(10)
    ]
    assert PRIORITY_STEPS == [0, 3, 6, 9]


def test_the_message_is_what_celery_itself_would_send() -> None:
    from celery import Celery

    app = Celery(set_as_current=False)
    made = payload(prompt="a private prompt", priority=6)
    message = build_message("job-1", made)
    reference = app.amqp.as_task_v2("job-1", "tokenmill.generate", args=[made.to_dict()], kwargs={})
    assert set(message["headers"]) == set(reference.headers)
    ours = json.loads(base64.b64decode(message["body"]))
    assert ours == json.loads(json.dumps(reference.body))
    assert message["properties"]["correlation_id"] == reference.properties["correlation_id"]
    assert message["properties"]["priority"] == 6
    assert "private" not in json.dumps({k: v for k, v in message.items() if k != "body"})


def test_each_publication_has_its_own_tag_and_nothing_else_changes() -> None:
    message = build_message("job-1", payload(priority=7))
    (key_a, one), (key_b, two) = wire(message), wire(message)
    assert key_a == key_b == queue_key("tokenmill.smollm2", 6)
    first, second = json.loads(one), json.loads(two)
    tags = {m["properties"].pop("delivery_tag") for m in (first, second)}
    assert len(tags) == 2
    assert first == second


class Pipeline:
    def __init__(self) -> None:
        self.commands: list[tuple[str, tuple[bytes, ...]]] = []
        self.executed = 0

    def lpush(self, name: str, *values: bytes) -> None:
        self.commands.append((name, values))

    def execute(self) -> None:
        self.executed += 1

    @property
    def pushed(self) -> list[tuple[str, bytes]]:
        return [(name, value) for name, values in self.commands for value in values]


def test_publish_keeps_the_order() -> None:
    pipeline = Pipeline()
    publish(pipeline, [build_message(str(n), payload()) for n in range(3)])
    assert [json.loads(data)["headers"]["id"] for _, data in pipeline.pushed] == ["0", "1", "2"]
    assert pipeline.executed == 1


def test_neighbours_of_one_list_are_pushed_in_one_command_of_bounded_size() -> None:
    sent = [("a", b"1"), ("a", b"2"), ("b", b"3"), ("a", b"4"), ("a", b"x" * 5_000_000), ("a", b"5")]
    pipeline = Pipeline()
    push(pipeline, sent)
    assert pipeline.pushed == sent
    assert [(name, len(values)) for name, values in pipeline.commands] == [
        ("a", 2), ("b", 1), ("a", 1), ("a", 1), ("a", 1)
    ]  # fmt: skip
    assert pipeline.executed == 1


def test_only_a_message_of_a_stored_job_says_so() -> None:
    made = payload()
    bare = build_message("job-1", made)
    assert STORED_HEADER not in bare["headers"]
    stored = json.loads(encode_message("job-1", made, made.to_dict(), stored=True))
    assert stored["headers"] == bare["headers"] | {STORED_HEADER: True}
    again = json.loads(wire(bare, stored=True)[1])
    assert again["headers"] == stored["headers"]
    assert STORED_HEADER not in bare["headers"], "what is kept stays as it came"
    assert STORED_HEADER not in json.loads(wire(bare)[1])["headers"]


@pytest.mark.parametrize("name", ["smollm2", "Qwen/Ü{id}\\u0000", 'a "quoted" {body}'])
@pytest.mark.parametrize("job_id", ["0199f0c2-aaaa-7bbb-8ccc-0123456789ab", 'odd "id" {tag} \\ ü'])
def test_names_that_look_like_parts_of_a_message_are_kept(name: str, job_id: str) -> None:
    made = payload(model=name, prompt="Grüße, 世界 \U0001f30d", priority=7, tenant="t")
    text = encode_message(job_id, made, made.to_dict())
    first, second = json.loads(text), build_message(job_id, made)
    tags = {message["properties"].pop("delivery_tag") for message in (first, second)}
    assert (first, len(tags), text.isascii()) == (second, 2, True)
    headers, properties = first["headers"], first["properties"]
    assert (headers["id"], headers["root_id"], properties["correlation_id"]) == (job_id,) * 3
    assert headers["argsrepr"] == describe(name)
    assert properties["delivery_info"]["routing_key"] == queue_for(name)
    ((fields,), _, _) = json.loads(base64.b64decode(first["body"]))
    assert fields == made.to_dict()


@pytest.mark.parametrize("job_id", ["", "x" * 156])
def test_ids_that_the_job_table_cannot_hold_are_refused(job_id: str) -> None:
    with pytest.raises(RequestError, match="job_id"):
        build_message(job_id, payload())


def test_the_forms_of_a_payload_are_what_its_methods_give() -> None:
    made = payload(
        temperature=0.25, seed=7, logit_bias={3: 1}, stop="x", tenant="t", priority=6, return_token_ids=True
    )
    forms = Forms.of(made)
    assert (forms.params, forms.prompt, forms.digest()) == (made.params(), made.prompt_json(), made.digest())
    assert forms.params == made.model_dump(
        mode="json", include=set(SamplingParams.model_fields), exclude_defaults=True
    )
    assert forms.fields == made.to_dict()


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": "ü\n" * 800},
        {"prompt": None, "messages": [{"role": "user", "content": "\x01"}] * 400},
        {"prompt": None, "token_ids": [100_000] * 600},
        {"stop": ["a" * 900] * 4},
        {"logit_bias": dict.fromkeys(range(1000, 1300), 1.0000001)},
    ],
)
def test_a_payload_is_bounded_as_a_whole_to_the_byte(fields: dict[str, Any]) -> None:
    made = payload(**fields)
    size = len(json.dumps(made.to_dict(), separators=(",", ":"), ensure_ascii=False).encode())
    assert size > 2000
    made.check_limits(load_settings(max_payload_bytes=size))
    with pytest.raises(
        RequestError, match=rf"max_payload_bytes \({size - 1}\).*got {size}.*TOKENMILL_MAX_PAYLOAD"
    ):
        made.check_limits(load_settings(max_payload_bytes=size - 1))


def test_the_quick_look_at_the_size_never_lets_too_much_through() -> None:
    largest = payload(
        model="\x01" * 255,
        prompt="\x01" * 100,
        tenant="\x01" * 255,
        custom_id="\x01" * 255,
        stop=["\x01" * 900] * 2,
        stop_token_ids=[900_000_000] * 10,
        logit_bias={900_000_000 + n: -0.12345678901234567 for n in range(10)},
        temperature=0.12345678901234567,
        top_p=0.12345678901234567,
        min_p=0.12345678901234567,
        repetition_penalty=1.2345678901234567,
        presence_penalty=-1.2345678901234567,
        frequency_penalty=-1.2345678901234567,
        seed=2**63 - 1,
        max_tokens=10_000_000,
        deadline_s=123456789.12345678,
    )
    for limit in (1024, 8_000, 16_000, 30_000, 60_000):
        size = len(json.dumps(largest.to_dict(), separators=(",", ":"), ensure_ascii=False).encode())
        assert (largest._size_beyond(limit) is not None) == (size > limit)


def test_a_stop_string_is_bounded() -> None:
    assert payload(stop="x" * 1000).stop == ("x" * 1000,)
    with pytest.raises(RequestError, match=r"stop: is longer than 1000 characters \(got 1001\)"):
        payload(stop="x" * 1001)


@pytest.mark.parametrize("bad", ["a\x00b", "a\ud800b", "\udfff"])
@pytest.mark.parametrize(
    "field", ["model", "prompt", "messages", "role", "stop", "tenant", "custom_id", "callback_url"]
)
def test_text_that_some_database_refuses_is_refused_in_every_field(field: str, bad: str) -> None:
    fields: dict[str, Any] = {field: bad}
    if field in ("messages", "role"):
        turn = {"role": "user", "content": "x"} | ({"role": bad} if field == "role" else {"content": bad})
        fields = {"prompt": None, "messages": [turn]}
    with pytest.raises(RequestError):
        payload(**fields).check_limits(
            load_settings(callback_hosts=("example.com",), model=bad if field == "model" else "smollm2")
        )


def test_every_text_field_is_among_those() -> None:
    texts = {
        name
        for name, info in GeneratePayload.model_fields.items()
        if re.search(r"\bstr\b", str(info.annotation))
    }
    assert texts == {"model", "prompt", "stop", "tenant", "custom_id", "callback_url"}


def test_a_tenants_limit_is_asked_at_submission_alone() -> None:
    """A worker whose limit is lower runs what was accepted."""
    settings = load_settings(tenant_max_open_tokens=100)
    made = payload(tenant="acme", max_tokens=200)
    with pytest.raises(RequestError, match="TENANT_MAX_OPEN_TOKENS"):
        made.check_limits(settings)
    made.check_limits(settings, at_submission=False)
