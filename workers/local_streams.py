"""Token streams within one process: what ``workers.testing`` has instead of Redis.

Only the few commands that the worker's writer and the clients' readers use, in the shape that redis-py gives them, so
that writer and readers are the real ones.
"""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from workers.streams import stream_key

Entry = tuple[str, dict[str, str]]


class LocalStreams:
    """The streams of all jobs, and who waits for news of one. For ``StreamWriter`` and ``read_stream``."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: dict[str, list[Entry]] = defaultdict(list)
        self._written: dict[str, int] = defaultdict(int)
        self._silent: set[str] = set()
        self._waiting: dict[str, set[Callable[[], None]]] = defaultdict(set)

    def pipeline(self, transaction: bool) -> _Pipeline:
        """As redis-py's."""
        return _Pipeline(self)

    def xadd(self, key: str, fields: Mapping[str, str], *, maxlen: int) -> None:
        """Append an entry; the oldest goes when there are more than ``maxlen``."""
        with self._lock:
            self._written[key] += 1
            entries = self._entries[key]
            entries.append((f"{self._written[key]}-0", dict(fields)))
            del entries[:-maxlen]
        self._wake(key)

    def ended(self, job_id: str) -> None:
        """A job has ended that has no stream: nobody need wait for its entries."""
        key = stream_key(job_id)
        with self._lock:
            self._silent.add(key)
        self._wake(key)

    def xread(self, streams: Mapping[str, str], count: int, block: int | None = None) -> list[Any]:
        """As redis-py's, of one stream."""
        ((key, after),) = streams.items()
        news = threading.Event()
        with self._told(key, news.set):
            found = self.after(key, after, count)
            if found or block is None or key in self._silent:
                return found
            news.wait(block / 1000)
        return self.after(key, after, count)

    def after(self, key: str, entry_id: str, count: int) -> list[Any]:
        """The entries behind this one, as ``XREAD`` gives them."""
        with self._lock:
            later = [each for each in self._entries[key] if _number(each[0]) > _number(entry_id)][:count]
        return [[key, later]] if later else []

    def close(self) -> None:
        """As redis-py's; there is nothing to close."""

    @contextmanager
    def _told(self, key: str, wake: Callable[[], None]) -> Iterator[None]:
        with self._lock:
            self._waiting[key].add(wake)
        try:
            yield
        finally:
            with self._lock:
                self._waiting[key].discard(wake)

    def _wake(self, key: str) -> None:
        with self._lock:
            waiting = list(self._waiting[key])
        for wake in waiting:
            wake()


class AsyncLocalStreams:
    """The reader's side for asyncio, on whichever loop asks."""

    def __init__(self, streams: LocalStreams) -> None:
        self._streams = streams

    async def xread(self, streams: Mapping[str, str], count: int, block: int | None = None) -> list[Any]:
        """As redis-py's, of one stream."""
        ((key, after),) = streams.items()
        news, loop = asyncio.Event(), asyncio.get_running_loop()

        def wake() -> None:
            with suppress(RuntimeError):  # the loop is closed, so nobody waits any more
                loop.call_soon_threadsafe(news.set)

        with self._streams._told(key, wake):
            found = self._streams.after(key, after, count)
            if found or block is None or key in self._streams._silent:
                return found
            with suppress(TimeoutError):
                # wait_for may lose a cancellation before Python 3.12.
                async with asyncio.timeout(block / 1000):
                    await news.wait()
        return self._streams.after(key, after, count)

    async def aclose(self) -> None:
        """As redis-py's; there is nothing to close."""


class _Pipeline:
    """What ``StreamWriter`` does in one round trip."""

    def __init__(self, streams: LocalStreams) -> None:
        self._streams = streams
        self._commands: list[tuple[str, Mapping[str, str], int]] = []

    def __enter__(self) -> _Pipeline:
        return self

    def __exit__(self, *_: object) -> None:
        self._commands.clear()

    def xadd(self, key: str, fields: Mapping[str, str], *, maxlen: int, approximate: bool) -> None:
        self._commands.append((key, fields, maxlen))

    def pexpire(self, key: str, milliseconds: int) -> None:
        """A test is over long before."""

    def execute(self) -> None:
        for key, fields, maxlen in self._commands:
            self._streams.xadd(key, fields, maxlen=maxlen)


def _number(entry_id: str) -> int:
    return int(entry_id.partition("-")[0])
