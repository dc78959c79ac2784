"""Inserting, looking up, cancelling and retrying jobs, on every database."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import update
from sqlalchemy.exc import StatementError

from models_db.batches import create_batch, finish_batch_if_done, set_batch_state
from models_db.claims import ClaimItem, ClaimKind, claim
from models_db.errors import (
    DuplicateCustomIdError,
    DuplicateJobIdError,
    IdempotencyConflictError,
    InvalidValueError,
    UnknownBatchError,
)
from models_db.jobs import (
    NewJob,
    cancelled_running,
    insert_jobs,
    job_attempts,
    job_result,
    job_results,
    job_states,
    job_status,
    job_statuses,
    mark_callbacks_sent,
    mark_published,
    mark_unpublished,
    request_cancel,
    request_revoke,
    retry_failed,
    stored_messages,
)
from models_db.session import transaction
from models_db.tables import BatchState, Job, JobState
from tests.db.helpers import T0, add_jobs, add_workers, at, claim_one, finish_one, new_job, snapshot


def keyed(job_id, key="key", payload="hash", **fields):
    return new_job(job_id, idempotency_key=key, payload_hash=payload, **fields)


def insert(db, *jobs):
    return transaction(db, lambda conn: insert_jobs(conn, jobs))


# --------------------------------------------------------------------------------------------------------- insert


def test_a_new_job_is_queued_with_everything_it_was_given(db):
    outcome = insert(db, new_job("j", tenant="acme", priority=9, deadline_at=at(60), custom_id="line-1"))[0]
    assert (outcome.id, outcome.created, outcome.state) == ("j", True, JobState.QUEUED)
    with db.connect() as conn:
        job = job_status(conn, "j")
        assert (job.tenant, job.priority, job.deadline_at, job.custom_id) == ("acme", 9, at(60), "line-1")
        assert (job.state, job.attempt, job.owner, job.published_at) == (JobState.QUEUED, 0, None, None)
        message = stored_messages(conn, ["j", "unknown"])["j"]
        assert (message.queue, message.message) == (
            "tokenmill.smollm2",
            {"headers": {"id": "j"}, "body": "…"},
        )
        assert job_status(conn, "unknown") is None
        assert job_result(conn, "j") is None


def test_ids_names_and_keys_compare_byte_for_byte(db):
    insert(
        db, new_job("ab"), new_job("AB"), new_job("ab "), new_job("äb"), keyed("1", "key"), keyed("2", "KEY ")
    )
    with db.connect() as conn:
        assert set(job_states(conn, ["ab", "AB", "ab ", "äb", "aB"])) == {"ab", "AB", "ab ", "äb"}


def test_the_same_key_and_payload_is_the_same_job(db):
    assert insert(db, keyed("first"))[0].created
    again = insert(db, new_job("other"), keyed("second"))[1]
    assert (again.id, again.created, again.state) == ("first", False, JobState.QUEUED)
    with db.connect() as conn:
        assert set(job_states(conn, ["first", "second", "other"])) == {"first", "other"}


def test_the_same_key_twice_in_one_list_is_one_job(db):
    outcomes = insert(db, keyed("first"), keyed("second"), keyed("third", "another"))
    assert [(outcome.id, outcome.created) for outcome in outcomes] == [
        ("first", True),
        ("first", False),
        ("third", True),
    ]


@pytest.mark.parametrize("together", [True, False])
def test_the_same_key_with_another_payload_is_refused_and_nothing_stored(db, together):
    if not together:
        insert(db, keyed("first"))
    jobs = [keyed("first")] if together else []
    with pytest.raises(IdempotencyConflictError, match="'key' already belongs to job first"):
        insert(db, new_job("neighbour"), *jobs, keyed("second", payload="other hash"))
    with db.connect() as conn:
        assert set(job_states(conn, ["neighbour", "second"])) == set()


def test_racing_submissions_with_one_key_make_one_job(db):
    count = 6
    barrier = threading.Barrier(count)

    def submit(number):
        barrier.wait(60)
        jobs = [keyed(f"{round_}-{number}", f"key-{round_}") for round_ in range(10)]
        return transaction(db, lambda conn: insert_jobs(conn, jobs if number % 2 else jobs[::-1]))

    with ThreadPoolExecutor(count) as pool:
        outcomes = [outcome for some in pool.map(submit, range(count)) for outcome in some]
    assert sum(outcome.created for outcome in outcomes) == 10
    assert len({outcome.id for outcome in outcomes}) == 10


def test_racing_submissions_with_one_key_and_two_payloads_keep_the_first(db):
    barrier = threading.Barrier(4)

    def submit(number):
        barrier.wait(60)
        try:
            return insert(db, keyed(f"job-{number}", payload=f"hash-{number}"))[0].id
        except IdempotencyConflictError as exc:
            return exc

    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(submit, range(4)))
    winners = [answer for answer in answers if isinstance(answer, str)]
    assert len(winners) == 1
    assert {answer.job_id for answer in answers if not isinstance(answer, str)} == set(winners)


def test_a_custom_id_occurs_once_in_its_batch(db):
    with db.begin() as conn:
        for batch_id in ("b1", "b2"):
            create_batch(conn, name="n", batch_id=batch_id)
    line = {"custom_id": "line", "position": 1}
    insert(db, new_job("1", batch_id="b1", **line), new_job("2", batch_id="b2", **line), new_job("3", **line))
    before = snapshot(db)
    with pytest.raises(DuplicateCustomIdError, match="'line' occurs twice in batch b1"):
        insert(db, new_job("4"), new_job("5", batch_id="b1", **line))
    with pytest.raises(DuplicateCustomIdError, match="'line' occurs twice in batch b1"):
        insert(db, new_job("4"), keyed("5", batch_id="b1", **line))
    twin = {"batch_id": "b2", "custom_id": "twin", "position": 1}
    with pytest.raises(DuplicateCustomIdError, match="'twin' occurs twice in batch b2"):
        insert(db, new_job("4", **twin), new_job("5", **twin))
    assert snapshot(db) == before


def test_a_taken_job_id_and_an_unknown_batch_are_named(db):
    insert(db, new_job("j"))
    for job in (new_job("j"), keyed("j")):
        with pytest.raises(DuplicateJobIdError, match="job j exists already"):
            insert(db, new_job("fine"), job)
    with pytest.raises(DuplicateJobIdError):
        insert(db, new_job("k"), new_job("k"))
    with pytest.raises(UnknownBatchError, match="there is no batch nowhere"):
        insert(db, new_job("k", batch_id="nowhere", position=1))
    with db.connect() as conn:
        assert set(job_states(conn, ["j", "k", "fine"])) == {"j"}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"id": "x" * 156}, "id: has 156 characters, more than the 155 that fit"),
        ({"id": ""}, "id: must not be empty"),
        ({"custom_id": "a\x00b"}, r"custom_id: contains U\+0000 at position 1"),
        ({"tenant": "\ud800"}, r"tenant: contains U\+D800 at position 0"),
        ({"model": "m" * 256}, "model: has 256 characters"),
        ({"priority": 10}, "priority: must lie between 0"),
        ({"priority": -1}, "priority: must lie between 0"),
        ({"idempotency_key": "k"}, "payload_hash: is missing"),
        ({"batch_id": "b"}, "position: is missing"),
    ],
)
def test_what_no_column_can_hold_is_refused_at_the_edge(fields, message):
    with pytest.raises(InvalidValueError, match=message):
        NewJob(**({"model": "m", "queue": "q", "params": {}, "prompt": {}} | fields))


def test_marks_of_publication_and_callbacks(db):
    add_jobs(db, "a", "b", "c")
    with db.begin() as conn:
        mark_published(conn, ["a", "b"], at=at(1))
        mark_callbacks_sent(conn, ["b"], at=at(2))
    with db.connect() as conn:
        jobs = job_statuses(conn, ["a", "b", "c"])
    assert [(jobs[name].published_at, jobs[name].callbacks_sent_at) for name in "abc"] == [
        (at(1), None),
        (at(1), at(2)),
        (None, None),
    ]


def test_a_mark_is_taken_back_where_nobody_has_published_since(db):
    add_jobs(db, "a", "b", "c", published_at=at(1))
    with db.begin() as conn:
        mark_published(conn, ["b"], at=at(2))
        mark_unpublished(conn, ["a", "b", "gone"], at=at(1))
        assert {name: job.published_at for name, job in job_statuses(conn, ["a", "b", "c"]).items()} == {
            "a": None,
            "b": at(2),
            "c": at(1),
        }
        mark_unpublished(conn, ["b", "c"])
        assert {job.published_at for job in job_statuses(conn, ["a", "b", "c"]).values()} == {None}


def test_look_ups_of_more_ids_than_one_statement_takes(db):
    add_workers(db, "w")
    names = [f"job-{number:04}" for number in range(1201)]
    add_jobs(db, *names)
    claim_one(db, names[7], "w")
    finish_one(db, names[7], 1, "w")
    with db.connect() as conn:
        assert len(job_states(conn, names)) == 1201
        assert list(job_results(conn, names)) == [names[7]]


# --------------------------------------------------------------------------------------------------------- cancel


def test_cancel_ends_the_queued_flags_the_running_and_leaves_the_ended(db):
    add_workers(db, "w")
    add_jobs(db, "queued", "running", "done")
    claim_one(db, "running", "w")
    claim_one(db, "done", "w")
    finish_one(db, "done", 1, "w")
    for _ in range(2):  # twice changes nothing more
        with db.begin() as conn:
            states = request_cancel(conn, ["queued", "running", "done", "unknown"], at=at(5))
        assert states == {
            "queued": JobState.CANCELLED,
            "running": JobState.RUNNING,
            "done": JobState.SUCCEEDED,
        }
        with db.connect() as conn:
            assert cancelled_running(conn, "w") == ["running"]
            assert job_status(conn, "queued").finished_at == at(5)
            assert not job_status(conn, "done").cancel_requested
    assert claim_one(db, "queued", "w").kind is ClaimKind.TERMINAL


def test_a_revoke_cancels_what_is_queued_and_only_one_that_terminates_what_runs(db):
    add_workers(db, "w")
    add_jobs(db, "queued", "suspect", "running", "done", "later")
    for name in ("running", "done"):
        claim_one(db, name, "w")
    finish_one(db, "done", 1, "w")
    with db.begin() as conn:
        conn.execute(update(Job).where(Job.id == "suspect").values(deaths=2, published_at=T0))
    ids = ["queued", "suspect", "running", "done", "unknown"]
    with db.begin() as conn:
        assert sorted(request_revoke(conn, ids, terminate=False, at=at(5))) == ["queued", "suspect"]
        assert cancelled_running(conn, "w") == []
        status = job_status(conn, "suspect")
        assert (status.state, status.finished_at, status.published_at) == (JobState.CANCELLED, at(5), None)
        assert request_revoke(conn, ids, terminate=True) == ["running"]
        assert cancelled_running(conn, "w") == ["running"]
    before = snapshot(db)
    for terminate in (False, True):  # as the others of the fleet hear it
        with db.begin() as conn:
            assert request_revoke(conn, ids, terminate=terminate) == []
    assert snapshot(db) == before
    assert claim_one(db, "queued", "w").kind is ClaimKind.TERMINAL


def test_of_a_revoke_and_a_claim_at_once_neither_is_lost(db):
    add_workers(db, "w")
    for number in range(8):
        job_id = f"job-{number}"
        add_jobs(db, job_id)

        def one(index, job_id=job_id):
            if index:
                return transaction(db, lambda conn: request_revoke(conn, [job_id], terminate=False))
            return transaction(db, lambda conn: claim(conn, [ClaimItem(new_job(job_id))], "w"))[0].kind

        with ThreadPoolExecutor(2) as threads:
            kind, revoked = threads.map(one, range(2))
        assert (kind, revoked) in ((ClaimKind.CLAIMED, []), (ClaimKind.TERMINAL, [job_id]))


# ---------------------------------------------------------------------------------------------------------- retry


def test_retry_queues_failed_jobs_afresh_and_keeps_their_history(db):
    add_workers(db, "w")
    with db.begin() as conn:
        create_batch(conn, name="n", batch_id="b", total=2, state=BatchState.IN_PROGRESS)
    add_jobs(db, "alone", deadline_at=at(50))
    with db.begin() as conn:
        lines = [new_job(name, batch_id="b", position=n) for n, name in enumerate(("failed", "fine"), 1)]
        insert_jobs(conn, lines)
    for name, state in (
        ("alone", JobState.FAILED),
        ("failed", JobState.FAILED),
        ("fine", JobState.SUCCEEDED),
    ):
        claim_one(db, name, "w", now=at(1))
        finish_one(db, name, 1, "w", state, now=at(2))
    with db.begin() as conn:
        mark_published(conn, ["alone"])
        mark_callbacks_sent(conn, ["alone"])
        assert finish_batch_if_done(conn, "b") is BatchState.COMPLETED
        assert retry_failed(conn, ids=["fine", "unknown"]) == []
        assert retry_failed(conn, batch_id="b") == ["failed"]
        assert set_batch_state(conn, "b", BatchState.IN_PROGRESS), "a finished batch is open again"
        assert retry_failed(conn, ids=["alone"], at=at(100)) == ["alone"]
    with db.connect() as conn:
        job = job_status(conn, "alone")
        assert (job.state, job.attempt, job.error_type, job.finished_at) == (JobState.QUEUED, 1, None, None)
        assert (job.published_at, job.callbacks_sent_at, job.deadline_at) == (None, None, None)
        assert job_status(conn, "fine").state is JobState.SUCCEEDED
    assert claim_one(db, "alone", "w").attempt == 2
    assert not finish_one(db, "alone", 1, "w")
    assert finish_one(db, "alone", 2, "w")
    with db.connect() as conn:
        assert [(one.number, one.worker_name, one.outcome) for one in job_attempts(conn, "alone")] == [
            (1, "w", "failed"),
            (2, "w", "succeeded"),
        ]


def test_retry_replaces_the_result_and_says_what_it_needs(db):
    add_workers(db, "w")
    add_jobs(db, "b", created_at=at(2))
    add_jobs(db, "c", created_at=at(1))
    add_jobs(db, "a", created_at=at(2))
    for name in "abc":
        claim_one(db, name, "w")
        finish_one(db, name, 1, "w")
    with db.begin() as conn:
        assert retry_failed(conn, ids=["a", "b", "c"]) == []
        assert retry_failed(conn, ids=["a", "b", "c"], states=[JobState.SUCCEEDED]) == ["c", "a", "b"]
        assert job_result(conn, "a") is None
        with pytest.raises(InvalidValueError, match="ids: are missing"):
            retry_failed(conn)
        with pytest.raises(InvalidValueError, match="states: must be terminal"):
            retry_failed(conn, ids=["a"], states=[JobState.RUNNING])
    claim_one(db, "a", "w")
    assert finish_one(db, "a", 2, "w")


def test_a_retried_job_has_not_waited_since_it_was_created(db):
    add_workers(db, "w")
    add_jobs(db, "ran")
    add_jobs(db, "waited", created_at=at(1))

    def claim_all(now):
        items = [ClaimItem(new_job(name), max_age_s=60) for name in ("ran", "waited")]
        with db.begin() as conn:
            return [outcome.kind for outcome in claim(conn, items, "w", now=now)]

    claim_one(db, "ran", "w", now=at(1))
    finish_one(db, "ran", 1, "w", JobState.FAILED, now=at(2))
    assert claim_all(at(100)) == [ClaimKind.TERMINAL] * 2
    with db.begin() as conn:
        both = [JobState.FAILED, JobState.EXPIRED]
        assert retry_failed(conn, ids=["waited", "ran"], states=both, at=at(200)) == ["ran", "waited"]
        assert job_status(conn, "ran").created_at == T0
    assert claim_all(at(250)) == [ClaimKind.CLAIMED] * 2


def test_a_naive_time_is_refused(db):
    with db.connect() as conn, pytest.raises(StatementError, match="naive time"):
        mark_published(conn, ["j"], at=T0.replace(tzinfo=None))
