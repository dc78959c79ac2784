"""Claiming suspects: what a claim takes, and that a lost answer strands nothing."""

from __future__ import annotations

import pytest
from sqlalchemy import update

from models_db.claims import ReleaseItem, release
from models_db.deaths import (
    ALONE_DEATHS,
    HELD_FOR_DEAD,
    KILLED_ITS_WORKER,
    LIVED,
    SUSPECT_DEATHS,
    Burial,
    absolve,
    bury,
)
from models_db.jobs import job_attempts, job_status
from models_db.suspects import claim_suspects, take_lock
from models_db.tables import AttemptOutcome, Job, JobState
from tests.db.database_thread import get, running
from tests.db.helpers import add_jobs, add_workers, at, attempts, claim_one, job_row
from tests.db.outage import Outage
from workers.sweeper import _burial

QUEUE = "tokenmill.smollm2"


@pytest.fixture
def ward(db):
    """A worker, and suspects of every degree."""
    add_workers(db, "w", "other")
    add_jobs(db, "plain")
    add_jobs(db, "one", "two", "bare")
    add_jobs(db, "bad")
    with db.begin() as conn:
        grouped = ["one", "two", "bare"]
        conn.execute(update(Job).where(Job.id.in_(grouped)).values(deaths=SUSPECT_DEATHS))
        conn.execute(update(Job).where(Job.id == "bad").values(deaths=ALONE_DEATHS))
        conn.execute(update(Job).where(Job.id == "bare").values(message=None))
    return db


def claim(conn, worker="w", *, limit=8, alone=False, now):
    if not take_lock(conn, "lock", worker):
        return None
    return claim_suspects(conn, QUEUE, "lock", worker, limit, alone=alone, now=now)


@pytest.mark.parametrize("goes_through", [False, True], ids=["not committed", "committed, answer lost"])
@pytest.mark.parametrize(("alone", "expected"), [(False, ["bare", "one", "two"]), (True, ["bad"])])
def test_a_claim_whose_answer_is_lost_says_what_it_has_claimed(ward, goes_through, alone, expected):
    armed = []
    with Outage(ward) as outage, running(ward, sleep=outage.delays.append) as thread:
        outage.commit_goes_through = goes_through

        def work(conn):
            if not armed:
                armed.append(True)
                outage.commits = 2
            return claim(conn, alone=alone, now=at(100))

        claimed = get(thread.call(work))
    assert [(suspect.job_id, suspect.attempt) for suspect in claimed] == [(job_id, 1) for job_id in expected]
    with ward.connect() as conn:
        assert [attempts(conn, job_id) for job_id in expected] == [[(1, "w", None)]] * len(expected)
        assert attempts(conn, "plain") == []


def test_a_later_claim_takes_what_is_left_and_not_what_runs(ward):
    with ward.begin() as conn:
        first = claim(conn, limit=2, now=at(100))
        again = claim(conn, limit=2, now=at(100))
        later = claim(conn, limit=2, now=at(101))
        assert claim(conn, "other", now=at(102)) is None
    assert first == again
    assert [suspect.job_id for suspect in [*first, *later]] == ["bare", "one", "two"]
    assert first[0].stored.message is None, "its caller ends it"


@pytest.mark.parametrize("goes_through", [False, True], ids=["not committed", "committed, answer lost"])
def test_a_burial_whose_answer_is_lost_says_what_it_has_done(ward, goes_through):
    with ward.begin() as conn:
        conn.execute(update(Job).where(Job.id == "bad").values(solo_deaths=1))
        claim(conn, "other", alone=True, now=at(100))
    with Outage(ward) as outage, running(ward, sleep=outage.delays.append) as thread:
        outage.commit_goes_through = goes_through
        bury_it = _burial("other")
        armed = []

        def work(conn):
            if not armed:
                armed.append(True)
                outage.commits = 2
            return bury_it(conn)

        burial = get(thread.call(work))
        assert get(thread.call(_burial("other"))) == Burial(), "others find nothing more"
    assert burial.ended == ["bad"], "Celery has to hear of it"
    with ward.connect() as conn:
        assert attempts(conn, "bad") == [(1, "other", "lost")]


def counts(db, job_id):
    with db.connect() as conn:
        row = job_row(conn, job_id)
    return row.deaths, row.solo_deaths


def cut_off(db, worker, *, back):
    """The others take this worker for dead; ``back`` says whether it finds that out."""
    with db.begin() as conn:
        bury(conn, worker)
        if back:
            absolve(conn, worker)


def test_a_job_whose_workers_were_only_cut_off_runs_as_often_as_it_takes(db):
    add_workers(db, *(f"w{n}" for n in range(6)))
    add_jobs(db, "j")
    for n in range(4):
        assert claim_one(db, "j", f"w{n}").attempt == n + 1
        cut_off(db, f"w{n}", back=True)
        assert counts(db, "j") == (0, 0)
    with db.connect() as conn:
        assert {one.error for one in job_attempts(conn, "j")} == {LIVED}
        assert {one.outcome for one in job_attempts(conn, "j")} == {AttemptOutcome.LOST}
    for n in (4, 5):  # and these do not come back
        claim_one(db, "j", f"w{n}")
        cut_off(db, f"w{n}", back=False)
    with db.begin() as conn:
        assert (job_status(conn, "j").state, job_status(conn, "j").error_type) == (
            JobState.FAILED,
            KILLED_ITS_WORKER,
        )
        assert absolve(conn, "w5") == [], "only a retry leaves an end"
        assert job_status(conn, "j").state is JobState.FAILED


def test_only_what_was_counted_is_taken_back_and_only_once(db):
    add_workers(db, "w1", "w2", "w3")
    add_jobs(db, "alone", "late", "engine", "other")
    claim_one(db, "other", "w2")
    claim_one(db, "alone", "w1")
    cut_off(db, "w1", back=False)
    cut_off(db, "w2", back=False)
    claim_one(db, "late", "w1")  # before it finds out
    claim_one(db, "engine", "w1")
    with db.begin() as conn:
        items = [
            ReleaseItem("late", 1, AttemptOutcome.LOST, HELD_FOR_DEAD),
            ReleaseItem("engine", 1, AttemptOutcome.LOST, "a sticky device error"),
        ]
        assert release(conn, items, "w1") == [True, True]
    assert claim_one(db, "alone", "w3").attempt == 2
    assert [counts(db, name) for name in ("alone", "late", "engine")] == [(1, 1), (1, 0), (1, 0)]
    for expected in (["alone", "late"], []):
        with db.begin() as conn:
            assert sorted(absolve(conn, "w1")) == expected
        found = [counts(db, name) for name in ("alone", "late", "engine", "other")]
        assert found == [(0, 0), (0, 0), (1, 0), (1, 1)]
