"""Tokens from a worker to a client through Redis: in time, complete, resumable, and right after a death."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Iterator

import pytest
import redis

from backend.api import GenerationHandle, GenerationRequest, Prompt, RequestError, TokenChunk
from models_db.tables import JobState
from tests.fleet.conftest import MakeFleet
from tests.fleet.fleet import RedisServer
from workers.broker import stream_connection
from workers.client import AsyncClient, Client, StreamEvent, StreamTimeoutError
from workers.stream_writer import StreamWriter
from workers.streams import StreamEnd, stream_key

WORDS = " ".join(f"word{number}" for number in range(30))


def text_of(events: list[StreamEvent]) -> str:
    text = ""
    for event in events:
        text = "" if event.kind == "restart" else text + event.text
    return text


@pytest.fixture
def client(make_fleet: MakeFleet) -> Iterator[Client]:
    fleet = make_fleet(engine={"echo_tokens_per_s": 100})
    fleet.worker()
    with Client(fleet.settings) as made:
        yield made


def test_a_stream_gives_the_result_s_text_in_pieces_and_then_its_end(client: Client) -> None:
    job = client.submit(WORDS, max_tokens=30, stream=True)
    events = list(job.stream(timeout_s=30))
    assert [event.kind for event in events[:-1]] == ["text"] * (len(events) - 1)
    assert len(events) > 5
    result = client.result(job.id)  # the end comes after the commit
    assert text_of(events) == result.text
    assert events[-1].end == StreamEnd(
        "succeeded", result.finish_reason, result.prompt_tokens, result.completion_tokens
    )
    assert sum(event.tokens for event in events) == result.completion_tokens
    assert list(job.stream(timeout_s=30)) == events, "it can be read again"
    middle = events[3].id
    assert list(job.stream(last_id=middle, timeout_s=30)) == events[4:]


def test_asyncio_reads_the_same(client: Client) -> None:
    async def read() -> tuple[list[StreamEvent], str]:
        async with AsyncClient(client.settings) as made:
            job = await made.submit(WORDS, max_tokens=30, stream=True)
            events = [event async for event in job.stream(timeout_s=30)]
            return events, (await job.wait()).text

    events, text = asyncio.run(read())
    assert text_of(events) == text
    assert events[-1].end is not None


def test_a_failure_and_a_cancel_end_the_stream(client: Client) -> None:
    job = client.submit(WORDS, max_tokens=4000, stream=True)
    events = job.stream(timeout_s=30)
    assert next(events).kind == "text"
    job.cancel()
    last = list(events)[-1]
    assert last.end is not None
    assert last.end.state == "cancelled"
    refused = client.submit("  ", stream=True)
    (only,) = list(refused.stream(timeout_s=30))
    assert only.end is not None
    assert (only.end.state, only.end.error_type) == ("failed", "RequestError")
    assert "holds no word" in (only.end.error_message or "")


def test_a_job_that_no_worker_had_ends_all_the_same(make_fleet: MakeFleet) -> None:
    with Client(make_fleet().settings) as client:
        job = client.submit(WORDS, stream=True)
        with pytest.raises(StreamTimeoutError, match=job.id):
            list(job.stream(timeout_s=0.1))
        job.cancel()
        (only,) = list(job.stream(timeout_s=30))
        assert only.end is not None
        assert only.end.state == "cancelled"
        with pytest.raises(RequestError, match="last_id"):
            list(job.stream(last_id="yesterday"))


def test_what_redis_does_not_have_any_more_comes_from_sql(client: Client, redis_server: RedisServer) -> None:
    job = client.submit(WORDS, max_tokens=30, stream=True)
    first = list(job.stream(timeout_s=30))
    redis_server.client.delete(stream_key(job.id))
    whole = list(job.stream(timeout_s=30))
    assert [event.kind for event in whole] == ["text", "end"]
    assert text_of(whole) == text_of(first)
    rest = list(job.stream(last_id=first[2].id, timeout_s=30))
    assert [event.kind for event in rest] == ["text", "end"]
    assert text_of(rest) == text_of(first[3:])
    assert list(job.stream(last_id=rest[0].id, timeout_s=30)) == rest[1:], "its end alone"
    assert list(job.stream(last_id=rest[1].id, timeout_s=30)) == []


def test_a_job_that_begins_again_elsewhere_restarts_its_stream(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(engine={"echo_tokens_per_s": 4})
    victim = fleet.worker()
    with Client(fleet.settings) as client:
        job = client.submit(WORDS, max_tokens=30, stream=True)
        events = job.stream(timeout_s=60)
        heard = [next(events)]
        victim.kill()
        fleet.worker(engine={})
        heard += list(events)
        assert fleet.state(job.id) is JobState.SUCCEEDED
        assert "restart" in [event.kind for event in heard]
        assert text_of(heard) == client.result(job.id).text


# ------------------------------------------------------------------------------------------------ the writer


def handle() -> GenerationHandle:
    request = GenerationRequest(request_id="j", prompt=Prompt(prompt="x"), stream=True)
    return GenerationHandle(request, lambda: None)


class Lagging:
    """A Redis that fails until ``back`` is set."""

    def __init__(self, real: redis.Redis) -> None:
        self.real = real
        self.tried = threading.Event()
        self.back = threading.Event()

    def pipeline(self, transaction: bool) -> redis.client.Pipeline:
        if not self.back.is_set():
            self.tried.set()
            raise redis.ConnectionError("gone")
        return self.real.pipeline(transaction)

    def close(self) -> None:
        self.real.close()


def test_text_waits_while_redis_is_away(redis_server: RedisServer) -> None:
    lagging = Lagging(redis.Redis(port=redis_server.port, decode_responses=True))
    writer = StreamWriter(lagging, interval_s=0.001, expires_s=60, max_entries=100)  # type: ignore[arg-type]
    writer.start()
    made = handle()
    made.push(TokenChunk("before ", (1,)))  # before anybody forwards
    writer.begin("away", 1, made)
    made.push(TokenChunk("after", (2,)))
    writer.end("away", 1, StreamEnd("succeeded"))
    assert lagging.tried.wait(20)
    lagging.back.set()
    entries: list[dict[bytes, bytes]] = []
    last = "0"
    while not entries or entries[-1][b"kind"] != b"end":
        ((_, found),) = redis_server.client.xread({stream_key("away"): last}, block=10_000)
        entries += [fields for _, fields in found]
        last = found[-1][0]
    writer.stop(20)
    assert entries[0][b"kind"] == b"restart"
    assert b"".join(entry.get(b"text", b"") for entry in entries) == b"before after"
    assert 0 < redis_server.client.pttl(stream_key("away")) <= 60_000


def test_a_stream_is_bounded_and_who_falls_behind_has_the_rest_from_sql(
    make_fleet: MakeFleet, redis_server: RedisServer
) -> None:
    fleet = make_fleet(stream_max_entries=100)
    fleet.worker()
    with Client(fleet.settings) as client:
        job = client.submit(WORDS, max_tokens=500)  # the worker leaves its stream to this test
        whole = job.wait(30)
        first, *pieces = re.findall(r" ?\S+", whole.text)
        key, made = stream_key(job.id), handle()
        writer = StreamWriter(
            stream_connection(fleet.settings.broker_url),
            interval_s=0,
            expires_s=60,
            max_entries=fleet.settings.stream_max_entries,
        )
        writer.start()
        writer.begin(job.id, 1, made)
        made.push(TokenChunk(first, (1,)))
        slow = job.stream(timeout_s=30)
        heard = [next(slow)]
        last: bytes | str = heard[0].id.partition(".")[0]
        lengths, written = [], 0
        for piece in pieces:
            made.push(TokenChunk(piece, (1,)))
            ((_, found),) = redis_server.client.xread({key: last}, block=10_000)
            last, written = found[-1][0], written + len(found)
            lengths.append(redis_server.client.xlen(key))
        writer.end(job.id, 1, StreamEnd("succeeded"))
        writer.stop(20)
        assert written == len(pieces) == 499
        assert 100 <= lengths[-1] <= max(lengths) <= 200, "Redis drops nodes of up to a hundred entries whole"

        heard += slow
        assert [event.kind for event in heard] == ["text", "text", "end"]
        assert heard[0].text == first
        assert text_of(heard) == whole.text
        assert list(job.stream(last_id=heard[0].id, timeout_s=30)) == heard[1:]
        late = list(job.stream(timeout_s=30))
        assert [(event.kind, event.text) for event in late] == [("text", whole.text), ("end", "")]
