"""The outbox: a callback is there when its job is, due when that ends, taken by one sender, and never lost."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, event, func, select, text, update
from sqlalchemy.exc import IntegrityError, OperationalError

from backend.api import ConfigurationError
from models_db.batches import create_batch, finish_batch_if_done, request_cancel_batch, set_batch_state
from models_db.callback_ends import job_ends
from models_db.callbacks import (
    Callback,
    CallbackRecord,
    CallbackState,
    DueCallback,
    NewCallback,
    callback_counts,
    claim_due,
    database_now,
    due_hosts,
    insert_batch_callback,
    insert_job_callbacks,
    list_callbacks,
    record_delivered,
    record_failed,
    record_retry,
    retry_callbacks,
)
from models_db.claims import ClaimItem, FinishItem, claim, finish
from models_db.deaths import bury
from models_db.jobs import insert_jobs, request_cancel, retry_failed
from models_db.migrate import downgrade, upgrade
from models_db.retention import prune
from models_db.reuse import ReusedJob, insert_reused
from models_db.session import make_engine, transaction
from models_db.tables import BatchState, Job, JobState
from tests.db.helpers import (
    add_jobs,
    add_workers,
    at,
    claim_one,
    finish_one,
    new_job,
    new_result,
)
from workers.callbacks.schedule import Answer
from workers.callbacks.sender import CallbackSender, SenderLimits
from workers.callbacks.signing import new_secret, verify_callback
from workers.callbacks.urls import CallbackRules, CallbackUrl, HostRule

HOST = "hooks.example.com"
CALLBACK = NewCallback(f"https://{HOST}/done?token=x", HOST)
LEASE = timedelta(seconds=60)
SECRET = new_secret()


def add_with_callback(db: Engine, *ids: str, callback: NewCallback = CALLBACK, **fields: Any) -> None:
    add_jobs(db, *ids, callback=callback, **fields)


def run_to_end(db: Engine, job_id: str, state: JobState = JobState.SUCCEEDED, attempt: int = 1) -> None:
    claim_one(db, job_id, "w")
    assert finish_one(db, job_id, attempt, "w", state)


def of_job(db: Engine, job_id: str) -> CallbackRecord:
    with db.connect() as conn:
        (record,) = list_callbacks(conn, ids=[job_id])
    return record


def states(db: Engine) -> dict[str | None, CallbackState]:
    with db.connect() as conn:
        return {it.job_id or it.batch_id: it.state for it in list_callbacks(conn, limit=1000)}


def take(db: Engine, limit: int = 10, host: str = HOST, lease: timedelta = LEASE) -> list[DueCallback]:
    with db.begin() as conn:
        return claim_due(conn, host, limit, database_now(conn), lease)


def hosts(db: Engine, **options: Any) -> tuple[list[str], str]:
    with db.connect() as conn:
        return due_hosts(conn, database_now(conn), **options)


@pytest.fixture
def world(db: Engine) -> Engine:
    """With a worker."""
    add_workers(db, "w")
    return db


# ------------------------------------------------------------------------------------------------ made and made due


def test_it_waits_with_its_job_and_is_due_when_that_has_ended(world: Engine) -> None:
    add_with_callback(world, "j")
    add_jobs(world, "without")
    assert states(world) == {"j": CallbackState.WAITING}
    claim_one(world, "j", "w")
    assert hosts(world) == ([], "")
    assert take(world) == []
    assert finish_one(world, "j", 1, "w")
    assert hosts(world) == ([HOST], "")
    (due,) = take(world)
    assert (due.job_id, due.events, due.tries, due.url) == ("j", 1, 1, CALLBACK.url)


def test_no_row_without_the_job_and_none_with_a_job_that_was_there(world: Engine) -> None:
    keyed = {"idempotency_key": "k", "payload_hash": "h", "callback": CALLBACK}
    with world.begin() as conn:
        insert_jobs(conn, [new_job("first", **keyed), new_job("second", **keyed)])
    assert states(world) == {"first": CallbackState.WAITING}
    with world.connect() as conn:
        insert_jobs(conn, [new_job("undone", callback=CALLBACK)])
        conn.rollback()
    assert states(world) == {"first": CallbackState.WAITING}


def test_a_bare_delivery_brings_its_callback_once(world: Engine) -> None:
    item = ClaimItem(new_job("bare", callback=CALLBACK))
    for _ in range(2):
        with world.begin() as conn:
            claim(conn, [item], "w")
    assert states(world) == {"bare": CallbackState.WAITING}
    with world.begin() as conn:
        insert_job_callbacks(conn, [("bare", CALLBACK)])
    assert len(states(world)) == 1


END_IN_OTHER_WAYS: dict[str, Callable[[Engine], object]] = {}


def ends(function: Callable[[Engine], object]) -> Callable[[Engine], object]:
    END_IN_OTHER_WAYS[function.__name__] = function
    return function


@ends
def cancelled_while_queued(db: Engine) -> None:
    with db.begin() as conn:
        request_cancel(conn, ["j"])


@ends
def expired_before_its_start(db: Engine) -> None:
    with db.begin() as conn:
        conn.execute(update(Job).values(deadline_at=at(1)))
        claim(conn, [ClaimItem(new_job("j"))], "w", now=at(2))


@ends
def failed(db: Engine) -> None:
    run_to_end(db, "j", JobState.FAILED)


@ends
def cancelled_as_its_worker_died(db: Engine) -> None:
    claim_one(db, "j", "w")
    with db.begin() as conn:
        request_cancel(conn, ["j"])
        bury(conn, "w")


@ends
def failed_alone_with_dead_workers(db: Engine) -> None:
    with db.begin() as conn:
        conn.execute(update(Job).values(solo_deaths=1))
    claim_one(db, "j", "w")
    with db.begin() as conn:
        bury(conn, "w")


@pytest.mark.parametrize("name", END_IN_OTHER_WAYS)
def test_every_way_to_end_makes_it_due(world: Engine, name: str) -> None:
    add_with_callback(world, "j")
    END_IN_OTHER_WAYS[name](world)
    with world.connect() as conn:
        state = conn.scalar(select(Job.state))
    assert state is not None
    assert state.terminal
    assert states(world) == {"j": CallbackState.DUE}


def test_a_known_answer_is_told_at_once(world: Engine) -> None:
    add_jobs(world, "source")
    run_to_end(world, "source")
    with world.begin() as conn:
        insert_reused(conn, [ReusedJob(new_job("copy", callback=CALLBACK), "source")])
    assert states(world) == {"copy": CallbackState.DUE}


def test_who_knows_that_nobody_asked_spares_the_look(world: Engine) -> None:
    add_with_callback(world, "asked", "not-asked")
    for name, callback in (("asked", True), ("not-asked", False)):
        claim_one(world, name, "w")
        with world.begin() as conn:
            item = FinishItem(name, 1, JobState.SUCCEEDED, new_result(), callback=callback)
            assert finish(conn, [item], "w") == [True]
    assert states(world) == {"asked": CallbackState.DUE, "not-asked": CallbackState.WAITING}


def test_a_result_that_does_not_count_tells_nothing(world: Engine) -> None:
    add_with_callback(world, "j")
    claim_one(world, "j", "w")
    assert not finish_one(world, "j", 7, "w")
    assert states(world) == {"j": CallbackState.WAITING}
    assert finish_one(world, "j", 1, "w", now=at(3))
    assert finish_one(world, "j", 1, "w", now=at(3), replay=True), "the answer to the commit got lost"
    assert of_job(world, "j").events == 1


def test_a_job_that_is_retried_is_told_of_again_under_another_id(world: Engine) -> None:
    add_with_callback(world, "j")
    run_to_end(world, "j", JobState.FAILED)
    (first,) = take(world)
    with world.begin() as conn:
        assert retry_failed(conn, ids=["j"]) == ["j"]
        assert not record_delivered(conn, first), "its end is no end any more"
    assert states(world) == {"j": CallbackState.WAITING}
    run_to_end(world, "j", attempt=2)
    (second,) = take(world)
    assert first.message_id != second.message_id
    assert (second.events, second.tries) == (2, 1)
    with world.begin() as conn:
        assert not record_failed(conn, first, "late"), "of an end before"
        assert record_delivered(conn, second)
    assert states(world) == {"j": CallbackState.DELIVERED}


def test_a_batch_is_told_of_when_all_of_it_has_ended(world: Engine) -> None:
    with world.begin() as conn:
        batch_id = create_batch(conn, name="n", state=BatchState.IN_PROGRESS, total=1)
        insert_batch_callback(conn, batch_id, CALLBACK)
        insert_jobs(conn, [new_job("line", batch_id=batch_id, position=1)])
        assert finish_batch_if_done(conn, batch_id) is None
    assert states(world) == {batch_id: CallbackState.WAITING}
    run_to_end(world, "line", JobState.FAILED)
    with world.begin() as conn:
        assert finish_batch_if_done(conn, batch_id) is BatchState.COMPLETED
    assert states(world) == {batch_id: CallbackState.DUE}
    with world.begin() as conn:
        retry_failed(conn, batch_id=batch_id)
    assert states(world) == {batch_id: CallbackState.WAITING}
    with world.begin() as conn:
        request_cancel_batch(conn, batch_id)
    assert states(world) == {batch_id: CallbackState.DUE}


# ----------------------------------------------------------------------------------------------------- the senders


def test_a_lease_keeps_others_away_until_it_ends(world: Engine) -> None:
    """The sender is killed between sending and writing that down: another one sends again, under the same id."""
    add_with_callback(world, "j")
    run_to_end(world, "j")
    (first,) = take(world, lease=timedelta(seconds=-1))  # over at once
    (second,) = take(world)
    assert (first.message_id, first.tries) == (second.message_id, 1)
    assert second.tries == 2
    assert take(world) == [], "it is leased"
    assert hosts(world) == ([], "")
    with world.begin() as conn:
        assert not record_retry(conn, first, "late", database_now(conn)), "another one has it"
        assert not record_delivered(conn, first)
        assert record_delivered(conn, second)
        assert not record_delivered(conn, second), "once"
    assert states(world) == {"j": CallbackState.DELIVERED}
    assert take(world) == []


def test_senders_at_once_take_each_callback_once(world: Engine) -> None:
    names = [f"j{number:02}" for number in range(24)]
    add_with_callback(world, *names)
    with world.begin() as conn:
        request_cancel(conn, names)
    taken: list[str | None] = []
    together = threading.Barrier(4)

    def sender(seed: int) -> None:
        shuffle = random.Random(seed).shuffle
        together.wait()
        misses = 0
        while misses < 5:
            mine = transaction(
                world, lambda conn: claim_due(conn, HOST, 3, database_now(conn), LEASE, shuffle)
            )
            misses += not mine
            taken.extend(it.job_id for it in mine)

    threads = [threading.Thread(target=sender, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(map(str, taken)) == names


def test_a_retry_is_due_when_it_says_and_a_failure_never_again(world: Engine) -> None:
    add_with_callback(world, "later", "never")
    run_to_end(world, "later")
    run_to_end(world, "never")
    claims = {it.job_id: it for it in take(world)}
    with world.begin() as conn:
        assert record_retry(conn, claims["later"], "HTTP 503", database_now(conn) + timedelta(hours=1))
        assert record_failed(conn, claims["never"], "HTTP 410\x00" + "x" * 5000)
    assert states(world) == {"later": CallbackState.DUE, "never": CallbackState.FAILED}
    assert hosts(world) == ([], "")
    assert of_job(world, "later").error == "HTTP 503"
    error = of_job(world, "never").error
    assert error is not None
    assert (len(error), "\x00" in error) == (1000, False)
    with world.begin() as conn:
        assert callback_counts(conn) == {"due": 1, "failed": 1}
        assert retry_callbacks(conn, host="other.example.com") == 0
        assert retry_callbacks(conn, ["later", "never"]) == 1
    (again,) = take(world)
    assert again.message_id == claims["never"].message_id, "receivers know it by its id"


def test_hosts_are_looked_at_in_turn(world: Engine) -> None:
    for number in range(5):
        add_with_callback(world, f"j{number}", callback=replace(CALLBACK, host=f"h{number}"))
    with world.begin() as conn:
        request_cancel(conn, [f"j{number}" for number in range(5)])
    found, after = hosts(world, limit=2)
    assert (found, after) == (["h0", "h1"], "h1")
    found, after = hosts(world, after=after, limit=3)
    assert (found, after) == (["h2", "h3", "h4"], "h4")
    assert hosts(world, after=after) == ([], "")
    (only,) = take(world, host="h3")
    assert only.job_id == "j3"


@pytest.mark.parametrize(
    "change",
    [
        "state = 'due'",
        "due_at = created_at",
        "settled_at = created_at",
        "state = 'delivered'",
        "state = 'lost'",
        "job_id = NULL",
        "batch_id = 'b'",
        "job_id = 'nobody'",
        "tries = -1",
    ],
)
def test_the_database_refuses_what_makes_no_sense(world: Engine, change: str) -> None:
    with world.begin() as conn:
        create_batch(conn, name="n", batch_id="b")
    add_with_callback(world, "j")
    with pytest.raises((IntegrityError, OperationalError)), world.begin() as conn:
        conn.execute(text(f"UPDATE callback SET {change}"))


def test_it_goes_with_its_job_and_with_its_batch(world: Engine) -> None:
    with world.begin() as conn:
        batch_id = create_batch(conn, name="n", total=0, at=at(0))
        insert_batch_callback(conn, batch_id, CALLBACK)
        set_batch_state(conn, batch_id, BatchState.CANCELLED, at=at(1))
    add_with_callback(world, "j")
    with world.begin() as conn:
        request_cancel(conn, ["j"], at=at(1))
    assert len(states(world)) == 2
    prune(world, at(2 * 3600))
    with world.connect() as conn:
        assert conn.scalar(select(func.count()).select_from(Callback)) == 0


def test_the_migration_goes_down_and_up_with_callbacks_there(empty_url: str) -> None:
    upgrade(empty_url)
    engine = make_engine(empty_url)
    add_with_callback(engine, "j")
    downgrade(empty_url, "0005")
    upgrade(empty_url)
    with engine.connect() as conn:
        assert conn.scalars(select(Job.id)).all() == ["j"]
    assert states(engine) == {}
    engine.dispose()


def test_looking_costs_the_same_however_many_wait(tmp_path: Path) -> None:
    """A million jobs that run must not be looked through each second: the plan uses the index alone."""
    url = f"sqlite:///{tmp_path / 'plans.db'}"
    upgrade(url)
    engine = make_engine(url)
    with engine.connect() as conn:
        for query in (
            "SELECT min(host) FROM callback WHERE state = 'due' AND host > 'a'",
            "SELECT min(due_at) FROM callback WHERE state = 'due' AND host = 'a'",
            "SELECT id FROM callback WHERE state = 'due' AND host = 'a' AND due_at <= 'b' ORDER BY due_at LIMIT 9",
        ):
            plan = " ".join(str(row[3]) for row in conn.execute(text(f"EXPLAIN QUERY PLAN {query}")))
            assert "SEARCH callback USING" in plan, plan
            assert "ix_callback_state_host_due_at" in plan, plan
            assert "TEMP B-TREE" not in plan, plan
    engine.dispose()


# ------------------------------------------------------------------------------------------------ what a sender does


class Hooks:
    """Stands for the receivers: keeps what comes, and answers."""

    def __init__(self, *answers: Answer) -> None:
        self.sent: list[tuple[CallbackUrl, Mapping[str, str], bytes]] = []
        self._answers = list(answers)

    async def post(self, url: CallbackUrl, headers: Mapping[str, str], body: bytes) -> Answer:
        self.sent.append((url, headers, body))
        return self._answers.pop(0) if self._answers else Answer(204)

    def events(self) -> list[dict[str, Any]]:
        return [verify_callback(SECRET, headers, body) for _, headers, body in self.sent]


def sender_for(
    db: Engine, hooks: Hooks, *, hosts: tuple[str, ...] = (HOST,), **limits: Any
) -> CallbackSender:
    rules = CallbackRules(tuple(map(HostRule.parse, hosts)))
    # Chance takes the shortest pause and leaves hosts in their order; the host's own pauses are over at once.
    clock = iter(range(0, 10**9, 1000))
    spread = random.Random(1)
    spread.uniform = lambda low, high: low  # type: ignore[method-assign]
    spread.shuffle = lambda rows: None  # type: ignore[method-assign]
    return CallbackSender(
        db, rules, [SECRET], hooks, SenderLimits(**limits), monotonic=lambda: next(clock), spread=spread
    )


def send(sender: CallbackSender) -> None:
    asyncio.run(sender.send_due())


def make_due(db: Engine) -> None:
    """Let the time of all that waits for its next try come."""
    with db.begin() as conn:
        conn.execute(update(Callback).where(Callback.state == "due").values(due_at=at(0)))


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


def test_what_was_taken_is_sent_although_the_next_host_cannot_be_read(world: Engine) -> None:
    for host in ("a.example.com", "b.example.com"):
        add_with_callback(world, host, callback=NewCallback(f"https://{host}/", host))
    with world.begin() as conn:
        request_cancel(conn, ["a.example.com", "b.example.com"])
    hooks = Hooks()
    sender = sender_for(world, hooks, hosts=(".example.com",))
    take_them = sender._take

    def breaks(conn: Any, host: str, limit: int) -> Any:
        if host.startswith("b") and not hooks.sent:
            raise RuntimeError("away")
        return take_them(conn, host, limit)

    sender._take = breaks  # type: ignore[method-assign]
    send(sender)
    assert [event["data"]["id"] for event in hooks.events()] == ["a.example.com", "b.example.com"]


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


def test_a_host_that_is_listed_no_more_gets_nothing(world: Engine) -> None:
    add_with_callback(world, "j")
    run_to_end(world, "j")
    hooks = Hooks()
    send(sender_for(world, hooks, hosts=("other.example.com",)))
    assert hooks.sent == []
    error = of_job(world, "j").error
    assert error is not None
    assert "TOKENMILL_CALLBACK_HOSTS" in error
    assert "token" not in error.lower().replace("tokenmill", "")


def test_nothing_is_sent_unsigned(world: Engine) -> None:
    add_with_callback(world, "j")
    run_to_end(world, "j")
    hooks = Hooks()
    rules = CallbackRules((HostRule.parse(HOST),))
    sender = CallbackSender(world, rules, [f"other.example.com={SECRET}"], hooks)
    send(sender)
    assert hooks.sent == []
    assert "callback_secrets" in str(of_job(world, "j").error)


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

    monkeypatch.setattr("workers.callbacks.sender.finish_batch_if_done", finish_it)
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
            await asyncio.wait_for(self.quick_came.wait(), 20)  # as long as the other one waits
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
        await asyncio.wait_for(running, 10)

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
        await asyncio.wait_for(sender_for(world, hooks).run(stop), 20)

    asyncio.run(scene())
    assert [event["data"]["id"] for event in hooks.events()] == ["j"]
    assert states(world) == {"j": CallbackState.DELIVERED}


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
