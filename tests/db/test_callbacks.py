"""The outbox: a callback is there when its job is, due when that ends, and goes when that goes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from sqlalchemy import Engine, select, text, update
from sqlalchemy.exc import IntegrityError, OperationalError

from models_db.batches import create_batch, finish_batch_if_done, request_cancel_batch
from models_db.callbacks import (
    CallbackState,
    insert_batch_callback,
    insert_job_callbacks,
    record_delivered,
    record_failed,
)
from models_db.claims import ClaimItem, FinishItem, claim, finish
from models_db.deaths import bury
from models_db.jobs import insert_jobs, request_cancel, retry_failed
from models_db.migrate import downgrade, upgrade
from models_db.reuse import ReusedJob, insert_reused
from models_db.session import make_engine
from models_db.tables import BatchState, Job, JobState
from tests.db.callback_world import CALLBACK, HOST, add_with_callback, hosts, of_job, run_to_end, states, take
from tests.db.helpers import add_jobs, at, claim_one, finish_one, new_job, new_result


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


def test_the_migration_goes_down_and_up_with_callbacks_there(empty_url: str) -> None:
    upgrade(empty_url)
    engine = make_engine(empty_url)
    add_with_callback(engine, "j")
    downgrade(empty_url, "0008")
    upgrade(empty_url)
    assert states(engine) == {"j": CallbackState.WAITING}
    assert of_job(engine, "j").unwanted == 0
    downgrade(empty_url, "0005")
    upgrade(empty_url)
    with engine.connect() as conn:
        assert conn.scalars(select(Job.id)).all() == ["j"]
    assert states(engine) == {}
    engine.dispose()
