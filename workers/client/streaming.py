"""Reading a job's tokens as they come, from Redis, and what Redis cannot tell from SQL."""

from __future__ import annotations

import re
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from typing import Any

import redis
import redis.asyncio
from sqlalchemy import Connection

from backend.api import RequestError, TokenmillError
from models_db import jobs
from models_db.jobs import JobStatus, StoredResult
from workers.broker import BrokerUnavailableError
from workers.streams import FIRST_ID, Position, StreamEnd, StreamEvent, StreamReader, stream_key

_BLOCK_S = 1.0  # between two looks at SQL, for jobs that end without a word in the stream
_BATCH = 500
_ID = re.compile(r"(\d{1,20})(?:-(\d{0,20}))?(?:\.(\d{1,10})\.(\d{1,10})(\.end)?)?", re.ASCII)
_LARGEST = 2**64 - 1  # that Redis takes


def check_last_id(last_id: str) -> Position | None:
    """Where the event of this id was; ``None`` for the id of a mere entry, which does not tell what came of it.

    Raises:
        RequestError: it is none.
    """
    match = _ID.fullmatch(last_id) if isinstance(last_id, str) else None
    first, second = (0, 0) if match is None else (int(match[1]), int(match[2] or 0))
    if match is None or max(first, second) > _LARGEST:
        raise RequestError(
            "is not the id of an event",
            field="last_id",
            value=last_id,
            fix="Give the id of the last event read",
        )
    entry_id = f"{first}-{second}"
    if match[3] is None:
        return Position() if entry_id == FIRST_ID else None
    return Position(entry_id, int(match[3]), int(match[4]), match[5] is not None)


class StreamTimeoutError(TokenmillError, TimeoutError):
    """The time given to ``stream`` is over. The job goes on; read on after ``last_id``, or cancel it."""

    code = "stream_timeout"

    def __init__(self, job_id: str, timeout_s: float, last_id: str) -> None:
        self.last_id = last_id
        super().__init__(
            f"job {job_id} has not ended after {timeout_s:g} s. It goes on: read on with last_id={last_id!r}, "
            "or cancel it"
        )


Outcome = tuple[JobStatus, StoredResult | None]


def concluded(connection: Connection, job_id: str) -> Outcome | None:
    """Status and result of a job that has ended; ``None`` while it has not, or has no row yet."""
    status = jobs.job_status(connection, job_id)
    if status is None or not status.state.terminal:
        return None
    return status, jobs.job_result(connection, job_id)


def conclusion(reader: StreamReader, status: JobStatus, result: StoredResult | None) -> list[StreamEvent]:
    """The events that are left, from SQL."""
    end = StreamEnd.of(str(status.state), result, status.error_type, status.error_message)
    return reader.conclude(status.attempt, None if result is None else result.text, end)


def read_stream(
    connection: redis.Redis,
    job_id: str,
    outcome: Callable[[], Outcome | None],
    *,
    url: str,
    last_id: str | None = None,
    timeout_s: float | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[StreamEvent]:
    """See ``Client.stream``.

    Args:
        outcome: looks into SQL, see ``concluded``.
        url: the connection's, for errors.
    """
    key = stream_key(job_id)
    reader, voided = _begin(last_id)
    give_up = None if timeout_s is None else clock() + timeout_s
    try:
        yield from voided
        while not reader.ended:
            left = _BLOCK_S if give_up is None else min(_BLOCK_S, give_up - clock())
            if left <= 0:
                raise StreamTimeoutError(job_id, timeout_s or 0.0, str(reader.position))
            block_ms = max(1, round(1000 * left))
            found: Any = connection.xread({key: reader.last_id}, count=_BATCH, block=block_ms)
            if not found and (ended := outcome()) is not None:
                # What came between the two looks.
                found = connection.xread({key: reader.last_id}, count=_BATCH)
                if not found:
                    yield from conclusion(reader, *ended)
                    return
            yield from _events(reader, found)
            if found and reader.needs_sql and (ended := outcome()) is not None:
                yield from conclusion(reader, *ended)
                return
    except StreamTimeoutError:  # an OSError, too
        raise
    except (redis.RedisError, OSError) as error:
        raise BrokerUnavailableError(url, error) from error


async def read_stream_async(
    connection: redis.asyncio.Redis,
    job_id: str,
    outcome: Callable[[], Awaitable[Outcome | None]],
    *,
    url: str,
    last_id: str | None = None,
    timeout_s: float | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> AsyncGenerator[StreamEvent, None]:
    """As ``read_stream``, without a thread while it waits."""
    key = stream_key(job_id)
    reader, voided = _begin(last_id)
    give_up = None if timeout_s is None else clock() + timeout_s
    try:
        for event in voided:
            yield event
        while not reader.ended:
            left = _BLOCK_S if give_up is None else min(_BLOCK_S, give_up - clock())
            if left <= 0:
                raise StreamTimeoutError(job_id, timeout_s or 0.0, str(reader.position))
            block_ms = max(1, round(1000 * left))
            found: Any = await connection.xread({key: reader.last_id}, count=_BATCH, block=block_ms)
            if not found and (ended := await outcome()) is not None:
                # What came between the two looks.
                found = await connection.xread({key: reader.last_id}, count=_BATCH)
                if not found:
                    for event in conclusion(reader, *ended):
                        yield event
                    return
            for event in _events(reader, found):
                yield event
            if found and reader.needs_sql and (ended := await outcome()) is not None:
                for event in conclusion(reader, *ended):
                    yield event
                return
    except StreamTimeoutError:  # an OSError, too
        raise
    except (redis.RedisError, OSError) as error:
        raise BrokerUnavailableError(url, error) from error


def _begin(last_id: str | None) -> tuple[StreamReader, list[StreamEvent]]:
    """A reader that goes on behind this event, and what is to be said first."""
    if last_id is None:
        return StreamReader(), []
    position = check_last_id(last_id)
    if position is None:
        reader = StreamReader()
        return reader, [reader.lost()]
    return StreamReader(position), []


def _events(reader: StreamReader, found: Any) -> Iterator[StreamEvent]:
    for _, entries in found:
        for entry_id, fields in entries:
            yield from reader.feed(entry_id, fields)
