"""The Redis channel: leases on one clock, bulk within its limits, nothing unreadable lost. On a real Redis."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
import redis
from kombu import Connection, Queue

from tests.fleet.fleet import RedisServer
from workers.leases import renew
from workers.payload import queue_key
from workers.transport import DEAD_LETTERS_KEY, Credit, with_leases

QUEUE = "tokenmill.transport"


class Reader:
    """A consumer of one queue; ``got`` holds what has been delivered and not acknowledged."""

    def __init__(self, server: RedisServer, prefetch: int = 0) -> None:
        options = {"visibility_timeout": 5, "unacked_restore_throttle": 1}
        self.connection = with_leases(Connection(server.url, transport_options=options))
        self.channel = self.connection.channel()
        self.channel.worker_id = "w"
        self.channel.qos.prefetch_count = prefetch
        self.got: list[Any] = []
        consumer = self.connection.Consumer(
            [Queue(QUEUE)], channel=self.channel, on_message=self.got.append, accept=["json"]
        )
        consumer.consume()

    def read(self, count: int, timeout_s: float = 20.0) -> list[str]:
        """Wait until this many are held, or nothing comes for a while; their bodies, in order."""
        end = time.monotonic() + timeout_s
        while len(self.got) < count and time.monotonic() < end:
            with suppress(socket.timeout):
                self.connection.drain_events(timeout=0.2)
        return [message.payload for message in self.got]

    def acknowledge(self, body: str) -> None:
        message = next(message for message in self.got if message.payload == body)
        message.ack()
        self.got.remove(message)


@pytest.fixture
def server(redis_server: RedisServer) -> RedisServer:
    redis_server.client.flushall()
    return redis_server


@pytest.fixture
def readers(server: RedisServer) -> Iterator[list[Reader]]:
    made: list[Reader] = []
    yield made
    for reader in made:
        reader.connection.close()


def send(server: RedisServer, *bodies: str, priority: int = 3) -> None:
    with Connection(server.url) as connection:
        producer = connection.Producer()
        for body in bodies:
            producer.publish(
                body, serializer="json", routing_key=QUEUE, priority=priority, declare=[Queue(QUEUE)]
            )


def test_a_wrong_clock_neither_takes_nor_loses_a_delivery(
    server: RedisServer, readers: list[Reader], monkeypatch: pytest.MonkeyPatch
) -> None:
    readers.append(right := Reader(server))
    send(server, "a", "b")
    assert right.read(2) == ["a", "b"]
    right_now = time.time
    for hours in (1, -1):
        with monkeypatch.context() as patch:
            patch.setattr(time, "time", lambda hours=hours: right_now() + 3600 * hours)
            patch.setattr("kombu.transport.redis.time", time.time)
            readers.append(wrong := Reader(server))
            wrong.channel.qos.restore_visible(interval=1)
            assert server.client.hlen("unacked") >= 2, "the leases of others have not ended"
            send(server, f"c{hours}")
            assert wrong.read(1) == [f"c{hours}"]
    right.channel.qos.restore_visible(interval=1)
    assert server.client.hlen("unacked") == 4, "nor have those that a wrong clock began"
    seconds, _ = server.client.time()
    assert all(
        abs(score - seconds) < 30
        for _, score in server.client.zrange("unacked_index", 0, -1, withscores=True)
    )


def test_an_ended_lease_makes_a_new_delivery(server: RedisServer, readers: list[Reader]) -> None:
    readers.append(first := Reader(server))
    send(server, "a")
    first.read(1)
    (tag,) = server.client.zrange("unacked_index", 0, -1)
    server.client.zincrby("unacked_index", -60, tag)
    readers.append(second := Reader(server))
    assert second.read(1) == ["a"]


def test_bulk_stops_at_its_limit_where_urgent_jobs_go_on(server: RedisServer, readers: list[Reader]) -> None:
    readers.append(reader := Reader(server, prefetch=6))
    reader.channel.credit = Credit(most=3, resume=2, least=0)
    send(server, *[f"bulk{n}" for n in range(8)], priority=6)
    reader.read(3)
    assert reader.read(4, timeout_s=1) == ["bulk0", "bulk1", "bulk2"], "the fourth is not for it"
    send(server, "urgent", priority=3)
    assert reader.read(4)[-1] == "urgent", "the pop that waits for urgent jobs alone brings it"
    reader.acknowledge("bulk0")
    assert reader.read(4)[-1] == "bulk3"
    assert reader.channel.qos.bulk == 3
    reader.acknowledge("urgent")
    assert len(reader.read(4, timeout_s=0.5)) == 3, "the reserve is not for bulk"
    for n in (1, 2, 3):
        reader.acknowledge(f"bulk{n}")
    assert len(reader.read(3)) == 3


def test_a_waiting_pop_ends_as_soon_as_bulk_may_go_on(server: RedisServer, readers: list[Reader]) -> None:
    readers.append(reader := Reader(server))
    reader.connection.transport.brpop_timeout = reader.channel.brpop_timeout = 60
    reader.channel.credit = Credit(most=1, resume=0, least=0)
    send(server, "a", "b", priority=9)
    reader.read(1)
    assert reader.read(2, timeout_s=1) == ["a"]
    reader.acknowledge("a")
    assert reader.read(1) == ["b"], "long before that pop would have ended by itself"


def test_bulk_keeps_its_share_in_a_flood(server: RedisServer, readers: list[Reader]) -> None:
    send(server, *[f"urgent{n}" for n in range(5)], priority=0)
    send(server, *[f"bulk{n}" for n in range(5)], priority=9)
    readers.append(reader := Reader(server, prefetch=5))
    reader.channel.credit = Credit(most=4, resume=3, least=2)
    assert reader.read(5) == ["bulk0", "bulk1", "urgent0", "urgent1", "urgent2"]


def test_a_paused_channel_takes_nothing(server: RedisServer, readers: list[Reader]) -> None:
    readers.append(reader := Reader(server))
    reader.channel.paused = True
    send(server, "a")
    assert reader.read(1, timeout_s=0.5) == []
    reader.channel.paused = False
    assert reader.read(1) == ["a"]


def test_what_cannot_be_read_is_put_aside_and_the_next_message_comes(
    server: RedisServer, readers: list[Reader], caplog: pytest.LogCaptureFixture
) -> None:
    readers.append(reader := Reader(server))
    secret = b'{"body": "a secret prompt"'
    for raw in (b"\xff\xfe", secret, b"[]", b'{"properties": {"delivery_tag": "t"}}'):
        server.client.lpush(queue_key(QUEUE, 3), raw)
    send(server, "good")
    assert reader.read(1) == ["good"]
    letters = [json.loads(letter) for letter in server.client.lrange(DEAD_LETTERS_KEY, 0, -1)]
    assert len(letters) == 4
    assert letters[-2]["message"] == secret.decode()
    assert {letter["queue"] for letter in letters} == {QUEUE}
    assert "it is no JSON" in caplog.text
    assert "a secret prompt" not in caplog.text


@pytest.mark.parametrize("closed", [False, True], ids=["half closed", "closed"])
def test_an_acknowledgement_after_its_connection_meets_a_lost_connection(
    server: RedisServer, closed: bool
) -> None:
    """Which everybody expects of Redis, rather than an error of the code that looks for the connection's host."""
    reader = Reader(server)
    send(server, "a", "b")
    assert reader.read(2) == ["a", "b"]
    channel = reader.channel
    errors = reader.connection.connection_errors
    if closed:
        reader.connection.close()
    else:  # Redis was away, which ends the closing of a connection half way
        reader.connection.transport.client = None
    channel._pool = None
    with pytest.raises(errors, match="connection of these deliveries is closed"):
        channel.qos.ack(reader.got[0].delivery_tag)
    with channel.qos.gathered():
        reader.got[1].ack()  # is kept
    assert channel.qos._acked == [message.delivery_tag for message in reader.got]
    if not closed:
        reader.connection.transport.client = reader.connection
        reader.connection.close()


@pytest.mark.parametrize("front", [True, False], ids=["to the front", "to the end"])
def test_a_hand_back_that_redis_refuses_is_made_up_for(
    server: RedisServer, readers: list[Reader], front: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as one that has no memory left, or is read-only for now. The connection works."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise redis.OutOfMemoryError("command not allowed when used memory > 'maxmemory'")

    reader = Reader(server, prefetch=3)
    readers.append(reader)
    send(server, "a", "b", "c")
    assert reader.read(3) == ["a", "b", "c"]
    a, b, c = reader.got
    qos = reader.channel.qos
    with monkeypatch.context() as patch:
        patch.setattr(reader.channel, "conn_or_acquire", refuse)
        qos.give_back(a.delivery_tag, front=front)
        b.requeue()
        c.ack()
    assert set(qos.returning) == {a.delivery_tag, b.delivery_tag}
    assert not qos.can_consume(), "they are still in flight here"
    send(server, "d")
    key = qos.unacked_index_key
    server.client.zadd(key, {message.delivery_tag: 1 for message in reader.got})
    assert renew(reader.channel) == 1, "only what is neither acknowledged nor to be handed back"
    assert sorted(server.client.zrangebyscore(key, 1, 1)) == sorted(
        message.delivery_tag.encode() for message in (a, b)
    )
    qos.send_acks()
    qos.send_returns()
    assert (list(qos.returning), server.client.zcard(key), server.client.hlen("unacked")) == ([], 0, 0)
    assert qos.can_consume()
    reader.got.clear()
    assert reader.read(3) == (["a", "d", "b"] if front else ["d", "a", "b"])


def test_a_connection_that_is_lost_keeps_what_is_to_be_handed_back(server: RedisServer) -> None:
    reader = Reader(server)
    send(server, "a")
    assert reader.read(1) == ["a"]
    reader.connection.close()
    reader.channel._pool = None
    qos = reader.channel.qos
    qos.give_back(reader.got[0].delivery_tag, front=True)  # raises nothing: the lease ends by itself
    assert list(qos.returning) == [reader.got[0].delivery_tag]
