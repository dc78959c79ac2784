"""``AsyncClient``: the client for asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

import redis.asyncio

from models_db.jobs import JobStatus, StoredResult
from models_db.tables import JobState
from workers.broker import Broker, async_stream_connection
from workers.client.arguments import checked_size
from workers.client.errors import JobNotFinishedError, WaitTimeoutError
from workers.client.fields import PayloadFields
from workers.client.streaming import check_last_id, read_stream_async
from workers.client.sync import Client
from workers.client.waiting import check_timeout, pauses
from workers.settings import Settings
from workers.streams import StreamEvent

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class AsyncJobHandle:
    """A job that was accepted; as ``JobHandle``, with ``async`` methods."""

    id: str
    created: bool
    published: bool
    client: AsyncClient = field(repr=False, compare=False)

    async def wait(self, timeout_s: float | None = None) -> StoredResult:
        """See ``AsyncClient.wait``."""
        return await self.client.wait(self.id, timeout_s)

    def stream(
        self, *, last_id: str | None = None, timeout_s: float | None = None
    ) -> AsyncGenerator[StreamEvent, None]:
        """See ``Client.stream``."""
        return self.client.stream(self.id, last_id=last_id, timeout_s=timeout_s)

    async def status(self) -> JobStatus:
        """See ``Client.status``."""
        return await self.client.status(self.id)

    async def cancel(self) -> JobState:
        """See ``Client.cancel``."""
        return await self.client.cancel(self.id)


class AsyncClient:
    """``Client`` for asyncio: the same methods, each call in a small pool of threads of its own.

    Waiting costs no thread: between two looks at SQL the coroutine sleeps. Takes ``Client``'s arguments. Serves any
    event loop, also several one after the other, as where each request or each test has its own.

    A call that is cancelled ends at once, but what its thread has begun goes on: a cancelled ``submit`` may have
    accepted the job. With an ``idempotency_key`` it can be submitted again.
    """

    def __init__(
        self,
        settings: Settings | None = None,
        *,
        broker_url: str | None = None,
        database_url: str | None = "",
        broker: Broker | None = None,
        threads: int = 4,
    ) -> None:
        self.sync = Client(settings, broker_url=broker_url, database_url=database_url, broker=broker)
        # A connection is of one loop.
        self._streams: dict[asyncio.AbstractEventLoop, redis.asyncio.Redis] = {}
        self._size = checked_size(threads)
        self._threads = self._pool()

    async def submit(
        self,
        /,
        prompt: str | None = None,
        *,
        messages: Sequence[Mapping[str, str]] | None = None,
        token_ids: Sequence[int] | None = None,
        model: str | None = None,
        idempotency_key: str | None = None,
        **params: Unpack[PayloadFields],
    ) -> AsyncJobHandle:
        """See ``Client.submit``."""
        handle = await self._run(
            lambda: self.sync.submit(
                prompt,
                messages=messages,
                token_ids=token_ids,
                model=model,
                idempotency_key=idempotency_key,
                **params,
            )
        )
        return AsyncJobHandle(handle.id, handle.created, handle.published, self)

    async def submit_many(self, requests: Iterable[Mapping[str, Any]]) -> list[AsyncJobHandle]:
        """See ``Client.submit_many``."""
        handles = await self._run(lambda: self.sync.submit_many(requests))
        return [AsyncJobHandle(handle.id, handle.created, handle.published, self) for handle in handles]

    async def status(self, job_id: str) -> JobStatus:
        """See ``Client.status``."""
        return await self._run(lambda: self.sync.status(job_id))

    async def result(self, job_id: str) -> StoredResult:
        """See ``Client.result``."""
        return await self._run(lambda: self.sync.result(job_id))

    async def cancel(self, job_id: str) -> JobState:
        """See ``Client.cancel``."""
        return await self._run(lambda: self.sync.cancel(job_id))

    async def wait(self, job_id: str, timeout_s: float | None = None) -> StoredResult:
        """See ``Client.wait``."""
        for pause_s in pauses(timeout_s, job_id):
            try:
                return await self.result(job_id)
            except JobNotFinishedError as error:
                if pause_s is None:
                    assert timeout_s is not None
                    raise WaitTimeoutError(error.status, timeout_s) from None
            await asyncio.sleep(pause_s)
        raise AssertionError("the pauses end with None")

    def stream(
        self, job_id: str, *, last_id: str | None = None, timeout_s: float | None = None
    ) -> AsyncGenerator[StreamEvent, None]:
        """See ``Client.stream``. The job is looked for with the first event; its arguments are checked at once."""
        check_timeout(timeout_s)
        if last_id is not None:
            check_last_id(last_id)
        return self._stream(job_id, last_id, timeout_s)

    async def _stream(
        self, job_id: str, last_id: str | None, timeout_s: float | None
    ) -> AsyncGenerator[StreamEvent, None]:
        if self.sync.has_database:
            await self.status(job_id)
        events = read_stream_async(
            self._stream_connection(),
            job_id,
            lambda: self._run(lambda: self.sync.concluded(job_id)),
            url=self.sync.settings.broker_url,
            last_id=last_id,
            timeout_s=timeout_s,
        )
        async with aclosing(events):
            async for event in events:
                yield event

    def _stream_connection(self) -> redis.asyncio.Redis:
        loop = asyncio.get_running_loop()
        if loop not in self._streams:
            for other in list(self._streams):
                if other.is_closed():  # a loop that is over cannot close its connections any more
                    self._streams.pop(other, None)
            self._streams[loop] = async_stream_connection(self.sync.settings.broker_url)
        return self._streams[loop]

    async def close(self) -> None:
        """Close the connections and the threads; the client can be used again and opens new ones."""
        loop = asyncio.get_running_loop()
        streams = self._streams.pop(loop, None)
        self._streams.clear()
        threads, self._threads = self._threads, self._pool()
        try:
            if streams is not None:
                await streams.aclose()
        finally:  # also where the task is cancelled meanwhile
            closing = loop.run_in_executor(threads, self.sync.close)
            threads.shutdown(wait=False)  # what has been given to them is done
            await asyncio.shield(closing)

    def _pool(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(self._size, thread_name_prefix="tokenmill-client")

    async def _run(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
