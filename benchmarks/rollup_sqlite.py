"""What a roll-up costs where the database is an SQLite file, and how long it keeps whoever writes waiting.

    python -m benchmarks.rollup_sqlite

fills a file with an hour of 100 jobs a minute and the samples of 32 workers, of which the last three minutes have more
jobs, and rolls these up one by one, as a worker does. SQLite computes in the worker's own process, whose Python goes on
meanwhile, and lets one write at a time: claims wait while the rows are stored, not while they are computed. Writes the
times into results/rollup_sqlite.txt.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

from rich.table import Table
from sqlalchemy import Connection, Engine, func, select

from benchmarks.report import keep
from models_db import rollups
from models_db.claims import ClaimItem, FinishItem, claim, finish
from models_db.jobs import NewJob, StoredResult
from models_db.migrate import upgrade
from models_db.rollup_tables import JobMinute
from models_db.rollups import MINUTE, advance_aside
from models_db.session import make_engine, transaction
from models_db.tables import JobState
from models_db.workers import NewSample, NewWorker, add_samples, register_worker

HOUR = datetime(2026, 3, 2, 21, tzinfo=UTC)
WORKERS = [f"w{number}" for number in range(32)]
MANY = (100, 1_000, 5_000, 10_000)  # jobs a minute
MEASURED = 3  # minutes
PIECE = 500  # jobs in a transaction


def main() -> None:
    """Measure each number of jobs a minute."""
    table = Table(title=f"one minute rolled up on SQLite, the mean of {MEASURED}: seconds")
    table.add_column("jobs a minute", justify="right")
    for name in ("all of it", "CPU of the process", "others' writes wait"):
        table.add_column(name, justify="right")
    data = {}
    for jobs in MANY:
        with tempfile.TemporaryDirectory() as folder:
            found = measure(Path(folder), jobs)
        data[str(jobs)] = found
        table.add_row(f"{jobs:,}", *(f"{found[name]:.2f}" for name in ("wall_s", "cpu_s", "locked_s")))
    keep("rollup_sqlite", "python -m benchmarks.rollup_sqlite", [table], {"a_minute": data})


def measure(folder: Path, jobs: int) -> dict[str, float]:
    """Fill a new file, roll up what is measured, and say how long a minute takes."""
    url = f"sqlite:///{folder / 'rollup.db'}"
    upgrade(url)
    engine = make_engine(url)
    with engine.begin() as conn:
        for worker in WORKERS:
            about = {
                "id": worker,
                "name": worker,
                "host": "node",
                "version": "0",
                "backend": "echo",
                "model": "m",
            }
            register_worker(conn, NewWorker(**about, pid=1, started_at=HOUR))
    quiet = 60 - MEASURED
    for minute in range(60):
        fill(engine, HOUR + minute * MINUTE, 100 if minute < quiet else jobs)
    first = HOUR + quiet * MINUTE
    while advance_aside(engine, first + rollups.SETTLE):
        pass
    with _storing_timed() as locked:
        wall, cpu = time.perf_counter(), time.process_time()
        for minute in range(1, MEASURED + 1):
            advance_aside(engine, first + minute * MINUTE + rollups.SETTLE)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    with engine.connect() as conn:
        rolled = conn.scalar(select(func.sum(JobMinute.succeeded)).where(JobMinute.started_at >= first))
    engine.dispose()
    if rolled != MEASURED * jobs:
        raise RuntimeError(f"{rolled} jobs are in the roll-ups of {MEASURED * jobs}: nothing was measured")
    return {
        name: value / MEASURED
        for name, value in (("wall_s", wall), ("cpu_s", cpu), ("locked_s", sum(locked)))
    }


def fill(engine: Engine, minute: datetime, jobs: int) -> None:
    """Jobs of eight classes that begin and end in the minute, and its samples."""
    zeros = {spec.name: 0 for spec in fields(NewSample)}
    samples = [
        NewSample(
            **(zeros | {"worker_id": worker, "interval_s": 5.0, "sampled_at": minute + timedelta(seconds=at)})
        )
        for worker in WORKERS
        for at in range(0, 60, 5)
    ]
    transaction(engine, partial(add_samples, samples=samples))
    for start in range(0, jobs, PIECE):
        numbers = range(start, min(start + PIECE, jobs))
        at = minute + timedelta(seconds=59 * start / jobs)
        transaction(engine, partial(_work, numbers=numbers, worker=WORKERS[start // PIECE % 32], at=at))


def _work(conn: Connection, *, numbers: range, worker: str, at: datetime) -> None:
    items = [
        ClaimItem(
            NewJob(
                id=f"{at:%H%M%S%f}-{n}",
                model=("large", "small")[n % 2],
                queue=f"tokenmill.{n % 2}",
                tenant=f"t{n % 4}",
                params={"max_tokens": 64},
                prompt={"prompt": "what is"},
                message={"body": ""},
                created_at=at - timedelta(seconds=n % 50),
            )
        )
        for n in numbers
    ]
    claims = claim(conn, items, worker, now=at)
    ends = [
        FinishItem(each.job_id, each.attempt, JobState.SUCCEEDED, _result(number))
        for number, each in enumerate(claims)
    ]
    finish(conn, ends, worker, now=at + timedelta(seconds=0.5))


def _result(number: int) -> StoredResult:
    return StoredResult(
        "an answer",
        "stop",
        prompt_tokens=50,
        completion_tokens=64,
        queue_time_s=number % 97 / 10,
        time_to_first_token_s=0.1 + number % 53 / 50,
        latency_s=1 + number % 89 / 8,
    )


@contextmanager
def _storing_timed() -> Iterator[list[float]]:
    """How long each roll-up in the block holds the file's write lock."""
    taken: list[float] = []
    store = rollups._store

    def timed(*args: Any, **options: Any) -> bool:
        began = time.perf_counter()
        try:
            return store(*args, **options)
        finally:
            taken.append(time.perf_counter() - began)

    rollups._store = timed
    try:
        yield taken
    finally:
        rollups._store = store


if __name__ == "__main__":
    main()
