"""A sender waits for no row that somebody else holds. (SQLite has no locks of rows: its one writer is waited for.)"""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import Engine, select, text
from typer.testing import CliRunner

from models_db.batches import create_batch
from models_db.callbacks import CallbackState, NewCallback, claim_due, database_now, insert_batch_callback
from models_db.jobs import request_cancel
from models_db.tables import Batch, BatchState
from tests.db.callback_world import CALLBACK, HOST, LEASE, Hooks, add_with_callback, send, sender_for, states
from tests.db.conftest import KINDS
from workers.callbacks.sender import CallbackSender
from workers.callbacks.service import IDLE_IN_TRANSACTION_S, start_sender
from workers.cli import app
from workers.settings import Settings, load_settings

with_row_locks = pytest.mark.parametrize("kind", KINDS[1:], indirect=True)


def send_at_once(db: Engine, hooks: Hooks) -> None:
    """Send, and fail where it takes as long as a lock may be waited for."""
    sender = sender_for(db, hooks)
    thread = threading.Thread(target=send, args=(sender,), daemon=True)
    thread.start()
    thread.join(14)  # MariaDB waits for 15 s, PostgreSQL for ever
    assert not thread.is_alive(), "it waits for a lock"


@with_row_locks
def test_a_batch_that_somebody_holds_keeps_nothing_from_being_told(world: Engine) -> None:
    with world.begin() as conn:
        held, free = (create_batch(conn, name="n", state=BatchState.IN_PROGRESS, total=0) for _ in range(2))
        for batch_id in (held, free):
            insert_batch_callback(conn, batch_id, CALLBACK)
    add_with_callback(world, "j")
    with world.begin() as conn:
        request_cancel(conn, ["j"])
    hooks = Hooks()
    with world.begin() as conn:  # as a cancel of a million jobs would have it, for long
        conn.execute(select(Batch.id).where(Batch.id == held).with_for_update())
        send_at_once(world, hooks)
        assert states(world) == {
            "j": CallbackState.DELIVERED,
            free: CallbackState.DELIVERED,
            held: CallbackState.WAITING,
        }
    send_at_once(world, hooks)
    assert states(world)[held] is CallbackState.DELIVERED


@with_row_locks
def test_a_sender_that_froze_while_it_took_some_holds_up_none_but_those(world: Engine) -> None:
    names = [f"j{number}" for number in range(9)]
    add_with_callback(world, *names)
    with world.begin() as conn:
        request_cancel(conn, names)
    hooks = Hooks()
    with world.connect() as frozen:
        taken = {claim.job_id for claim in claim_due(frozen, HOST, 3, database_now(frozen), LEASE)}
        assert len(taken) == 3
        send_at_once(world, hooks)
        assert {event["data"]["id"] for event in hooks.events()} == set(names) - taken
        frozen.rollback()  # the server ends its transaction
    send_at_once(world, hooks)
    assert len(hooks.sent) == 9


@with_row_locks
def test_every_sender_lets_go_of_its_locks_when_it_freezes(
    migrated_url: str, db: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one of ``tokenmill callbacks send`` as well as the one beside a worker."""
    limits: list[float] = []

    def note(settings: Settings, engine: Engine) -> CallbackSender:
        query = {
            "postgresql": "SELECT extract(epoch FROM current_setting('idle_in_transaction_session_timeout')::interval)",
        }.get(engine.dialect.name, "SELECT @@SESSION.idle_transaction_timeout")
        with engine.connect() as conn:
            limits.append(float(conn.scalar(text(query)) or 0))
        return sender_for(engine, Hooks())

    monkeypatch.setattr("workers.callbacks.service.make_sender", note)
    monkeypatch.setattr(
        "workers.callbacks.service.run_sender", lambda settings, engine: note(settings, engine)
    )
    done = CliRunner().invoke(
        app, ["callbacks", "send", "--database-url", migrated_url], env={"TOKENMILL_CALLBACK_HOSTS": HOST}
    )
    assert done.exit_code == 0, done.output
    beside = start_sender(load_settings(database_url=migrated_url, callback_hosts=HOST))
    assert beside is not None
    beside.stop()
    assert limits == [IDLE_IN_TRANSACTION_S] * 2


def test_a_look_sends_what_it_took_before_the_leases_are_over(world: Engine) -> None:
    """Each host costs six seconds here: the third is left to the next look."""
    names = ["a", "b", "c", "d"]
    for name in names:
        add_with_callback(
            world, name, callback=NewCallback(f"https://{name}.example.com/", f"{name}.example.com")
        )
    with world.begin() as conn:
        request_cancel(conn, names)
    sender = sender_for(world, Hooks(), hosts=(".example.com",))
    take, seconds = sender._take, iter(range(0, 100, 6))

    def slow(conn: Any, **rest: Any) -> Any:
        taken, now = take(conn, **rest)
        return taken, now + timedelta(seconds=next(seconds))

    sender._take = slow  # type: ignore[method-assign]
    look = sender._look()
    assert [taken.claim.job_id for taken in look.taken] == ["a", "b", "c"]
    assert look.more
    assert [taken.claim.job_id for taken in sender._look().taken] == ["d"]
