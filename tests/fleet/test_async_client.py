"""What asyncio asks of ``AsyncClient``: cancelled anywhere, on any loop, closed and used again."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Coroutine
from typing import Any

import pytest

from tests.fleet.conftest import MakeFleet
from tests.fleet.fleet import RedisServer
from workers.client import AsyncClient, StreamEvent
from workers.local_streams import AsyncLocalStreams, LocalStreams
from workers.settings import load_settings
from workers.streams import text_fields
from workers.testing import LocalFleet

STEPS = 40  # of the event loop; a reader that connects has come to its wait for tokens after half of them
PROMPTLY_S = 0.5  # a reader that has lost a cancellation waits for a second at least


async def steps(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def ends_when_cancelled(work: Coroutine[Any, Any, object], at: int) -> bool:
    """Whether a task ends that is cancelled after so many steps."""
    task = asyncio.create_task(work)
    await steps(at)
    task.cancel()
    done, _ = await asyncio.wait({task}, timeout=PROMPTLY_S)
    while not task.done():
        task.cancel()
        await asyncio.wait({task}, timeout=0.05)
    return bool(done) and task.cancelled()


async def read(events: AsyncGenerator[StreamEvent, None]) -> None:
    async for _ in events:
        pass


def test_a_reader_that_is_cancelled_ends_whatever_it_was_about(redis_server: RedisServer) -> None:
    settings = load_settings(broker_url=redis_server.url, model="smollm2")

    async def connect_and_read() -> None:
        async with AsyncClient(settings, database_url=None) as client:
            await read(client.stream("nobody's"))

    async def lost() -> list[int]:
        return [at for at in range(STEPS) if not await ends_when_cancelled(connect_and_read(), at)]

    assert asyncio.run(lost()) == []


def test_a_reader_in_a_local_fleet_that_is_cancelled_as_tokens_come_ends() -> None:
    async def wait_on(streams: LocalStreams) -> None:
        while True:
            await AsyncLocalStreams(streams).xread({"tokens": "0-0"}, count=1, block=10_000)
            await asyncio.Event().wait()  # what it reads does not matter, only that it heeds the cancellation

    async def lost() -> list[int]:
        found = []
        for at in range(STEPS):
            streams = LocalStreams()

            def come(streams: LocalStreams = streams) -> None:
                streams.xadd("tokens", text_fields(1, 0, "word", 1), maxlen=10)

            task = asyncio.create_task(wait_on(streams))
            await steps(STEPS)
            come()
            await steps(at)
            task.cancel()
            await asyncio.wait({task}, timeout=PROMPTLY_S)
            if not task.cancelled():
                found.append(at)
                task.cancel()
                await asyncio.wait({task})
        return found

    assert asyncio.run(lost()) == []


def test_one_client_serves_one_loop_after_the_other(make_fleet: MakeFleet) -> None:
    fleet = make_fleet()
    fleet.worker()
    client = AsyncClient(fleet.settings)

    async def talk() -> str:
        job = await client.submit("one two", max_tokens=2, stream=True)
        return "".join([event.text async for event in job.stream(timeout_s=20)])

    assert [asyncio.run(talk()) for _ in range(3)] == ["one two"] * 3
    asyncio.run(client.close())


def test_a_closed_client_can_be_closed_and_used_again(tmp_path_factory: pytest.TempPathFactory) -> None:
    with LocalFleet() as fleet:
        settings = fleet.client.settings

        async def talk() -> None:
            client = AsyncClient(settings)
            job = await fleet.async_client.submit("one two", max_tokens=2)
            for _ in range(2):
                await client.close()
            assert (await client.wait(job.id, 20)).text == "one two"
            await client.close()

        asyncio.run(talk())


def test_a_close_that_is_cancelled_closes_all_the_same(redis_server: RedisServer) -> None:
    settings = load_settings(broker_url=redis_server.url, model="smollm2")

    async def close(at: int) -> bool:
        client = AsyncClient(settings, database_url=None)
        closed = threading.Event()
        original = client.sync.close

        def close_and_tell() -> None:
            original()
            closed.set()

        client.sync.close = close_and_tell  # type: ignore[method-assign]
        reading = asyncio.create_task(read(client.stream("nobody's")))
        await steps(STEPS)
        reading.cancel()
        await asyncio.wait({reading})
        task = asyncio.create_task(client.close())
        await steps(at)
        task.cancel()
        await asyncio.wait({task})
        return await asyncio.to_thread(closed.wait, 5)

    async def not_closed() -> list[int]:
        return [at for at in range(1, 12) if not await close(at)]

    assert asyncio.run(not_closed()) == []
