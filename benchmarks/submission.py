"""How fast jobs are submitted, beside what the database alone takes; without a model.

    python -m benchmarks.submission
    python -m benchmarks.submission --jobs 5000 --repetitions 1

The same requests, into a database of their own and a private Redis: ready rows into the database alone, in
transactions of the client's size; ``Client.submit_each``, which checks, stores and publishes; ``bulk run --no-wait``,
which also reads them from a file. Then the first two again while one worker (echo) works through what is queued.
Each repetition does all of them in turn, so that whatever else the machine does strikes them alike.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from rich.table import Table
from sqlalchemy import Engine, text

from benchmarks import echo_jobs, report
from benchmarks.servers import database, postgresql_if_any
from benchmarks.worker_process import wait
from models_db import migrate
from workers.bulk import BulkRunner
from workers.bulk_input import LineOptions
from workers.bulk_source import validate_source
from workers.client import Client
from workers.private_redis import PrivateRedis

ALONE = "ready rows into the database alone"
CLIENT = "Client.submit_each"
FILE = "bulk run --no-wait"
_SLOTS = 64


def measure(
    jobs: int, folder: Path, broker_url: str, database_url: str, found: dict[tuple[str, bool], list[float]]
) -> None:
    """One repetition: jobs a second of each way, without and with a worker, added to ``found``."""
    settings = echo_jobs.settings_for(broker_url, database_url, _SLOTS)
    migrate.upgrade(database_url)
    lines = folder / "in.jsonl"
    line = {"prompt": echo_jobs.PROMPT, "max_tokens": echo_jobs.MAX_TOKENS}
    lines.write_text("".join(json.dumps({"custom_id": str(n)} | line) + "\n" for n in range(jobs)))
    with Client(settings) as client, ExitStack() as stack:
        engine = client.engine()
        echo_jobs.submit(client, 500)  # connections, compiled statements
        _empty(engine)
        found.setdefault((ALONE, False), []).append(echo_jobs.database_alone(client, engine, jobs))
        found.setdefault((CLIENT, False), []).append(jobs / _seconds(lambda: echo_jobs.submit(client, jobs)))
        _empty(engine)
        found.setdefault((FILE, False), []).append(jobs / _feeding_s(client, lines))
        _empty(engine)
        echo_jobs.submit(client, 10_000)
        running = stack.enter_context(echo_jobs.worker(settings, folder))
        wait(lambda: _succeeded(engine) > 0, running, "the first job to end")
        found.setdefault((CLIENT, True), []).append(jobs / _seconds(lambda: echo_jobs.submit(client, jobs)))


def _feeding_s(client: Client, lines: Path) -> float:
    """Seconds to make jobs of a file whose lines have been checked."""
    with lines.open("rb") as file:
        options = LineOptions(defaults={"model": client.settings.model})
        made, _ = validate_source(str(lines), file, options)
        runner = BulkRunner(client)
        batch_id = runner.create("benchmark", made)
        return _seconds(lambda: runner.feed(batch_id, made, file, bounded=False))


def _seconds(work: Callable[[], object]) -> float:
    began = time.monotonic()
    work()
    return time.monotonic() - began


def _succeeded(engine: Engine) -> int:
    with engine.connect() as connection:
        return connection.scalar(text("SELECT count(*) FROM job WHERE state = 'succeeded'")) or 0


def _empty(engine: Engine) -> None:
    with engine.begin() as connection:
        connection.execute(text("DELETE FROM job"))


def main(arguments: list[str] | None = None) -> int:
    """Run the measurement; see the module's text."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.submission", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--jobs", type=int, default=20_000)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--output", type=Path, default=report.RESULTS, help="folder for the results")
    options = parser.parse_args(arguments)
    found: dict[tuple[str, bool], list[float]] = {}
    load = os.getloadavg()[0]
    with postgresql_if_any() as postgresql:
        for _ in range(options.repetitions):
            with ExitStack() as stack:
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
                broker = stack.enter_context(PrivateRedis(folder)).url
                url = stack.enter_context(database(postgresql, folder))
                measure(options.jobs, folder, broker, url, found)
    where = "PostgreSQL" if postgresql else "SQLite"
    shown = Table(
        title=f"submission of {options.jobs:,} jobs into {where}; one-minute load {load:.1f} at the start"
    )
    for column in ("way", "worker beside it", "jobs/s (median, all)", "of the database alone"):
        shown.add_column(column, justify="left" if column == "way" else "right")
    alone = statistics.median(found[ALONE, False])
    for (way, worker), rates in found.items():
        middle = statistics.median(rates)
        listed = " ".join(f"{each:.0f}" for each in rates)
        shown.add_row(way, "yes" if worker else "no", f"{middle:,.0f} ({listed})", f"{middle / alone:.2f} x")
    command = " ".join(
        ["python -m benchmarks.submission", *(sys.argv[1:] if arguments is None else arguments)]
    )
    data = {
        "jobs": options.jobs,
        "load": load,
        "rates": [
            {"way": way, "worker": worker, "jobs_per_s": rates} for (way, worker), rates in found.items()
        ],
    }
    report.keep("submission", command, [shown], data, options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
