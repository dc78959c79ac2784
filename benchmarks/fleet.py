"""Jobs a second through Redis, a worker and SQL, without a model; plain Celery with threads as the peer.

    python -m benchmarks.fleet
    python -m benchmarks.fleet --jobs 1000 --queued 0        # the rates alone, quickly

The rates: every system gets the same prompts from a private Redis and echoes them in one worker process with the
same number of deliveries in flight. Ours commits each job to PostgreSQL and gives Celery its result in Redis, and
acknowledges after both. The peers are Celery's ``-P threads`` with its results in Redis, and with its results in
PostgreSQL. All jobs are queued before a worker starts; the rate is that between the first and the last result, and
the CPU time is the worker's own between two looks, so that neither start nor publisher counts.

Then, with many bulk jobs submitted through the client and queued: the rate of that submission beside what the
database alone takes, the worker's memory while it works through all of them (100,000 take about two minutes), and how
soon an urgent job starts meanwhile. ``--seconds`` ends it earlier.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

import redis
from rich.table import Table
from sqlalchemy import Engine, create_engine, func, make_url, select, text

from benchmarks import echo_jobs, report
from benchmarks.servers import database, postgresql_if_any
from benchmarks.urgent import Urgent, start_of, told
from benchmarks.worker_process import WorkerProcess, cpu_s, rss_mib, start_process, wait
from models_db import migrate
from models_db.tables import Job, JobState
from workers.client import Client
from workers.payload import BULK_PRIORITY
from workers.private_redis import PrivateRedis
from workers.settings import load_settings

STILL_S = 60.0


@dataclass(frozen=True, slots=True)
class Rate:
    """One run of one system."""

    jobs_per_s: float
    cpu_ms_per_job: float | None  # of the worker process; unknown where there is no /proc


@dataclass(frozen=True, slots=True)
class Load:
    """What was seen while a worker worked through many queued jobs."""

    queued: int
    submitted_per_s: float
    database_per_s: float  # the same rows, inserted by nobody else and published nowhere
    seconds: float  # from the first end to the last look
    # Bulk jobs done, and MiB of the worker's largest process then; each second.
    memory: list[tuple[int, float]]
    urgent: list[Urgent]

    @property
    def done(self) -> int:
        """Bulk jobs that had ended at the last look."""
        return self.memory[-1][0]


# ------------------------------------------------------------------------------------------------------ systems


def tokenmill(jobs: int, folder: Path, broker_url: str, database_url: str, slots: int) -> Rate:
    """A Tokenmill worker with the echo backend."""
    settings = echo_jobs.settings_for(broker_url, database_url, slots)
    migrate.upgrade(database_url)
    with Client(settings) as client:
        echo_jobs.submit(client, jobs)
        engine = client.engine()
        ended = select(func.count(), func.min(Job.finished_at), func.max(Job.finished_at)).where(
            Job.state == JobState.SUCCEEDED
        )

        def done() -> tuple[int, datetime | None, datetime | None]:
            with engine.connect() as connection:
                count, first, last = connection.execute(ended).one()
                return count, first, last

        return _measure(echo_jobs.worker(settings, folder), jobs, done)


def celery_threads(
    jobs: int, folder: Path, broker_url: str, database_url: str | None, threads: int, prefetch: int
) -> Rate:
    """A plain Celery worker with ``-P threads``; its results go to the database, or to the broker's Redis."""
    from benchmarks.celery_peer import BROKER, PREFETCH, RESULTS, echo

    results = broker_url if database_url is None else f"db+{_celery_url(database_url)}"
    app = echo.app
    app.conf.broker_url = broker_url
    with app.connection_for_write() as connection:
        for _ in range(jobs):
            echo.apply_async(
                (echo_jobs.PROMPT, echo_jobs.MAX_TOKENS), connection=connection, ignore_result=False
            )
    variables = {
        BROKER: broker_url,
        RESULTS: results,
        PREFETCH: str(max(1, prefetch // threads)),
        "C_FORCE_ROOT": "1",
    }
    command = [
        "-m",
        "celery",
        "-A",
        "benchmarks.celery_peer:app",
        "worker",
        "-P",
        "threads",
        "-c",
        str(threads),
    ]
    worker = start_process(
        [*command, "--without-gossip", "--loglevel", "warning"], variables, folder / "celery.log"
    )
    if database_url is None:
        with redis.Redis.from_url(broker_url) as store:
            return _measure(worker, jobs, lambda: _done_in_redis(store, jobs))
    engine = create_engine(_celery_url(database_url))
    try:
        return _measure(worker, jobs, lambda: _done_in_sql(engine))
    finally:
        engine.dispose()


def under_load(
    queued: int, seconds: float | None, folder: Path, broker_url: str, database_url: str, slots: int
) -> Load:
    """Queue many bulk jobs, let a worker work through them, and submit an urgent one each second.

    Until all are done, or for so many seconds.
    """
    settings = echo_jobs.settings_for(broker_url, database_url, slots)
    migrate.upgrade(database_url)
    with Client(settings) as client:
        engine = client.engine()
        alone = echo_jobs.database_alone(client, engine, min(queued, 10_000))
        began = time.monotonic()
        echo_jobs.submit(client, queued)
        submitted = queued / (time.monotonic() - began)
        ended = select(func.count()).where(Job.state == JobState.SUCCEEDED, Job.priority == BULK_PRIORITY)

        def count() -> int:
            with engine.connect() as connection:
                return connection.scalar(ended) or 0

        memory: list[tuple[int, float]] = []
        urgent: list[tuple[str, int, float]] = []
        with echo_jobs.worker(settings, folder) as worker:
            wait(lambda: count() > 0, worker, "the first job to end")
            began = moved = looked = time.monotonic()
            while not memory or (memory[-1][0] < queued and (seconds is None or looked - began < seconds)):
                at = time.monotonic()
                job_id = client.submit(echo_jobs.PROMPT, max_tokens=echo_jobs.MAX_TOKENS, priority=0).id
                urgent.append((job_id, memory[-1][0] if memory else 0, time.monotonic() - at))
                time.sleep(1.0)
                worker.check()
                done, looked = count(), time.monotonic()
                if not memory or done > memory[-1][0]:
                    moved = looked
                elif looked - moved > STILL_S:
                    raise RuntimeError(f"no job has ended for {STILL_S:g} s; {done:,} of {queued:,} are done")
                memory.append((done, rss_mib(worker.pid)))
            starts = [start_of(client, *one) for one in urgent]
    return Load(queued, submitted, alone, looked - began, memory, starts)


# ------------------------------------------------------------------------------------------------ measuring


def rate(jobs: int, first: datetime, last: datetime) -> float:
    """Jobs a second between the first and the last result.

    Raises:
        RuntimeError: all came at the same moment.
    """
    if last <= first:
        raise RuntimeError(f"{jobs} jobs ended at one moment, which gives no rate. Raise --jobs")
    return jobs / (last - first).total_seconds()


Done = Callable[[], tuple[int, datetime | None, datetime | None]]


def _measure(worker: WorkerProcess, jobs: int, done: Done) -> Rate:
    """Wait until a worker has done all jobs; stops it."""
    with worker:
        wait(lambda: done()[0] > 0, worker, "the first result")
        before, cpu = done()[0], cpu_s(worker.pid)
        wait(lambda: done()[0] >= jobs, worker, "the last result")
        after = cpu_s(worker.pid)
        _, first, last = done()
    assert first is not None
    assert last is not None
    spent = None if cpu is None or after is None or before >= jobs else 1e3 * (after - cpu) / (jobs - before)
    return Rate(rate(jobs, first, last), spent)


def _done_in_redis(store: redis.Redis, jobs: int) -> tuple[int, datetime | None, datetime | None]:
    keys = list(store.scan_iter("celery-task-meta-*", count=10_000))
    if len(keys) < jobs:
        return len(keys), None, None
    times = [datetime.fromisoformat(json.loads(raw)["date_done"]) for raw in store.mget(keys) if raw]
    return len(keys), min(times), max(times)


def _done_in_sql(engine: Engine) -> tuple[int, datetime | None, datetime | None]:
    if engine.dialect.name == "sqlite":
        present = "select count(*) from sqlite_master where name = 'celery_taskmeta'"
    else:
        present = "select count(*) from information_schema.tables where table_name = 'celery_taskmeta'"
    with engine.connect() as sql:
        if not sql.scalar(text(present)):
            return 0, None, None
        count, *times = sql.execute(
            text(
                "select count(*), min(date_done), max(date_done) from celery_taskmeta where status = 'SUCCESS'"
            )
        ).one()
    first, last = (datetime.fromisoformat(one) if isinstance(one, str) else one for one in times)
    return count, first, last


def _celery_url(url: str) -> str:
    return (
        make_url(url).set(drivername="postgresql+psycopg").render_as_string(False) if "post" in url else url
    )


# --------------------------------------------------------------------------------------------------------- main


def main(arguments: list[str] | None = None) -> int:
    """Run the measurement; see the module's text."""
    parser = argparse.ArgumentParser(prog="benchmarks.fleet", description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--jobs", type=int, default=5000, help="jobs of each system; a fifth where it is slow"
    )
    parser.add_argument("--slots", type=int, default=64, help="slots of the echo backend")
    parser.add_argument("--threads", type=int, default=16, help="threads of the Celery worker")
    parser.add_argument(
        "--queued", type=int, default=100_000, help="bulk jobs queued for the load; 0 skips it"
    )
    parser.add_argument("--seconds", type=float, help="how long the load lasts; until all are done")
    parser.add_argument("--repetitions", type=int, default=1)
    parser.add_argument("--output", type=Path, default=report.RESULTS, help="folder for the results")
    options = parser.parse_args(arguments)
    prefetch = options.slots + load_settings(model="echo").headroom(options.slots)
    load: Load | None = None
    with postgresql_if_any() as postgresql:
        sql = "PostgreSQL" if postgresql else "SQLite"
        ours, in_redis, in_sql = "tokenmill", "celery, results in Redis", f"celery, results in {sql}"
        runs: dict[str, list[Rate]] = {ours: [], in_redis: [], in_sql: []}
        for _ in range(options.repetitions):
            for name, found in runs.items():
                with ExitStack() as stack:
                    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
                    broker = stack.enter_context(PrivateRedis(folder)).url
                    url = stack.enter_context(database(postgresql, folder))
                    if name == ours:
                        one = tokenmill(options.jobs, folder, broker, url, options.slots)
                    else:
                        jobs = options.jobs if name == in_redis else max(100, options.jobs // 5)
                        results = None if name == in_redis else url
                        one = celery_threads(jobs, folder, broker, results, options.threads, prefetch)
                found.append(one)
                print(f"{name}: {one.jobs_per_s:.0f} jobs/s", file=sys.stderr)
        if options.queued:
            with ExitStack() as stack:
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
                broker = stack.enter_context(PrivateRedis(folder)).url
                url = stack.enter_context(database(postgresql, folder))
                load = under_load(options.queued, options.seconds, folder, broker, url, options.slots)
    title = f"echo jobs from Redis, one worker process, {prefetch} deliveries in flight; ours into {sql}"
    tables = [_rates_table(title, runs)]
    if load is not None:
        tables.append(_load_table(load))
    command = " ".join(["python -m benchmarks.fleet", *(sys.argv[1:] if arguments is None else arguments)])
    data = {
        "jobs": options.jobs,
        "rates": {name: [asdict(one) for one in found] for name, found in runs.items()},
        "load": None if load is None else asdict(load),
    }
    report.keep("fleet", command, tables, data, options.output)
    return 0


def _rates_table(title: str, runs: dict[str, list[Rate]]) -> Table:
    shown = Table(title=title)
    for column in ("system", "jobs/s (median, all)", "CPU ms a job", "ours is"):
        shown.add_column(column, justify="left" if column == "system" else "right")
    middle = {name: statistics.median(one.jobs_per_s for one in found) for name, found in runs.items()}
    ours = next(iter(middle.values()))
    for name, found in runs.items():
        listed = " ".join(f"{one.jobs_per_s:.0f}" for one in found)
        cpu = [one.cpu_ms_per_job for one in found if one.cpu_ms_per_job is not None]
        shown.add_row(
            name,
            f"{middle[name]:.0f} ({listed})",
            f"{statistics.median(cpu):.2f}" if cpu else "unknown",
            f"{ours / middle[name]:.2f} x",
        )
    return shown


def course(memory: list[tuple[int, float]], points: int = 10) -> list[tuple[int, float]]:
    """The first look, and the first after each further tenth of what was done: whether growth goes on or ends."""
    last = memory[-1][0]
    marks = [last * number / points for number in range(points + 1)]
    picked = [next(look for look in memory if look[0] >= mark) for mark in marks]
    return list(dict.fromkeys(picked))


def _load_table(load: Load) -> Table:
    shown = Table(title=f"{load.queued:,} bulk jobs queued")
    for column in ("what", "measured"):
        shown.add_column(column)
    shown.add_row("submitted by the client, committed and published", f"{load.submitted_per_s:,.0f} jobs/s")
    shown.add_row("the same rows into the database alone", f"{load.database_per_s:,.0f} rows/s")
    shown.add_row("done by the worker meanwhile", f"{load.done:,} jobs in {load.seconds:.0f} s")
    for done, mib in course(load.memory):
        shown.add_row(f"worker's memory after {done:,} jobs", f"{mib:.0f} MiB")
    shown.add_row("worker's memory, the most", f"{max(mib for _, mib in load.memory):.0f} MiB")
    for what, value in told(load.urgent):
        shown.add_row(what, value)
    return shown


if __name__ == "__main__":
    sys.exit(main())
