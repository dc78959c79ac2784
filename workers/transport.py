"""Kombu's Redis transport, with leases on Redis's own clock and nothing thrown away that cannot be read.

Kombu notes when a delivery was received, and looks for those that were received too long ago, by the clock of the
worker that does it. With one wrong clock live jobs would be delivered again all the time.
"""

from __future__ import annotations

import base64
import json
import uuid
from collections.abc import Mapping
from functools import partial
from typing import Any

from celery.utils.log import get_logger
from kombu import Connection
from kombu.transport import redis as plain
from kombu.transport import virtual
from kombu.utils.json import dumps

logger = get_logger(__name__)

DEAD_LETTERS_KEY = "tokenmill.dead-letters"

_RECEIVE = """
local now = redis.call('TIME')
redis.call('ZADD', KEYS[1], now[1] + now[2] / 1000000, ARGV[1])
redis.call('HSET', KEYS[2], ARGV[1], ARGV[2])
"""


class LeaseQoS(plain.QoS):  # type: ignore[misc]
    """Scores of unacknowledged deliveries are seconds on Redis's clock."""

    def append(self, message: Any, delivery_tag: str) -> None:
        """Note a delivery as received."""
        info = message.delivery_info
        entry = dumps([message._raw, info["exchange"], info["routing_key"]])
        with self.channel.conn_or_acquire() as client:
            client.eval(_RECEIVE, 2, self.unacked_index_key, self.unacked_key, delivery_tag, entry)
        virtual.QoS.append(self, message, delivery_tag)

    def restore_visible(self, start: int = 0, num: int | None = 10, interval: int = 10) -> None:
        """Put deliveries back whose lease has ended."""
        self._vrestore_count += 1
        if (self._vrestore_count - 1) % (interval or 1):
            return
        limit = {"offset": start, "num": num} if num else {}
        with self.channel.conn_or_acquire() as client:
            seconds, microseconds = client.time()
            ended = seconds + microseconds / 1e6 - self.visibility_timeout
            try:
                with plain.Mutex(client, self.unacked_mutex_key, self.unacked_mutex_expire):
                    for tag in client.zrange(self.unacked_index_key, "-inf", ended, byscore=True, **limit):
                        self.restore_by_tag(tag, client)
            except plain.MutexHeld:
                pass

    def can_consume(self) -> bool:
        """Not while the channel is paused, either."""
        return not self.channel.paused and bool(super().can_consume())


class LeaseChannel(plain.Channel):  # type: ignore[misc]
    """See the module.

    Attributes:
        paused: nothing more is taken from the queues. (One message may have been handed out already.)
        worker_id: whom dead letters name.
    """

    QoS = LeaseQoS
    paused = False
    worker_id = ""
    _taken: tuple[bytes, bytes] | None = None

    def put_aside(self, queue: str, reason: str, message: str, job_id: str | None = None) -> None:
        """Keep what nobody can read where the sweeper finds it and moves it to the table ``dead_letter``."""
        logger.error("A message of queue %s cannot be read and is put aside: %s", queue, reason)
        letter = {
            "id": str(uuid.uuid4()),
            "queue": queue,
            "worker_id": self.worker_id,
            "reason": reason,
            "message": message,
            "job_id": job_id,
        }
        with self.conn_or_acquire() as client:
            client.lpush(DEAD_LETTERS_KEY, json.dumps(letter))

    def _create_client(self, *args: Any, **kwargs: Any) -> Any:
        client = super()._create_client(*args, **kwargs)
        client.parse_response = partial(self._remember, client.parse_response)
        return client

    def _remember(self, parse: Any, connection: Any, command_name: str, **options: Any) -> Any:
        answer = parse(connection, command_name, **options)
        if command_name == "BRPOP":
            self._taken = answer or None
        return answer

    def _brpop_read(self, **options: Any) -> Any:
        try:
            return super()._brpop_read(**options)
        except (ValueError, TypeError, LookupError, AttributeError):
            if self._taken is None or (reason := unreadable(self._taken[1])) is None:
                raise
            queue = self._taken[0].decode(errors="replace").rsplit(self.sep, 1)[0]
            self.put_aside(queue, reason, self._taken[1].decode(errors="backslashreplace"))
            return True
        finally:
            self._taken = None


class LeaseTransport(plain.Transport):  # type: ignore[misc]
    """Plain, TLS and socket URLs."""

    Channel = LeaseChannel


class LeaseSentinelChannel(LeaseChannel, plain.SentinelChannel):  # type: ignore[misc]
    """``LeaseChannel`` behind Sentinel."""


class LeaseSentinelTransport(plain.SentinelTransport):  # type: ignore[misc]
    """Sentinel URLs."""

    Channel = LeaseSentinelChannel


def with_leases(connection: Connection) -> Connection:
    """Have this unused connection, made from its URL by Celery, use the classes of this module."""
    if connection.transport_cls in ("redis", "rediss"):
        connection.transport_cls = f"{__name__}:{LeaseTransport.__name__}"  # a name, because Celery shows it
    elif connection.transport_cls == "sentinel":
        connection.transport_cls = f"{__name__}:{LeaseSentinelTransport.__name__}"
    return connection


def unreadable(raw: bytes) -> str | None:
    """Why kombu cannot make a message of this, or ``None`` when it can."""
    try:
        message = json.loads(raw)
    except ValueError:
        return "it is no JSON"
    if not isinstance(message, Mapping):
        return "it is no JSON object"
    properties = message.get("properties")
    if not isinstance(properties, Mapping):
        return "it has no properties"
    if not isinstance(properties.get("delivery_tag"), str):
        return "its properties have no delivery_tag"
    info = properties.get("delivery_info")
    if not isinstance(info, Mapping) or not {"exchange", "routing_key"} <= info.keys():
        return "its properties have no delivery_info with exchange and routing_key"
    encoding, body = properties.get("body_encoding"), message.get("body")
    if encoding not in (None, "", "base64"):
        return "its body_encoding is not base64"
    if body and encoding:
        try:
            base64.b64decode(body)
        except (ValueError, TypeError):
            return "its body is not base64"
    return None
