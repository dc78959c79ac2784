"""The OpenAI-compatible doorway, by the official client and by hand, over a real fleet (echo)."""

from __future__ import annotations

import json
import re

import httpx2 as httpx
import openai
import pytest
from sqlalchemy import select, text

from backend.api import MAX_SEED
from models_db import keys
from models_db.session import transaction
from models_db.tables import Job, JobState
from tests.fleet.conftest import MakeFleet
from tests.fleet.doorway import serving
from tests.fleet.fleet import Fleet

BAD = openai.BadRequestError
WORDS = "one two three four five six seven eight nine ten"
ASK = [{"role": "user", "content": WORDS}]


@pytest.fixture(scope="module")
def fleet(module_fleet: MakeFleet) -> Fleet:
    running = module_fleet(engine={"echo_tokens_per_s": 200})
    running.worker()
    return running


def echoed(client: openai.OpenAI, **options: object) -> str:
    answer = client.chat.completions.create(model="echo", messages=ASK, **options)  # type: ignore[call-overload]
    return str(answer.choices[0].message.content)


def test_a_chat_answer_has_text_reason_and_usage(client: openai.OpenAI, fleet: Fleet) -> None:
    answer = client.chat.completions.create(model="echo", messages=ASK, max_tokens=4)  # type: ignore[arg-type]
    (choice,) = answer.choices
    job_id = answer.id.removeprefix("chatcmpl-")
    stored = fleet.result(job_id)
    assert stored is not None
    assert choice.message.content == stored.text != ""
    assert choice.finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == stored.completion_tokens == 4
    assert answer.usage.total_tokens == stored.prompt_tokens + 4
    assert answer.object == "chat.completion"
    assert answer.model == "echo"


def test_a_stream_says_the_same_in_pieces(client: openai.OpenAI) -> None:
    whole = echoed(client, temperature=0, max_tokens=10)
    chunks = list(
        client.chat.completions.create(
            model="echo",
            messages=ASK,  # type: ignore[arg-type]
            temperature=0,
            max_tokens=10,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    *pieces, last = chunks
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == whole
    assert len(pieces) > 3
    assert pieces[0].choices[0].delta.role == "assistant"
    assert pieces[-1].choices[0].finish_reason == "length"
    assert last.usage is not None
    assert last.usage.completion_tokens == 10


def test_completions_take_several_prompts_and_several_choices(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="echo", prompt=["a b c", "x y z"], n=2, max_tokens=2)
    texts = [choice.text for choice in answer.choices]
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert texts[0] == texts[1] != texts[2] == texts[3]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 8
    single = client.completions.create(model="echo", prompt="a b c", max_tokens=2)
    assert single.usage is not None
    assert single.choices[0].text == texts[0]
    streamed = list(client.completions.create(model="echo", prompt="a b c", n=2, max_tokens=2, stream=True))
    for index in (0, 1):
        text = "".join(c.text for chunk in streamed for c in chunk.choices if c.index == index)
        assert text == texts[0]


def test_text_parts_and_the_developer_are_understood(client: openai.OpenAI) -> None:
    parts = [{"type": "text", "text": "one two "}, {"type": "text", "text": "three"}]
    messages = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": parts}]
    answer = client.chat.completions.create(model="echo", messages=messages, max_tokens=50)  # type: ignore[arg-type]
    assert answer.choices[0].message.content


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["echo"]
    assert client.models.retrieve("echo").id == "echo"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"model": "other"}, openai.NotFoundError, "is not served here"),
        ({"messages": []}, openai.BadRequestError, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, openai.BadRequestError, r"messages\.0\.role"),
        ({"temperature": 1000}, openai.BadRequestError, "temperature"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, openai.BadRequestError, "tools: "),
        ({"response_format": {"type": "json_object"}}, openai.BadRequestError, "response_format"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}},
            BAD,
            "and check it",
        ),
        ({"logprobs": True, "top_logprobs": 21}, BAD, "top_logprobs"),
        ({"top_logprobs": 2}, BAD, "top_logprobs: needs logprobs"),
        ({"stream_options": {"include_usage": True}}, BAD, "stream_options: is only for a stream"),
        ({"stream": True, "stream_options": {"usage": True}}, BAD, "has no field usage"),
        ({"reasoning_effort": "high"}, BAD, "reasoning_effort"),
        ({"modalities": ["text", "audio"]}, BAD, "modalities"),
        ({"logit_bias": {"5": 1000}}, BAD, "logit_bias"),
        ({"max_completion_tokens": 0}, BAD, "max_completion_tokens"),
        ({"stop": [""]}, BAD, "stop"),
        ({"messages": [{"role": "user", "content": "x", "name": "ann"}]}, BAD, r"messages\.0\.name"),
        ({"messages": [{"role": "tool", "content": "x", "tool_call_id": "1"}]}, BAD, r"messages\.0\.role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            BAD,
            "content",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "size": 5}]}]},
            BAD,
            r"messages\.0\.content\.0\.size: the models here read text alone",
        ),
        ({"max_completion_tokens": 10**8}, BAD, "max_completion_tokens: must be at most"),
        ({"max_tokens": 10**8}, BAD, "max_tokens: must be at most"),
        ({"extra_body": {"max_token": 5}}, openai.BadRequestError, "max_token: no such field"),
        ({"n": 100}, openai.BadRequestError, "n: "),
        ({"messages": [{"role": "user", "content": "a\x00b"}]}, openai.BadRequestError, "NUL"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(
    client: openai.OpenAI, change: dict[str, object], kind: type[openai.APIStatusError], message: str
) -> None:
    with pytest.raises(kind, match=message):
        client.chat.completions.create(**({"model": "echo", "messages": ASK} | change))  # type: ignore[call-overload]


@pytest.mark.parametrize("body", [b"{", b"[1", b"\xff", b"[" * 100_000, b'{"a":' * 100_000, b"5", b""])
def test_a_body_that_cannot_be_read_is_the_caller_s_fault(url: str, body: bytes) -> None:
    headers = {"content-type": "application/json"}
    refused = httpx.post(f"{url}/v1/chat/completions", content=body, headers=headers)
    assert refused.status_code == 400
    assert refused.json()["error"]["message"].startswith("the body ")


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("POST", "/v1/embeddings", 404, "unknown_url"),
        ("GET", "/", 404, "unknown_url"),
        ("GET", "/v1/chat/completions", 405, "method_not_allowed"),
        ("DELETE", "/v1/batches", 405, "method_not_allowed"),
        ("POST", "/health", 405, "method_not_allowed"),
    ],
)
def test_what_is_not_there_is_told_in_openai_s_form(
    url: str, method: str, path: str, status: int, code: str
) -> None:
    refused = httpx.request(method, f"{url}{path}")
    assert refused.status_code == status
    error = refused.json()["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", code)
    assert path in error["message"]
    assert status == 404 or refused.headers["allow"]


@pytest.mark.parametrize(
    "path",
    [
        "/v1/files/a%00b",
        "/v1/files/a%00b/content",
        "/v1/batches/a%00b",
        "/v1/models/a%00b",
        "/v1/files?after=a%00b",
        "/v1/files?purpose=%00",
        "/v1/batches?after=%00",
    ],
)
def test_a_name_that_no_database_can_be_asked_for_is_the_caller_s_fault(url: str, path: str) -> None:
    refused = httpx.get(f"{url}{path}")
    assert refused.status_code == 400
    assert "holds NUL or a lone surrogate" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ('{"input_file_id": "a\\u0000b"}', "input_file_id"),
        ('{"input_file_id": 5}', "input_file_id"),
        ('{"input_file_id": "a", "metadata": {"a": "\\ud800"}}', "metadata"),
        ('{"input_file_id": "a", "metadata": {"\\u0000": "b"}}', "metadata"),
        ('{"input_file_id": "a", "metadata": {"a": 5}}', "metadata.a"),
        ('{"input_file_id": "a", "endpoint": "/v1/embeddings"}', "endpoint"),
        ('{"input_file_id": "a", "completion_window": "1h"}', "completion_window"),
        ('{"input_file_id": "a", "output_expires_after": {"seconds": 5}}', "output_expires_after"),
        ('{"input_file_id": "a", "priority": 5}', "priority"),
        ("[]", None),
    ],
)
def test_a_batch_that_cannot_be_stored_is_the_caller_s_fault(url: str, body: str, named: str | None) -> None:
    rest = {"endpoint": "/v1/chat/completions", "completion_window": "24h"}
    data = json.loads(body)
    sent = json.dumps(rest | data if isinstance(data, dict) else data)
    refused = httpx.post(f"{url}/v1/batches", content=sent, headers={"content-type": "application/json"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, named)


def test_a_form_that_cannot_be_read_is_the_caller_s_fault(url: str) -> None:
    kind = {"content-type": "multipart/form-data; boundary=a"}
    refused = httpx.post(f"{url}/v1/files", content=b"x", headers=kind)
    assert refused.status_code == 400
    assert refused.json()["error"]["message"].startswith("the body cannot be read")


def test_a_key_that_was_used_for_another_request_is_named_as_the_caller_wrote_it(
    client: openai.OpenAI,
) -> None:
    ask = {"model": "echo", "messages": ASK, "extra_headers": {"Idempotency-Key": "order-9"}}
    first = client.chat.completions.create(**ask, max_tokens=2)  # type: ignore[call-overload]
    assert client.chat.completions.create(**ask, max_tokens=2).id == first.id  # type: ignore[call-overload]
    with pytest.raises(openai.ConflictError, match="'order-9' was used before for another") as caught:
        client.chat.completions.create(**ask, max_tokens=3)  # type: ignore[call-overload]
    assert "http:" not in str(caught.value)
    assert caught.value.param == "Idempotency-Key"


@pytest.mark.parametrize("kind", ["json_object", "json_schema"])
@pytest.mark.parametrize("path", ["chat/completions", "completions"])
def test_structured_output_is_refused_in_openai_s_form(url: str, path: str, kind: str) -> None:
    prompt = {"messages": ASK} if path == "chat/completions" else {"prompt": "x"}
    asked = {"model": "echo", "response_format": {"type": kind}} | prompt
    refused = httpx.post(f"{url}/v1/{path}", json=asked)
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert (error["type"], error["param"], error["code"]) == (
        "invalid_request_error",
        "response_format",
        "unsupported_parameter",
    )
    assert error["message"].startswith("response_format: this service cannot do that")
    assert kind in error["message"]


def test_every_field_that_is_taken_reaches_the_job(client: openai.OpenAI, fleet: Fleet) -> None:
    answer = client.chat.completions.create(
        model="echo",
        messages=ASK,  # type: ignore[arg-type]
        max_completion_tokens=7,
        temperature=0.5,
        top_p=0.9,
        presence_penalty=0.1,
        frequency_penalty=0.2,
        seed=-1,
        stop=["never", "ever"],
        logit_bias={"5": -100},
        logprobs=True,
        top_logprobs=3,
        service_tier="flex",
        user="someone",
        metadata={"night": "monday"},
        store=False,
        tools=[],
        response_format={"type": "text"},
        extra_body={
            "top_k": 5,
            "min_p": 0.05,
            "repetition_penalty": 1.1,
            "min_tokens": 2,
            "ignore_eos": True,
        },
    )
    with fleet.engine.connect() as conn:
        job_id = answer.id.removeprefix("chatcmpl-")
        params = dict(conn.scalar(select(Job.params).where(Job.id == job_id)))
        assert conn.scalar(select(Job.priority).where(Job.id == job_id)) == 6
    wanted = {
        "max_tokens": 7,
        "temperature": 0.5,
        "top_p": 0.9,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.2,
        "seed": MAX_SEED,
        "stop": ["never", "ever"],
        "logit_bias": {"5": -100.0},
        "logprobs": 3,
        "top_k": 5,
        "min_p": 0.05,
        "repetition_penalty": 1.1,
        "min_tokens": 2,
        "ignore_eos": True,
    }
    assert {name: params.get(name) for name in wanted} == wanted


def test_an_answer_may_be_sent_back_as_it_came(client: openai.OpenAI) -> None:
    """The usual next turn of a conversation: the message object, with its empty fields, is put behind the others."""
    first = client.chat.completions.create(model="echo", messages=ASK, max_tokens=3)  # type: ignore[arg-type]
    turns = [*ASK, first.choices[0].message.model_dump(), {"role": "user", "content": "and on"}]
    again = client.chat.completions.create(model="echo", messages=turns, max_tokens=3)  # type: ignore[arg-type]
    assert again.choices[0].message.content


@pytest.mark.parametrize("stream", [False, True])
def test_chat_reports_log_probabilities(client: openai.OpenAI, fleet: Fleet, stream: bool) -> None:
    made = client.chat.completions.create(
        model="echo",
        messages=ASK,  # type: ignore[arg-type]
        max_tokens=4,
        n=2,
        logprobs=True,
        top_logprobs=1,
        stream=stream,
    )
    chunks = list(made) if stream else [made]
    choices = [choice for chunk in chunks for choice in chunk.choices if choice.logprobs is not None]
    assert sorted(choice.index for choice in choices) == [0, 1]
    stored = fleet.result(chunks[0].id.removeprefix("chatcmpl-"))
    assert stored is not None
    assert stored.logprobs
    content = next(choice for choice in choices if choice.index == 0).logprobs.content
    assert [(int(each.token.removeprefix("token_id:")), each.logprob) for each in content] == [
        (entry["token_id"], entry["logprob"]) for entry in stored.logprobs
    ]
    assert len(content) == 4
    assert [len(each.top_logprobs) for each in content] == [1] * 4


def test_completions_report_log_probabilities(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="echo", prompt="a b c", max_tokens=3, logprobs=1)
    found = answer.choices[0].logprobs
    assert found is not None
    assert found.token_logprobs == [0.0] * 3
    assert all(re.fullmatch(r"token_id:\d+", token) for token in found.tokens or [])
    assert [list(top) for top in found.top_logprobs or []] == [[token] for token in found.tokens or []]
    assert client.completions.create(model="echo", prompt="a b c", max_tokens=3).choices[0].logprobs is None
    streamed = list(
        client.completions.create(model="echo", prompt="a b c", max_tokens=3, logprobs=0, stream=True)
    )
    (with_them,) = [c.logprobs for chunk in streamed for c in chunk.choices if c.logprobs is not None]
    assert with_them.token_logprobs == [0.0] * 3
    assert with_them.top_logprobs is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logprobs": 21}, "logprobs"),
        ({"echo": True}, "echo: "),
        ({"suffix": "x"}, "suffix: "),
        ({"best_of": 3}, "best_of: .*Use n"),
        ({"prompt": []}, "prompt"),
        (
            {"extra_body": {"max_completion_tokens": 5}},
            r"max_completion_tokens: no such field \(got 5\). Use max_tokens",
        ),
        ({"extra_body": {"messages": []}}, "messages: .*/v1/chat/completions"),
    ],
)
def test_completions_refuse_by_name(client: openai.OpenAI, change: dict[str, object], message: str) -> None:
    with pytest.raises(BAD, match=message):
        client.completions.create(**({"model": "echo", "prompt": "a b c"} | change))  # type: ignore[call-overload]


def test_a_stop_text_ends_the_answer_and_is_not_in_it(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="echo", prompt="one two three four five", max_tokens=5, stop="three", temperature=0
    )
    assert answer.choices[0].finish_reason == "stop"
    assert "two" in answer.choices[0].text
    assert "three" not in answer.choices[0].text


def test_bodies_that_are_no_request(url: str) -> None:
    path = f"{url}/v1/chat/completions"
    assert httpx.post(path, content="{", headers={"content-type": "application/json"}).status_code == 400
    assert httpx.post(path, json=["x"]).status_code == 400
    form = httpx.post(path, content="{}", headers={"content-type": "text/plain"})
    assert form.status_code == 415, "a page of another site can send such a form"
    assert httpx.get(f"{url}/v1/models", headers={"host": "evil.example"}).status_code == 403
    assert httpx.get(f"{url}/health").json() == {"status": "ok"}


def test_a_failure_before_the_first_token_is_a_status_also_for_a_stream(client: openai.OpenAI) -> None:
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError, match="holds no word"):
            client.chat.completions.create(
                model="echo", messages=[{"role": "user", "content": " "}], stream=stream
            )


def test_the_same_idempotency_key_is_the_same_answer(client: openai.OpenAI) -> None:
    def ask(words: str) -> str:
        return client.chat.completions.create(
            model="echo",
            messages=[{"role": "user", "content": words}],
            max_tokens=3,
            extra_headers={"Idempotency-Key": "k1"},
        ).id

    assert ask(WORDS) == ask(WORDS)
    with pytest.raises(openai.ConflictError):
        ask("something else")


def test_a_caller_that_goes_away_cancels_its_jobs(url: str, fleet: Fleet) -> None:
    body = {"model": "echo", "messages": ASK, "max_tokens": 100_000, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body) as answer:
        line = next(answer.iter_lines())
        job_id = json.loads(line.removeprefix("data: "))["id"].removeprefix("chatcmpl-")
    fleet.wait_state(job_id, JobState.CANCELLED)


def test_a_caller_that_goes_away_may_come_back_with_its_key(
    url: str, client: openai.OpenAI, fleet: Fleet
) -> None:
    body = {"model": "echo", "messages": ASK, "max_tokens": 60, "temperature": 0, "ignore_eos": True}
    headers = {"Idempotency-Key": "come-back"}
    with httpx.stream(
        "POST", f"{url}/v1/chat/completions", json=body | {"stream": True}, headers=headers
    ) as answer:
        line = next(answer.iter_lines())
        job_id = json.loads(line.removeprefix("data: "))["id"].removeprefix("chatcmpl-")
    again = httpx.post(f"{url}/v1/chat/completions", json=body, headers=headers, timeout=30)
    assert again.json()["id"] == f"chatcmpl-{job_id}"
    assert fleet.state(job_id) is JobState.SUCCEEDED


def test_an_answer_that_takes_too_long_is_cancelled(fleet: Fleet) -> None:
    before = fleet.states().keys()
    with (
        serving(fleet.settings, timeout_s=0.2) as address,
        openai.OpenAI(base_url=f"{address}/v1", api_key="x", max_retries=0) as client,
        pytest.raises(openai.InternalServerError, match=r"no answer within 0\.2 s"),
    ):
        client.chat.completions.create(
            model="echo",
            messages=ASK,  # type: ignore[arg-type]
            max_tokens=100_000,
            extra_body={"ignore_eos": True},
        )
    (job_id,) = fleet.states().keys() - before
    fleet.wait_state(job_id, JobState.CANCELLED)


def test_a_key_lets_its_tenant_in(fleet: Fleet) -> None:
    engine = fleet.engine
    record, key = transaction(engine, lambda conn: keys.create_key(conn, tenant="acme", name="test"))
    with engine.connect() as conn:
        rows = conn.execute(text("SELECT * FROM api_key")).all()
    assert len(rows) == 1
    assert key.rpartition("_")[2] not in repr(rows), "no column holds the key itself"
    with serving(fleet.settings, open_to_all=False) as address:
        for wrong in ("tm_0_1", key[:-1], f"{key}0"):
            answer = httpx.get(f"{address}/v1/models", headers={"authorization": f"Bearer {wrong}"})
            assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
        assert httpx.get(f"{address}/v1/models").status_code == 401
        with openai.OpenAI(base_url=f"{address}/v1", api_key=key, max_retries=0) as client:
            answer_id = client.chat.completions.create(model="echo", messages=ASK).id  # type: ignore[arg-type]
        status = fleet.status(answer_id.removeprefix("chatcmpl-"))
        assert status is not None
        assert status.tenant == "acme"
    assert transaction(engine, lambda conn: keys.revoke_key(conn, record.id))
    with serving(fleet.settings, open_to_all=False) as address:
        answer = httpx.get(f"{address}/v1/models", headers={"authorization": f"Bearer {key}"})
        assert answer.status_code == 401
