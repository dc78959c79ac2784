"""The jobs of one HTTP request: submitted, read as they come, cancelled when nobody waits for them any more."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from workers.client import (
    AsyncClient,
    DatabaseError,
    IdempotencyConflictError,
    StreamEnd,
    StreamEvent,
    StreamTimeoutError,
)
from workers.client.aio import AsyncJobHandle
from workers.serve.answers import Choice
from workers.serve.errors import ApiError, from_end


class Continuous:
    """One answer's text, in pieces that only ever add to what was sent.

    An attempt that begins again says the same again, which is passed over, since what was sent cannot be taken back.
    """

    def __init__(self) -> None:
        self.sent = ""
        self._said = ""

    def feed(self, event: StreamEvent) -> str:
        """What there is to send.

        Raises:
            ApiError: the answer has begun again and come out differently.
        """
        if event.kind == "restart":
            self._said = ""
        self._said += event.text
        if not self._said.startswith(self.sent[: len(self._said)]):
            raise ApiError(
                500, "the answer had to begin again and came out differently. Ask again", kind="server_error"
            )
        fresh = self._said[len(self.sent) :]
        self.sent += fresh
        return fresh


class Generation:
    """See the module. Use it as an asynchronous context: jobs that have not ended are cancelled at its end.

    Those with a key are not: the caller that has gone may be about to ask again, or wait with the same key elsewhere.
    """

    def __init__(
        self, client: AsyncClient, jobs: Sequence[AsyncJobHandle], timeout_s: float, *, cancels: bool
    ) -> None:
        self._client = client
        self.jobs = jobs
        self._timeout_s = timeout_s
        self._cancels = cancels
        self._ended: set[str] = set()

    @classmethod
    async def submit(
        cls,
        client: AsyncClient,
        payloads: Sequence[dict[str, Any]],
        *,
        tenant: str | None,
        key: str | None,
        timeout_s: float,
    ) -> Generation:
        """Accept the jobs. ``key`` makes a repeated request find the same ones.

        Raises:
            SubmissionUnknownError: the jobs may have been accepted, and then run with nobody waiting for them.
            RequestError, DatabaseError: nothing was accepted.
        """
        requests = []
        for index, payload in enumerate(payloads):
            extra: dict[str, Any] = {"stream": True}
            if tenant is not None:
                extra["tenant"] = tenant
            if key is not None:
                extra["idempotency_key"] = _job_key(tenant, key, index)
                if len(payloads) > 1:
                    # A part of what a repeated request is compared with: so many answers it wants.
                    extra["custom_id"] = f"{index + 1}/{len(payloads)}"
            requests.append(payload | extra)
        try:
            jobs = await client.submit_many(requests)
        except IdempotencyConflictError:
            raise ApiError(  # its own words name the digest that the key is kept as
                409,
                f"Idempotency-Key: {key!r} was used before for another request. Send that one again, or choose "
                "a new key",
                kind="invalid_request_error",
                code="idempotency_conflict",
                param="Idempotency-Key",
            ) from None
        return cls(client, jobs, timeout_s, cancels=key is None)

    async def __aenter__(self) -> Generation:
        return self

    async def __aexit__(self, *_: object) -> None:
        left = [job for job in self.jobs if job.id not in self._ended]
        if left and self._cancels:
            # Shielded: the caller is often being cancelled itself, because its client has gone.
            await asyncio.shield(self._cancel(left))

    async def _cancel(self, jobs: Sequence[AsyncJobHandle]) -> None:
        for job in jobs:
            try:
                await job.cancel()
            except DatabaseError:  # they run to their end; nothing is lost but their time
                return

    async def events(self) -> AsyncGenerator[tuple[int, StreamEvent], None]:
        """The events of all jobs as they come, each with its job's index.

        Raises:
            ApiError: the time is over.
            BrokerUnavailableError: Redis does not answer.
        """
        news: asyncio.Queue[tuple[int, StreamEvent | BaseException]] = asyncio.Queue()

        async def read(index: int, job: AsyncJobHandle) -> None:
            try:
                async with aclosing(job.stream(timeout_s=self._timeout_s)) as events:
                    async for event in events:
                        await news.put((index, event))
            except Exception as error:
                await news.put((index, error))

        tasks = [asyncio.create_task(read(index, job)) for index, job in enumerate(self.jobs)]
        try:
            while len(self._ended) < len(self.jobs):
                index, event = await news.get()
                if isinstance(event, StreamTimeoutError):
                    raise ApiError(
                        504,
                        f"no answer within {self._timeout_s:g} s. Ask for less, or use a batch",
                        kind="server_error",
                        code="timeout",
                    )
                if isinstance(event, BaseException):
                    raise event
                if event.end is not None:
                    self._ended.add(self.jobs[index].id)
                yield index, event
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def choices(self) -> list[Choice]:
        """All answers, complete.

        Raises:
            ApiError: one of them failed, or the time is over.
        """
        async with aclosing(self.events()) as events:
            async for index, event in events:
                if event.end is not None and event.end.state != "succeeded":
                    raise from_end(self.jobs[index].id, event.end)
        return [await self.stored(index) for index in range(len(self.jobs))]

    async def stored(self, index: int) -> Choice:
        """The answer of a job that has succeeded, as SQL holds it."""
        return Choice.of(await self._client.result(self.jobs[index].id))


def _job_key(tenant: str | None, key: str, index: int) -> str:
    """The key of one job of a request; hashed, since the column is short and tenants must not share keys."""
    return "http:" + hashlib.sha256(f"{tenant or ''}\0{key}\0{index}".encode()).hexdigest()


def choice_of(text: str, end: StreamEnd) -> Choice:
    """An answer that was streamed."""
    return Choice(text, end.finish_reason, end.prompt_tokens, end.completion_tokens, end.cached_tokens)
