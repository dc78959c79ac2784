"""What a sender sends, and what becomes of a callback after each answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta

import pytest
from sqlalchemy import Engine

from backend.api import ConfigurationError
from models_db.callback_ends import job_ends
from models_db.callbacks import CallbackState, retry_callbacks
from models_db.tables import JobState
from tests.db.callback_world import (
    CALLBACK,
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
    take,
)
from workers.callbacks.schedule import FEW_TRIES, Answer
from workers.callbacks.urls import CallbackUrl


def test_an_end_is_told_once_and_signed(world: Engine) -> None:
    add_with_callback(world, "j", tenant="acme", custom_id=None)
    run_to_end(world, "j")
    hooks = Hooks()
    sender = sender_for(world, hooks)
    send(sender)
    send(sender)
    (event,) = hooks.events()
    url, headers, _ = hooks.sent[0]
    assert url == CallbackUrl("https", HOST, 443, "/done?token=x")
    assert headers["webhook-id"] == event["id"]
    assert event["type"] == "job.succeeded"
    data = event["data"]
    assert (data["id"], data["state"], data["tenant"], data["attempt"]) == ("j", "succeeded", "acme", 1)
    assert data["finish_reason"] == "stop"
    assert data["usage"] == {"prompt_tokens": 5, "completion_tokens": 3, "cached_tokens": 0}
    assert data["error"] is None
    assert "text" not in data, "nobody asked for it"
    assert event["timestamp"].endswith("Z")
    assert states(world) == {"j": CallbackState.DELIVERED}
    assert sender.counts.delivered == 1


def test_the_text_comes_along_where_it_was_asked_for(world: Engine) -> None:
    add_with_callback(world, "with", callback=replace(CALLBACK, include_output=True))
    add_with_callback(world, "without")
    run_to_end(world, "with")
    run_to_end(world, "without")
    with world.connect() as conn:
        texts = {job_id: end.text for job_id, end in job_ends(conn, ["with", "without"]).items()}
    assert texts == {"with": "a fine answer", "without": None}
    hooks = Hooks()
    send(sender_for(world, hooks))
    assert sorted((event["data"]["id"], event["data"].get("text")) for event in hooks.events()) == [
        ("with", "a fine answer"),
        ("without", None),
    ]


def test_a_failure_tells_its_error_and_no_usage(world: Engine) -> None:
    add_with_callback(world, "j")
    run_to_end(world, "j", JobState.FAILED)
    hooks = Hooks()
    send(sender_for(world, hooks))
    (event,) = hooks.events()
    assert event["type"] == "job.failed"
    assert event["data"]["error"]["type"] == "boom"
    assert event["data"]["usage"] is None


def test_trouble_is_tried_again_with_the_same_id_and_body(world: Engine) -> None:
    add_with_callback(world, "j")
    run_to_end(world, "j")
    hooks = Hooks(Answer(500), Answer(error="timed out"))
    sender = sender_for(world, hooks)
    for tries, error in ((1, "HTTP 500"), (2, "timed out")):
        send(sender)
        record = of_job(world, "j")
        assert (record.state, record.tries, record.error) == (CallbackState.DUE, tries, error)
        assert len(hooks.sent) == tries, "not before its time"
        make_due(world)
    send(sender)
    assert states(world) == {"j": CallbackState.DELIVERED}
    assert len({(headers["webhook-id"], body) for _, headers, body in hooks.sent}) == 1
    assert (sender.counts.postponed, sender.counts.delivered) == (2, 1)


def test_a_fault_of_ours_is_one_try_in_vain_and_not_one_for_ever(world: Engine) -> None:
    add_with_callback(world, "j")
    run_to_end(world, "j")

    class Faulty(Hooks):
        async def post(self, url: CallbackUrl, headers: Mapping[str, str], body: bytes) -> Answer:
            raise ZeroDivisionError

    sender = sender_for(world, Faulty())
    send(sender)
    record = of_job(world, "j")
    assert (record.state, record.tries) == (CallbackState.DUE, 1)
    assert record.error is not None
    assert "ZeroDivisionError" in record.error
    assert sender.counts.postponed == 1


def test_gone_is_given_up_and_so_is_what_is_too_old(world: Engine) -> None:
    add_with_callback(world, "gone")
    run_to_end(world, "gone")
    sender = sender_for(world, Hooks(Answer(410), Answer(503)), max_age_s=2.0)
    send(sender)
    assert (of_job(world, "gone").state, of_job(world, "gone").error) == (CallbackState.FAILED, "HTTP 410")
    add_with_callback(world, "old")
    run_to_end(world, "old")
    send(sender)
    assert (of_job(world, "old").state, of_job(world, "old").error) == (CallbackState.FAILED, "HTTP 503")
    assert sender.counts.failed == 2


def test_a_sender_that_cannot_send_says_what_is_missing(db: Engine) -> None:
    from workers.callbacks.service import make_sender
    from workers.settings import load_settings

    with pytest.raises(ConfigurationError, match="TOKENMILL_CALLBACK_HOSTS"):
        make_sender(load_settings(), db)
    with pytest.raises(ConfigurationError, match="tokenmill callbacks secret"):
        make_sender(load_settings(callback_hosts=HOST), db)
    make_sender(load_settings(callback_hosts=HOST, callback_secrets=SECRET), db)


@pytest.mark.parametrize("per_host", [1, 8, 64])
def test_no_host_may_have_most_of_a_senders_requests(db: Engine, per_host: int) -> None:
    from workers.callbacks.service import make_sender
    from workers.settings import load_settings

    settings = load_settings(callback_hosts=HOST, callback_secrets=SECRET, callback_host_connections=per_host)
    limits = make_sender(settings, db)._limits
    assert limits.per_host == per_host
    assert limits.in_all >= max(64, 4 * per_host)


def test_a_receiver_that_was_down_has_all_its_tries_when_it_says_no(world: Engine) -> None:
    """And so has one whose senders died: only answers that say no count as such."""
    add_with_callback(world, "j")
    run_to_end(world, "j")
    for _ in range(3):
        take(world, lease=timedelta(seconds=-1))
    said = [Answer(503)] * 5 + [Answer(error="ours", refused=True)] + [Answer(404)] * 5
    sender = sender_for(world, Hooks(*said))
    for number in range(1, len(said) + 1):
        record = of_job(world, "j")
        assert record.state is CallbackState.DUE, f"after {number - 1} answers"
        make_due(world)
        send(sender)
    record = of_job(world, "j")
    assert (record.state, record.tries, record.error) == (CallbackState.FAILED, 3 + len(said), "HTTP 404")
    assert record.unwanted == FEW_TRIES - 1
    with world.begin() as conn:
        assert retry_callbacks(conn, ["j"]) == 1
    assert of_job(world, "j").unwanted == 0


def test_hosts_that_are_never_heard_of_again_are_forgotten(
    world: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.callbacks.sender._MOST_PAUSES", 3)
    sender = sender_for(world, Hooks())
    for number in range(20):
        sender._note_host(f"h{number}.example.com", Answer(error="no such name"))
    assert len(sender._pauses) <= 3
