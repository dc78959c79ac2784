"""The sweeper's, the fleet lock's and the dead letters' SQL, on every database."""

from __future__ import annotations

import pytest
from sqlalchemy import update

from models_db.claims import WAITED_TOO_LONG, ClaimItem, ClaimKind, claim
from models_db.dead_letters import UNREADABLE, NewDeadLetter, list_dead_letters, store_dead_letters
from models_db.deaths import SUSPECT_DEATHS, bury
from models_db.jobs import job_status, mark_published
from models_db.suspects import claim_suspects, drop_lock, suspects_waiting, take_lock
from models_db.sweeping import mark_republished, queued_count, queued_page
from models_db.tables import Job, JobState, WorkerState
from models_db.workers import set_worker_state
from tests.db.helpers import add_jobs, add_workers, at, claim_one, finish_one, job_row, new_job

QUEUE = new_job("any").queue


@pytest.fixture
def fleet(db):
    add_workers(db, "w1", "w2")
    return db


def suspect(engine, *ids, deaths=SUSPECT_DEATHS):
    with engine.begin() as conn:
        conn.execute(update(Job).where(Job.id.in_(ids)).values(deaths=deaths))


def test_only_what_a_delivery_has_to_bring_is_counted_and_paged(fleet):
    add_jobs(fleet, "a", "b", "c", "running", "suspect", "other")
    claim_one(fleet, "running", "w1")
    suspect(fleet, "suspect")
    with fleet.begin() as conn:
        conn.execute(update(Job).where(Job.id == "other").values(queue="another"))
        mark_published(conn, ["b"], at=at(1))
        assert queued_count(conn, QUEUE) == 3
        assert queued_page(conn, QUEUE, "", 2) == [("a", None), ("b", at(1))]
        assert queued_page(conn, QUEUE, "b", 2) == [("c", None)]
        assert queued_count(conn, "nobody's") == 0


def test_a_job_is_republished_only_as_it_was_seen_and_once(fleet):
    add_jobs(fleet, "a", "b", "moved", "done")
    with fleet.begin() as conn:
        mark_published(conn, ["b", "moved"], at=at(1))
    seen = {"a": None, "b": at(1), "moved": None, "done": None, "unknown": None}
    claim_one(fleet, "done", "w1")
    finish_one(fleet, "done", 1, "w1")
    with fleet.begin() as conn:
        stored = mark_republished(conn, seen, now=at(5))
        assert [entry.id for entry in stored] == ["a", "b"]
        assert stored[0].message == {"headers": {"id": "a"}, "body": "…"}
        assert job_row(conn, "a").published_at == at(5)
    with fleet.begin() as conn:
        assert mark_republished(conn, seen, now=at(6)) == []


def test_the_lock_is_one_living_workers(fleet):
    with fleet.begin() as conn:
        assert take_lock(conn, "l", "w1")
        assert take_lock(conn, "l", "w1"), "again"
        assert not take_lock(conn, "l", "w2")
        drop_lock(conn, "l", "w2")
        assert not take_lock(conn, "l", "w2"), "nobody gives back what is someone else's"
        drop_lock(conn, "l", "w1")
        assert take_lock(conn, "l", "w2")
        set_worker_state(conn, "w2", WorkerState.STOPPED)
        assert take_lock(conn, "l", "w1")


def test_suspects_are_claimed_by_the_holder_of_the_lock_only(fleet):
    add_jobs(fleet, "a", "b", "plain")
    suspect(fleet, "a", "b")
    with fleet.begin() as conn:
        assert (suspects_waiting(conn, QUEUE).grouped, suspects_waiting(conn, QUEUE).alone) == (2, 0)
        assert claim(conn, [ClaimItem(new_job("a"))], "w1")[0].kind is ClaimKind.SUSPECT
        assert claim_suspects(conn, QUEUE, "l", "w1", 5, alone=False) == []
        take_lock(conn, "l", "w1")
        assert claim_suspects(conn, QUEUE, "l", "w2", 5, alone=False) == []
        assert claim_suspects(conn, QUEUE, "l", "w1", 5, alone=True) == []
        (one,) = claim_suspects(conn, QUEUE, "l", "w1", 1, alone=False)
        assert (one.job_id, one.attempt, one.stored.queue) == ("a", 1, QUEUE)
        assert suspects_waiting(conn, QUEUE).grouped == 1


def test_what_a_worker_ended_just_before_its_death_may_be_untold(fleet):
    add_jobs(fleet, "told", "untold", "running")
    for name in ("told", "untold", "running"):
        claim_one(fleet, name, "w1", now=at(1))
    for name in ("told", "untold"):
        finish_one(fleet, name, 1, "w1", now=at(2))
    with fleet.begin() as conn:
        conn.execute(update(Job).where(Job.id == "told").values(callbacks_sent_at=at(2)))
        burial = bury(conn, "w1", now=at(9))
        assert (burial.queued, burial.untold, burial.ended, burial.suspects) == (
            ["running"],
            ["untold"],
            [],
            [],
        )
        again = bury(conn, "w1", now=at(10))
        assert (again.queued, again.untold) == ([], [])


def test_a_job_that_waited_too_long_expires_at_its_claim(fleet):
    add_jobs(fleet, "old", "young")
    with fleet.begin() as conn:
        items = [ClaimItem(new_job("old"), 10.0), ClaimItem(new_job("young"), 100.0)]
        kinds = [outcome.kind for outcome in claim(conn, items, "w1", now=at(11))]
        assert kinds == [ClaimKind.TERMINAL, ClaimKind.CLAIMED]
        status = job_status(conn, "old")
        assert (status.state, status.error_message) == (JobState.EXPIRED, WAITED_TOO_LONG)


def test_a_dead_letter_is_kept_once_and_fails_its_waiting_job(fleet):
    add_jobs(fleet, "waits", "runs")
    claim_one(fleet, "runs", "w1")
    letters = [
        NewDeadLetter(f"l{n}", QUEUE, "w1", "it is \x00 no JSON", "{\x00 ", job_id, at(n))
        for n, job_id in enumerate(["waits", "runs", None, "x" * 300])
    ]
    for _ in range(2):
        with fleet.begin() as conn:
            store_dead_letters(conn, letters)
    with fleet.connect() as conn:
        kept = list_dead_letters(conn)
        assert [letter.id for letter in kept] == ["l3", "l2", "l1", "l0"]
        assert kept[0].received_at == at(3)
        waits, runs = job_status(conn, "waits"), job_status(conn, "runs")
    assert (waits.state, waits.error_type, runs.state) == (JobState.FAILED, UNREADABLE, JobState.RUNNING)
