"""A plain connection to the Redis that carries the deliveries, for those who only publish or look."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import redis
import redis.asyncio
from redis.asyncio.connection import AbstractConnection

from backend.api import ConfigurationError, TokenmillError
from workers.payload import push, wire
from workers.redaction import redact_text, redact_url

_TIMEOUT_S = 5.0


class BrokerUnavailableError(TokenmillError):
    """Redis does not answer or refuses the message."""

    code = "broker_unavailable"

    def __init__(self, url: str, cause: Exception) -> None:
        super().__init__(
            f"broker_url (TOKENMILL_BROKER_URL): Redis at {redact_url(url)} failed: "
            f"{redact_text(str(cause)).rstrip('.')}. Start it (redis-server), or correct the URL"
        )


class _OnePiece:
    """Packs a command into one run of bytes (RESP arrays).

    redis-py's own packer makes many small writes of a large command. Each write lets another thread have the
    interpreter, for milliseconds when that one is busy, and the next chunk of a submission is made meanwhile.
    """

    def pack(self, *args: Any) -> list[bytes]:
        """The command; what is no bytes goes as UTF-8 text."""
        name, *values = args
        words: list[Any] = [*(name.encode() if isinstance(name, str) else name).split(), *values]
        pieces = [b"*%d\r\n" % len(words)]
        for word in words:
            data = word if isinstance(word, bytes) else str(word).encode()
            pieces += (b"$%d\r\n" % len(data), data, b"\r\n")
        return [b"".join(pieces)]


class Broker:
    """Publishes messages. Safe to use from any thread; connects when first used.

    Raises:
        ConfigurationError: the URL is of a kind that only workers can use.
    """

    def __init__(self, url: str, *, connection: redis.Redis | None = None) -> None:
        self._url = url
        self._redis = connection or _connect(url, command_packer=_OnePiece())

    def publish(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """Publish the messages of stored jobs in order, in one round trip.

        Raises:
            BrokerUnavailableError: Redis did not take them; some may have arrived all the same.
        """
        self.push(wire(message, stored=True) for message in messages)

    def push(self, deliveries: Iterable[tuple[str, bytes]]) -> None:
        """``publish`` for messages that are ready: each with its list, as bytes, and never pushed before.

        Raises:
            BrokerUnavailableError: as above.
        """
        try:
            with self._redis.pipeline(transaction=False) as pipeline:
                push(pipeline, deliveries)
        except (redis.RedisError, OSError) as error:
            raise BrokerUnavailableError(self._url, error) from error

    def info(self) -> dict[str, Any]:
        """The server's ``INFO``, with its ``maxmemory-policy``.

        Raises:
            BrokerUnavailableError: Redis does not answer.
        """
        try:
            return dict(self._redis.info())
        except (redis.RedisError, OSError) as error:
            raise BrokerUnavailableError(self._url, error) from error

    def close(self) -> None:
        """Close the connections."""
        self._redis.close()


def stream_connection(url: str) -> redis.Redis:
    """A connection that reads or writes token streams, as text.

    Raises:
        ConfigurationError: the URL is of a kind that only workers can use.
    """
    return _connect(url, decode_responses=True, protocol=2)


def async_stream_connection(url: str) -> redis.asyncio.Redis:
    """As ``stream_connection``, for asyncio."""
    _connect(url)  # says what is wrong with it
    made: redis.asyncio.Redis = redis.asyncio.Redis.from_url(
        _plain_url(url),
        socket_timeout=_TIMEOUT_S,
        socket_connect_timeout=_TIMEOUT_S,
        decode_responses=True,
        protocol=2,
    )
    pool = made.connection_pool  # the URL has decided on the kind: TCP, TLS or a socket's file
    pool.connection_class = type("Cancellable", (_Cancellable, pool.connection_class), {})
    return made


class _Cancellable(AbstractConnection):
    """A connection that loses no cancellation.

    redis-py writes within ``asyncio.wait_for``, which before Python 3.12 keeps a cancellation to itself when it meets
    the end of the write. The task would then read on as if nobody had asked it to stop.
    """

    async def send_packed_command(
        self, command: bytes | str | Iterable[bytes], check_health: bool = True
    ) -> None:
        task = asyncio.current_task()
        asked = 0 if task is None else task.cancelling()
        await super().send_packed_command(command, check_health)
        if task is not None and task.cancelling() > asked:
            await self.disconnect(nowait=True)  # nobody will read the reply
            raise asyncio.CancelledError


def _plain_url(url: str) -> str:
    scheme = url.partition(":")[0]
    if scheme == "sentinel":
        raise ConfigurationError(
            "broker_url (TOKENMILL_BROKER_URL): clients cannot publish through sentinel URLs. "
            "Give them the master's redis:// URL"
        )
    if scheme == "redis+socket":
        return "unix" + url.removeprefix("redis+socket").replace("virtual_host=", "db=")
    return url


def _connect(url: str, **options: Any) -> redis.Redis:
    # Without time limits a lost network would hang the web request that submits.
    try:
        made = redis.Redis.from_url(
            _plain_url(url), socket_timeout=_TIMEOUT_S, socket_connect_timeout=_TIMEOUT_S, **options
        )
        made.connection_pool.connection_class(**made.connection_pool.connection_kwargs)  # not connected yet
    except (ValueError, TypeError) as error:
        raise ConfigurationError(
            f"broker_url (TOKENMILL_BROKER_URL): {redact_url(url)} cannot be used: {redact_text(str(error))}. "
            "Use one like redis://127.0.0.1:6379/0"
        ) from None
    return made
