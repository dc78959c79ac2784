"""What delivery.md promises of claims, on every database: who runs a job, and whose result counts."""

from __future__ import annotations

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import event, select

from models_db.claims import (
    EXPIRED_BEFORE_START,
    WAITED_TOO_LONG,
    ClaimItem,
    ClaimKind,
    FinishItem,
    ReleaseItem,
    claim,
    finish,
    release,
)
from models_db.errors import InvalidValueError
from models_db.jobs import job_result, job_status, request_cancel
from models_db.session import transaction
from models_db.tables import AttemptOutcome, Job, JobState
from tests.db.helpers import (
    T0,
    add_jobs,
    add_workers,
    at,
    attempts,
    claim_one,
    finish_one,
    job_row,
    new_job,
    new_result,
    snapshot,
)

TERMINAL = [state for state in JobState if state.terminal]


@pytest.fixture
def fleet(db):
    add_workers(db, "w1", "w2", "w3")
    return db


def test_a_queued_job_is_claimed_and_its_attempt_opened(fleet):
    add_jobs(fleet, "j")
    outcome = claim_one(fleet, "j", "w1", now=at(1))
    assert (outcome.kind, outcome.attempt, outcome.outcome) == (ClaimKind.CLAIMED, 1, None)
    with fleet.connect() as conn:
        job = job_status(conn, "j")
        assert (job.state, job.owner, job.attempt, job.started_at) == (JobState.RUNNING, "w1", 1, at(1))
        assert attempts(conn, "j") == [(1, "w1", None)]


def test_a_bare_delivery_inserts_its_row_once_and_leaves_an_existing_one_alone(fleet):
    assert claim_one(fleet, "bare", "w1", now=at(1)).kind is ClaimKind.CLAIMED
    with fleet.connect() as conn:
        row = job_row(conn, "bare")
        assert (row.published_at, row.prompt) == (at(1), {"prompt": "Grüße, 世界 🌍"})
    add_jobs(fleet, "kept", priority=7, params={"mine": True})
    claim_one(fleet, "kept", "w1")
    with fleet.connect() as conn:
        row = job_row(conn, "kept")
        assert (row.priority, row.params) == (7, {"mine": True})


def test_a_job_that_runs_here_is_joined_and_one_that_runs_elsewhere_is_left(fleet):
    add_jobs(fleet, "j")
    claim_one(fleet, "j", "w1")
    before = snapshot(fleet)
    joined = claim_one(fleet, "j", "w1", dead=("w1", "w2"))
    assert (joined.kind, joined.attempt) == (ClaimKind.JOINED, 1)
    assert claim_one(fleet, "j", "w2", dead=("w3",)).kind is ClaimKind.ELSEWHERE
    assert snapshot(fleet) == before


def test_a_job_of_a_dead_incarnation_is_taken_over_and_the_old_owner_fenced(fleet):
    add_jobs(fleet, "j")
    claim_one(fleet, "j", "w1")
    taken = claim_one(fleet, "j", "w2", dead=("w1",))
    assert (taken.kind, taken.attempt) == (ClaimKind.CLAIMED, 2)
    with fleet.connect() as conn:
        assert attempts(conn, "j") == [(1, "w1", AttemptOutcome.LOST), (2, "w2", None)]
    before = snapshot(fleet)
    assert not finish_one(fleet, "j", 1, "w1", result=new_result("too late"))
    assert not finish_one(fleet, "j", 2, "w1", result=new_result("not mine"))
    assert not finish_one(fleet, "j", 1, "w2", result=new_result("wrong attempt"))
    assert snapshot(fleet) == before
    assert finish_one(fleet, "j", 2, "w2", result=new_result("mine"))
    with fleet.connect() as conn:
        assert job_result(conn, "j").text == "mine"
        assert attempts(conn, "j")[-1] == (2, "w2", AttemptOutcome.SUCCEEDED)


@pytest.mark.parametrize("state", TERMINAL)
def test_the_end_is_committed_once_with_result_and_attempt(fleet, state):
    add_jobs(fleet, "j")
    claim_one(fleet, "j", "w1")
    result = new_result("partial", token_ids=[1, 2], stop_reason=7, seed=2**63 - 1, logprobs=[[1, -0.5]])
    assert finish_one(fleet, "j", 1, "w1", state, result, now=at(2))
    before = snapshot(fleet)
    for again in TERMINAL:
        assert not finish_one(fleet, "j", 1, "w1", again)
    assert snapshot(fleet) == before
    with fleet.connect() as conn:
        job = job_status(conn, "j")
        assert (job.state, job.owner, job.finished_at) == (state, None, at(2))
        assert job_result(conn, "j") == result
        assert attempts(conn, "j") == [(1, "w1", AttemptOutcome(state))]


@pytest.mark.parametrize("state", TERMINAL)
def test_a_delivery_of_a_terminal_job_gets_the_stored_outcome(fleet, state):
    add_jobs(fleet, "j")
    claim_one(fleet, "j", "w1")
    result = new_result("stored") if state is JobState.SUCCEEDED else None
    finish_one(fleet, "j", 1, "w1", state, result)
    before = snapshot(fleet)
    outcome = claim_one(fleet, "j", "w2", dead=("w1",))
    assert (outcome.kind, outcome.attempt) == (ClaimKind.TERMINAL, 1)
    assert (outcome.outcome.state, outcome.outcome.result) == (state, result)
    assert outcome.outcome.error_type == ("boom" if state is JobState.FAILED else None)
    assert outcome.outcome.callbacks_sent_at is None
    assert snapshot(fleet) == before


def test_a_cancel_before_the_claim_ends_the_job_in_place(fleet):
    add_jobs(fleet, "j")
    claim_one(fleet, "j", "w1")
    with fleet.begin() as conn:
        assert request_cancel(conn, ["j"]) == {"j": JobState.RUNNING}
    assert claim_one(fleet, "j", "w1").cancel_requested, "a joined delivery learns of the wish"
    outcome = claim_one(fleet, "j", "w2", dead=("w1",), now=at(3))
    assert (outcome.kind, outcome.attempt, outcome.outcome.state) == (
        ClaimKind.TERMINAL,
        1,
        JobState.CANCELLED,
    )
    with fleet.connect() as conn:
        assert job_status(conn, "j").finished_at == at(3)
        assert attempts(conn, "j") == [(1, "w1", AttemptOutcome.LOST)]


def test_a_deadline_that_has_passed_ends_the_job_in_place(fleet):
    add_jobs(fleet, "late", "soon", deadline_at=at(10))
    outcome = claim_one(fleet, "late", "w1", now=at(10))
    assert (outcome.kind, outcome.attempt) == (ClaimKind.TERMINAL, 0)
    assert (outcome.outcome.state, outcome.outcome.error_message) == (JobState.EXPIRED, EXPIRED_BEFORE_START)
    with fleet.connect() as conn:
        assert (job_status(conn, "late").state, attempts(conn, "late")) == (JobState.EXPIRED, [])
    in_time = claim_one(fleet, "soon", "w1", now=at(9.999999))
    assert (in_time.kind, in_time.deadline_at) == (ClaimKind.CLAIMED, at(10))


def test_only_a_job_that_never_ran_can_have_waited_too_long(fleet):
    add_jobs(fleet, "handed back", "of the dead", "never ran")

    def claim_both(worker, now, dead=()):
        items = [ClaimItem(new_job(name), max_age_s=10) for name in ("handed back", "of the dead")]
        with fleet.begin() as conn:
            return [outcome.kind for outcome in claim(conn, items, worker, dead, now=now)]

    assert claim_both("w1", at(1)) == [ClaimKind.CLAIMED] * 2
    with fleet.begin() as conn:
        assert release(conn, [ReleaseItem("handed back", 1)], "w1", now=at(2000)) == [True]
    assert claim_both("w2", at(2001), dead=["w1"]) == [ClaimKind.CLAIMED] * 2
    with fleet.begin() as conn:
        (never,) = claim(conn, [ClaimItem(new_job("never ran"), max_age_s=10)], "w2", now=at(2001))
    assert (never.kind, never.outcome.error_message) == (ClaimKind.TERMINAL, WAITED_TOO_LONG)


def test_release_queues_the_job_again_for_anyone(fleet):
    add_jobs(fleet, "j", "k")
    claim_one(fleet, "j", "w1")
    claim_one(fleet, "k", "w1")
    with fleet.begin() as conn:
        items = [
            ReleaseItem("j", 1),
            ReleaseItem("k", 1, AttemptOutcome.LOST, "engine died"),
            ReleaseItem("no", 1),
        ]
        assert release(conn, items, "w2") == [False, False, False]
        assert release(conn, items, "w1") == [True, True, False]
        assert release(conn, items, "w1") == [False, False, False]
    with fleet.connect() as conn:
        job = job_status(conn, "j")
        assert (job.state, job.owner, job.attempt, job.started_at) == (JobState.QUEUED, None, 1, None)
        assert attempts(conn, "j") == [(1, "w1", AttemptOutcome.RELEASED)]
        assert attempts(conn, "k") == [(1, "w1", AttemptOutcome.LOST)]
    assert claim_one(fleet, "j", "w2").attempt == 2
    assert not finish_one(fleet, "j", 1, "w1")


def test_one_batch_may_hold_every_case_and_the_same_job_twice(fleet):
    add_jobs(fleet, "queued", "dead", "elsewhere", "here", "done")
    claim_one(fleet, "dead", "w2")
    claim_one(fleet, "elsewhere", "w3")
    claim_one(fleet, "here", "w1")
    claim_one(fleet, "done", "w1")
    finish_one(fleet, "done", 1, "w1")
    names = ["queued", "dead", "elsewhere", "new", "here", "done", "queued", "new"]
    with fleet.begin() as conn:
        outcomes = claim(conn, [ClaimItem(new_job(name)) for name in names], "w1", ["w2"])
    assert [(outcome.job_id, outcome.kind.value, outcome.attempt) for outcome in outcomes] == [
        ("queued", "claimed", 1),
        ("dead", "claimed", 2),
        ("elsewhere", "elsewhere", 1),
        ("new", "claimed", 1),
        ("here", "joined", 1),
        ("done", "terminal", 1),
        ("queued", "joined", 1),
        ("new", "joined", 1),
    ]
    items = [FinishItem(name, 1, JobState.FAILED, None, "boom") for name in names]
    with fleet.begin() as conn:
        committed = finish(conn, items, "w1")
    assert committed == [True, False, False, True, True, False, False, False]


def test_claim_and_finish_take_few_statements_however_many_jobs(fleet):
    names = [f"job-{number:04}" for number in range(300)]
    add_jobs(fleet, *names)
    statements = []

    def count(conn, cursor, statement, parameters, context, executemany):
        statements.append(statement)

    event.listen(fleet, "before_cursor_execute", count)
    try:
        with fleet.begin() as conn:
            outcomes = claim(conn, [ClaimItem(new_job(name)) for name in names], "w1")
        with fleet.begin() as conn:
            items = [FinishItem(name, 1, JobState.SUCCEEDED, new_result(name)) for name in names]
            assert all(finish(conn, items, "w1"))
    finally:
        event.remove(fleet, "before_cursor_execute", count)
    assert all(outcome.kind is ClaimKind.CLAIMED for outcome in outcomes)
    own = [statement for statement in statements if not statement.startswith(("BEGIN", "SAVEPOINT"))]
    assert len(own) <= 8, own


def test_a_replay_recognises_its_own_commit_and_nothing_else(fleet):
    add_jobs(fleet, "j", "older", "back")
    claim_one(fleet, "older", "w1", now=at(1))
    claim_one(fleet, "j", "w1", now=at(2))
    claim_one(fleet, "back", "w1", now=at(2))
    assert claim_one(fleet, "j", "w1", now=at(2), replay=True).kind is ClaimKind.CLAIMED
    assert claim_one(fleet, "older", "w1", now=at(2), replay=True).kind is ClaimKind.JOINED
    assert finish_one(fleet, "j", 1, "w1", now=at(3))
    before = snapshot(fleet)
    assert finish_one(fleet, "j", 1, "w1", now=at(3), replay=True)
    assert not finish_one(fleet, "j", 1, "w1", now=at(4), replay=True)
    assert not finish_one(fleet, "j", 1, "w2", now=at(3), replay=True)
    assert snapshot(fleet) == before
    with fleet.begin() as conn:
        assert release(conn, [ReleaseItem("back", 1)], "w1", now=at(5)) == [True]
        assert release(conn, [ReleaseItem("back", 1)], "w1", now=at(5), replay=True) == [True]


def test_text_that_some_database_refuses_is_stored_alike_on_all(fleet):
    add_jobs(fleet, "j", "k")
    claim_one(fleet, "j", "w1")
    claim_one(fleet, "k", "w1")
    odd = "a\x00b\ud800c 🌍"
    result = new_result(odd, stop_reason=odd, logprobs=[float("-inf"), -1.5], finish_reason="stop")
    assert finish_one(fleet, "j", 1, "w1", result=result)
    with fleet.begin() as conn:
        item = FinishItem("k", 1, JobState.FAILED, None, odd * 100, odd)
        assert finish(conn, [item], "w1") == [True]
    with fleet.connect() as conn:
        stored = job_result(conn, "j")
        assert (stored.text, stored.stop_reason) == ("a\ufffdb\ufffdc 🌍",) * 2
        assert stored.logprobs == [None, -1.5]
        job = job_status(conn, "k")
        assert job.error_message == "a\ufffdb\ufffdc 🌍"
        assert job.error_type == ("a\ufffdb\ufffdc 🌍" * 100)[:128]


def test_a_long_text_survives(fleet):
    add_jobs(fleet, "j", prompt={"prompt": "ü" * 200_000})
    claim_one(fleet, "j", "w1")
    assert finish_one(fleet, "j", 1, "w1", result=new_result("世" * 200_000))
    with fleet.connect() as conn:
        assert job_result(conn, "j").text == "世" * 200_000
        assert job_row(conn, "j").prompt == {"prompt": "ü" * 200_000}


def test_impossible_ends_are_refused_before_they_reach_the_database():
    with pytest.raises(InvalidValueError, match="state: must be terminal"):
        FinishItem("j", 1, JobState.RUNNING)
    with pytest.raises(InvalidValueError, match="result: a success needs a result"):
        FinishItem("j", 1, JobState.SUCCEEDED)
    with pytest.raises(InvalidValueError, match="outcome: must be released or lost"):
        ReleaseItem("j", 1, AttemptOutcome.SUCCEEDED)


# --------------------------------------------------------------------------------------------------- concurrency


def race(count, work):
    """Run ``work(n)`` in ``count`` threads that start together; their results."""
    barrier = threading.Barrier(count)

    def run(number):
        barrier.wait(60)
        return work(number)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, range(count)))


@pytest.mark.parametrize("inserted", [True, False], ids=["queued", "bare"])
def test_of_many_racing_claims_exactly_one_wins(fleet, inserted):
    workers = [f"racer-{number}" for number in range(6)]
    add_workers(fleet, *workers)
    for number in range(8):
        job_id = f"job-{number}"
        if inserted:
            add_jobs(fleet, job_id)

        def one(index, job_id=job_id):
            item = ClaimItem(new_job(job_id))
            return transaction(fleet, lambda conn: claim(conn, [item], workers[index]))[0].kind

        kinds = Counter(race(len(workers), one))
        assert kinds == {ClaimKind.CLAIMED: 1, ClaimKind.ELSEWHERE: len(workers) - 1}
        with fleet.connect() as conn:
            assert len(attempts(conn, job_id)) == 1


def test_of_many_racing_take_overs_exactly_one_wins(fleet):
    add_jobs(fleet, "j")
    claim_one(fleet, "j", "w1")

    def one(index):
        item = ClaimItem(new_job("j"))
        return transaction(fleet, lambda conn: claim(conn, [item], ("w2", "w3")[index], ["w1"]))[0].kind

    assert Counter(race(2, one)) == {ClaimKind.CLAIMED: 1, ClaimKind.ELSEWHERE: 1}
    with fleet.connect() as conn:
        assert [outcome for _, _, outcome in attempts(conn, "j")] == [AttemptOutcome.LOST, None]


def test_batches_of_claims_in_opposite_orders_share_the_jobs_without_loss(fleet):
    names = [f"job-{number:03}" for number in range(60)]

    def one(index):
        mine = names if index % 2 else names[::-1]
        items = [ClaimItem(new_job(name)) for name in mine]
        outcomes = transaction(fleet, lambda conn: claim(conn, items, ("w1", "w2", "w3")[index]))
        return [outcome.job_id for outcome in outcomes if outcome.kind is ClaimKind.CLAIMED]

    won = [job_id for some in race(3, one) for job_id in some]
    assert sorted(won) == names


def test_a_finish_racing_a_take_over_leaves_one_truth(fleet):
    for number in range(8):
        job_id = f"job-{number}"
        add_jobs(fleet, job_id)
        claim_one(fleet, job_id, "w1")

        def one(index, job_id=job_id):
            if index:
                item = ClaimItem(new_job(job_id))
                return transaction(fleet, lambda conn: claim(conn, [item], "w2", ["w1"]))[0].kind
            end = FinishItem(job_id, 1, JobState.SUCCEEDED, new_result())
            return transaction(fleet, lambda conn: finish(conn, [end], "w1"))[0]

        finished, kind = race(2, one)
        assert (finished, kind) in ((True, ClaimKind.TERMINAL), (False, ClaimKind.CLAIMED))


def test_a_cancel_racing_a_claim_is_never_forgotten(fleet):
    for number in range(8):
        job_id = f"job-{number}"
        add_jobs(fleet, job_id)

        def one(index, job_id=job_id):
            if index:
                return transaction(fleet, lambda conn: request_cancel(conn, [job_id]))[job_id]
            item = ClaimItem(new_job(job_id))
            return transaction(fleet, lambda conn: claim(conn, [item], "w1"))[0].kind

        kind, state = race(2, one)
        with fleet.connect() as conn:
            job = job_status(conn, job_id)
        assert job.cancel_requested
        assert (kind, state, job.state) in (
            (ClaimKind.CLAIMED, JobState.RUNNING, JobState.RUNNING),
            (ClaimKind.TERMINAL, JobState.CANCELLED, JobState.CANCELLED),
        )


def test_times_come_back_as_they_went_in(fleet):
    add_jobs(fleet, "j", deadline_at=at(0.000001))
    with fleet.connect() as conn:
        job = job_status(conn, "j")
        assert (job.created_at, job.deadline_at) == (T0, at(0.000001))
        assert job.created_at.utcoffset().total_seconds() == 0


def test_a_message_of_a_job_that_was_stored_brings_no_pruned_job_back(world):
    items = [
        ClaimItem(new_job("pruned"), stored=True),
        ClaimItem(new_job("bare")),
        ClaimItem(new_job("twice")),
        ClaimItem(new_job("twice"), stored=True),
        ClaimItem(new_job("here"), stored=True),
    ]
    add_jobs(world, "here")
    with world.begin() as conn:
        kinds = [outcome.kind for outcome in claim(conn, items, "w")]
    gone, claimed = ClaimKind.GONE, ClaimKind.CLAIMED
    assert kinds == [gone, claimed, gone, gone, claimed]
    with world.connect() as conn:
        assert set(conn.scalars(select(Job.id))) == {"bare", "here"}
