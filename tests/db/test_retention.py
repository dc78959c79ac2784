"""Pruning old history, on every database."""

from __future__ import annotations

from dataclasses import replace

import pytest

from models_db.batches import create_batch, set_batch_state
from models_db.jobs import insert_jobs, job_states
from models_db.retention import PruneReport, prune
from models_db.session import reading
from models_db.tables import BatchState, WorkerState
from models_db.workers import add_samples, list_workers, set_worker_state
from tests.db.helpers import (
    T0,
    add_jobs,
    add_workers,
    at,
    attempts,
    claim_one,
    finish_one,
    new_job,
    new_sample,
)

OLD, NEW = at(0), at(100)
LIMIT = at(50)


@pytest.fixture
def history(db):
    add_workers(db, "old", "new", "idle", "live")
    add_jobs(db, "queued", "running", *(f"old-{n}" for n in range(7)), "new")
    claim_one(db, "running", "live", now=OLD)
    for n in range(7):
        claim_one(db, f"old-{n}", "old", now=OLD)
        finish_one(db, f"old-{n}", 1, "old", now=OLD)
    claim_one(db, "new", "new", now=OLD)
    finish_one(db, "new", 1, "new", now=NEW)
    with db.begin() as conn:
        for batch_id in ("ended", "open"):
            create_batch(conn, name="n", batch_id=batch_id, state=BatchState.IN_PROGRESS, at=OLD)
            insert_jobs(conn, [new_job(f"in-{batch_id}", batch_id=batch_id, position=0)])
    for batch_id in ("ended", "open"):
        claim_one(db, f"in-{batch_id}", "old", now=OLD)
        finish_one(db, f"in-{batch_id}", 1, "old", now=OLD)
    with db.begin() as conn:
        set_batch_state(conn, "ended", BatchState.COMPLETED, at=OLD)
        add_samples(conn, [new_sample("old", sampled_at=at(-n)) for n in range(5)])
        add_samples(conn, [new_sample("new", sampled_at=time) for time in (OLD, NEW)])
        for worker_id in ("old", "new", "idle"):
            set_worker_state(conn, worker_id, WorkerState.STOPPED, at=OLD)
    return db


EXPECTED = PruneReport(jobs=8, attempts=8, results=8, batches=1, samples=6, workers=1, dry_run=False)


@pytest.mark.parametrize("chunk", [2, 8, 500])
def test_what_ended_long_ago_goes_and_all_else_stays(history, chunk):
    dry = prune(history, LIMIT, dry_run=True)
    assert dry == replace(EXPECTED, dry_run=True)
    assert prune(history, LIMIT, chunk=chunk) == EXPECTED
    assert prune(history, LIMIT, chunk=chunk) == PruneReport(0, 0, 0, 0, 0, 0, dry_run=False)
    with reading(history) as conn:
        kept = ["queued", "running", "new", "in-open"]
        assert sorted(job_states(conn, [*kept, "in-ended", *(f"old-{n}" for n in range(7))])) == sorted(kept)
        assert attempts(conn, "running") == [(1, "live", None)]
        # "old" still ran a job of the open batch, "new" a job that is kept.
        assert {worker.id for worker in list_workers(conn)} == {"old", "new", "live"}


def test_nothing_is_old_enough(history):
    assert prune(history, T0.replace(year=2020)) == PruneReport(0, 0, 0, 0, 0, 0, dry_run=False)
