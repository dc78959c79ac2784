"""Jobs a second through Redis, a worker and SQL, without a model; plain Celery with threads as the peer.

    python -m benchmarks.fleet
    python -m benchmarks.fleet --jobs 1000

Both get the same prompts from a private Redis, echo them in one worker process and commit each result to a
SQLite file of its own before they acknowledge it. All jobs are queued before the worker starts, and the rate is
that between the first and the last result in the database, so that neither the start nor the publisher counts.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path

import redis
from rich.table import Table
from sqlalchemy import Engine, create_engine, func, select, text

from benchmarks import report
from models_db import migrate
from models_db.ids import uuid7
from models_db.jobs import insert_jobs, mark_published
from models_db.records import NewJob
from models_db.session import make_engine
from models_db.tables import Job, JobState
from workers.demo import stop_group
from workers.payload import GeneratePayload, build_message, publish, queue_for
from workers.private_redis import PrivateRedis
from workers.settings import load_settings

PROMPT = "the quick brown fox jumps over the lazy dog and runs away"
MAX_TOKENS = 32
TIMEOUT_S = 600.0
_CHUNK = 500


def tokenmill(jobs: int, folder: Path, broker_url: str, slots: int) -> float:
    """Jobs a second of a Tokenmill worker with the echo backend."""
    url = f"sqlite:///{folder / 'tokenmill.db'}"
    settings = load_settings(
        broker_url=broker_url,
        database_url=url,
        backend="echo",
        model="echo",
        engine={"max_num_seqs": slots, "max_num_batched_tokens": max(512, slots)},
    )
    migrate.upgrade(url)
    engine = make_engine(url)
    payload = GeneratePayload.parse({"model": "echo", "prompt": PROMPT, "max_tokens": MAX_TOKENS})
    with redis.Redis.from_url(broker_url) as server:
        for start in range(0, jobs, _CHUNK):
            ids = [str(uuid7()) for _ in range(min(_CHUNK, jobs - start))]
            messages = {job_id: build_message(job_id, payload, settings) for job_id in ids}
            rows = [
                NewJob(
                    id=job_id,
                    model="echo",
                    queue=queue_for("echo"),
                    params=payload.params(),
                    prompt=payload.prompt_json(),
                    message=messages[job_id],
                    priority=payload.priority,
                )
                for job_id in ids
            ]
            with engine.begin() as connection:
                insert_jobs(connection, rows)
            publish(server.pipeline(), messages.values())
            with engine.begin() as connection:
                mark_published(connection, ids)
    variables = {
        "TOKENMILL_BROKER_URL": broker_url,
        "TOKENMILL_DATABASE_URL": url,
        "TOKENMILL_BACKEND": "echo",
        "TOKENMILL_MODEL": "echo",
        "TOKENMILL_ENGINE__MAX_NUM_SEQS": str(slots),
        "TOKENMILL_ENGINE__MAX_NUM_BATCHED_TOKENS": str(max(512, slots)),
    }
    ended = select(func.count()).where(Job.state == JobState.SUCCEEDED)
    times = select(func.min(Job.finished_at), func.max(Job.finished_at)).where(
        Job.state == JobState.SUCCEEDED
    )

    def done() -> int:
        with engine.connect() as connection:
            return connection.scalar(ended) or 0

    try:
        _run_worker(
            ["-m", "workers.cli", "worker", "--once"], variables, folder / "tokenmill.log", done, jobs
        )
        with engine.connect() as connection:
            first, last = connection.execute(times).one()
        if first is None or last is None:
            raise RuntimeError("no job has an end")
        return rate(jobs, first, last)
    finally:
        engine.dispose()


def celery_threads(jobs: int, folder: Path, broker_url: str, threads: int) -> float:
    """Jobs a second of a plain Celery worker with ``-P threads``."""
    from benchmarks.celery_peer import BROKER, RESULTS, echo

    results = f"sqlite:///{folder / 'celery.db'}"
    app = echo.app
    app.conf.broker_url = broker_url
    with app.connection_for_write() as connection:
        for _ in range(jobs):
            echo.apply_async((PROMPT, MAX_TOKENS), connection=connection, ignore_result=False)
    engine = create_engine(results, connect_args={"timeout": 60})
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
    variables = {BROKER: broker_url, RESULTS: f"db+{results}", "C_FORCE_ROOT": "1"}
    try:
        _run_worker(
            [*command, "--loglevel", "warning"],
            variables,
            folder / "celery.log",
            lambda: _celery_done(engine),
            jobs,
        )
        with engine.connect() as sql:
            first, last = sql.execute(
                text("select min(date_done), max(date_done) from celery_taskmeta")
            ).one()
        return rate(jobs, datetime.fromisoformat(first), datetime.fromisoformat(last))
    finally:
        engine.dispose()


def rate(jobs: int, first: datetime, last: datetime) -> float:
    """Jobs a second between the first and the last result.

    Raises:
        RuntimeError: all came at the same moment.
    """
    if last <= first:
        raise RuntimeError(f"{jobs} jobs ended at one moment, which gives no rate. Raise --jobs")
    return jobs / (last - first).total_seconds()


def _celery_done(engine: Engine) -> int:
    with engine.connect() as sql:
        if not sql.scalar(text("select count(*) from sqlite_master where name = 'celery_taskmeta'")):
            return 0
        return int(sql.scalar(text("select count(*) from celery_taskmeta where status = 'SUCCESS'")) or 0)


def _run_worker(
    arguments: list[str], variables: dict[str, str], log: Path, done: Callable[[], int], jobs: int
) -> None:
    """Start a worker, wait until it has stored every result, and stop it."""
    root = Path(__file__).resolve().parent.parent
    with log.open("wb") as file:
        worker = subprocess.Popen(
            [sys.executable, *arguments],
            env=os.environ | variables,
            cwd=root,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        limit = time.monotonic() + TIMEOUT_S
        while (count := done()) < jobs:
            if worker.poll() is not None or time.monotonic() > limit:
                tail = "\n".join(log.read_text(errors="replace").splitlines()[-10:])
                raise RuntimeError(f"the worker did {count} of {jobs} jobs. Its log ends with:\n{tail}")
            time.sleep(0.25)
    finally:
        stop_group(worker)


def main(arguments: list[str] | None = None) -> int:
    """Run the measurement; see the module's text."""
    parser = argparse.ArgumentParser(prog="benchmarks.fleet", description=__doc__.partition("\n")[0])
    parser.add_argument("--jobs", type=int, default=3000)
    parser.add_argument("--slots", type=int, default=64, help="slots of the echo backend")
    parser.add_argument("--threads", type=int, default=16, help="threads of the Celery worker")
    parser.add_argument("--repetitions", type=int, default=1)
    parser.add_argument("--output", type=Path, default=report.RESULTS, help="folder for the results")
    options = parser.parse_args(arguments)
    rates: dict[str, list[float]] = {"tokenmill, echo": [], f"celery, {options.threads} threads": []}
    ours, peer = rates
    for _ in range(options.repetitions):
        for name in (ours, peer):
            with ExitStack() as stack:
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
                server = stack.enter_context(PrivateRedis(folder))
                if name == ours:
                    found = tokenmill(options.jobs, folder, server.url, options.slots)
                else:
                    found = celery_threads(options.jobs, folder, server.url, options.threads)
            rates[name].append(found)
            print(f"{name}: {found:.0f} jobs/s", file=sys.stderr)
    shown = Table(title=f"{options.jobs} echo jobs through Redis into SQLite, one worker process")
    for column in ("system", "jobs/s (median, all)", "x celery"):
        shown.add_column(column, justify="left" if column == "system" else "right")
    middle = {name: statistics.median(each) for name, each in rates.items()}
    for name, each in rates.items():
        listed = " ".join(f"{one:.0f}" for one in each)
        shown.add_row(name, f"{middle[name]:.0f} ({listed})", f"{middle[name] / middle[peer]:.2f}")
    command = " ".join(["python -m benchmarks.fleet", *(sys.argv[1:] if arguments is None else arguments)])
    report.keep("fleet", command, [shown], {"jobs": options.jobs, "jobs_per_s": rates}, options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
