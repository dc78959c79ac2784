"""What a starting worker asks the others, and for how long it waits for them. On a real Redis."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import pytest

from models_db.tables import JobState
from tests.fleet.conftest import MakeFleet
from tests.fleet.fleet import PATIENCE_S, RedisServer, wait_until
from workers.app import TokenmillApp, make_app
from workers.settings import load_settings

FOR_EVER_S = 3600.0  # longer than a test may take: whoever waits for it fails


@pytest.fixture
def app(redis_server: RedisServer) -> TokenmillApp:
    redis_server.client.flushall()
    return make_app(load_settings(broker_url=redis_server.url, backend="echo"))


@contextmanager
def listener(app: TokenmillApp, name: str, revoked: list[str]) -> Iterator[list[dict[str, Any]]]:
    """A worker as far as its control commands go; what it has been asked."""
    asked: list[dict[str, Any]] = []
    ended = threading.Event()

    def hello(state: Any, **arguments: Any) -> dict[str, Any]:
        asked.append(arguments)
        return {"revoked": revoked, "clock": 1}

    def ping(state: Any) -> None:
        asked.append({"ping": "that was for somebody else"})

    with app.connection_for_write() as connection:
        node = app.control.mailbox.Node(
            name, handlers={"hello": hello, "ping": ping}, channel=connection.channel()
        )
        node.listen(callback=node.handle_message)

        def run() -> None:
            while not ended.is_set():
                with suppress(TimeoutError):
                    connection.drain_events(timeout=0.05)

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield asked
        finally:
            ended.set()
            thread.join()


def say_hello(app: TokenmillApp, timeout_s: float) -> dict[str, Any] | None:
    """As Celery's consumer does it."""
    with app.connection_for_read() as connection:
        answers: dict[str, Any] | None = app.control.inspect(timeout=timeout_s, connection=connection).hello(
            "new@host", ["a"]
        )
        return answers


def wait_for_listeners(server: RedisServer, count: int) -> None:
    """Kombu does not wait until it is subscribed."""
    wait_until(
        lambda: len(server.client.client_list(_type="pubsub")) >= count,
        PATIENCE_S,
        f"{count} listeners to be subscribed",
    )


def test_who_is_alone_waits_for_nobody(app: TokenmillApp) -> None:
    assert say_hello(app, FOR_EVER_S) is None


@pytest.mark.parametrize("count", [1, 3])
def test_the_wait_ends_with_the_last_answer(app: TokenmillApp, redis_server: RedisServer, count: int) -> None:
    with ExitStack() as stack:
        asked = [stack.enter_context(listener(app, f"w{n}@host", [f"r{n}"])) for n in range(count)]
        wait_for_listeners(redis_server, count)
        answers = say_hello(app, FOR_EVER_S)
    assert answers == {f"w{n}@host": {"revoked": [f"r{n}"], "clock": 1} for n in range(count)}
    assert asked == [[{"from_node": "new@host", "revoked": ["a"]}]] * count


def test_one_that_does_not_answer_costs_the_timeout_and_no_answer_of_the_others(
    app: TokenmillApp, redis_server: RedisServer
) -> None:
    with listener(app, "w@host", ["r"]), app.connection_for_write() as frozen:
        node = app.control.mailbox.Node("frozen@host", channel=frozen.channel())
        node.listen()
        frozen.drain_events(timeout=PATIENCE_S)  # it is subscribed, and reads nothing any more
        wait_for_listeners(redis_server, 2)
        answers = say_hello(app, 1.0)
    assert answers == {"w@host": {"revoked": ["r"], "clock": 1}}


def test_without_a_connection_of_its_own_it_is_celerys(app: TokenmillApp, redis_server: RedisServer) -> None:
    with listener(app, "w@host", ["r"]):
        wait_for_listeners(redis_server, 1)
        answers = app.control.inspect(timeout=1.0).hello("new@host")
    assert answers == {"w@host": {"revoked": ["r"], "clock": 1}}


def test_a_worker_that_starts_learns_what_the_others_have_been_told_to_revoke(make_fleet: MakeFleet) -> None:
    fleet = make_fleet()
    old = fleet.worker()
    fleet.tell("revoke", task_id="revoked-before")  # of a job that is nowhere yet, so that SQL cannot know it
    fleet.worker()
    old.kill()
    fleet.send_raw({"model": "echo", "prompt": "x"}, task_id="revoked-before")
    fleet.wait_state("revoked-before", JobState.CANCELLED)
    assert fleet.result("revoked-before") is None
