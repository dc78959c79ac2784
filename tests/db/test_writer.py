"""The database thread: what it puts into one transaction, in which order, and how it stops."""

from __future__ import annotations

import threading
from concurrent.futures import CancelledError
from itertools import islice

import pytest
from sqlalchemy import func, select

from models_db import writer
from models_db.claims import ClaimItem, ClaimKind, ReleaseItem
from models_db.errors import WriterStoppedError
from models_db.jobs import job_states, job_status
from models_db.tables import EngineSample, JobState, Worker, WorkerState
from models_db.writer import DatabaseThread
from tests.db.database_thread import LIMIT_S, commits, get, held_up, running, success
from tests.db.helpers import add_jobs, claim_one, new_job, new_result, new_sample


def test_the_life_of_a_job_through_the_thread(fleet):
    with running(fleet) as thread:
        outcome = get(thread.claim(ClaimItem(new_job("j"))))
        assert (outcome.kind, outcome.attempt) == (ClaimKind.CLAIMED, 1)
        assert get(thread.release(ReleaseItem("j", 1))) is True
        assert get(thread.claim(ClaimItem(new_job("j")))).attempt == 2
        assert get(thread.finish(success("j", 2))) is True
        assert get(thread.finish(success("j", 2))) is False
        assert get(thread.claim(ClaimItem(new_job("j")))).outcome.result == new_result("text")
        assert get(thread.heartbeat(3)) is WorkerState.STARTING
        assert get(thread.sample(new_sample("w"))) is None
        assert get(thread.call(lambda conn: job_status(conn, "j").state)) is JobState.SUCCEEDED
        assert thread.stop()
        assert thread.pending == 0
    with fleet.connect() as conn:
        assert conn.scalar(select(func.count()).select_from(EngineSample)) == 1
        assert conn.scalar(select(Worker.heartbeat).where(Worker.id == "w")) == 3


def test_one_operation_alone_never_waits_for_others(fleet):
    pauses = []
    with running(fleet, pause=pauses.append) as thread, commits(fleet) as count:
        for number in range(3):
            get(thread.claim(ClaimItem(new_job(f"j{number}"))))
    assert (pauses, len(count)) == ([], 3)


def test_a_busy_batch_waits_while_more_arrives_and_answers_in_order(fleet):
    ids = [f"j{number:02}" for number in range(60)]
    late = iter(ids[10:])
    answers = []

    def claim(job_id):
        thread.claim(ClaimItem(new_job(job_id))).add_done_callback(
            lambda future: answers.append(future.result().job_id)
        )

    def pause(_seconds):
        for job_id in islice(late, 4):
            claim(job_id)

    with running(fleet, pause=pause, clock=lambda: 0.0) as thread, commits(fleet) as count:
        with held_up(thread):
            for job_id in ids[:10]:
                claim(job_id)
        while len(answers) < len(ids):
            get(thread.call(lambda conn: None))
        assert thread.stop()
    assert answers == ids
    assert len(count) < 12  # alone they are 60; the longest wait lets about forty gather


def test_dead_incarnations_are_asked_for_at_each_claim(fleet):
    add_jobs(fleet, "j")
    claim_one(fleet, "j", "other")
    dead = set()
    with running(fleet, dead_ids=lambda: dead) as thread:
        assert get(thread.claim(ClaimItem(new_job("j")))).kind is ClaimKind.ELSEWHERE
        dead.add("other")
        assert get(thread.claim(ClaimItem(new_job("j")))).kind is ClaimKind.CLAIMED


def test_everything_that_waits_goes_into_one_transaction_up_to_the_limit(fleet):
    with running(fleet, max_batch=100) as thread, commits(fleet) as count:
        with held_up(thread):
            futures = [thread.claim(ClaimItem(new_job(f"j{n:03}"))) for n in range(250)]
            assert thread.pending == 251
        assert {get(future).kind for future in futures} == {ClaimKind.CLAIMED}
    assert len(count) == 1 + 3, "the blocker, then 100, 100 and 50"


def test_an_idle_thread_commits_at_once_and_one_by_one(fleet):
    with running(fleet) as thread, commits(fleet) as count:
        for number in range(5):
            get(thread.claim(ClaimItem(new_job(f"j{number}"))))
    assert len(count) == 5


def test_a_heartbeat_goes_before_everything_that_waits(fleet):
    order = []
    with running(fleet, max_batch=10) as thread:
        with held_up(thread):
            for number in range(50):
                future = thread.claim(ClaimItem(new_job(f"j{number}")))
                future.add_done_callback(lambda _future: order.append("claim"))
            beats = [thread.heartbeat(number) for number in (1, 2, 3)]
            beats[-1].add_done_callback(lambda _future: order.append("beat"))
        assert {get(beat) for beat in beats} == {WorkerState.STARTING}
        assert thread.stop()
    assert order.index("beat") == 0
    with fleet.connect() as conn:
        assert conn.scalar(select(Worker.heartbeat).where(Worker.id == "w")) == 3


def test_results_too_large_for_one_transaction_are_spread(fleet, monkeypatch):
    monkeypatch.setattr(writer, "MAX_BATCH_BYTES", 10_000)
    add_jobs(fleet, *(f"j{n}" for n in range(6)))
    for number in range(6):
        claim_one(fleet, f"j{number}", "w")
    with running(fleet) as thread, commits(fleet) as count:
        with held_up(thread):
            futures = [thread.finish(success(f"j{n}", text="x" * 6000)) for n in range(6)]
        assert all(map(get, futures))
    assert len(count) == 1 + 3


def test_what_was_cancelled_before_its_turn_is_not_done(fleet):
    with running(fleet) as thread:
        with held_up(thread):
            future = thread.claim(ClaimItem(new_job("j")))
            assert future.cancel()
        assert thread.stop()
    with pytest.raises(CancelledError):
        future.result(0)
    with fleet.connect() as conn:
        assert job_states(conn, ["j"]) == {}


def test_threads_may_submit_together_and_each_gets_its_own_answer(fleet):
    answers = {}

    def submit(worker):
        futures = {f"{worker}-{n}": thread.claim(ClaimItem(new_job(f"{worker}-{n}"))) for n in range(40)}
        answers.update({name: get(future).job_id for name, future in futures.items()})

    with running(fleet) as thread, commits(fleet) as count:
        threads = [threading.Thread(target=submit, args=(number,)) for number in range(4)]
        for one in threads:
            one.start()
        for one in threads:
            one.join(LIMIT_S)
    assert answers == {f"{worker}-{n}": f"{worker}-{n}" for worker in range(4) for n in range(40)}
    assert len(count) < 160, "what waits meanwhile shares a transaction"


def test_stop_drains_and_then_takes_nothing_more(fleet):
    with running(fleet) as thread:
        with held_up(thread):
            futures = [thread.claim(ClaimItem(new_job(f"j{n}"))) for n in range(20)]
            stopper = threading.Thread(target=thread.stop)
            stopper.start()
        stopper.join(LIMIT_S)
        assert all(future.done() and get(future).kind is ClaimKind.CLAIMED for future in futures)
        with pytest.raises(WriterStoppedError):
            thread.heartbeat(1)


def test_stop_without_drain_fails_what_waits(fleet):
    with running(fleet) as thread:
        with held_up(thread):
            future = thread.claim(ClaimItem(new_job("j")))
            left = []
            stopper = threading.Thread(target=lambda: left.append(thread.stop(drain=False)))
            stopper.start()
            assert thread._given_up.wait(LIMIT_S)
        stopper.join(LIMIT_S)
        assert left == [False]
        assert isinstance(future.exception(LIMIT_S), WriterStoppedError)


def test_a_thread_that_never_started_fails_what_it_was_given(fleet):
    thread = DatabaseThread(fleet, "w")
    future = thread.claim(ClaimItem(new_job("j")))
    assert thread.stop() is False
    assert isinstance(future.exception(LIMIT_S), WriterStoppedError)
