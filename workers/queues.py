"""A queue as Redis holds it, seen from beside the consumer: lengths, ids, publishing, a lease for the sweeper."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import redis
from kombu import Connection
from kombu.exceptions import KombuError

from workers.payload import PRIORITY_STEPS, queue_key, wire
from workers.transport import DEAD_LETTERS_KEY

LOST = (redis.RedisError, OSError, KombuError)
"""What any method raises when Redis does not answer."""

_TIMEOUT_S = 5.0
_CHUNK = 500
_SWEEPER_KEY = "tokenmill.sweeper."

# Only ids travel: messages may be large, and there may be many.
_LIST_IDS = """
local ids = {}
local raws = redis.call('LRANGE', KEYS[1], ARGV[1], ARGV[2])
for _, raw in ipairs(raws) do
    local ok, message = pcall(cjson.decode, raw)
    if ok and type(message) == 'table' and type(message['headers']) == 'table' then
        local id = message['headers']['id']
        if type(id) == 'string' then ids[#ids + 1] = id end
    end
end
return {#raws, ids}
"""
_UNACKED_IDS = """
local ids = {}
for _, raw in ipairs(redis.call('HMGET', KEYS[1], unpack(ARGV))) do
    local ok, entry = pcall(cjson.decode, raw or '')
    local message = ok and type(entry) == 'table' and entry[1]
    if type(message) == 'table' and type(message['headers']) == 'table' then
        local id = message['headers']['id']
        if type(id) == 'string' then ids[#ids + 1] = id end
    end
end
return ids
"""
_ELECT = """
local holder = redis.call('GET', KEYS[1])
if holder and holder ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1
"""


class QueueView:
    """One queue. Not for several threads at once; connects when needed, and again after a loss.

    Args:
        connect: makes an unused connection to the broker.
    """

    def __init__(self, connect: Callable[[], Connection], queue: str) -> None:
        self._connect = connect
        self._keys = [queue_key(queue, step) for step in PRIORITY_STEPS]
        self._sweeper_key = _SWEEPER_KEY + queue
        self._transport: Any = None
        self._channel: Any = None

    def length(self) -> int:
        """Messages that wait, of every priority."""
        with self._client().pipeline(transaction=False) as pipeline:
            for key in self._keys:
                pipeline.llen(key)
            return sum(pipeline.execute())

    def held_ids(self) -> set[str]:
        """Ids of the jobs whose message waits or is unacknowledged somewhere.

        What moves meanwhile may be missed once: believe only what two calls say.
        """
        client = self._client()
        found: set[str] = set()
        for key in self._keys:
            start = 0
            # From the end where messages arrive, so that what is taken meanwhile hides nothing.
            while True:
                count, ids = client.eval(_LIST_IDS, 1, key, start, start + _CHUNK - 1)
                found.update(job_id.decode() for job_id in ids)
                if count < _CHUNK:
                    break
                start += count
        tags = client.hkeys(self._channel.unacked_key)
        for start in range(0, len(tags), _CHUNK):
            ids = client.eval(_UNACKED_IDS, 1, self._channel.unacked_key, *tags[start : start + _CHUNK])
            found.update(job_id.decode() for job_id in ids)
        return found

    def elect(self, candidate: str, lease_s: float) -> bool:
        """Whether the candidate is the one that sweeps, for the next ``lease_s`` seconds."""
        return bool(self._client().eval(_ELECT, 1, self._sweeper_key, candidate, int(lease_s * 1000)))

    def publish(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """Publish stored messages under their own ids, before all that waits: these have waited already."""
        for start in range(0, len(messages), _CHUNK):
            with self._client().pipeline(transaction=False) as pipeline:
                for message in reversed(messages[start : start + _CHUNK]):
                    pipeline.rpush(*wire(message, stored=True))
                pipeline.execute()

    def dead_letters(self, limit: int) -> list[bytes]:
        """The oldest unreadable messages that ``workers.transport`` has put aside, as it wrote them."""
        return list(self._client().lrange(DEAD_LETTERS_KEY, -limit, -1))

    def remove_dead_letter(self, letter: bytes) -> None:
        """It is kept elsewhere now."""
        self._client().lrem(DEAD_LETTERS_KEY, -1, letter)

    def close(self) -> None:
        """Drop the connection; the next call makes a new one."""
        transport, self._transport, self._channel = self._transport, None, None
        if transport is not None:
            with suppress(Exception):
                transport.close_connection(transport)

    def _client(self) -> Any:
        if self._channel is None:
            connection = self._connect()
            limits = {"socket_timeout": _TIMEOUT_S, "socket_connect_timeout": _TIMEOUT_S}
            connection.transport_options = {**(connection.transport_options or {}), **limits}
            # Not the connection's own way, which tries for seconds before it says that Redis is away.
            transport = self._transport = connection.transport
            self._channel = transport.create_channel(transport.establish_connection())
        return self._channel.client
