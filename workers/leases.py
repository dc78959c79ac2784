"""Leases: what is in flight here stays ours for as long as we live, and no longer.

Kombu's Redis transport keeps each unacknowledged delivery in a sorted set whose score is when it was received,
and delivers again what is older than the visibility timeout. Renewing the scores each second, on Redis's own
clock, is what lets that timeout be short while jobs run for hours.
"""

from __future__ import annotations

from typing import Any

import redis
from celery import bootsteps
from celery.utils.log import get_logger
from celery.worker.consumer.tasks import Tasks

from workers.transport import Credit

logger = get_logger(__name__)

# XX: a lease that another worker has ended must not come back to life.
# It begins with a write that needs no memory, so that a full Redis does the others, too.
_RENEW = """
local now = redis.call('TIME')
redis.call('ZREM', KEYS[1], '')
local score = now[1] + now[2] / 1000000
for _, tag in ipairs(ARGV) do
    redis.call('ZADD', KEYS[1], 'XX', score, tag)
end
return #ARGV
"""
_CHUNK = 4000


def renew(channel: Any) -> int:
    """Renew the lease of every unacknowledged delivery of the channel; returns how many there are.

    Not of those that are to be handed back and could not be yet.

    Raises the client's connection errors.
    """
    qos = channel.qos
    ended = qos._dirty | set(qos.returning)
    tags = [tag for tag in tuple(qos._delivered) if tag not in ended]
    if tags:
        # Not ``channel.client``: a blocking pop waits for its answer on that connection.
        with channel.conn_or_acquire() as client:
            for start in range(0, len(tags), _CHUNK):
                client.eval(_RENEW, 1, channel.unacked_index_key, *tags[start : start + _CHUNK])
    return len(tags)


class Leases(bootsteps.StartStopStep):  # type: ignore[misc]
    """Consumer step: adds the prefetch headroom, and keeps the leases alive from then on.

    Celery cancels the timer when the connection is lost. At a warm shutdown it goes on: the pool fires the
    hub's timers while it drains.
    """

    requires = (Tasks,)

    def __init__(self, consumer: Any, **kwargs: Any) -> None:
        super().__init__(consumer, **kwargs)

    def start(self, consumer: Any) -> None:
        settings = consumer.app.settings
        slots = consumer.pool.num_processes
        headroom = settings.headroom(slots)
        wanted = slots + headroom + settings.reserve(slots)
        missing = wanted - consumer.qos.value
        if missing > 0:
            consumer.qos.increment_eventually(missing)
        elif missing < 0:
            consumer.qos.decrement_eventually(-missing)
        channel = consumer.task_consumer.channel
        channel.credit = Credit.of(slots, headroom, settings.bulk_min_share)
        consumer.pool.attach_channel(channel)
        consumer.timer.call_repeatedly(settings.lease_interval_s, self._renew, (channel,))

    def stop(self, consumer: Any) -> None:
        """Nothing to do: see the class."""

    def _renew(self, channel: Any) -> None:
        try:
            channel.qos.send_acks()  # what could not be sent before
            channel.qos.send_returns()
            renew(channel)
        except channel.connection_errors as exc:
            logger.debug("Leases not renewed: %r", exc)
        except redis.RedisError as exc:  # such as one that has no memory left, or is read-only for now
            logger.warning("Leases not renewed: %r", exc)
