"""Claiming suspects: what a claim takes, and that a lost answer strands nothing."""

from __future__ import annotations

import pytest
from sqlalchemy import update

from models_db.deaths import ALONE_DEATHS, SUSPECT_DEATHS, Burial
from models_db.suspects import claim_suspects, take_lock
from models_db.tables import Job
from tests.db.helpers import add_jobs, add_workers, at, attempts
from tests.db.outage import Outage
from tests.db.test_writer import get, running
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
