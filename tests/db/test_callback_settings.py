"""A sender sends what its own settings allow, leaves the rest to others, and ends what none of them told in time."""

from __future__ import annotations

from datetime import timedelta

import pytest
from sqlalchemy import Engine, update

from models_db.callbacks import Callback, CallbackState, NewCallback, database_now
from models_db.jobs import request_cancel
from tests.db.callback_world import (
    HOST,
    SECRET,
    Hooks,
    add_with_callback,
    make_due,
    of_job,
    run_to_end,
    send,
    sender_for,
    states,
)
from tests.db.helpers import at
from workers.callbacks.sender import CallbackSender

UNENCRYPTED = NewCallback(f"HTTP://{HOST}:443/", f"{HOST}:443")  # the port makes both schemes one host

LIMITED = ["list", "secret", "scheme"]


def limited(db: Engine, hooks: Hooks, how: str, **limits: float) -> CallbackSender:
    """A sender that is not let send to the host, and would be with newer settings."""
    match how:
        case "list":
            return sender_for(db, hooks, hosts=("other.example.com",), **limits)
        case "secret":
            return sender_for(db, hooks, secrets=(f"other.example.com={SECRET}",), **limits)
        case _:
            return sender_for(db, hooks, hosts=(f"{HOST}:80",), **limits)


def full(db: Engine, hooks: Hooks) -> CallbackSender:
    return sender_for(db, hooks, hosts=(HOST, f"{HOST}:80", f"{HOST}:443"), allow_http=True)


def grow_old(db: Engine, *job_ids: str) -> None:
    with db.begin() as conn:
        conn.execute(update(Callback).where(Callback.job_id.in_(job_ids)).values(ended_at=at(0)))


@pytest.mark.parametrize("how", LIMITED)
def test_what_it_may_not_send_is_left_to_a_sender_that_may(
    world: Engine, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    plain = NewCallback(f"http://{HOST}:80/", HOST)  # not HTTPS, as the host alone would have it
    add_with_callback(world, *(("j",)), **({"callback": plain} if how == "scheme" else {}))
    run_to_end(world, "j")
    hooks = Hooks()
    sender = limited(world, hooks, how)
    for _ in range(3):
        send(sender)
    record = of_job(world, "j")
    assert hooks.sent == []
    assert (record.state, record.tries, record.error) == (CallbackState.DUE, 0, None)
    said = [record.message for record in caplog.records if "left to other senders" in record.message]
    assert len(said) == 1, "once a host"
    assert HOST in said[0]
    assert "/done" not in said[0]
    send(full(world, hooks))
    assert states(world) == {"j": CallbackState.DELIVERED}
    assert len(hooks.sent) == 1


@pytest.mark.parametrize(
    ("how", "reason"), [("list", "TOKENMILL_CALLBACK_HOSTS"), ("secret", "callback_secrets")]
)
def test_what_nobody_sent_in_time_is_ended_by_any_sender(world: Engine, how: str, reason: str) -> None:
    add_with_callback(world, "old", "young")
    with world.begin() as conn:
        request_cancel(conn, ["old", "young"])
    grow_old(world, "old")
    hooks = Hooks()
    sender = limited(world, hooks, how, max_age_s=3600.0)
    send(sender)
    assert hooks.sent == []
    assert states(world) == {"old": CallbackState.FAILED, "young": CallbackState.DUE}
    error = of_job(world, "old").error
    assert error is not None
    assert reason in error
    assert "token=" not in error
    assert sender.counts.failed == 1


def test_what_another_sender_has_is_not_ended(world: Engine) -> None:
    add_with_callback(world, "j")
    run_to_end(world, "j")
    grow_old(world, "j")
    with world.begin() as conn:
        later = database_now(conn) + timedelta(seconds=60)
        conn.execute(update(Callback).values(due_at=later, tries=1))
    send(limited(world, Hooks(), "list", max_age_s=1.0))
    assert states(world) == {"j": CallbackState.DUE}


def test_of_one_host_it_sends_what_it_may(world: Engine) -> None:
    """However many that it may not send have been due for longer."""
    host = f"{HOST}:443"
    plain = [f"plain{number}" for number in range(60)]
    add_with_callback(world, *plain, "plain-old", callback=UNENCRYPTED)
    with world.begin() as conn:
        request_cancel(conn, [*plain, "plain-old"])
    make_due(world)
    grow_old(world, "plain-old")
    add_with_callback(world, "good", callback=NewCallback(f"https://{HOST}/", host))
    run_to_end(world, "good")
    with world.begin() as conn:
        first = update(Callback).where(Callback.job_id == "plain-old")
        conn.execute(first.values(due_at=at(-1)))
    hooks = Hooks()
    send(sender_for(world, hooks, hosts=(HOST,), max_age_s=3600.0))
    assert [event["data"]["id"] for event in hooks.events()] == ["good"]
    found = states(world)
    assert (found.pop("good"), found.pop("plain-old")) == (CallbackState.DELIVERED, CallbackState.FAILED)
    assert set(found.values()) == {CallbackState.DUE}
    assert "https://" in str(of_job(world, "plain-old").error)
    send(full(world, hooks))
    assert len(hooks.sent) == 61
