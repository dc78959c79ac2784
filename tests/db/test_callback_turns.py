"""No host, no fault and no stop of a sender keeps others from being told."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest
from sqlalchemy import Engine

from models_db.callbacks import CallbackState, NewCallback, due_hosts
from models_db.jobs import request_cancel
from tests.db.callback_world import (
    HOST,
    Hooks,
    add_with_callback,
    make_due,
    of_job,
    run_to_end,
    send,
    sender_for,
    states,
)
from workers.callbacks.schedule import Answer
from workers.callbacks.urls import CallbackUrl


def test_what_was_taken_is_sent_although_the_next_host_cannot_be_read(world: Engine) -> None:
    for host in ("a.example.com", "b.example.com"):
        add_with_callback(world, host, callback=NewCallback(f"https://{host}/", host))
    with world.begin() as conn:
        request_cancel(conn, ["a.example.com", "b.example.com"])
    hooks = Hooks()
    sender = sender_for(world, hooks, hosts=(".example.com",))
    take_them = sender._take

    def breaks(conn: Any, host: str, **rest: Any) -> Any:
        if host.startswith("b") and not hooks.sent:
            raise RuntimeError("away")
        return take_them(conn, host, **rest)

    sender._take = breaks  # type: ignore[method-assign]
    send(sender)
    assert [event["data"]["id"] for event in hooks.events()] == ["a.example.com", "b.example.com"]


def test_a_slow_host_does_not_hold_up_another(world: Engine) -> None:
    slow = [f"slow{number}" for number in range(12)]
    add_with_callback(world, *slow, callback=NewCallback("https://slow.example.com/", "slow.example.com"))
    add_with_callback(world, "quick")
    with world.begin() as conn:
        request_cancel(conn, [*slow, "quick"])

    class SlowHooks(Hooks):
        most = at_once = 0

        def __init__(self) -> None:
            super().__init__()
            self.quick_came = asyncio.Event()

        async def post(self, url: CallbackUrl, headers: Mapping[str, str], body: bytes) -> Answer:
            if url.host == HOST:
                self.quick_came.set()
                return Answer(204)
            self.at_once += 1
            self.most = max(self.most, self.at_once)
            await asyncio.wait_for(self.quick_came.wait(), 40)  # as long as the other one waits
            self.at_once -= 1
            return await super().post(url, headers, body)

    async def scene() -> SlowHooks:
        hooks = SlowHooks()
        sender = sender_for(world, hooks, hosts=("slow.example.com", HOST), per_host=3)
        stop = asyncio.Event()
        running = asyncio.create_task(sender.run(stop))
        while sender.counts.delivered < 13:
            await asyncio.sleep(0.02)
        stop.set()
        await running
        return hooks

    hooks = asyncio.run(asyncio.wait_for(scene(), 60))
    assert hooks.most == 3
    assert len(hooks.sent) == len({headers["webhook-id"] for _, headers, _ in hooks.sent}) == 12


def test_hosts_that_are_slow_but_well_leave_a_hand_to_the_next_one(world: Engine) -> None:
    """Two of them hold all hands, and each of theirs that gets free goes to who has none, last in the alphabet."""
    for host in ("a.example.com", "b.example.com"):
        names = [f"{host[0]}{number}" for number in range(8)]
        add_with_callback(world, *names, callback=NewCallback(f"https://{host}/", host))
        with world.begin() as conn:
            request_cancel(conn, names)
    add_with_callback(world, "z", callback=NewCallback("https://z.example.com/", "z.example.com"))

    class SlowHooks(Hooks):
        def __init__(self) -> None:
            super().__init__()
            self.answers = asyncio.Semaphore(0)
            self.came: asyncio.Queue[str] = asyncio.Queue()

        async def post(self, url: CallbackUrl, headers: Mapping[str, str], body: bytes) -> Answer:
            self.came.put_nowait(url.host)
            await self.answers.acquire()
            return Answer(204)

    async def scene() -> list[str]:
        hooks = SlowHooks()
        sender = sender_for(world, hooks, hosts=(".example.com",), per_host=2, in_all=4)
        stop = asyncio.Event()
        running = asyncio.create_task(sender.run(stop))
        first = [await hooks.came.get() for _ in range(4)]
        await asyncio.to_thread(cancel, "z")
        hooks.answers.release()
        then = await hooks.came.get()
        stop.set()
        for _ in range(30):
            hooks.answers.release()
        await running
        return [*sorted(first), then]

    def cancel(job_id: str) -> None:
        with world.begin() as conn:
            request_cancel(conn, [job_id])

    came = asyncio.run(asyncio.wait_for(scene(), 30))
    assert came == ["a.example.com"] * 2 + ["b.example.com"] * 2 + ["z.example.com"]


def test_more_hosts_than_one_look_sees_have_their_turn_although_all_hands_are_busy(
    world: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    for host in ("a.example.com", "b.example.com"):
        names = [f"{host[0]}{number}" for number in range(8)]
        add_with_callback(world, *names, callback=NewCallback(f"https://{host}/", host))
        with world.begin() as conn:
            request_cancel(conn, names)
    monkeypatch.setattr(
        "workers.callbacks.sender.due_hosts",
        lambda conn, now, after: due_hosts(conn, now, after=after, limit=1),
    )
    sender = sender_for(world, Hooks(), hosts=(".example.com",), per_host=2, in_all=2)
    (one, two) = sender._look().taken
    assert {one.claim.host, two.claim.host} == {"a.example.com"}
    sender._busy["a.example.com"] = 2
    assert sender._look().taken == []
    sender._busy["a.example.com"] = 1
    assert [taken.claim.host for taken in sender._look().taken] == ["b.example.com"]


def test_a_host_that_asks_for_a_rest_gets_it_as_a_whole(world: Engine) -> None:
    add_with_callback(world, "first", "second")
    add_with_callback(world, "other", callback=NewCallback("https://other.example.com/", "other.example.com"))
    with world.begin() as conn:
        request_cancel(conn, ["first", "second", "other"])
    hooks = Hooks(Answer(429, retry_after_s=30))
    sender = sender_for(world, hooks, hosts=(".example.com",), per_host=1)
    now = 0.0
    sender._monotonic = lambda: now
    send(sender)
    assert [url.host for url, _, _ in hooks.sent] == [HOST, "other.example.com"]
    now = 29.0
    send(sender)
    assert len(hooks.sent) == 2
    now = 31.0
    send(sender)
    assert [url.host for url, _, _ in hooks.sent[2:]] == [HOST]
    assert sorted(states(world).values()) == ["delivered", "delivered", "due"]


def test_a_sender_outlives_a_database_that_is_away(world: Engine, caplog: pytest.LogCaptureFixture) -> None:
    add_with_callback(world, "j")
    run_to_end(world, "j")
    hooks = Hooks()
    sender = sender_for(world, hooks)
    look, failures = sender._look, [RuntimeError("away"), RuntimeError("away")]

    def fails_first() -> Any:
        if failures:
            raise failures.pop()
        return look()

    sender._look = fails_first  # type: ignore[method-assign]

    async def scene() -> None:
        stop = asyncio.Event()
        running = asyncio.create_task(sender.run(stop, away_s=0.01))
        while not sender.counts.delivered:
            await asyncio.sleep(0.01)
        stop.set()
        await running

    asyncio.run(asyncio.wait_for(scene(), 30))
    said = [record.message for record in caplog.records if "no callbacks are sent" in record.message]
    assert len(said) == 1, "the same trouble is told once"


def test_a_stop_waits_a_little_and_leaves_the_rest_to_others(world: Engine) -> None:
    add_with_callback(world, "j")
    run_to_end(world, "j")

    class Stuck(Hooks):
        async def post(self, url: CallbackUrl, headers: Mapping[str, str], body: bytes) -> Answer:
            self.sent.append((url, headers, body))
            await asyncio.sleep(60)
            return Answer(204)

    async def scene() -> None:
        hooks = Stuck()
        sender = sender_for(world, hooks, grace_s=0.05)
        stop = asyncio.Event()
        running = asyncio.create_task(sender.run(stop))
        while not hooks.sent:
            await asyncio.sleep(0.01)
        stop.set()
        await asyncio.wait_for(running, 30)

    asyncio.run(scene())
    assert (of_job(world, "j").state, of_job(world, "j").tries) == (CallbackState.DUE, 1)
    make_due(world)  # the lease ends
    hooks = Hooks()
    send(sender_for(world, hooks))
    assert [event["data"]["id"] for event in hooks.events()] == ["j"]


def test_what_is_due_when_it_stops_is_still_sent(world: Engine) -> None:
    add_with_callback(world, "j")
    run_to_end(world, "j")
    hooks = Hooks()

    async def scene() -> None:
        stop = asyncio.Event()
        stop.set()
        await asyncio.wait_for(sender_for(world, hooks).run(stop), 40)

    asyncio.run(scene())
    assert [event["data"]["id"] for event in hooks.events()] == ["j"]
    assert states(world) == {"j": CallbackState.DELIVERED}
