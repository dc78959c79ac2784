"""Files and batches of the doorway, by the official client: run, cancelled, kept apart by tenant, taken over."""

from __future__ import annotations

import json
from typing import Any

import httpx2
import openai
import pytest

from models_db import keys
from models_db.session import transaction
from tests.fleet.conftest import MakeFleet
from tests.fleet.doorway import line, serving
from tests.fleet.fleet import Fleet, wait_until


@pytest.fixture(scope="module")
def fleet(module_fleet: MakeFleet) -> Fleet:
    running = module_fleet(max_file_bytes=100_000, models=["nobody"])
    running.worker()
    return running


def run(client: openai.OpenAI, *rows: str) -> Any:
    """Upload, start, and wait for the end."""
    name = ("in.jsonl", "\n".join(rows).encode())
    file = client.files.create(file=name, purpose="batch")
    batch = client.batches.create(
        input_file_id=file.id,
        endpoint="/v1/chat/completions",
        completion_window="24h",
        metadata={"night": "monday"},
    )
    return wait_for_end(client, batch.id)


def wait_for_end(client: openai.OpenAI, batch_id: str) -> Any:
    def ended() -> Any:
        found = client.batches.retrieve(batch_id)
        return found if found.status in ("completed", "failed", "expired", "cancelled") else None

    return wait_until(ended, 60, "the batch to end")


def read(client: openai.OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    assert file_id is not None
    text = client.files.content(file_id).text
    return [json.loads(row) for row in text.splitlines()]


def test_a_batch_is_answered_line_by_line(client: openai.OpenAI) -> None:
    rows = [line(f"q{n}", f"word{n}", max_tokens=1) for n in range(30)]
    refused_lines = [
        line("tool", "x", tools=[{}]),
        line("stream", "x", stream=True),
        line("grammar", "x", response_format={"type": "json_object"}),
        line("url", "x").replace("/v1/chat/completions", "/v1/completions"),
    ]
    batch = run(client, *rows, "{broken", *refused_lines)
    assert batch.status == "completed"
    assert batch.metadata == {"night": "monday"}
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (35, 30, 5)
    answers = read(client, batch.output_file_id)
    assert [answer["custom_id"] for answer in answers] == [f"q{n}" for n in range(30)]
    body = answers[7]["response"]["body"]
    assert body["choices"][0]["message"]["content"]
    assert body["usage"]["completion_tokens"] == 1
    broken, *refused = read(client, batch.error_file_id)
    assert (broken["custom_id"], broken["error"]["code"]) == (None, "malformed_json")
    assert [each["custom_id"] for each in refused] == ["tool", "stream", "grammar", "url"]
    for each, field in zip(refused, ("tools", "stream", "response_format", "url"), strict=True):
        assert f"{field}: " in each["error"]["message"]
    assert [each.id for each in client.batches.list(limit=1).data] == [batch.id]
    file = client.files.retrieve(batch.output_file_id)
    assert file.bytes == len(client.files.content(file.id).content)
    assert file.purpose == "batch_output"


def test_a_file_without_a_good_line_fails_its_batch(client: openai.OpenAI) -> None:
    batch = run(client, "{broken")
    assert batch.status == "failed"
    assert "1 bad line" in batch.errors.data[0].message
    assert (batch.output_file_id, batch.error_file_id) == (None, None)
    assert run(client).status == "failed"


def test_a_batch_is_cancelled(client: openai.OpenAI) -> None:
    file = client.files.create(file=("in.jsonl", line("a", "x", model="nobody").encode()), purpose="batch")
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    client.batches.cancel(batch.id)
    ended = wait_for_end(client, batch.id)
    assert ended.status == "cancelled"
    assert ended.request_counts.completed == 0


def test_files_are_listed_read_and_deleted(client: openai.OpenAI, url: str) -> None:
    made = [client.files.create(file=(f"{n}.jsonl", b"x" * n), purpose="batch") for n in range(3)]
    newest, following = client.files.list(limit=2).data[:2]
    assert [newest.id, following.id] == [made[2].id, made[1].id]
    newest_first = [file.id for file in client.files.list()]
    assert [file.id for file in client.files.list(order="asc", limit=2)] == newest_first[::-1]
    assert [file.id for file in client.files.list(order="asc", after=made[0].id)] == [made[1].id, made[2].id]
    assert client.files.content(made[2].id).content == b"xx"
    assert client.files.delete(made[0].id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(made[0].id)
    with pytest.raises(openai.APIStatusError, match="max_file_bytes"):
        client.files.create(file=("big.jsonl", b"x" * 100_001), purpose="batch")
    with pytest.raises(openai.BadRequestError, match="purpose"):
        client.files.create(file=("a.jsonl", b"x"), purpose="vision")
    assert httpx2.post(f"{url}/v1/files", files={"purpose": (None, "batch")}).status_code == 400
    assert httpx2.post(f"{url}/v1/files", data={"purpose": "batch"}).status_code == 415
    assert httpx2.get(f"{url}/v1/files?limit=0").status_code == 400
    assert "order" in httpx2.get(f"{url}/v1/files?order=up").json()["error"]["message"]


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"endpoint": "/v1/embeddings"}, "endpoint"),
        ({"completion_window": "1h"}, "completion_window"),
        ({"input_file_id": 5}, "input_file_id"),
    ],
)
def test_a_batch_that_cannot_be_is_refused(client: openai.OpenAI, change: dict[str, Any], name: str) -> None:
    given = {"input_file_id": "file-0", "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    with pytest.raises(openai.BadRequestError, match=name):
        client.batches.create(**(given | change))
    with pytest.raises(openai.NotFoundError, match="file-0"):
        client.batches.create(**given)  # type: ignore[arg-type]


def test_what_belongs_to_one_tenant_is_not_there_for_another(fleet: Fleet) -> None:
    held = {
        name: transaction(fleet.engine, lambda conn, name=name: keys.create_key(conn, tenant=name, name="t"))[
            1
        ]
        for name in ("acme", "bolt")
    }
    with (
        serving(fleet.settings, open_to_all=False) as address,
        openai.OpenAI(base_url=f"{address}/v1", api_key=held["acme"], max_retries=0) as acme,
        openai.OpenAI(base_url=f"{address}/v1", api_key=held["bolt"], max_retries=0) as bolt,
    ):
        batch = run(acme, line("a", "one", max_tokens=1))
        assert batch.status == "completed"
        (answer,) = read(acme, batch.output_file_id)
        status = fleet.status(answer["response"]["request_id"])
        assert status is not None
        assert status.tenant == "acme"
        ids = [
            each.completions.create(
                model="echo", prompt="a b", max_tokens=2, extra_headers={"Idempotency-Key": "same"}
            ).id
            for each in (acme, bolt, acme)
        ]
        assert ids[0] == ids[2] != ids[1], "a key is its tenant's own"
        theirs = fleet.status(ids[1].removeprefix("cmpl-"))
        assert theirs is not None
        assert theirs.tenant == "bolt"
        assert list(bolt.batches.list()) == []
        assert list(bolt.files.list()) == []
        for attempt in (
            lambda: bolt.batches.retrieve(batch.id),
            lambda: bolt.batches.cancel(batch.id),
            lambda: bolt.files.retrieve(batch.output_file_id),
            lambda: bolt.files.content(batch.output_file_id),
            lambda: bolt.files.delete(batch.input_file_id),
            lambda: bolt.batches.create(
                input_file_id=batch.input_file_id,
                endpoint="/v1/chat/completions",
                completion_window="24h",
            ),
        ):
            with pytest.raises(openai.NotFoundError):
                attempt()
