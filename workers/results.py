"""Celery's Redis result backend, storing the results of many tasks in two round trips instead of two for each."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import redis
import redis.sentinel
from celery.backends.redis import RedisBackend, SentinelBackend
from celery.exceptions import BackendError
from kombu.exceptions import OperationalError

from workers.refusing_redis import noticing_refusals

BACKEND_AWAY = (redis.ConnectionError, redis.TimeoutError, OperationalError, BackendError, OSError)
"""What Celery's result backends raise while theirs does not answer, or takes nothing."""

OVERRIDES = {
    "redis": "workers.results:GatheringRedisBackend",
    "rediss": "workers.results:GatheringRedisBackend",
    "sentinel": "workers.results:GatheringSentinelBackend",
}
"""For the attribute ``override_backends`` of a Celery loader."""


class _Gathered(threading.local):
    """What one thread has read, and not written yet."""

    known: dict[str, Any] | None = None
    waiting: list[tuple[str, Any, int | None]]


class Gathering:
    """Mixed into Celery's backends: within ``gathered``, results wait and are written at the end.

    What such a block stores is as if each had been stored by itself: a result that is there already stays, the same
    keys are written with the same lifetime, and whoever waits is told.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._gathered = _Gathered()
        backend: Any = self
        found = backend.connparams.get("connection_class", backend.usual_connection_class)
        backend.connparams["connection_class"] = noticing_refusals(found)

    @contextmanager
    def gathered(self, task_ids: Sequence[str]) -> Iterator[None]:
        """Gather the results of these tasks that this thread stores within the block.

        Raises:
            Exception: at the end of the block, what the last try to write them met; some may have been written.
        """
        backend: Any = self
        keys = [backend.get_key_for_task(task_id) for task_id in task_ids]
        state = self._gathered
        state.known = dict(zip(keys, backend.mget(keys), strict=True))
        state.waiting = []
        try:
            yield
            self._write_waiting()
        finally:
            state.known = None

    def get(self, key: Any) -> Any:
        """The stored bytes, or ``None``."""
        known = self._gathered.known
        return known[key] if known is not None and key in known else super().get(key)  # type: ignore[misc]

    def _set(self, key: Any, value: Any, expires: int | None = None) -> None:
        state = self._gathered
        if state.known is not None and key in state.known:
            state.known[key] = value
            state.waiting.append((key, value, expires))
        else:
            super()._set(key, value, expires)  # type: ignore[misc]

    def on_chord_part_return(self, *args: Any, **kwargs: Any) -> Any:
        """A chord's body may start by this and look for its parts."""
        if self._gathered.known is not None:
            self._write_waiting()
        return super().on_chord_part_return(*args, **kwargs)  # type: ignore[misc]

    def _write_waiting(self) -> None:
        backend: Any = self
        state = self._gathered
        waiting, state.waiting = state.waiting, []
        if waiting:
            backend.ensure(self._write, (waiting,))

    def _write(self, entries: Sequence[tuple[str, Any, int | None]]) -> None:
        backend: Any = self
        with backend.client.pipeline(transaction=False) as pipe:
            for key, value, expires in entries:
                lifetime = backend.expires if expires is None else expires
                # Plain commands: the client's methods for them cost more than the rest of this loop.
                if lifetime:
                    pipe.execute_command("SETEX", key, lifetime, value)
                else:
                    pipe.execute_command("SET", key, value)
                pipe.execute_command("PUBLISH", key, value)
            pipe.execute()


class GatheringRedisBackend(Gathering, RedisBackend):  # type: ignore[misc]
    """For ``redis://`` and ``rediss://``."""

    usual_connection_class = redis.Connection


class GatheringSentinelBackend(Gathering, SentinelBackend):  # type: ignore[misc]
    """For ``sentinel://``."""

    usual_connection_class = redis.sentinel.SentinelManagedConnection
