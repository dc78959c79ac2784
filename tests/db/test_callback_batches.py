"""The ends of batches that nobody watches are seen by senders."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import Engine, event

from models_db.batches import create_batch, finish_batch_if_done
from models_db.callbacks import CallbackState, insert_batch_callback
from models_db.jobs import insert_jobs, request_cancel
from models_db.tables import BatchState
from tests.db.callback_world import CALLBACK, Hooks, add_with_callback, run_to_end, send, sender_for, states
from tests.db.helpers import new_job


def test_a_batch_that_nobody_watches_is_ended_and_told_of(world: Engine) -> None:
    with world.begin() as conn:
        watched = create_batch(conn, name="nightly", state=BatchState.IN_PROGRESS, total=1)
        fed = create_batch(conn, name="fed", state=BatchState.VALIDATING)
        written = create_batch(conn, name="written", state=BatchState.FINALIZING, total=0)
        for batch_id in (watched, fed, written):
            insert_batch_callback(conn, batch_id, CALLBACK)
        insert_jobs(conn, [new_job("line", batch_id=watched, position=1)])
    hooks = Hooks()
    sender = sender_for(world, hooks)
    send(sender)
    assert hooks.sent == []
    run_to_end(world, "line")
    send(sender)
    (event,) = hooks.events()
    assert event["type"] == "batch.completed"
    assert event["data"]["counts"] == {"succeeded": 1, "failed": 0, "cancelled": 0, "expired": 0}
    assert states(world) == {
        watched: CallbackState.DELIVERED,
        fed: CallbackState.WAITING,
        written: CallbackState.WAITING,
    }


def test_a_batch_that_cannot_be_ended_keeps_nothing_else_from_being_told(
    world: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with world.begin() as conn:
        stuck, other = (create_batch(conn, name="n", state=BatchState.IN_PROGRESS, total=0) for _ in range(2))
        for batch_id in (stuck, other):
            insert_batch_callback(conn, batch_id, CALLBACK)
    add_with_callback(world, "j")
    run_to_end(world, "j")
    tried: list[str] = []

    def finish_it(conn: Any, batch_id: str) -> BatchState | None:
        tried.append(batch_id)
        if batch_id == stuck:
            raise RuntimeError("read timeout")
        return finish_batch_if_done(conn, batch_id)

    monkeypatch.setattr("workers.callbacks.batch_ends.finish_batch_if_done", finish_it)
    hooks = Hooks()
    sender = sender_for(world, hooks)
    now = 0.0
    sender._monotonic = lambda: now
    while now < 10.0:
        send(sender)
        now += 3.0
    assert {event["data"]["id"] for event in hooks.events()} == {"j", other}
    assert tried.count(stuck) == 1, "it has a pause"
    assert [stuck in record.message for record in caplog.records if "cannot be ended" in record.message] == [
        True
    ]
    now = 12.0
    send(sender)
    assert tried.count(stuck) == 2


def test_the_end_of_a_batch_does_not_add_up_its_results(world: Engine) -> None:
    """They may be millions, and the batch is locked meanwhile."""
    with world.begin() as conn:
        batch_id = create_batch(conn, name="n", state=BatchState.IN_PROGRESS, total=0)
    said: list[str] = []

    def note(conn: Any, cursor: Any, statement: str, *rest: Any) -> None:
        said.append(statement)

    event.listen(world, "before_cursor_execute", note)
    try:
        with world.begin() as conn:
            assert finish_batch_if_done(conn, batch_id) is BatchState.COMPLETED
    finally:
        event.remove(world, "before_cursor_execute", note)
    assert said
    assert not [statement for statement in said if "completion_tokens" in statement]


def test_a_batch_whose_lines_are_missing_is_not_counted_at_each_look(
    world: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with world.begin() as conn:
        fed = create_batch(conn, name="n", state=BatchState.IN_PROGRESS, total=2)
        insert_batch_callback(conn, fed, CALLBACK)
    counted: list[str] = []

    def finish_it(conn: Any, batch_id: str) -> BatchState | None:
        counted.append(batch_id)
        return finish_batch_if_done(conn, batch_id)

    monkeypatch.setattr("workers.callbacks.batch_ends.finish_batch_if_done", finish_it)
    hooks = Hooks()
    sender = sender_for(world, hooks)
    now = 0.0
    sender._monotonic = lambda: now
    while now < 25.0:
        send(sender)
        now += 3.0
    assert len(counted) == 3, "each ten seconds, as long as it lasts"
    with world.begin() as conn:
        insert_jobs(conn, [new_job(f"line{number}", batch_id=fed, position=number) for number in (1, 2)])
        request_cancel(conn, ["line1", "line2"])
    now = 40.0
    send(sender)
    assert [event["type"] for event in hooks.events()] == ["batch.completed"]
