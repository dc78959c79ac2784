"""The service in one process that web apps test against behaves like a fleet."""

from __future__ import annotations

import asyncio
import importlib
import json
import re
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
from starlette.testclient import TestClient

from backend.api import RequestError
from models_db.errors import IdempotencyConflictError, UnknownJobError
from models_db.tables import JobState
from workers.client import JobFailedError, JobNotFinishedError, StreamTimeoutError
from workers.demo import PROMPTS
from workers.testing import LocalFleet

WORDS = " ".join(f"word{number}" for number in range(30))


def test_jobs_run_fail_wait_and_are_cancelled() -> None:
    with LocalFleet(max_prompt_chars=100) as fleet:
        client = fleet.client
        job = client.submit("say this back", max_tokens=3)
        assert job.wait(timeout_s=20).text == "say this back"
        assert client.submit("one", idempotency_key="k").id == client.submit("one", idempotency_key="k").id
        with pytest.raises(IdempotencyConflictError):
            client.submit("other", idempotency_key="k")
        with pytest.raises(RequestError, match="max_prompt_chars"):
            client.submit("x" * 101)

        fleet.fail_next("the sky fell")
        broken = client.submit("one")
        with pytest.raises(JobFailedError, match="the sky fell"):
            broken.wait(timeout_s=20)
        (event,) = broken.stream(timeout_s=20)
        assert event.end is not None
        assert event.end.error_message == "the sky fell"

        fleet.hold()
        waiting, unwanted = client.submit("later", max_tokens=1), client.submit("never")
        assert waiting.status().state is JobState.QUEUED
        assert unwanted.cancel() is JobState.CANCELLED
        fleet.release()
        assert waiting.wait(timeout_s=20).text == "later"
        assert unwanted.status().state is JobState.CANCELLED


def test_streams_are_those_of_a_fleet() -> None:
    with LocalFleet(tokens_per_s=100, stream_interval_s=0.001) as fleet:
        client = fleet.client
        job = client.submit(WORDS, max_tokens=30, stream=True)
        events = job.stream(timeout_s=20)
        heard = [next(events)]
        assert job.status().state is JobState.RUNNING, "text comes while the answer is being made"
        heard += events
        result = job.wait(timeout_s=20)
        assert "".join(event.text for event in heard) == result.text == WORDS
        assert heard[-1].end is not None
        assert heard[-1].end.completion_tokens == result.completion_tokens
        for cut, event in enumerate(heard, 1):
            assert list(client.stream(job.id, last_id=event.id, timeout_s=20)) == heard[cut:]

        whole = client.submit("a b c", max_tokens=3)  # without stream=True: in one piece, from SQL
        assert [(event.kind, event.text) for event in whole.stream(timeout_s=20)] == [
            ("text", "a b c"),
            ("end", ""),
        ]
        fleet.fail_next("the sky fell")
        (event,) = client.submit("one", stream=True).stream(timeout_s=20)
        assert event.end is not None
        assert (event.end.state, event.end.error_message) == ("failed", "the sky fell")


def test_what_is_wrong_with_a_stream_is_said_at_the_call() -> None:
    with LocalFleet() as fleet:
        job = fleet.client.submit("one", stream=True)
        with pytest.raises(UnknownJobError):
            fleet.client.stream("none")
        for client in (fleet.client, fleet.async_client):
            with pytest.raises(RequestError, match="last_id: is not the id of an event"):
                client.stream(job.id, last_id="foo")
            with pytest.raises(RequestError, match="timeout_s: "):
                client.stream(job.id, timeout_s=float("nan"))
        fleet.hold()
        with pytest.raises(StreamTimeoutError):
            next(fleet.client.submit("held", stream=True).stream(timeout_s=0.01))


def test_the_asyncio_client_does_the_same() -> None:
    async def talk(fleet: LocalFleet) -> None:
        async with fleet.async_client as client:
            job = await client.submit(WORDS, max_tokens=30, stream=True)
            heard = [event async for event in job.stream(timeout_s=20)]
            assert len(heard) > 2
            assert "".join(event.text for event in heard) == (await job.wait(20)).text == WORDS
            assert [each async for each in client.stream(job.id, last_id=heard[0].id)] == heard[1:]
            many = await client.submit_many([{"prompt": "one"}, {"prompt": "two", "max_tokens": 1}])
            assert (await client.wait(many[1].id, 20)).text == "two"
            assert await client.result(job.id) == fleet.client.result(job.id)
            fleet.hold()
            held = await client.submit("never", stream=True)
            with pytest.raises(JobNotFinishedError):
                await client.result(held.id)
            with pytest.raises(StreamTimeoutError):
                await anext(held.stream(timeout_s=0.01))
            assert await held.cancel() is JobState.CANCELLED
            assert (await held.status()).state is JobState.CANCELLED
            fleet.release()
            with pytest.raises(UnknownJobError):
                await anext(client.stream("none"))

    with LocalFleet(tokens_per_s=200, stream_interval_s=0.001) as fleet:
        asyncio.run(talk(fleet))
        asyncio.run(talk(fleet))  # on another loop, after an application has closed it


def test_a_running_job_is_cancelled() -> None:
    with LocalFleet(tokens_per_s=20) as fleet:
        job = fleet.client.submit("words without end", max_tokens=10_000)
        job.cancel()
        with pytest.raises(JobFailedError, match="was cancelled"):
            job.wait(timeout_s=20)


# --------------------------------------------------------------------------------------------- the example applications

Get = Callable[..., tuple[int, str]]


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Imports an example as its users do, by its name."""
    monkeypatch.syspath_prepend(str(PROMPTS.parent))
    return importlib.import_module


@pytest.fixture(params=["fastapi", "flask", "django"])
def web(
    request: pytest.FixtureRequest, example: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[LocalFleet, Get]]:
    """Each example application, in this process, with a local fleet; and how to ask it."""
    app = example(f"web_{request.param}")
    with LocalFleet() as fleet:
        if request.param == "fastapi":
            monkeypatch.setattr(app, "AsyncClient", lambda: fleet.async_client)
            with TestClient(app.app) as browser:
                yield fleet, lambda path, **more: _read(browser, path, **more)
            return
        monkeypatch.setattr(app, "client", fleet.client)
        if request.param == "flask":
            yield fleet, lambda path, **more: _read(app.app.test_client(), path, **more)
        else:
            yield fleet, lambda path, **more: _read_django(path, **more)


def _read(browser: Any, path: str, body: Any = None, last_id: str = "") -> tuple[int, str]:
    headers = {"last-event-id": last_id} if last_id else {}
    answer = browser.get(path, headers=headers) if body is None else browser.post(path, json=body)
    return answer.status_code, answer.text


def _read_django(path: str, body: Any = None, last_id: str = "") -> tuple[int, str]:
    from django.test import Client  # only once the example has set Django up

    browser = Client(SERVER_NAME="localhost")
    if body is None:
        answer: Any = browser.get(path, headers={"last-event-id": last_id} if last_id else {})
    else:
        answer = browser.post(path, json.dumps(body), content_type="application/json")
    content = b"".join(answer.streaming_content) if answer.streaming else answer.content
    return answer.status_code, content.decode()


def test_each_web_example_can_be_tested_with_a_local_fleet(web: tuple[LocalFleet, Get]) -> None:
    fleet, ask = web
    status, said = ask("/questions", body={"text": "one two three"})
    assert status == 202
    address = f"/questions/{json.loads(said)['id']}"
    status, stream = ask(f"{address}/events")
    assert status == 200
    events = [
        dict(line.split(": ", 1) for line in event.splitlines()) for event in stream.split("\n\n") if event
    ]
    *pieces, end = events
    assert json.loads(end["data"])["state"] == "succeeded"
    text = json.loads(ask(address)[1])["text"]
    assert "".join(json.loads(piece["data"]) for piece in pieces) == text != ""
    assert ask(f"{address}/events", last_id=pieces[-1]["id"])[1].count("event: ") == 1, "only the end is left"
    assert ask(f"{address}/events", last_id="foo")[0] == 422
    for path in ("/questions/none", "/questions/none/events"):
        assert ask(path)[0] == 404
    fleet.fail_next("the sky fell")
    broken = json.loads(ask("/questions", body={"text": "one"})[1])["id"]
    assert "the sky fell" in ask(f"/questions/{broken}/events")[1]
    assert json.loads(ask(f"/questions/{broken}")[1]) == {"state": "failed", "error": "the sky fell"}


@pytest.mark.parametrize("web", ["fastapi"], indirect=True)
def test_the_page_of_the_fastapi_example_goes_on_behind_any_event(web: tuple[LocalFleet, Get]) -> None:
    """It gives the id in the address, as it is."""
    _, ask = web
    address = f"/questions/{json.loads(ask('/questions', body={'text': 'one two'})[1])['id']}/events"
    whole = ask(address)[1]
    ids = re.findall(r"^id: (.*)$", whole, re.MULTILINE)
    assert len(ids) > 1
    for last in ids:
        assert ask(f"{address}?last_id={last}") == (
            200,
            whole.partition(f"id: {last}\n")[2].partition("\n\n")[2],
        )
