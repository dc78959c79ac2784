"""What is still to be told of is not pruned; what was told, or given up, goes with its callback."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import Engine, func, select, update

from models_db import retention
from models_db.batches import create_batch, set_batch_state
from models_db.callbacks import (
    Callback,
    CallbackState,
    insert_batch_callback,
    record_delivered,
    record_failed,
    retry_callbacks,
)
from models_db.jobs import insert_jobs, request_cancel
from models_db.retention import PruneReport, prune
from models_db.tables import Batch, BatchState, Job
from tests.db.callback_world import CALLBACK, add_with_callback, states, take
from tests.db.helpers import add_jobs, at, new_job

LATER = at(2 * 3600)


@pytest.fixture
def ended(world: Engine) -> Engine:
    """Two jobs with a callback and one without, and two batches of a job each, of which one has a callback."""
    add_with_callback(world, "told", "untold")
    add_jobs(world, "silent")
    with world.begin() as conn:
        for batch_id in ("loud-batch", "silent-batch"):
            create_batch(conn, name="n", batch_id=batch_id, state=BatchState.IN_PROGRESS, at=at(0))
            insert_jobs(conn, [new_job(f"in-{batch_id}", batch_id=batch_id, position=1)])
        insert_batch_callback(conn, "loud-batch", CALLBACK)
        request_cancel(conn, ["told", "untold", "silent", "in-loud-batch", "in-silent-batch"], at=at(1))
        for batch_id in ("loud-batch", "silent-batch"):
            assert set_batch_state(conn, batch_id, BatchState.COMPLETED, at=at(1))
    return world


def settle(db: Engine, *subjects: str, given_up: bool = False) -> None:
    claims = {claim.job_id or claim.batch_id: claim for claim in take(db)}
    with db.begin() as conn:
        for subject in subjects:
            assert (
                record_failed(conn, claims[subject], "HTTP 410")
                if given_up
                else record_delivered(conn, claims[subject])
            )
        conn.execute(update(Callback).where(Callback.state == CallbackState.DUE).values(due_at=at(0)))


def left(db: Engine) -> set[str]:
    with db.connect() as conn:
        return {*conn.scalars(select(Job.id)), *conn.scalars(select(Batch.id))}


def both_ways(db: Engine, **options: Any) -> PruneReport:
    dry = prune(db, LATER, now=LATER, dry_run=True)
    report = prune(db, LATER, now=LATER, **options)
    assert (dry.jobs, dry.batches, dry.kept) == (report.jobs, report.batches, report.kept)
    return report


@pytest.mark.parametrize("chunk", [1, 2, 500])
def test_what_is_still_to_be_told_of_stays_and_is_counted(ended: Engine, chunk: int) -> None:
    settle(ended, "told")
    report = both_ways(ended, chunk=chunk)
    assert (report.jobs, report.batches, report.kept) == (3, 1, 3)
    assert left(ended) == {"untold", "loud-batch", "in-loud-batch"}
    assert states(ended) == {"untold": CallbackState.DUE, "loud-batch": CallbackState.DUE}
    settle(ended, "untold", "loud-batch")
    report = both_ways(ended, chunk=chunk)
    assert (report.jobs, report.batches, report.kept) == (2, 1, 0)
    assert left(ended) == set()


def test_a_callback_that_was_given_up_goes_with_what_it_tells_of(ended: Engine) -> None:
    settle(ended, "told", "untold", "loud-batch", given_up=True)
    assert both_ways(ended).kept == 0
    assert left(ended) == set()
    with ended.connect() as conn:
        assert conn.scalar(select(func.count()).select_from(Callback)) == 0


def test_one_that_is_sent_again_at_the_same_moment_keeps_its_job_and_its_batch(
    ended: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    settle(ended, "told", "untold", "loud-batch", given_up=True)
    judge = retention._retried

    def retried_meanwhile(conn: Any, column: Any, ids: Any) -> set[str]:
        # SQLite has one writer at a time, so that there is no such moment: the retry is part of the transaction.
        if ended.dialect.name == "sqlite":
            retry_callbacks(conn, ["untold", "loud-batch"])
        else:
            with ended.begin() as other:
                retry_callbacks(other, ["untold", "loud-batch"])
        return judge(conn, column, ids)

    monkeypatch.setattr(retention, "_retried", retried_meanwhile)
    with ended.begin() as conn:
        conn.execute(update(Job).where(Job.batch_id == "loud-batch").values(finished_at=LATER))
    report = prune(ended, LATER, now=LATER, chunk=2)
    assert left(ended) == {"untold", "loud-batch", "in-loud-batch"}
    assert (report.jobs, report.batches, report.kept) == (3, 1, 2)
    assert states(ended) == {"untold": CallbackState.DUE, "loud-batch": CallbackState.DUE}
