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
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

import redis
from rich.table import Table
from sqlalchemy import Engine, create_engine, func, make_url, select, text

from benchmarks import report
from benchmarks.urgent import Urgent, start_of, told
from models_db import migrate
from models_db.jobs import insert_jobs
from models_db.session import make_engine
from models_db.tables import Job, JobState
from tests.servers import ServerUnavailableError, server
from workers.client import Client
from workers.client.sync import Submission
from workers.demo import stop_group
from workers.payload import BULK_PRIORITY
from workers.private_redis import PrivateRedis
from workers.settings import Settings, load_settings

PROMPT = "the quick brown fox jumps over the lazy dog and runs away"
MAX_TOKENS = 32
TIMEOUT_S = 600.0
LOOK_S = 0.25
STILL_S = 60.0
_CHUNK = 500


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
    memory: list[
        tuple[int, float]
    ]  # bulk jobs done, and MiB of the worker's largest process then; each second
    urgent: list[Urgent]

    @property
    def done(self) -> int:
        """Bulk jobs that had ended at the last look."""
        return self.memory[-1][0]


# ------------------------------------------------------------------------------------------------------ systems


def tokenmill(jobs: int, folder: Path, broker_url: str, database_url: str, slots: int) -> Rate:
    """A Tokenmill worker with the echo backend."""
    settings = _settings(broker_url, database_url, slots)
    migrate.upgrade(database_url)
    with Client(settings) as client:
        _submit(client, jobs)
        engine = client.engine()
        ended = select(func.count(), func.min(Job.finished_at), func.max(Job.finished_at)).where(
            Job.state == JobState.SUCCEEDED
        )

        def done() -> tuple[int, datetime | None, datetime | None]:
            with engine.connect() as connection:
                count, first, last = connection.execute(ended).one()
                return count, first, last

        return _measure(_worker(settings, folder), jobs, done)


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
            echo.apply_async((PROMPT, MAX_TOKENS), connection=connection, ignore_result=False)
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
    settings = _settings(broker_url, database_url, slots)
    migrate.upgrade(database_url)
    with Client(settings) as client:
        engine = client.engine()
        alone = _database_alone(client, engine, min(queued, 10_000))
        began = time.monotonic()
        _submit(client, queued)
        submitted = queued / (time.monotonic() - began)
        ended = select(func.count()).where(Job.state == JobState.SUCCEEDED, Job.priority == BULK_PRIORITY)

        def count() -> int:
            with engine.connect() as connection:
                return connection.scalar(ended) or 0

        memory: list[tuple[int, float]] = []
        urgent: list[tuple[str, int, float]] = []
        with _worker(settings, folder) as worker:
            _wait(lambda: count() > 0, worker, "the first job to end")
            began = moved = looked = time.monotonic()
            while not memory or (memory[-1][0] < queued and (seconds is None or looked - began < seconds)):
                at = time.monotonic()
                job_id = client.submit(PROMPT, max_tokens=MAX_TOKENS, priority=0).id
                urgent.append((job_id, memory[-1][0] if memory else 0, time.monotonic() - at))
                time.sleep(1.0)
                worker.check()
                done, looked = count(), time.monotonic()
                if not memory or done > memory[-1][0]:
                    moved = looked
                elif looked - moved > STILL_S:
                    raise RuntimeError(f"no job has ended for {STILL_S:g} s; {done:,} of {queued:,} are done")
                memory.append((done, _rss_mib(worker.pid)))
            starts = [start_of(client, *one) for one in urgent]
    return Load(queued, submitted, alone, looked - began, memory, starts)


def _settings(broker_url: str, database_url: str, slots: int) -> Settings:
    return load_settings(
        broker_url=broker_url,
        database_url=database_url,
        backend="echo",
        model="echo",
        log_level="warning",
        engine={"max_num_seqs": slots, "max_num_batched_tokens": max(512, slots)},
    )


def _submit(client: Client, jobs: int) -> None:
    """Submit bulk jobs as ``tokenmill bulk run`` does."""
    request = {"model": "echo", "prompt": PROMPT, "max_tokens": MAX_TOKENS, "priority": BULK_PRIORITY}
    for _ in client.submit_each(request for _ in range(jobs)):
        pass


def _database_alone(client: Client, engine: Engine, jobs: int) -> float:
    """Rows a second of ready jobs in transactions of the client's size. They are removed again."""
    payload = client.payload({"model": "echo", "prompt": PROMPT, "max_tokens": MAX_TOKENS})
    rows = client.new_jobs([Submission(payload)] * jobs)
    began = time.monotonic()
    for start in range(0, jobs, _CHUNK):
        with engine.begin() as connection:
            insert_jobs(connection, rows[start : start + _CHUNK])
    rate = jobs / (time.monotonic() - began)
    with engine.begin() as connection:
        connection.execute(text("DELETE FROM job"))
    return rate


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


class WorkerProcess:
    """A worker and its log. The context stops it."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self._process = process
        self._log = log
        self.pid = process.pid

    def check(self) -> None:
        """Raise when it has ended."""
        if self._process.poll() is not None:
            tail = "\n".join(self._log.read_text(errors="replace").splitlines()[-10:])
            raise RuntimeError(
                f"the worker ended with {self._process.returncode}. Its log ends with:\n{tail}"
            )

    def __enter__(self) -> WorkerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        stop_group(self._process)


def _measure(worker: WorkerProcess, jobs: int, done: Done) -> Rate:
    """Wait until a worker has done all jobs; stops it."""
    with worker:
        _wait(lambda: done()[0] > 0, worker, "the first result")
        before, cpu = done()[0], _cpu_s(worker.pid)
        _wait(lambda: done()[0] >= jobs, worker, "the last result")
        after = _cpu_s(worker.pid)
        _, first, last = done()
    assert first is not None
    assert last is not None
    spent = None if cpu is None or after is None or before >= jobs else 1e3 * (after - cpu) / (jobs - before)
    return Rate(rate(jobs, first, last), spent)


def _wait(until: Callable[[], bool], worker: WorkerProcess, what: str) -> None:
    limit = time.monotonic() + TIMEOUT_S
    while not until():
        worker.check()
        if time.monotonic() > limit:
            raise RuntimeError(f"waited {TIMEOUT_S:g} s for {what}")
        time.sleep(LOOK_S)


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


def _processes(pid: int) -> list[list[str]]:
    """``/proc``'s numbers of a process and all below it, from its state on; none where there is no ``/proc``."""
    found: dict[int, list[str]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has just ended
            found[int(stat.parent.name)] = stat.read_text().rpartition(")")[2].split()
    tree = [pid] if pid in found else []
    for parent in tree:  # grows while it is walked
        tree.extend(child for child, numbers in found.items() if int(numbers[1]) == parent)
    return [found[each] for each in tree]


def _cpu_s(pid: int) -> float | None:
    """CPU seconds of a worker: its supervisor and its process."""
    ticks = [int(numbers[11]) + int(numbers[12]) for numbers in _processes(pid)]
    return sum(ticks) / os.sysconf("SC_CLK_TCK") if ticks else None


def _rss_mib(pid: int) -> float:
    """Resident memory of a worker's largest process."""
    pages = max((int(numbers[21]) for numbers in _processes(pid)), default=0)
    return float(pages * os.sysconf("SC_PAGE_SIZE") / 2**20)


def _worker(settings: Settings, folder: Path) -> WorkerProcess:
    slots = settings.engine.max_num_seqs
    variables = {
        "TOKENMILL_BROKER_URL": settings.broker_url,
        "TOKENMILL_DATABASE_URL": settings.database_url,
        "TOKENMILL_BACKEND": "echo",
        "TOKENMILL_MODEL": "echo",
        "TOKENMILL_LOG_LEVEL": settings.log_level,
        "TOKENMILL_ENGINE__MAX_NUM_SEQS": str(slots),
        "TOKENMILL_ENGINE__MAX_NUM_BATCHED_TOKENS": str(settings.engine.max_num_batched_tokens),
    }
    return start_process(["-m", "workers.cli", "worker", "--once"], variables, folder / "tokenmill.log")


def start_process(arguments: list[str], variables: dict[str, str], log: Path) -> WorkerProcess:
    """Start Python with these arguments and more variables; the context that it is stops it."""
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, *arguments],
            env=os.environ | variables,
            cwd=Path(__file__).resolve().parent.parent,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return WorkerProcess(process, log)


# --------------------------------------------------------------------------------------------------- databases


@contextmanager
def _postgresql() -> Iterator[str | None]:
    """A server's URL, or nothing where there is none."""
    with ExitStack() as stack:
        try:
            url: str | None = stack.enter_context(server("postgresql")).url
        except ServerUnavailableError as exc:
            print(f"SQLite stands in for PostgreSQL: {exc}", file=sys.stderr)
            url = None
        yield url


@contextmanager
def _database(on: str | None, folder: Path) -> Iterator[str]:
    """A new database with the server's own settings for durability; a file where there is no server."""
    if on is None:
        yield f"sqlite:///{folder / f'{secrets.token_hex(4)}.db'}"
        return
    name = f"tokenmill_bench_{secrets.token_hex(6)}"
    engine = make_engine(on).execution_options(isolation_level="AUTOCOMMIT")
    try:
        with engine.connect() as connection:
            connection.execute(text(f"CREATE DATABASE {name}"))
        yield make_url(on).set(database=name).render_as_string(hide_password=False)
        with engine.connect() as connection:
            connection.execute(text(f"DROP DATABASE {name} WITH (FORCE)"))
    finally:
        engine.dispose()


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
    with _postgresql() as postgresql:
        sql = "PostgreSQL" if postgresql else "SQLite"
        ours, in_redis, in_sql = "tokenmill", "celery, results in Redis", f"celery, results in {sql}"
        runs: dict[str, list[Rate]] = {ours: [], in_redis: [], in_sql: []}
        for _ in range(options.repetitions):
            for name, found in runs.items():
                with ExitStack() as stack:
                    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
                    broker = stack.enter_context(PrivateRedis(folder)).url
                    url = stack.enter_context(_database(postgresql, folder))
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
                url = stack.enter_context(_database(postgresql, folder))
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
