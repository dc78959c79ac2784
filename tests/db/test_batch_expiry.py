"""The end of what waits beyond its batch's deadline, on every database."""

from __future__ import annotations

from sqlalchemy import Engine, select

from models_db.batch_expiry import expire_batch
from models_db.batches import create_batch, finish_batch_if_done, set_batch_state
from models_db.claims import ClaimKind
from models_db.jobs import insert_jobs
from models_db.session import reading
from models_db.tables import BatchState, Job, JobState
from tests.db.helpers import add_workers, at, claim_one, finish_one, new_job


def fill(db: Engine) -> None:
    add_workers(db, "w")
    with db.begin() as conn:
        for batch_id, deadline in (("b", at(50)), ("other", None)):
            create_batch(conn, name="nightly", batch_id=batch_id, at=at(0), deadline_at=deadline)
            lines = [
                new_job(f"{batch_id}-{n}", batch_id=batch_id, position=n, deadline_at=at(50))
                for n in range(1, 8)
            ]
            lines += [new_job(f"{batch_id}-again", batch_id=batch_id, position=8)]
            insert_jobs(conn, lines)
            set_batch_state(conn, batch_id, BatchState.IN_PROGRESS, total=8)
    claim_one(db, "b-1", "w", now=at(1))


def states(db: Engine, batch_id: str) -> dict[str, str]:
    with reading(db) as conn:
        rows = conn.execute(select(Job.id, Job.state).where(Job.batch_id == batch_id))
        return {job_id.removeprefix(f"{batch_id}-"): str(state) for job_id, state in rows}


def test_what_waits_expires_once_the_deadline_has_passed_and_nothing_else_does(db: Engine) -> None:
    fill(db)
    before = states(db, "b")
    assert expire_batch(db, "b", at=at(49)) == 0
    assert states(db, "b") == before
    assert expire_batch(db, "b", piece=4, at=at(50)) == 6
    late = {str(n): "expired" for n in range(2, 8)}
    assert states(db, "b") == {"1": "running", "again": "queued"} | late
    assert expire_batch(db, "b", at=at(51)) == 0
    assert expire_batch(db, "other", at=at(99)) == expire_batch(db, "nowhere", at=at(99)) == 0
    assert {*states(db, "other").values()} == {"queued"}
    with reading(db) as conn:
        end = conn.execute(select(Job.finished_at, Job.error_type).where(Job.id == "b-2")).one()
    assert tuple(end) == (at(50), "deadline")


def test_a_batch_that_nobody_works_on_ends_and_a_late_delivery_finds_the_end(db: Engine) -> None:
    fill(db)
    finish_one(db, "b-1", 1, "w", JobState.SUCCEEDED)
    claim_one(db, "b-again", "w")
    finish_one(db, "b-again", 1, "w", JobState.SUCCEEDED)
    expire_batch(db, "b", at=at(60))
    with db.begin() as conn:
        assert finish_batch_if_done(conn, "b", at=at(60)) is BatchState.EXPIRED
    late = claim_one(db, "b-2", "w")
    assert late.kind is ClaimKind.TERMINAL
    assert late.outcome is not None
    assert late.outcome.state is JobState.EXPIRED
