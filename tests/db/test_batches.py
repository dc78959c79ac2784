"""Bulk submissions, on every database."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import delete

from models_db.batch_rows import iter_batch_rows
from models_db.batches import (
    EndedLine,
    batch_progress,
    create_batch,
    finish_batch_if_done,
    insert_ended_lines,
    list_batches,
    open_jobs,
    positions_after,
    request_cancel_batch,
    set_batch_state,
)
from models_db.errors import InvalidValueError, UnknownBatchError
from models_db.jobs import insert_jobs, job_status
from models_db.session import reading, transaction
from models_db.tables import Batch, BatchState, Job, JobState
from tests.db.helpers import add_workers, at, claim_one, finish_one, new_job, new_result


@pytest.fixture
def batch(db):
    """A batch ``b`` of four lines in progress, none of them claimed."""
    add_workers(db, "w")
    with db.begin() as conn:
        create_batch(conn, name="nightly", source="in.jsonl", batch_id="b", at=at(0), deadline_at=at(100))
        insert_lines(conn, range(4))
        set_batch_state(conn, "b", BatchState.IN_PROGRESS, total=4)
    return db


def insert_lines(conn, numbers, batch_id="b"):
    lines = [new_job(f"{batch_id}-{n}", batch_id=batch_id, position=n, custom_id=f"c{n}") for n in numbers]
    insert_jobs(conn, lines)


def run(db, job_id, state=JobState.SUCCEEDED, **kw):
    claim_one(db, job_id, "w")
    finish_one(db, job_id, 1, "w", state, **kw)


def test_lines_that_have_ended_go_in_once_whoever_inserts_them(db):
    """Two commands that feed one batch read the same file, and bad lines may have no id that would be refused."""
    with db.begin() as conn:
        create_batch(conn, name="nightly", batch_id="b")
    both = threading.Barrier(2, timeout=60)

    def insert(first):
        for start in range(first, first + 40, 10):
            lines = [
                EndedLine(n, f"c{n}" if n % 3 == 0 else None, JobState.FAILED, "bad", "bad")
                for n in range(start, start + 10)
            ]
            both.wait()
            transaction(
                db, lambda conn, lines=lines: insert_ended_lines(conn, "b", lines, model="m", queue="q")
            )

    with ThreadPoolExecutor(2) as feeders:
        for done in [feeders.submit(insert, first) for first in (1, 4)]:
            done.result()
    with reading(db) as conn:
        assert positions_after(conn, "b", 0, 100) == [*range(1, 44)]


def test_progress_counts_every_state_and_all_tokens(batch):
    run(batch, "b-0")
    run(batch, "b-1", JobState.FAILED)
    run(batch, "b-2", JobState.CANCELLED, result=new_result("partial", completion_tokens=2))
    with reading(batch) as conn:
        progress = batch_progress(conn, "b")
        assert batch_progress(conn, "unknown") is None
    assert {state.value: count for state, count in progress.counts.items() if count} == {
        "queued": 1,
        "succeeded": 1,
        "failed": 1,
        "cancelled": 1,
    }
    assert (progress.total, progress.inserted, progress.done) == (4, 4, 3)
    assert (progress.prompt_tokens, progress.completion_tokens) == (10, 5)
    assert (progress.name, progress.source, progress.created_at, progress.deadline_at) == (
        "nightly",
        "in.jsonl",
        at(0),
        at(100),
    )


def test_a_batch_ends_when_its_last_job_has(batch):
    for number in range(4):
        with batch.begin() as conn:
            assert finish_batch_if_done(conn, "b") is None
        run(batch, f"b-{number}", JobState.FAILED if number == 1 else JobState.SUCCEEDED)
    with batch.begin() as conn:
        assert finish_batch_if_done(conn, "b", at=at(9)) is BatchState.COMPLETED
        assert finish_batch_if_done(conn, "b", at=at(10)) is BatchState.COMPLETED
        assert not set_batch_state(conn, "b", BatchState.CANCELLING), "an ended batch stays ended"
        row = conn.execute(Batch.__table__.select()).one()
        assert (row.succeeded, row.failed, row.cancelled, row.expired, row.finished_at) == (3, 1, 0, 0, at(9))


def test_a_batch_whose_lines_are_still_coming_does_not_end(batch):
    with batch.begin() as conn:
        set_batch_state(conn, "b", BatchState.IN_PROGRESS, total=5)
        create_batch(conn, name="empty", batch_id="validating")
        assert finish_batch_if_done(conn, "validating") is None
    for number in range(4):
        run(batch, f"b-{number}")
    with batch.begin() as conn:
        assert finish_batch_if_done(conn, "b") is None


def test_a_batch_that_missed_its_deadline_has_expired(batch):
    for number in range(3):
        run(batch, f"b-{number}")
    run(batch, "b-3", JobState.EXPIRED)
    with batch.begin() as conn:
        assert finish_batch_if_done(conn, "b", at=at(100)) is BatchState.EXPIRED


def test_cancelling_ends_the_queued_and_waits_for_the_running(batch):
    run(batch, "b-0")
    claim_one(batch, "b-1", "w")
    with batch.begin() as conn:
        counts = request_cancel_batch(conn, "b")
        assert {state.value: count for state, count in counts.items() if count} == {
            "succeeded": 1,
            "running": 1,
            "cancelled": 2,
        }
        assert job_status(conn, "b-1").cancel_requested
        assert batch_progress(conn, "b").state is BatchState.CANCELLING
        assert finish_batch_if_done(conn, "b") is None
    finish_one(batch, "b-1", 1, "w", JobState.CANCELLED)
    with batch.begin() as conn:
        assert finish_batch_if_done(conn, "b") is BatchState.CANCELLED
        assert request_cancel_batch(conn, "b")[JobState.CANCELLED] == 3


def test_cancelling_a_batch_that_has_not_begun_ends_it_at_once(batch):
    with batch.begin() as conn:
        request_cancel_batch(conn, "b")
        assert batch_progress(conn, "b").state is BatchState.CANCELLED


def test_a_refused_input_fails_the_batch_with_its_reason(batch):
    with batch.begin() as conn:
        create_batch(conn, name="bad", batch_id="bad")
        assert set_batch_state(conn, "bad", BatchState.FAILED, error="line 3: no prompt \x00", at=at(1))
        progress = batch_progress(conn, "bad")
    assert (progress.state, progress.error, progress.finished_at) == (
        BatchState.FAILED,
        "line 3: no prompt \ufffd",
        at(1),
    )


@pytest.mark.parametrize("state", [BatchState.VALIDATING, BatchState.IN_PROGRESS])
def test_whoever_feeds_a_batch_that_is_being_cancelled_does_not_call_it_back(batch, state):
    claim_one(batch, "b-0", "w")
    with batch.begin() as conn:
        request_cancel_batch(conn, "b")
        assert not set_batch_state(conn, "b", state, total=9)
        progress = batch_progress(conn, "b")
    assert (progress.state, progress.total) == (BatchState.CANCELLING, 4)
    finish_one(batch, "b-0", 1, "w")
    with batch.begin() as conn:
        assert finish_batch_if_done(conn, "b") is BatchState.CANCELLED


def test_open_jobs_are_those_that_wait_or_run(batch):
    claim_one(batch, "b-0", "w")
    run(batch, "b-1")
    run(batch, "b-2", JobState.FAILED)
    with reading(batch) as conn:
        assert open_jobs(conn, "b", 9) == (BatchState.IN_PROGRESS, 2)
        assert open_jobs(conn, "b", 1) == (BatchState.IN_PROGRESS, 1), "no more was asked for"
        with pytest.raises(UnknownBatchError, match="nope"):
            open_jobs(conn, "nope", 1)


def test_an_ended_batch_keeps_its_counts_when_retention_has_removed_its_jobs(batch):
    for number in range(4):
        run(batch, f"b-{number}", JobState.FAILED if number == 1 else JobState.SUCCEEDED)
    with batch.begin() as conn:
        finish_batch_if_done(conn, "b", at=at(9))
        conn.execute(delete(Job).where(Job.batch_id == "b"))
        progress = batch_progress(conn, "b")
    assert (progress.inserted, progress.done, progress.counts[JobState.FAILED]) == (4, 4, 1)


def test_rows_come_in_input_order_whatever_order_they_ended_in(batch):
    with batch.begin() as conn:
        insert_lines(conn, [11, 10, 12, 4])
        create_batch(conn, name="other", batch_id="other")
        insert_lines(conn, range(3), "other")
    run(batch, "b-12", result=new_result("twelve"))
    run(batch, "b-3", JobState.FAILED)
    for chunk in (1, 2, 3, 500):
        with reading(batch) as conn:
            rows = list(iter_batch_rows(conn, "b", chunk=chunk))
        assert [(row.position, row.custom_id) for row in rows] == [
            (n, f"c{n}") for n in (0, 1, 2, 3, 4, 10, 11, 12)
        ]
        assert rows[-1].result == new_result("twelve")
        assert (rows[3].state, rows[3].error_type, rows[3].result) == (JobState.FAILED, "boom", None)
        assert (rows[0].state, rows[0].job_id, rows[0].model) == (JobState.QUEUED, "b-0", "smollm2")


def test_rows_come_as_they_ended_and_open_ones_last(batch):
    with batch.begin() as conn:
        insert_lines(conn, [11, 10])
    for n, name in enumerate(["b-11", "b-2", "b-0"]):
        run(batch, name, result=new_result(name), now=at(60 + n))
    for chunk in (1, 2, 500):
        with reading(batch) as conn:
            rows = list(iter_batch_rows(conn, "b", chunk=chunk, by_completion=True))
        assert [row.position for row in rows] == [11, 2, 0, 1, 3, 10]
        assert [row.result is None for row in rows] == [False] * 3 + [True] * 3


def test_lines_that_share_a_position_are_all_exported(batch):
    with batch.begin() as conn:
        insert_jobs(conn, [new_job(f"same-{n}", batch_id="b", position=3) for n in range(5)])
    with reading(batch) as conn:
        rows = list(iter_batch_rows(conn, "b", chunk=2))
    assert len({row.job_id for row in rows}) == len(rows) == 9


def test_the_latest_batches_come_first(db):
    with db.begin() as conn:
        for number in range(5):
            create_batch(conn, name=f"n{number}", at=at(number))
        assert [progress.name for progress in list_batches(conn, limit=3)] == ["n4", "n3", "n2"]


def test_unknown_batches_and_bad_names_are_named(db):
    with db.begin() as conn:
        for change in (
            lambda: set_batch_state(conn, "nope", BatchState.FINALIZING),
            lambda: finish_batch_if_done(conn, "nope"),
            lambda: request_cancel_batch(conn, "nope"),
        ):
            with pytest.raises(UnknownBatchError, match="there is no batch nope"):
                change()
        with pytest.raises(InvalidValueError, match="name: has 256 characters"):
            create_batch(conn, name="n" * 256)
