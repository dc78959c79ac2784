"""Pruning beside a fleet that works: nothing live is touched, and no error comes out on either side."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
from sqlalchemy import Engine, func, select

from models_db import retention
from models_db.batches import create_batch, finish_batch_if_done
from models_db.claims import ClaimItem, ClaimKind, FinishItem, claim, finish
from models_db.jobs import insert_jobs, request_cancel, retry_failed
from models_db.retention import prune
from models_db.rollup_tables import JobHour, ThroughputHour
from models_db.rollups import catch_up
from models_db.session import transaction
from models_db.tables import Attempt, Batch, BatchState, EngineSample, Job, JobState, Result
from models_db.workers import add_samples
from tests.db.helpers import add_workers, at, new_job, new_result, new_sample

OLD, CUT, NOW = at(0), at(3600), at(7200)
WORKERS, ROUNDS, JOBS = 3, 12, 4
LIMIT_S = 120.0


def old_id(number: int) -> str:
    return f"old-{number:03}"


class Fleet:
    """Workers that do what real ones do, in the same transactions, each on connections of its own; turn by turn."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.turns = threading.Semaphore(0)
        self.retried: set[str] = set()

    def work(self, number: int) -> None:
        """Make jobs, try old ones that failed again, claim them all, end them, and write a sample, round for round."""
        worker = f"live-{number}"
        for turn in range(ROUNDS):
            assert self.turns.acquire(timeout=LIMIT_S)
            batch_id = f"batch-{number}-{turn}"
            jobs = [
                new_job(f"{batch_id}-{n}", batch_id=batch_id, position=n, created_at=NOW) for n in range(JOBS)
            ]
            transaction(
                self._engine,
                partial(create_batch, name="n", batch_id=batch_id, state=BatchState.IN_PROGRESS, at=NOW),
            )
            transaction(self._engine, partial(insert_jobs, jobs=jobs))
            old = old_id(3 * (ROUNDS * WORKERS - 1 - turn * WORKERS - number))  # the last ones first
            again = transaction(self._engine, partial(retry_failed, ids=[old], states=["cancelled"], at=NOW))
            self.retried.update(again)
            items = [ClaimItem(job) for job in (*jobs, *map(new_job, again))]
            claims = transaction(
                self._engine, partial(claim, items=items, worker_id=worker, dead_ids=(), now=NOW)
            )
            assert {outcome.kind for outcome in claims} == {ClaimKind.CLAIMED}
            ends = [
                FinishItem(item.job.id, outcome.attempt, JobState.SUCCEEDED, new_result(), None)
                for item, outcome in zip(items, claims, strict=True)
            ]
            assert all(transaction(self._engine, partial(finish, items=ends, worker_id=worker, now=NOW)))
            late = new_sample(worker, sampled_at=at(7000 + turn))
            transaction(self._engine, partial(add_samples, samples=[late]))
            assert transaction(self._engine, partial(finish_batch_if_done, batch_id=batch_id, at=NOW))


def old_history(db: Engine, jobs: int) -> None:
    add_workers(db, "old", *(f"live-{number}" for number in range(WORKERS)))
    with db.begin() as conn:
        insert_jobs(conn, [new_job(old_id(n)) for n in range(jobs)])
        request_cancel(conn, [old_id(n) for n in range(jobs)], at=OLD)
        add_samples(conn, [new_sample("old", sampled_at=at(n)) for n in range(50)])


def while_it_works(work: list[Callable[[], None]], prune_once: Callable[[], int]) -> int:
    """Prune again and again until everybody is done; how many jobs went."""
    gone = 0
    with ThreadPoolExecutor(len(work)) as pool:
        working = [pool.submit(each) for each in work]
        while True:
            over = all(future.done() for future in working)
            gone += prune_once()
            if over:
                break
        for future in working:
            future.result(LIMIT_S)
    return gone


def test_a_fleet_works_on_while_old_rows_go(db: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    old = WORKERS * ROUNDS * 3
    old_history(db, old)
    fleet = Fleet(db)
    prune_jobs = retention._prune_jobs

    def beside_a_turn(*args: Any, **options: Any) -> Any:
        fleet.turns.release()
        return prune_jobs(*args, **options)

    monkeypatch.setattr(retention, "_prune_jobs", beside_a_turn)
    gone = while_it_works(
        [partial(fleet.work, number) for number in range(WORKERS)],
        lambda: prune(db, CUT, now=NOW, chunk=2).jobs,
    )
    made = WORKERS * ROUNDS * JOBS
    assert gone + len(fleet.retried) == old, "each old job was tried again, or went"
    with db.connect() as conn:
        found = {row.id: row for row in conn.execute(select(Job.id, Job.state))}
        assert {job_id for job_id in found if job_id.startswith("old-")} == fleet.retried
        assert len(found) == made + len(fleet.retried)
        assert {row.state for row in found.values()} == {JobState.SUCCEEDED}
        for table in (Attempt, Result):
            assert set(conn.scalars(select(table.job_id))) == found.keys()
        assert set(conn.scalars(select(Batch.state))) == {BatchState.COMPLETED}
        assert conn.scalar(select(func.count()).select_from(Batch)) == WORKERS * ROUNDS
        assert conn.scalar(select(func.count()).select_from(EngineSample)) == WORKERS * ROUNDS
    catch_up(db, at(9000))
    with db.connect() as conn:
        sums = [
            conn.scalar(select(func.sum(column)))
            for column in (JobHour.succeeded, JobHour.cancelled, ThroughputHour.samples)
        ]
    # A job that was tried again has ended once: whether its first end is counted depends on who was first.
    assert (sums[0], sums[2]) == (len(found), 50 + WORKERS * ROUNDS)
    assert gone <= sums[1] <= old
