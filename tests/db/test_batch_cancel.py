"""Cancelling a batch in pieces: cut off, taken up, beside workers, beside whoever feeds it; on every database."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from sqlalchemy import Engine, select

from models_db.batch_cancel import cancel_batch, mark_cancelling, open_lines, to_cancel
from models_db.batches import (
    EndedLine,
    batch_progress,
    create_batch,
    finish_batch_if_done,
    insert_ended_lines,
    request_cancel_batch,
    set_batch_state,
)
from models_db.claims import ClaimItem, ClaimKind, FinishItem, ReleaseItem, claim, finish, release
from models_db.errors import BatchClosedError, UnknownBatchError
from models_db.jobs import insert_jobs
from models_db.session import reading, transaction
from models_db.tables import BatchState, Job, JobState
from tests.db.helpers import add_workers, at, claim_one, finish_one, new_job, new_result
from tests.db.test_batch_cost import analyse, rows_read

LINES = 60


class CutOffError(Exception):
    """The process that cancels is killed here."""


def cut_off_after(pieces: int) -> Callable[[int, int], None]:
    left = [pieces]

    def report(_done: int, _lines: int) -> None:
        left[0] -= 1
        if not left[0]:
            raise CutOffError

    return report


def fill(engine: Engine, lines: int = LINES, batch_id: str = "b") -> None:
    add_workers(engine, "w")
    with engine.begin() as conn:
        create_batch(conn, name="nightly", batch_id=batch_id, at=at(0))
        insert_jobs(conn, [new_job(f"{n:04}", batch_id=batch_id, position=n) for n in range(1, lines + 1)])
        set_batch_state(conn, batch_id, BatchState.IN_PROGRESS, total=lines)


def in_pieces(engine: Engine, piece: int = 10, **kw: Any) -> BatchState:
    return cancel_batch(engine, "b", piece=piece, pause=lambda seconds: None, **kw)


def counts(engine: Engine) -> dict[str, int]:
    with reading(engine) as conn:
        progress = batch_progress(conn, "b")
    assert progress is not None
    return {state.value: count for state, count in progress.counts.items() if count}


def state_of(engine: Engine) -> BatchState:
    with reading(engine) as conn:
        progress = batch_progress(conn, "b")
    assert progress is not None
    return progress.state


def test_a_cancel_in_pieces_ends_what_waits_and_flags_what_runs(db: Engine) -> None:
    fill(db)
    claim_one(db, "0003", "w")
    finish_one(db, "0003", 1, "w")
    claim_one(db, "0055", "w")
    seen: list[tuple[int, int]] = []
    assert in_pieces(db, report=lambda *done: seen.append(done)) is BatchState.CANCELLING
    assert counts(db) == {"succeeded": 1, "running": 1, "cancelled": 58}
    assert [done for done, _ in seen] == [10, 20, 30, 40, 50, 60, 61, 61]
    assert {lines for _, lines in seen} == {61}
    with reading(db) as conn:
        assert conn.scalar(select(Job.cancel_requested).where(Job.id == "0055"))
        assert to_cancel(conn, "b", 10) == []
    finish_one(db, "0055", 1, "w", JobState.CANCELLED)
    assert in_pieces(db) is BatchState.CANCELLED
    assert counts(db) == {"succeeded": 1, "cancelled": 59}


@pytest.mark.parametrize("pieces", [1, 2, 5])
def test_a_cancel_that_was_cut_off_is_taken_up_by_the_same_again(db: Engine, pieces: int) -> None:
    fill(db)
    with pytest.raises(CutOffError):
        in_pieces(db, report=cut_off_after(pieces), at=at(1))
    assert state_of(db) is BatchState.CANCELLING
    cancelled = 10 * pieces - 1  # there is no line 0
    assert counts(db) == {"queued": LINES - cancelled, "cancelled": cancelled}
    assert in_pieces(db, at=at(2)) is BatchState.CANCELLED
    assert counts(db) == {"cancelled": LINES}
    with reading(db) as conn:
        ended = list(conn.scalars(select(Job.finished_at).where(Job.batch_id == "b")))
    assert (ended.count(at(1)), ended.count(at(2))) == (cancelled, LINES - cancelled), "none has ended twice"
    assert in_pieces(db, at=at(3)) is BatchState.CANCELLED, "again changes nothing"


def test_once_it_is_marked_nothing_goes_in_any_more(db: Engine) -> None:
    fill(db)
    with db.begin() as conn:
        assert mark_cancelling(conn, "b") is BatchState.CANCELLING
    line = EndedLine(100, "late", JobState.FAILED, "bad", "bad")
    for _ in range(2):  # cancelling, then cancelled
        with db.begin() as conn:
            with pytest.raises(BatchClosedError, match=r"batch b is cancel\w+ and takes no more lines"):
                insert_jobs(conn, [new_job("late", batch_id="b", position=100)])
            with pytest.raises(BatchClosedError):
                insert_ended_lines(conn, "b", [line], model="m", queue="q")
        in_pieces(db)
    assert counts(db) == {"cancelled": LINES}


def test_whoever_stores_lines_is_waited_for_and_what_it_stored_is_cancelled(db: Engine, kind: str) -> None:
    fill(db)
    with ThreadPoolExecutor(1) as beside:
        with db.begin() as conn:
            insert_jobs(conn, [new_job("late", batch_id="b", position=LINES + 1)])
            cancelling = beside.submit(in_pieces, db)
            assert state_of(db) is BatchState.IN_PROGRESS
        assert cancelling.result(30) is BatchState.CANCELLED
    assert counts(db) == {"cancelled": LINES + 1}


def test_what_a_worker_hands_back_meanwhile_is_cancelled_too(db: Engine) -> None:
    fill(db)
    claim_one(db, "0001", "w")
    seen: list[int] = []

    def report(done: int, _lines: int) -> None:
        seen.append(done)
        if len(seen) == 3:  # its piece is done with
            with db.begin() as conn:
                assert release(conn, [ReleaseItem("0001", 1)], "w") == [True]

    assert in_pieces(db, report=report) is BatchState.CANCELLED
    assert counts(db) == {"cancelled": LINES}


def test_what_a_worker_starts_between_mark_and_piece_is_flagged_for_it(db: Engine) -> None:
    fill(db)
    with db.begin() as conn:
        mark_cancelling(conn, "b")
    assert claim_one(db, "0042", "w").kind is ClaimKind.CLAIMED
    assert in_pieces(db) is BatchState.CANCELLING
    with reading(db) as conn:
        assert conn.scalar(select(Job.cancel_requested).where(Job.id == "0042"))
    finish_one(db, "0042", 1, "w", JobState.CANCELLED, result=new_result("so far"))
    with db.begin() as conn:
        assert finish_batch_if_done(conn, "b") is BatchState.CANCELLED


def test_beside_workers_and_other_cancels_every_job_ends_once(db: Engine) -> None:
    """Two cancel while two workers claim and finish as fast as they can: what counts is what was committed."""
    fill(db, 400)
    add_workers(db, "w2")
    finished: list[str] = []
    done = threading.Event()

    def labour(worker: str, ids: list[str]) -> None:
        for some in (ids[n : n + 7] for n in range(0, len(ids), 7)):
            if done.is_set():
                return
            jobs = [ClaimItem(new_job(job_id), stored=True) for job_id in some]
            outcomes = transaction(db, lambda conn, jobs=jobs: claim(conn, jobs, worker), tries=30)
            ends = [
                FinishItem(each.job_id, each.attempt, JobState.SUCCEEDED, new_result())
                for each in outcomes
                if each.kind is ClaimKind.CLAIMED
            ]
            counted = transaction(db, lambda conn, ends=ends: finish(conn, ends, worker), tries=30)
            finished.extend(end.job_id for end, counts in zip(ends, counted, strict=True) if counts)

    ids = [f"{n:04}" for n in range(1, 401)]
    with ThreadPoolExecutor(4) as pool:
        working = [pool.submit(labour, "w", ids), pool.submit(labour, "w2", ids[::-1])]
        cancelling = [pool.submit(in_pieces, db, 40) for _ in range(2)]
        for each in cancelling:
            each.result(60)
        done.set()
        for each in working:
            each.result(60)
    assert in_pieces(db) is BatchState.CANCELLED
    with reading(db) as conn:
        ended = {row.id: row.state for row in conn.execute(select(Job.id, Job.state))}
    assert {job_id for job_id, state in ended.items() if state is JobState.SUCCEEDED} == set(finished)
    assert len(finished) == len(set(finished))
    assert set(ended.values()) <= {JobState.SUCCEEDED, JobState.CANCELLED}
    assert sum(counts(db).values()) == 400


def test_lines_that_share_a_position_and_an_empty_batch_are_cancelled(db: Engine) -> None:
    fill(db, 3)
    with db.begin() as conn:
        insert_jobs(conn, [new_job(f"same-{n}", batch_id="b", position=3) for n in range(5)])
        create_batch(conn, name="empty", batch_id="empty")
    assert in_pieces(db, piece=2) is BatchState.CANCELLED
    assert counts(db) == {"cancelled": 8}
    assert cancel_batch(db, "empty") is BatchState.CANCELLED
    with pytest.raises(UnknownBatchError, match="nope"):
        cancel_batch(db, "nope")


def test_all_at_once_does_the_same(db: Engine) -> None:
    fill(db)
    with pytest.raises(CutOffError):
        in_pieces(db, report=cut_off_after(2))
    with db.begin() as conn:
        assert request_cancel_batch(conn, "b")[JobState.CANCELLED] == LINES
    assert state_of(db) is BatchState.CANCELLED


def test_a_piece_looks_at_its_own_lines_alone(db: Engine) -> None:
    fill(db, 4000)
    analyse(db)
    with db.begin() as conn:
        mark_cancelling(conn, "b")
    assert rows_read(db, lambda conn: open_lines(conn, "b", 1000, 1010)) < 500
