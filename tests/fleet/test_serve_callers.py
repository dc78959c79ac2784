"""Callers of the doorway who leave before there is an answer, send too much, or are pages of other sites."""

from __future__ import annotations

import asyncio
import http.client
import json
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, closing
from typing import Any
from urllib.parse import urlsplit

import httpx2 as httpx
import pytest
from sqlalchemy import select

from models_db import keys
from models_db.door_tables import StoredFile
from models_db.session import transaction
from models_db.tables import JobState
from tests.fleet.conftest import MakeFleet
from tests.fleet.doorway import serving
from tests.fleet.fleet import PATIENCE_S, Fleet, wait_until
from workers.serve.app import EventStream

MOST_BYTES = 100_000
JSON = {"content-type": "application/json"}
FORM: dict[str, Any] = {"purpose": (None, "batch"), "file": ("in.jsonl", b"{}")}


@pytest.fixture(scope="module")
def fleet(module_fleet: MakeFleet) -> Fleet:
    """Without a worker: nothing is ever answered."""
    return module_fleet(max_file_bytes=MOST_BYTES)


def connected(url: str) -> http.client.HTTPConnection:
    return http.client.HTTPConnection(urlsplit(url).netloc, timeout=PATIENCE_S)


@pytest.mark.parametrize("stream", [False, True])
def test_a_caller_that_goes_away_before_the_first_token_cancels_its_jobs(
    url: str, fleet: Fleet, stream: bool
) -> None:
    before = fleet.states().keys()
    body = {"model": "echo", "prompt": ["one", "two"], "stream": stream}
    with closing(connected(url)) as connection:
        connection.request("POST", "/v1/completions", json.dumps(body), JSON)
        wait_until(lambda: len(fleet.states()) == len(before) + 2, PATIENCE_S, "the jobs")
        assert {fleet.state(each) for each in fleet.states().keys() - before} == {JobState.QUEUED}
    for job_id in fleet.states().keys() - before:
        fleet.wait_state(job_id, JobState.CANCELLED)


def test_a_caller_that_goes_away_at_the_first_token_ends_what_the_stream_reads_from() -> None:
    ended: list[str] = []

    async def events() -> AsyncGenerator[str, None]:
        yield "data: never sent"

    async def run() -> None:
        async def receive() -> dict[str, Any]:
            return {"type": "http.disconnect"}

        async def send(message: object) -> None:
            await asyncio.sleep(0)

        source = AsyncExitStack()
        source.callback(ended.append, "the source")
        await EventStream(events(), source)({"type": "http"}, receive, send)

    asyncio.run(run())
    assert ended == ["the source"]


def test_an_upload_that_does_not_say_its_length_is_bounded_while_it_comes(url: str, fleet: Fleet) -> None:
    head = b'--x\r\nContent-Disposition: form-data; name="file"; filename="big.jsonl"\r\n\r\n'
    sent = head + b"x" * (MOST_BYTES + 2**16)
    with closing(connected(url)) as connection:
        connection.putrequest("POST", "/v1/files")
        connection.putheader("Content-Type", "multipart/form-data; boundary=x")
        connection.putheader("Transfer-Encoding", "chunked")
        connection.endheaders()
        connection.send(b"%x\r\n%s\r\n" % (len(sent), sent))  # and no end
        answer = connection.getresponse()
        assert answer.status == 413
        assert "max_file_bytes" in json.loads(answer.read())["error"]["message"]


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "https://elsewhere.example"},
        {"origin": "null"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
    ],
)
def test_a_page_of_another_site_changes_nothing_in_a_service_without_keys(
    url: str, fleet: Fleet, headers: dict[str, str]
) -> None:
    def stored() -> int:
        with fleet.engine.connect() as conn:
            return len(conn.execute(select(StoredFile.id)).all())

    before = stored()
    for refused in (
        httpx.post(f"{url}/v1/files", files=FORM, headers=headers),
        httpx.delete(f"{url}/v1/files/file-1", headers=headers),
        httpx.post(f"{url}/v1/chat/completions", json={}, headers=headers),
        httpx.post(f"{url}/v1/batches/batch_1/cancel", headers=headers),
    ):
        assert refused.status_code == 403
        assert refused.json()["error"]["code"] == "cross_site_request"
    assert stored() == before
    assert httpx.get(f"{url}/v1/models", headers=headers).status_code == 200


def test_pages_of_the_service_itself_and_callers_with_a_key_may_upload(url: str, fleet: Fleet) -> None:
    for own in ({"origin": url}, {"sec-fetch-site": "same-origin"}, {}):
        assert httpx.post(f"{url}/v1/files", files=FORM, headers=own).status_code == 200
    _, key = transaction(fleet.engine, lambda conn: keys.create_key(conn, tenant="acme", name="page"))
    with serving(fleet.settings, open_to_all=False) as address:
        elsewhere = {"origin": "https://elsewhere.example", "authorization": f"Bearer {key}"}
        assert httpx.post(f"{address}/v1/files", files=FORM, headers=elsewhere).status_code == 200
