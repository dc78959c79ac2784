"""Kombu's Redis transport with fewer round trips: messages fetched, and acknowledged, many at a time.

The main thread of a worker speaks to Redis between other threads that want to compute, so what it pays for is the
number of its round trips. Kombu needs three for each message: a blocking pop, the record of the delivery, and its
removal. Here a blocking pop that found something is followed by one script that takes what else there is, within
the prefetch, and records it in the same step, so that a kill in between loses none of it. Acknowledgements are
gathered while the main thread works through its mailbox and sent together.

What lies in Redis is exactly what kombu would have put there, so that its own workers and tools read it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from json import loads
from typing import Any

from celery.utils.log import get_logger
from kombu.transport import redis as plain
from kombu.transport import virtual

logger = get_logger(__name__)

MOST_AT_ONCE = 64
UNREADABLE = (ValueError, TypeError, LookupError, AttributeError, RecursionError)
"""What kombu raises over a message that it cannot read."""

MOST_BYTES = 1_000_000  # of messages in one answer, roughly

# KEYS: index and records of the unacknowledged, then the lists in the order in which they are to be emptied.
# ARGV: how many messages, how many bytes, how many messages of bulk lists, and of each list whether it is one.
# Returns pairs: the list's number and the message.
_FETCH = """
local now = redis.call('TIME')
local score = now[1] + now[2] / 1000000
local left, size, bulk, found = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3]), {}
for number = 3, #KEYS do
    local is_bulk = ARGV[number + 1] == '1'
    while left > 0 and size > 0 and (bulk > 0 or not is_bulk) do
        local raw = redis.call('RPOP', KEYS[number])
        if not raw then break end
        local read, message = pcall(cjson.decode, raw)
        local properties = read and type(message) == 'table' and message.properties
        local tag = type(properties) == 'table' and properties.delivery_tag
        local info = type(properties) == 'table' and properties.delivery_info
        if type(tag) ~= 'string' or type(info) ~= 'table' then
            redis.call('RPUSH', KEYS[number], raw)  -- left to the ordinary way, which knows what to do
            return found
        end
        local rest = cjson.encode({info.exchange or '', info.routing_key or ''})
        redis.call('ZADD', KEYS[1], score, tag)
        redis.call('HSET', KEYS[2], tag, '[' .. raw .. ',' .. string.sub(rest, 2))
        found[#found + 1] = number - 3
        found[#found + 1] = raw
        left = left - 1
        if is_bulk then bulk = bulk - 1 end
        size = size - #raw
    end
end
return found
"""


class GatheringQoS(plain.QoS):  # type: ignore[misc]
    """What is in flight. Used by the main thread alone, as kombu's."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.recorded: set[str] = set()  # tags that the fetch has recorded in Redis
        self._gathering = False
        self._acked: list[str] = []
        self._returning: dict[str, bool] = {}  # tags to be handed back, and whether to the front

    @property
    def returning(self) -> Collection[str]:
        """Tags of deliveries that are to be handed back and could not be so far."""
        return self._returning.keys()

    def forget(self, delivery_tag: str) -> None:
        """Remove the record of a delivery that came to nothing."""
        self.recorded.discard(delivery_tag)
        self._remove_from_indices(delivery_tag).execute()

    def ack(self, delivery_tag: str) -> None:
        """Remove a delivery, here and in Redis; within ``gathered``, at its end."""
        if self._gathering:
            self._acked.append(delivery_tag)
            return
        try:
            super().ack(delivery_tag)
        except Exception as exc:
            self._acked.append(delivery_tag)  # or its lease would be renewed as long as we live
            if isinstance(exc, self.channel.connection_errors):
                raise
            logger.warning("An acknowledgement could not be sent and is sent again: %r", exc)

    def reject(self, delivery_tag: str, requeue: bool = False) -> None:
        """Put a delivery back at the end of its queue, or drop it."""
        if requeue:
            self.give_back(delivery_tag, front=False)
        else:
            self.ack(delivery_tag)

    def give_back(self, delivery_tag: str, *, front: bool) -> None:
        """Put a delivery back at the front or the end of its queue. Where that fails, it is tried again later."""
        self._returning[delivery_tag] = front
        self.send_returns()

    def send_returns(self) -> None:
        """Hand back what could not be handed back before. Its lease is not renewed, so that it ends in any case."""
        failed: Exception | None = None
        for tag, front in list(self._returning.items()):
            try:
                self.restore_by_tag(tag, leftmost=not front)
            except Exception as exc:
                failed = exc
                if isinstance(exc, self.channel.connection_errors):
                    break
            else:
                del self._returning[tag]
                virtual.QoS.ack(self, tag)
        if failed is not None:
            logger.warning(
                "%d messages could not be handed back and are again: %r", len(self._returning), failed
            )

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Send what is acknowledged within this block in one round trip."""
        self._gathering = True
        try:
            yield
        finally:
            self._gathering = False
            self.send_acks()

    def send_acks(self) -> None:
        """Send gathered acknowledgements. Where that fails they wait for the next time: the jobs are committed.

        When the connection is lost for good, the deliveries come again and are acknowledged then.
        """
        if not self._acked:
            return
        tags, self._acked = self._acked, []
        try:
            with self.pipe_or_acquire() as pipe:
                pipe.zrem(self.unacked_index_key, *tags)
                pipe.hdel(self.unacked_key, *tags)
                pipe.execute()
        except Exception as exc:
            logger.warning("%d acknowledgements could not be sent and are sent again: %r", len(tags), exc)
            self._acked = tags + self._acked
            return
        for tag in tags:
            virtual.QoS.ack(self, tag)


class FetchingChannel(plain.Channel):  # type: ignore[misc]
    """Fetches what else there is once a blocking pop has found a message."""

    QoS = GatheringQoS
    # Only where every consumer acknowledges, which those of Celery's control messages do not.
    fetching = False

    def fetch_more(self) -> None:
        """Take and deliver what else there is, as far as the prefetch goes."""
        # A prefix would be put before some keys only.
        if not self.fetching or self.global_keyprefix or not self.qos.can_consume():
            return
        credit = self.qos.can_consume_max_estimate()
        count = MOST_AT_ONCE if credit is None else min(credit, MOST_AT_ONCE)
        queues = self._queue_cycle.consume(len(self.active_queues))
        if count <= 0 or not queues:
            return
        steps, bulk = self.fetch_plan()
        lists = [(self._q_for_pri(queue, step), queue) for step, _ in steps for queue in queues]
        keys = [self.unacked_index_key, self.unacked_key, *(name for name, _ in lists)]
        limits = [count, MOST_BYTES, count if bulk is None else bulk]
        kinds = [int(is_bulk) for _, is_bulk in steps for _ in queues]
        with self.conn_or_acquire() as client:
            found = client.eval(_FETCH, len(keys), *keys, *limits, *kinds)
        for number, raw in zip(found[::2], found[1::2], strict=True):
            message, queue = loads(raw), lists[int(number)][1]
            tag = message["properties"]["delivery_tag"]
            self.qos.recorded.add(tag)
            try:
                self.connection._deliver(message, queue)
            except UNREADABLE:
                self.refuse(queue, raw)
                self.qos.forget(tag)

    def fetch_plan(self) -> tuple[list[tuple[int, bool]], int | None]:
        """The priority steps to fetch from, the first first, with which are bulk; how many of bulk at most."""
        return [(step, False) for step in self.priority_steps], None

    def refuse(self, queue: str, raw: bytes) -> None:
        """Keep a message that kombu could not read; raises again what is no fault of the message."""
        raise NotImplementedError
