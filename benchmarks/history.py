"""How long the documented queries take on a large history, and what keeping the history costs a worker.

    python -m benchmarks.history
    python -m benchmarks.history --server postgresql://USER@HOST/DATABASE

makes a database ``tokenmill_history`` there with a year of roll-ups of 32 workers, 30 days of their samples (one every
five seconds: 16.6 million) and five million jobs, asks every question of docs/queries.md, writes the times into
results/history.txt, and drops the database again. It needs about 25 GB of disk for the while. ``--scale 0.01`` makes a
hundredth of the jobs and days, ``--keep`` keeps the database, ``--reuse`` asks one that was kept.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import fields
from datetime import UTC, datetime, timedelta
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.table import Table
from sqlalchemy import Engine, make_url, text

from benchmarks.report import keep
from benchmarks.servers import add_server_option, administer, postgresql
from models_db.migrate import upgrade
from models_db.rollups import advance, floor_minute, reopen
from models_db.session import make_engine, transaction
from models_db.workers import NewSample, add_samples
from tests.answers import questions
from tests.guides import queries

DATABASE = "tokenmill_history"
END = "2026-03-05 12:00:00+00"  # that of the sample history, so that its questions find something
WORKERS = 32
LIMIT_MS = 200
REPETITIONS = 5
SIDE_BY_SIDE = 4  # connections that fill
TABLES = (
    "engine_sample",
    "result",
    "attempt",
    "throughput_minute",
    "throughput_hour",
    "job_minute",
    "latency_minute",
    "job_hour",
    "latency_hour",
    "job",
    "batch",
    "job_class",
    "worker",
    "dead_letter",
)

# Eight classes of jobs on two models; each worker has a new incarnation every 30 days.
CLASSES = """
INSERT INTO job_class (id, model, queue, tenant, priority)
SELECT k, CASE WHEN k % 2 = 0 THEN 'large' ELSE 'small' END,
       CASE WHEN k % 2 = 0 THEN 'tokenmill.large' ELSE 'tokenmill.small' END,
       (ARRAY['web', 'search', 'reports', 'mail'])[1 + (k - 1) / 2], CASE WHEN k <= 2 THEN 1 ELSE 5 END
FROM generate_series(1, 8) AS k
"""
FLEET = """
INSERT INTO worker (id, name, host, pid, version, backend, device, model, dtype, slots, state, heartbeat, started_at,
                    heartbeat_at, stopped_at, config)
SELECT lpad(w::text, 4, '0') || '-0000-7000-8000-' || lpad(i::text, 15, '0'), 'gpu-' || w, 'node-' || w / 8, 1,
       '0.1.0', 'async', 'cuda:' || w % 8, CASE WHEN w % 2 = 0 THEN 'large' ELSE 'small' END, 'bfloat16',
       CASE WHEN i = 0 THEN 32 ELSE 16 END, CASE WHEN i = 0 THEN 'online' ELSE 'stopped' END, 1,
       TIMESTAMPTZ '{end}' - (i + 1) * INTERVAL '30 days', TIMESTAMPTZ '{end}' - i * INTERVAL '30 days',
       CASE WHEN i = 0 THEN NULL ELSE TIMESTAMPTZ '{end}' - i * INTERVAL '30 days' END, '{{"block_size": 16}}'
FROM generate_series(1, {workers}) AS w, generate_series(0, 12) AS i
"""
# Some have died lately, and some messages could not be read.
DEATHS = """
INSERT INTO worker (id, name, host, pid, version, backend, device, model, dtype, slots, state, heartbeat, started_at,
                    heartbeat_at, stopped_at, config)
SELECT {worker}, 'gpu-' || w, 'node-' || w / 8, 1, '0.1.0', 'async', 'cuda:' || w % 8, 'large', 'bfloat16', 32,
       'dead', 1, TIMESTAMPTZ '{end}' - INTERVAL '3 days', TIMESTAMPTZ '{end}' - w * INTERVAL '1 hour',
       TIMESTAMPTZ '{end}' - w * INTERVAL '1 hour', '{{"block_size": 16}}'
FROM generate_series(4, {workers}, 4) AS w
"""
LETTERS = """
INSERT INTO dead_letter (id, queue, received_at, worker_id, reason, message)
SELECT lpad(to_hex(n), 8, '0') || '-0000-7000-8000-000000000001', 'tokenmill.large',
       TIMESTAMPTZ '{end}' - n * INTERVAL '7 minutes', {worker}, 'it is no JSON', repeat('message ', 35)
FROM (SELECT n, 1 + n % {workers} AS w FROM generate_series(1, 5000) AS n) AS numbers
"""
OF_WORKER = "lpad(w::text, 4, '0') || '-0000-7000-8000-' || lpad({incarnation}::text, 15, '0')"
SAMPLES = """
INSERT INTO engine_sample (worker_id, sampled_at, interval_s, running, waiting, prompt_tokens, cached_tokens,
                           generated_tokens, steps, requests_finished, requests_failed, preemptions, busy_s,
                           prepare_s, active_fraction, kv_used_fraction)
SELECT {worker}, t, 5, 16 + w % 8, (s / 100) % 12, 900 + s % 100, 300, 4000 + (s * 7 + w) % 900, 320, 2, 0, 0,
       4.9, 0.05, 0.98, 0.5
FROM (SELECT t, EXTRACT(EPOCH FROM t)::bigint / 5 AS s
      FROM generate_series(TIMESTAMPTZ '{start}', TIMESTAMPTZ '{stop}' - INTERVAL '5 s', INTERVAL '5 s') AS t
     ) AS times, generate_series(1, {workers}) AS w
"""
THROUGHPUT = """
INSERT INTO throughput_{span} (started_at, worker_id, {dates} samples, max_running, max_waiting, sampled_s, active_s,
                               working_s, prepare_s, running_s, waiting_s, kv_used_s, prompt_tokens, cached_tokens,
                               generated_tokens, steps, requests_finished, requests_failed, preemptions)
SELECT t, {worker}, {values} {n} * 12, 24, 12, {n} * 60, {n} * {busy}, {n} * 60, {n} * 0.6, {n} * 60 * (16 + w % 8),
       {n} * 60 * (EXTRACT(DAY FROM t)::int % 12), {n} * 30, {n} * 11400, {n} * 3600, {n} * (53000 + w * 40),
       {n} * 3840, {n} * 24, 0, {n} / 30
FROM generate_series(TIMESTAMPTZ '{start}', TIMESTAMPTZ '{stop}' - INTERVAL '1 {span}', INTERVAL '1 {span}') AS t,
     generate_series(1, {workers}) AS w
"""
ROLLED_JOBS = """
INSERT INTO job_{span} (started_at, class_id, {dates} succeeded, failed, cancelled, expired, released, lost,
                        without_attempt, retried, timed, first_tokens, prompt_tokens, cached_tokens, completion_tokens,
                        latency_s, queue_s, first_token_s)
SELECT t, k, {values} {n} * 14, {n} / 6, {n} / 8, {n} / 12, 0, {n} / 40, {n} / 20, {n} / 40, {n} * 14, {n} * 14,
       {n} * 5000, {n} * 1200, {n} * 9000, {n} * 140.0, {n} * 30.0, {n} * 3.0
FROM generate_series(TIMESTAMPTZ '{start}', TIMESTAMPTZ '{stop}' - INTERVAL '1 {span}', INTERVAL '1 {span}') AS t,
     generate_series(1, 8) AS k
"""
LATENCIES = """
INSERT INTO latency_{span} (started_at, class_id, metric, upper_ms, jobs)
SELECT t, k, m, u, {n} * 14 / {buckets} + 1
FROM generate_series(TIMESTAMPTZ '{start}', TIMESTAMPTZ '{stop}' - INTERVAL '1 {span}', INTERVAL '1 {span}') AS t,
     generate_series(1, 8) AS k, unnest(ARRAY['first_token', 'latency', 'queue']) AS m,
     unnest((ARRAY[100, 120, 150, 180, 220, 270, 330, 390, 470, 560, 680, 820, 1000, 1200, 1500])[1:{buckets}]) AS u
"""
# Seconds a minute that a device was busy: some hour of each worker it stood idle, though jobs waited.
BUSY = "CASE WHEN (EXTRACT(EPOCH FROM t)::bigint / 3600 + 7 * w) % 197 = 0 THEN 9 ELSE 58 END"
# Jobs come evenly; four in ten belong to one of ten batches a day. Attempts and results are made with them.
JOBS = """
WITH made AS (
INSERT INTO job (id, batch_id, position, custom_id, tenant, model, queue, priority, state, attempt, owner,
                 cancel_requested, created_at, published_at, started_at, finished_at, error_type, deaths, params,
                 prompt, message)
SELECT id, batch_id, CASE WHEN batch_id IS NULL THEN NULL ELSE n END,
       CASE WHEN batch_id IS NULL THEN NULL ELSE 'line-' || n END,
       (ARRAY['web', 'search', 'reports', 'mail'])[1 + (k - 1) / 2],
       CASE WHEN k % 2 = 0 THEN 'large' ELSE 'small' END,
       CASE WHEN k % 2 = 0 THEN 'tokenmill.large' ELSE 'tokenmill.small' END, CASE WHEN k <= 2 THEN 1 ELSE 5 END,
       state, CASE WHEN state = 'queued' THEN 0 WHEN n % 400 = 0 THEN 2 ELSE 1 END,
       CASE WHEN state = 'running' THEN {worker} END, FALSE, at, at,
       CASE WHEN state <> 'queued' THEN at + INTERVAL '2 seconds' END,
       CASE WHEN state NOT IN ('queued', 'running') THEN at + (5 + n % 20) * INTERVAL '0.5 s' END,
       CASE WHEN state = 'failed' THEN 'context_exceeded' END,
       CASE WHEN state <> 'queued' AND n % 400 = 0 THEN 1 ELSE 0 END, '{{"max_tokens": 1500}}',
       ('{{"prompt": "' || repeat('what is ', 25) || n || '"}}')::json,
       ('{{"body": "' || repeat('message ', 35) || n || '"}}')::json
FROM (SELECT n, 1 + n % 8 AS k, 1 + n % {workers} AS w,
             lpad(to_hex(n), 8, '0') || '-0000-7000-8000-000000000000' AS id,
             TIMESTAMPTZ '{start}' + n * {step} * INTERVAL '1 second' AS at,
             CASE WHEN n % 10 < 4 THEN 'batch-' || n * 10 / {per_day} END AS batch_id,
             CASE WHEN n >= {jobs} - 2000 THEN 'queued' WHEN n >= {jobs} - 2500 THEN 'running'
                  WHEN n % 100 = 7 THEN 'failed' WHEN n % 100 = 13 THEN 'cancelled' WHEN n % 200 = 21 THEN 'expired'
                  ELSE 'succeeded' END AS state
      FROM generate_series({first}, {last}) AS n) AS numbers
RETURNING id, state, attempt, started_at, finished_at, hashtext(id) & 65535 AS h, 1 + (hashtext(id) & 31) AS w
), tried AS (
INSERT INTO attempt (job_id, number, worker_id, started_at, ended_at, outcome, error)
SELECT id, a, {worker}, started_at, CASE WHEN a = attempt THEN finished_at ELSE started_at END,
       CASE WHEN a < attempt THEN 'lost' WHEN state = 'running' THEN NULL ELSE state END,
       CASE WHEN a < attempt THEN 'the worker died' END
FROM made CROSS JOIN LATERAL generate_series(1, attempt) AS a
)
INSERT INTO result (job_id, choice, finish_reason, prompt_tokens, completion_tokens, cached_tokens, seed, queue_time_s,
                    time_to_first_token_s, latency_s, created_at, text)
SELECT id, 0, 'stop', 200 + h % 300, 100 + h % 1000, 50, h, 0.02, 0.1 + (h % 100) / 500.0, 0.5 + (h % 200) / 20.0,
       finished_at, repeat('an answer ', 20)
FROM made WHERE state = 'succeeded'
"""
BATCHES = """
INSERT INTO batch (id, name, state, total, succeeded, failed, cancelled, expired, created_at, finished_at)
SELECT 'batch-' || b, 'batch-' || b, CASE WHEN b < {last} THEN 'completed' ELSE 'in_progress' END, {total},
       CASE WHEN b < {last} THEN {total} ELSE 0 END, 0, 0, 0, TIMESTAMPTZ '{start}' + b * INTERVAL '2.4 hours',
       CASE WHEN b < {last} THEN TIMESTAMPTZ '{start}' + (b + 1) * INTERVAL '2.4 hours' + b * INTERVAL '1 s' END
FROM generate_series(0, {last}) AS b
"""


def main() -> None:
    """Read the options and run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_server_option(parser)
    parser.add_argument("--scale", type=float, default=1.0, help="of the jobs and the days")
    parser.add_argument("--keep", action="store_true", help="do not drop the database")
    parser.add_argument("--reuse", action="store_true", help="ask the database that was kept")
    options = parser.parse_args()
    if (options.keep or options.reuse) and options.server is None:
        parser.error("--keep and --reuse need --server: what is kept must be found again")
    with postgresql(options.server) as server:
        run(server, options)


def run(server: str, options: argparse.Namespace) -> None:
    """Make, ask, write down, drop."""
    url = make_url(server).set(database=DATABASE).render_as_string(hide_password=False)
    if not options.reuse:
        administer(server, f"DROP DATABASE IF EXISTS {DATABASE}", f"CREATE DATABASE {DATABASE}")
    engine = make_engine(url)
    try:
        if not options.reuse:
            upgrade(url)
            fill(engine, options.scale)
        tables, data = measure(engine)
        if options.scale == 1.0:
            keep("history", "python -m benchmarks.history", tables, data)
        else:
            for table in tables:
                Console().print(table)
    finally:
        engine.dispose()
        if not options.keep:
            administer(server, f"DROP DATABASE IF EXISTS {DATABASE} WITH (FORCE)")


def fill(engine: Engine, scale: float) -> None:
    """All rows, without the indexes first."""
    end = datetime.fromisoformat(END)
    days, year = max(2, round(30 * scale)), max(3, round(365 * scale))
    jobs = round(5_000_000 * scale)
    start, year_start = end - timedelta(days=days), end - timedelta(days=year)
    common: dict[str, Any] = {"workers": WORKERS, "end": END}
    now_worker = OF_WORKER.format(incarnation="0")
    then_worker = OF_WORKER.format(
        incarnation=f"GREATEST(0, CEIL(EXTRACT(EPOCH FROM TIMESTAMPTZ '{END}' - t) / 2592000.0)::int - 1)"
    )

    def run(label: str, *statements: str) -> None:
        began = time.perf_counter()
        with engine.begin() as conn:
            conn.exec_driver_sql("SET LOCAL maintenance_work_mem = '512MB'")
            conn.exec_driver_sql("SET LOCAL session_replication_role = replica")  # no look-ups of parents
            for statement in statements:
                conn.exec_driver_sql(statement.replace("%", "%%"))
        print(f"{label:<28} {time.perf_counter() - began:7.1f} s", flush=True)

    with _without_indexes(engine, run), ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        run("unlogged", *(f"ALTER TABLE {table} SET UNLOGGED" for table in TABLES))
        dead_worker = OF_WORKER.format(incarnation="99")
        deaths = DEATHS.format(**common, worker=dead_worker)
        letters = LETTERS.format(**common, worker=now_worker)
        run("classes, fleet", CLASSES, FLEET.format(**common), deaths, letters)
        run("batch", BATCHES.format(start=start, last=days * 10 - 1, total=4 * jobs // (days * 100)))
        run("mark", f"INSERT INTO rollup_mark (name, rolled_until) VALUES ('rollups', TIMESTAMPTZ '{END}')")
        tasks: list[tuple[str, str]] = []

        def rollups(span: str, n: int, begin: datetime, stop: datetime, templates: dict[str, str]) -> None:
            dates = "(t AT TIME ZONE 'UTC')::date, (t AT TIME ZONE 'UTC' - INTERVAL '12 hours')::date,"
            values = common | {
                "span": span,
                "n": n,
                "start": begin,
                "stop": stop,
                "dates": "day, night," if span == "hour" else "",
                "values": dates if span == "hour" else "",
                "worker": then_worker,
                "busy": BUSY,
                "buckets": 15 if span == "hour" else 6,
            }
            tasks.extend((f"{name}_{span}", sql.format(**values)) for name, sql in templates.items())

        for begin, stop in _pieces(year_start, end, timedelta(days=30)):
            rollups("minute", 1, begin, stop, {"throughput": THROUGHPUT})
        for begin, stop in _pieces(start, end, timedelta(days=5)):
            rollups("minute", 1, begin, stop, {"job": ROLLED_JOBS, "latency": LATENCIES})
        rollups(
            "hour", 60, year_start, end, {"throughput": THROUGHPUT, "job": ROLLED_JOBS, "latency": LATENCIES}
        )
        for begin, stop in _pieces(start, end, timedelta(days=2)):
            sql = SAMPLES.format(**common, start=begin, stop=stop, worker=now_worker)
            tasks.append(("engine_sample", sql))
        chunk = 250_000
        for first in range(0, jobs, chunk):
            about = {"first": first, "last": min(first + chunk, jobs) - 1, "jobs": jobs, "start": start}
            rate = {"step": days * 86_400 / jobs, "per_day": jobs // days}
            sql = JOBS.format(**common, **about, **rate, worker=now_worker)
            tasks.append(("job, attempt, result", sql))
        list(pool.map(lambda task: run(*task), tasks))
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as conn:
        began = time.perf_counter()
        conn.exec_driver_sql("VACUUM ANALYZE")
        print(f"{'vacuum analyze':<28} {time.perf_counter() - began:7.1f} s", flush=True)


def _pieces(begin: datetime, end: datetime, length: timedelta) -> Iterator[tuple[datetime, datetime]]:
    """[begin, end) in stretches of at most that length."""
    while begin < end:
        yield begin, min(begin + length, end)
        begin += length


@contextmanager
def _without_indexes(engine: Engine, run: Callable[..., None]) -> Iterator[None]:
    """Drop the indexes and keys of the large tables, and make them again afterwards."""
    large = (
        "('engine_sample', 'job', 'attempt', 'result', 'throughput_minute', 'latency_minute', 'latency_hour')"
    )
    with engine.connect() as conn:
        foreign = conn.execute(
            text(
                "SELECT conrelid::regclass::text AS name, conname, pg_get_constraintdef(oid) AS definition "
                "FROM pg_constraint WHERE contype = 'f'"
            )
        ).all()
        keys = conn.execute(
            text(
                "SELECT conrelid::regclass::text AS name, conname, pg_get_constraintdef(oid) AS definition "
                f"FROM pg_constraint WHERE contype IN ('p', 'u') AND conrelid::regclass::text IN {large}"
            )
        ).all()
        indexes = conn.execute(
            text(
                "SELECT indexname, indexdef, tablename FROM pg_indexes WHERE schemaname = 'public' "
                f"AND tablename IN {large} AND indexname LIKE 'ix_%'"
            )
        ).all()
    run(
        "drop indexes",
        *(f"ALTER TABLE {row.name} DROP CONSTRAINT {row.conname}" for row in (*foreign, *keys)),
        *(f"DROP INDEX {row.indexname}" for row in indexes),
    )
    yield
    again = [
        (row.conname, f"ALTER TABLE {row.name} ADD CONSTRAINT {row.conname} {row.definition}") for row in keys
    ]
    again += [(row.indexname, row.indexdef) for row in indexes]
    by_table: dict[str, list[tuple[str, str]]] = {}
    for row, task in zip((*keys, *indexes), again, strict=True):
        by_table.setdefault(row[0] if row in keys else row.tablename, []).append(task)
    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:  # one table's indexes one after the other: they lock it
        list(pool.map(lambda tasks: [run(*task) for task in tasks], by_table.values()))
    # Foreign keys are not checked again: they cost reads nothing.


def measure(engine: Engine) -> tuple[list[Table], dict[str, Any]]:
    """Time every documented query, then what a worker spends on keeping the history."""
    with engine.connect() as conn:
        sizes = {
            table: conn.scalar(text(f"SELECT reltuples::bigint FROM pg_class WHERE relname = '{table}'"))
            for table in TABLES
        }
        gigabytes = conn.scalar(text("SELECT pg_database_size(current_database())")) / 1e9
    rows = Table("table", title=f"{gigabytes:.1f} GB on PostgreSQL with its default settings")
    rows.add_column("rows", justify="right")
    for table, count in sizes.items():
        rows.add_row(table, f"{count:,}")
    times = Table(title=f"every documented query, {REPETITIONS} times after a first")
    times.add_column("question", no_wrap=True)
    for name in ("rows", "first ms", "median", "worst", f"< {LIMIT_MS}"):
        times.add_column(name, justify="right")
    data = {}
    for question, sql in documented():
        found, taken = _ask(engine, sql)
        median, worst = statistics.median(taken[1:]), max(taken[1:])
        data[question] = {"rows": found, "first_ms": taken[0], "median_ms": median, "worst_ms": worst}
        under = "yes" if worst < LIMIT_MS else "NO"
        times.add_row(question[:46], f"{found}", f"{taken[0]:.1f}", f"{median:.1f}", f"{worst:.1f}", under)
    costs, cost = keeping(engine)
    return [rows, times, costs], {"rows": sizes, "queries": data, "keeping": cost}


def documented() -> Iterator[tuple[str, str]]:
    """Question and query: those of docs/queries.md, then those of the other pages by number."""
    yield from ((f"{number}. {question}", sql) for number, question, sql, _ in questions())
    others = (entry for entry in queries() if entry[0] != "queries.md")
    for page, entries in groupby(others, key=lambda entry: entry[0]):
        yield from ((f"{page}, {number}", sql) for number, (_, sql) in enumerate(entries, 1))


def _ask(engine: Engine, sql: str) -> tuple[int, list[float]]:
    taken = []
    with engine.connect() as conn:
        conn.execute(text("SET TIME ZONE 'UTC'"))
        for _ in range(REPETITIONS + 1):
            began = time.perf_counter()
            found = conn.execute(text(sql)).all()
            taken.append((time.perf_counter() - began) * 1000)
    return len(found), taken


def keeping(engine: Engine) -> tuple[Table, dict[str, float]]:
    """Seconds an hour that a worker's process, and the thread that does it, spend on samples and roll-ups.

    Samples are one in five seconds; the roll-ups are those of the whole fleet, once a minute, as if this worker did
    all of them: five million jobs in 30 days are 116 a minute.
    """
    end = datetime.fromisoformat(END).astimezone(UTC)
    with engine.connect() as conn:
        worker_id = conn.scalar(text("SELECT id FROM worker WHERE state = 'online' ORDER BY id LIMIT 1"))
    zeros = {spec.name: 0 for spec in fields(NewSample)}
    made = [
        NewSample(
            **(zeros | {"worker_id": worker_id, "interval_s": 5.0, "sampled_at": end + timedelta(seconds=n)})
        )
        for n in range(200)
    ]
    spent: dict[str, float] = {}
    table = Table("what", title="keeping the history, seconds an hour of one worker (0.5 % are 18)")
    for name in ("times an hour", "CPU of the process", "of the thread that does it"):
        table.add_column(name, justify="right")

    def add(label: str, an_hour: int, count: int, step: Callable[[int], object]) -> None:
        cpu, wall = time.process_time(), time.perf_counter()
        for n in range(count):
            step(n)
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        spent[f"{label}_cpu_s"], spent[f"{label}_wall_s"] = cpu / count * an_hour, wall / count * an_hour
        table.add_row(label, f"{an_hour}", f"{cpu / count * an_hour:.2f}", f"{wall / count * an_hour:.2f}")

    add("samples", 720, len(made), lambda n: transaction(engine, lambda conn: add_samples(conn, [made[n]])))
    back = floor_minute(end - timedelta(hours=2))

    def roll(n: int) -> None:
        now = back + timedelta(minutes=n, seconds=11)
        transaction(engine, lambda conn: advance(conn, now))

    with engine.begin() as conn:
        reopen(conn, back)
        conn.execute(text("UPDATE rollup_mark SET rolled_until = :at"), {"at": back})
    roll(1)
    add("roll-ups", 60, 50, lambda n: roll(n + 2))
    return table, spent


if __name__ == "__main__":
    main()
