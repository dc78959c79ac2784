"""Pruning old history, on every database."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from dataclasses import asdict, replace

import pytest
from pyarrow import parquet
from sqlalchemy import func, select

from models_db import archive_parquet
from models_db.archive_parquet import ParquetArchive
from models_db.batches import create_batch, set_batch_state
from models_db.dead_letters import NewDeadLetter, list_dead_letters, store_dead_letters
from models_db.errors import InvalidValueError
from models_db.jobs import insert_jobs, job_states
from models_db.retention import PruneReport, prune
from models_db.rollup_tables import JobHour, JobMinute, ThroughputHour
from models_db.rollups import advance, floor_hour, reopen
from models_db.session import reading
from models_db.tables import BatchState, Job, WorkerState
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

OLD, NEW = at(0), at(3600)
LIMIT = floor_hour(NEW)
NOW = at(7200)


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
        letters = [
            NewDeadLetter(f"letter-{n}", "q", "old", "no JSON", "{\0", received_at=OLD) for n in range(3)
        ]
        store_dead_letters(
            conn, [*letters, NewDeadLetter("late", "q", "old", "no JSON", "{", received_at=NEW)]
        )
        add_samples(conn, [new_sample("old", sampled_at=at(-n)) for n in range(5)])
        add_samples(conn, [new_sample("new", sampled_at=time) for time in (OLD, NEW)])
        for worker_id in ("old", "new", "idle"):
            set_worker_state(conn, worker_id, WorkerState.STOPPED, at=OLD)
    return db


EXPECTED = PruneReport(
    jobs=8,
    attempts=8,
    results=8,
    batches=1,
    api_batches=0,
    files=0,
    samples=6,
    workers=1,
    minutes=0,
    dead_letters=3,
    kept=0,
    dry_run=False,
)
NOTHING = PruneReport(**dict.fromkeys(asdict(EXPECTED), 0) | {"dry_run": False})


@pytest.mark.parametrize("chunk", [2, 8, 500])
def test_what_ended_long_ago_goes_and_all_else_stays(history, chunk):
    dry = prune(history, LIMIT, dry_run=True)
    assert dry == replace(EXPECTED, dry_run=True)
    assert prune(history, LIMIT, chunk=chunk, now=NOW) == EXPECTED
    assert prune(history, LIMIT, chunk=chunk, now=NOW) == NOTHING
    with reading(history) as conn:
        kept = ["queued", "running", "new", "in-open"]
        assert sorted(job_states(conn, [*kept, "in-ended", *(f"old-{n}" for n in range(7))])) == sorted(kept)
        assert [letter.id for letter in list_dead_letters(conn)] == ["late"]
        assert attempts(conn, "running") == [(1, "live", None)]
        # "old" and "new" are named by roll-ups.
        assert {worker.id for worker in list_workers(conn)} == {"old", "new", "live"}


def test_nothing_is_old_enough(history):
    assert prune(history, T0.replace(year=2020), now=NOW) == NOTHING


def test_rollups_outlive_what_they_count_even_when_told_to_compute_it_again(history):
    prune(history, LIMIT, now=NOW)
    with history.begin() as conn:
        sums = select(
            *(
                select(func.sum(column)).scalar_subquery()
                for column in (JobHour.succeeded, ThroughputHour.samples)
            )
        )
        assert conn.execute(sums).one() == (10, 7)
        reopen(conn, T0.replace(year=2020))
        while advance(conn, NOW):
            pass
        assert conn.execute(sums).one() == (10, 7)


def test_minutes_go_when_asked_for_and_never_before_what_they_are_made_of(history):
    with pytest.raises(InvalidValueError, match="must not lie after older_than"):
        prune(history, LIMIT, minutes_older_than=at(7200))
    assert prune(history, LIMIT, minutes_older_than=LIMIT, now=NOW).minutes > 0
    with reading(history) as conn:
        assert (
            conn.scalar(select(func.count()).select_from(JobMinute).where(JobMinute.started_at < LIMIT)) == 0
        )
        assert conn.scalar(select(func.sum(JobHour.succeeded))) == 10


@pytest.mark.parametrize("name", ["old.jsonl", "old.jsonl.gz"])
def test_the_archive_has_every_row_that_went(history, tmp_path, name):
    path = tmp_path / name
    report = prune(history, LIMIT, archive=path, chunk=3, now=NOW)
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
        rows = [json.loads(line) for line in lines]
    counts = Counter(row["table"] for row in rows)
    assert counts == {
        "job": report.jobs,
        "attempt": report.attempts,
        "result": report.results,
        "batch": report.batches,
        "engine_sample": report.samples,
        "worker": report.workers,
        "dead_letter": report.dead_letters,
    }
    (job,) = [row for row in rows if row.get("id") == "old-3"]
    assert (job["prompt"], job["finished_at"]) == ({"prompt": "Grüße, 世界 🌍"}, OLD.isoformat())
    with pytest.raises(InvalidValueError, match=r"exists already .* Name a new file"):
        prune(history, LIMIT, archive=path, now=NOW)


def test_a_parquet_archive_has_every_row_that_went_in_one_file_a_table(history, tmp_path):
    folder = tmp_path / "old.parquet"
    with reading(history) as conn:
        jobs = {row.id: row for row in conn.execute(select(Job.__table__))}
    report = prune(history, LIMIT, archive=folder, chunk=3, now=NOW)
    assert sorted(path.name for path in folder.iterdir()) == [
        f"{name}.parquet"
        for name in ("attempt", "batch", "dead_letter", "engine_sample", "job", "result", "worker")
    ]
    tables = {path.stem: parquet.read_table(path) for path in folder.iterdir()}
    assert {name: table.num_rows for name, table in tables.items()} == {
        "job": report.jobs,
        "attempt": report.attempts,
        "result": report.results,
        "batch": report.batches,
        "engine_sample": report.samples,
        "worker": report.workers,
        "dead_letter": report.dead_letters,
    }
    for kept in tables["job"].to_pylist():
        row = jobs[kept["id"]]
        assert [json.loads(kept[name]) for name in ("prompt", "message")] == [row.prompt, row.message]
        assert (kept["state"], kept["finished_at"]) == (str(row.state), row.finished_at)
        assert (kept["attempt"], kept["cancel_requested"]) == (row.attempt, row.cancel_requested)
    assert set(tables["job"].column_names) == {column.name for column in Job.__table__.columns}
    with pytest.raises(InvalidValueError, match=r"exists already .* Name a new folder"):
        prune(history, LIMIT, archive=folder, now=NOW)


def test_a_parquet_archive_that_is_broken_off_can_be_read(history, tmp_path):
    """The rows that were deleted before are there, whole: each piece is a file of its own."""
    folder = tmp_path / "old.parquet"
    with reading(history) as conn:
        before = set(conn.scalars(select(Job.id)))

    class PulledError(Exception):
        pass

    pieces = []

    class Breaking(ParquetArchive):
        def write(self):
            super().write()
            pieces.append(1)
            if len(pieces) == 3:
                raise PulledError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(archive_parquet, "ParquetArchive", Breaking)
        with pytest.raises(PulledError):
            prune(history, LIMIT, archive=folder, chunk=2, now=NOW)
    with reading(history) as conn:
        gone = before - set(conn.scalars(select(Job.id)))
    assert len(gone) == 4
    kept = parquet.read_table(folder / "job").column("id").to_pylist()
    assert set(kept) >= gone


def test_a_bad_archive_is_refused_before_anything_goes(history, tmp_path):
    for name, message in (
        ("old.csv", "must be a .jsonl"),
        ("no/such/folder.jsonl", "cannot be written"),
        ("no/such/folder.parquet", "cannot be made"),
    ):
        with pytest.raises(InvalidValueError, match=message):
            prune(history, LIMIT, archive=tmp_path / name, now=NOW)
    assert prune(history, LIMIT, dry_run=True).jobs == 8
