"""Fewer round trips to Redis: what lies there, and in which order things happen, stays as it was."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery, states
from celery.app.task import Context
from kombu import Connection, Consumer, Queue

from tests.fleet.fleet import RedisServer
from tests.messages import build_message, publish
from workers.finaliser import MOST_TOGETHER, Finaliser
from workers.intake import Call
from workers.payload import GeneratePayload
from workers.results import OVERRIDES
from workers.transport import DEAD_LETTERS_KEY, Credit, with_leases

QUEUE = "tokenmill.echo"


class Inbox:
    """A consumer as the worker's, without Celery."""

    def __init__(self, url: str, prefetch: int) -> None:
        self.connection = with_leases(Connection(url))
        self.channel = self.connection.channel()
        self.channel.fetching = True
        self.messages: list[Any] = []
        self.consumer = Consumer(
            self.channel, [Queue(QUEUE)], accept=["json"], on_message=self.messages.append
        )
        self.consumer.qos(prefetch_count=prefetch)
        self.consumer.consume()

    def drain(self) -> list[str]:
        """Ids of what has arrived."""
        with suppress(socket.timeout):
            self.connection.drain_events(timeout=20)
        return [message.headers["id"] for message in self.messages]


@pytest.fixture
def redis(redis_server: RedisServer) -> Any:
    redis_server.client.flushall()
    redis_server.client.config_resetstat()
    return redis_server.client


@pytest.fixture
def inbox(redis: Any, redis_server: RedisServer) -> Iterator[Callable[[int], Inbox]]:
    made: list[Inbox] = []

    def make(prefetch: int) -> Inbox:
        made.append(Inbox(redis_server.url, prefetch))
        return made[-1]

    yield make
    for each in made:
        each.channel.qos._delivered.clear()  # nothing to restore: the server is wiped
        each.connection.release()


def send(redis: Any, *ids: str, priority: int = 3) -> None:
    payload = GeneratePayload.parse({"model": "echo", "prompt": "hi", "priority": priority})
    publish(redis.pipeline(), [build_message(job_id, payload) for job_id in ids])


def commands(redis: Any, name: str) -> int:
    return int(redis.info("commandstats").get(f"cmdstat_{name}", {}).get("calls", 0))


def test_one_wake_up_brings_all_that_fits_the_prefetch_in_order(
    redis: Any, inbox: Callable[[int], Inbox]
) -> None:
    send(redis, "b1", "b2", "b3", "b4", priority=6)
    send(redis, "u1", "u2", priority=0)
    box = inbox(5)
    assert box.drain() == ["u1", "u2", "b1", "b2", "b3"]
    assert (redis.zcard("unacked_index"), redis.hlen("unacked")) == (5, 5)
    assert commands(redis, "brpop") == 1


@pytest.mark.parametrize(("credit", "expected"), [(Credit(3, 2, 0), 3), (Credit(5, 4, 2), 5)])
def test_bulk_is_fetched_up_to_its_credit_and_urgent_jobs_beyond(
    redis: Any, inbox: Callable[[int], Inbox], credit: Credit, expected: int
) -> None:
    send(redis, *[f"b{number}" for number in range(9)], priority=6)
    box = inbox(9)
    box.channel.credit = credit
    while len(box.messages) < expected:
        box.drain()
    assert box.channel.qos.bulk == expected
    send(redis, "u1", "u2", "u3", priority=0)
    while len(box.messages) < expected + 3:
        box.drain()
    assert [message.headers["id"] for message in box.messages[expected:]] == ["u1", "u2", "u3"]
    assert box.channel.qos.bulk == expected


def test_messages_that_nobody_acknowledges_are_not_recorded(redis: Any, redis_server: RedisServer) -> None:
    send(redis, "a", "b")
    taken: list[str] = []
    with with_leases(Connection(redis_server.url)) as connection:
        queue = Queue(QUEUE, no_ack=True)
        with Consumer(connection.channel(), [queue], on_message=lambda m: taken.append(m.headers["id"])):
            while len(taken) < 2:
                connection.drain_events(timeout=20)
        assert redis.hlen("unacked") == redis.zcard("unacked_index") == 0


def test_what_was_fetched_is_recorded_as_kombu_would(redis: Any, inbox: Callable[[int], Inbox]) -> None:
    send(redis, "a", "b")
    box = inbox(2)
    assert box.drain() == ["a", "b"]
    popped, fetched = (json.loads(redis.hget("unacked", each.delivery_tag)) for each in box.messages)
    assert popped[1:] == fetched[1:] == ["", QUEUE]
    assert popped[0].keys() == fetched[0].keys()
    assert fetched[0] == box.messages[1]._raw
    box.messages[1].reject(requeue=True)
    assert redis.hlen("unacked") == 1
    box.messages.clear()
    assert box.drain() == ["b"]


def test_what_cannot_be_read_is_put_aside_and_holds_up_nothing(
    redis: Any, inbox: Callable[[int], Inbox]
) -> None:
    send(redis, "a")
    message = build_message("bad", GeneratePayload.parse({"model": "echo", "prompt": "hi"}))
    redis.lpush(f"{QUEUE}\x06\x163", json.dumps(message | {"body": "abc"}))
    redis.lpush(f"{QUEUE}\x06\x163", "no json")
    send(redis, "b")
    box = inbox(9)
    while "b" not in box.drain():
        pass
    assert [message.headers["id"] for message in box.messages] == ["a", "b"]
    assert redis.llen(DEAD_LETTERS_KEY) == 2
    assert redis.hlen("unacked") == redis.zcard("unacked_index") == 2


def test_acknowledgements_of_a_round_go_together_and_survive_a_failure(
    redis: Any, inbox: Callable[[int], Inbox]
) -> None:
    send(redis, *"abcdef")
    box = inbox(6)
    assert len(box.drain()) == 6
    qos = box.channel.qos
    with qos.gathered():
        for message in box.messages[:3]:
            message.ack()
        assert redis.hlen("unacked") == 6
    assert redis.hlen("unacked") == redis.zcard("unacked_index") == 3
    assert commands(redis, "hdel") == 1
    assert qos.can_consume_max_estimate() == 3

    key, qos.__dict__["unacked_key"] = qos.unacked_key, "not-a-hash"
    redis.set("not-a-hash", "")
    with qos.gathered():
        box.messages[3].ack()
    assert qos.can_consume_max_estimate() == 3  # not acknowledged yet
    qos.__dict__["unacked_key"] = key
    with qos.gathered():
        box.messages[4].ack()
    assert redis.hlen("unacked") == 1
    assert qos.can_consume_max_estimate() == 5


# ------------------------------------------------------------------------------------------------------- results


@pytest.fixture
def celery_app(redis: Any, redis_server: RedisServer) -> Celery:
    app = Celery("t", set_as_current=False, broker=redis_server.url, backend=redis_server.url)
    app.loader.override_backends = OVERRIDES
    return app


def test_gathered_results_are_those_that_celery_stores(redis: Any, celery_app: Celery) -> None:
    backend = celery_app.backend
    backend.store_result("old", 1, states.SUCCESS)
    listener = redis.pubsub()
    listener.subscribe(backend.get_key_for_task("a").decode())
    assert listener.get_message(timeout=20)["type"] == "subscribe"
    with backend.gathered(["a", "b", "old"]):
        backend.mark_as_done("a", {"x": 1}, request=Context({"id": "a"}))
        backend.mark_as_failure("b", ValueError("no"), request=Context({"id": "b"}))
        backend.store_result("old", 2, states.FAILURE)
        backend.store_result("other", 3, states.SUCCESS)  # not of this batch: at once
        assert redis.exists(backend.get_key_for_task("a")) == 0
        assert celery_app.AsyncResult("other").result == 3
        assert celery_app.AsyncResult("a").state == states.SUCCESS  # for this thread it is stored
    assert celery_app.AsyncResult("a").get(timeout=20) == {"x": 1}
    assert celery_app.AsyncResult("b").state == states.FAILURE
    assert celery_app.AsyncResult("old").result == 1
    assert redis.ttl(backend.get_key_for_task("a")) == pytest.approx(backend.expires, abs=60)
    told = listener.get_message(timeout=20)
    assert json.loads(told["data"])["result"] == {"x": 1}


class Later:
    """The finaliser's threads, which run their work when told to."""

    def __init__(self) -> None:
        self.work: list[Callable[[], Any]] = []

    def __len__(self) -> int:
        return 2

    def submit(self, work: Callable[[], Any]) -> None:
        self.work.append(work)


class FailingBackend:
    """Its server goes away before the results are written."""

    @contextmanager
    def gathered(self, ids: list[str]) -> Iterator[None]:
        yield
        raise ConnectionError("away")


def told_by_finaliser(count: int, *, backend: object = None, bad: int | None = None) -> tuple[list[Any], int]:
    """What Celery is told of outcomes that wait together, in order; and in how many rounds."""
    told: list[Any] = []
    posted: list[Callable[[], None]] = []
    threads = Later()
    task = SimpleNamespace(backend=backend, outcome=lambda *_, **__: nullcontext(), track_started=False)
    finaliser = Finaliser(task, threads, posted.append)  # type: ignore[arg-type]

    def trace(number: int) -> tuple[int, str, float]:
        if number == bad:
            raise RuntimeError("the tracer broke")
        return 0, "", 0.0

    for number in range(count):
        request = SimpleNamespace(
            ignore_result=False,
            has_callbacks=False,
            beginning=None,
            settle=partial(told.append, ("settled", number)),
            hand_back=lambda number=number, **_: told.append(("handed back", number)),
        )
        delivery = SimpleNamespace(
            number=number,
            job_id=f"j{number}",
            request=request,
            abandoned=False,
            accepted=False,
            call=Call(trace, (number,), {}),
            callback=lambda _, number=number: told.append(("done", number)),
            error_callback=lambda _, number=number: told.append(("error", number)),
        )
        finaliser.trace(delivery, None, 0.1, partial(told.append, ("then", number)))  # type: ignore[arg-type]
    rounds = 0
    while threads.work:
        threads.work.pop(0)()
        rounds += 1
    assert told == []  # nothing before the main thread
    for action in posted:
        action()
    return told, rounds


@pytest.mark.parametrize("count", [1, 3, 2 * MOST_TOGETHER + 5])
def test_outcomes_that_wait_together_are_traced_together_in_order(count: int) -> None:
    told, rounds = told_by_finaliser(count)
    assert told == [(what, number) for number in range(count) for what in ("settled", "done", "then")]
    assert rounds <= 2 + count // MOST_TOGETHER


def test_one_tracer_that_raises_disturbs_no_other_of_its_round() -> None:
    told, _ = told_by_finaliser(3, bad=1)
    assert [one for one in told if one[0] in ("done", "error")] == [("done", 0), ("error", 1), ("done", 2)]


def test_a_result_that_cannot_be_written_is_no_success_to_celery() -> None:
    told, _ = told_by_finaliser(3, backend=FailingBackend())
    assert told == [(what, number) for number in range(3) for what in ("settled", "handed back", "then")]
