"""A million lines through ``tokenmill bulk``: memory of the submitter, speed in and out, and their order.

    python -m benchmarks.bulk
    python -m benchmarks.bulk --server postgresql://USER@HOST/DATABASE

makes a database and a Redis of its own, writes a file of so many lines, and runs the real commands on it as processes
of their own: ``bulk run --no-wait``, then ``bulk export``; their memory is looked at five times a second. In between
the jobs are ended: by a worker with the echo backend up to 50,000 lines, and beyond that by SQL statements that write
the result rows which a worker would, since the work itself is not what is measured (``--work`` chooses). The output
must hold every line in the order of the input. Writes results/bulk.txt and drops what it made; a million lines need
about 8 GB of disk and 2 GB of memory for the while, most of that Redis.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import redis
from rich.table import Table
from sqlalchemy import Engine, text

from benchmarks.report import RESULTS, keep
from benchmarks.servers import add_server_option, own_database, postgresql
from models_db.migrate import upgrade
from models_db.session import make_engine
from workers.private_redis import PrivateRedis

LINES = 1_000_000
ECHO_LINES = 50_000  # up to so many are worked on by a worker
LOOK_S = 0.2
MODEL = "smollm2"
TOKENS = 16
PROMPT = (
    "Summarise in one sentence what a reader of line {n} should know about the {n}th of these reviews. " * 2
)
_IMPORTED_S = 3.0  # of a process's life that its imports take, in which memory must grow
_GROUP = 20_000  # jobs that one statement ends

ENDED = """
WITH ended AS (
    UPDATE job SET state = 'succeeded', attempt = 1, started_at = created_at,
                   finished_at = now() + (position % 97) * INTERVAL '1 second'
    WHERE batch_id = :batch AND position > :first AND position <= :last RETURNING id, finished_at, position
)
INSERT INTO result (job_id, choice, finish_reason, prompt_tokens, completion_tokens, cached_tokens, queue_time_s,
                    time_to_first_token_s, latency_s, created_at, text)
SELECT id, 0, 'length', 40, 16, 0, 0.5, 0.1, 0.4, finished_at, 'An answer to line ' || position || '. '
       || repeat('It goes on like this. ', 5)
FROM ended
"""


@dataclass(slots=True)
class Watched:
    """What one command did. ``rss_mb`` are (seconds since its start, MB); ``fed`` (seconds, lines in SQL)."""

    command: str
    wall_s: float = 0.0
    said: str = ""
    printed: str = ""
    rss_mb: list[tuple[float, float]] = field(default_factory=list)
    fed: list[tuple[float, int]] = field(default_factory=list)

    def ends(self) -> tuple[float, float]:
        """The most memory within the first and within the last tenth of the time after the imports, in MB."""
        after = [(at, mb) for at, mb in self.rss_mb if at >= _IMPORTED_S] or self.rss_mb
        begin, end = after[0][0], after[-1][0]
        tenth = (end - begin) / 10
        first = max(mb for at, mb in after if at <= begin + tenth)
        return first, max(mb for at, mb in after if at >= end - tenth)

    def spoken_rate(self, verb: str) -> str:
        """The speed that the command itself printed."""
        found = re.search(rf"{verb}.*?\(([\d,]+) lines/s\)", self.said.replace("\n", " "))
        return found.group(1) if found else "not printed"

    def rate_between(self, begin: float, end: float) -> float | None:
        """Lines a second while the lines went from one share of all to another."""
        if not self.fed:
            return None
        total = self.fed[-1][1]
        inside = [(at, lines) for at, lines in self.fed if begin * total < lines <= end * total]
        if len(inside) < 2 or inside[-1][0] == inside[0][0]:
            return None
        return (inside[-1][1] - inside[0][1]) / (inside[-1][0] - inside[0][0])


def watch(
    arguments: list[str], environment: dict[str, str], lines_in: Callable[[], int] | None = None
) -> Watched:
    """Run ``tokenmill`` to its end and look at its memory meanwhile.

    Args:
        lines_in: how many lines are in SQL; looked at once a second.

    Raises:
        RuntimeError: it failed; with what it said.
    """
    seen = Watched("tokenmill " + " ".join(arguments))
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        began = time.monotonic()
        process = subprocess.Popen(
            [sys.executable, "-m", "workers.cli", *arguments], env=environment, stdout=out, stderr=err
        )
        asked = began
        while process.poll() is None:
            now = time.monotonic()
            if (mb := rss_mb(process.pid)) is not None:
                seen.rss_mb.append((now - began, mb))
            if lines_in is not None and now - asked >= 1:
                asked = now
                seen.fed.append((now - began, lines_in()))
            with suppress(subprocess.TimeoutExpired):
                process.wait(LOOK_S)
        seen.wall_s = time.monotonic() - began
        for file, name in ((out, "printed"), (err, "said")):
            file.seek(0)
            setattr(seen, name, file.read())
    if process.returncode != 0:
        raise RuntimeError(f"{seen.command} ended with status {process.returncode}:\n{seen.said[-2000:]}")
    return seen


def rss_mb(pid: int) -> float | None:
    """Resident memory of a process, in MB; ``None`` when it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    except OSError:
        return None
    found = re.search(r"VmRSS:\s+(\d+) kB", status)
    return int(found.group(1)) / 1024 if found else None


def write_input(path: Path, lines: int) -> None:
    """Lines with an id, a prompt of about 200 characters, and a key of their own to be carried through."""
    with path.open("w", encoding="utf-8") as file:
        for n in range(1, lines + 1):
            line = {"custom_id": f"line-{n:08}", "prompt": PROMPT.format(n=n), "max_tokens": TOKENS, "row": n}
            file.write(json.dumps(line) + "\n")


def check_output(path: Path, lines: int) -> None:
    """Every line of the input, in its order, with the key that it carried.

    Raises:
        AssertionError: it is not so.
    """
    n = 0
    with path.open(encoding="utf-8") as file:
        for n, raw in enumerate(file, 1):
            line = json.loads(raw)
            assert (line["custom_id"], line["row"]) == (f"line-{n:08}", n), f"line {n} is {line['custom_id']}"
    assert n == lines, f"{n} lines came out of {lines}"


@contextmanager
def echo_worker(environment: dict[str, str], log: Path) -> Iterator[None]:
    """A worker that repeats the words of its prompts."""
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "workers.cli", "worker", "--once"],
            env=environment,
            stdout=file,
            stderr=file,
        )
        try:
            yield
        finally:
            process.terminate()
            process.wait(60)


def end_by_worker(engine: Engine, batch_id: str, environment: dict[str, str], log: Path) -> None:
    """Let a worker do all jobs of the batch."""
    open_jobs = text(
        "SELECT count(*) FROM job WHERE batch_id = :batch AND state IN ('queued', 'running')"
    ).bindparams(batch=batch_id)
    with echo_worker(environment, log), engine.connect() as conn:
        while conn.scalar(open_jobs):
            conn.rollback()
            time.sleep(0.5)


def end_by_sql(engine: Engine, batch_id: str, lines: int) -> None:
    """Write for every job of the batch what a worker would have written."""
    for first in range(0, lines, _GROUP):
        with engine.begin() as conn:
            conn.execute(text(ENDED), {"batch": batch_id, "first": first, "last": first + _GROUP})
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as conn:
        conn.exec_driver_sql("VACUUM ANALYZE")  # as the server does by itself in the hours of a night's work


def measure(server: str, lines: int, work: str, folder: Path) -> tuple[list[Table], dict[str, Any]]:
    """Run it all; tables and what is in them."""
    source, output = folder / "in.jsonl", folder / "out.jsonl"
    write_input(source, lines)
    with own_database(server) as url, PrivateRedis(folder) as broker:
        upgrade(url)
        engine = make_engine(url)
        environment = os.environ | {
            "TOKENMILL_BROKER_URL": broker.url,
            "TOKENMILL_RESULT_BACKEND_URL": broker.url,
            "TOKENMILL_DATABASE_URL": url,
            "TOKENMILL_BACKEND": "echo",
            "TOKENMILL_MODEL": MODEL,
        }
        try:
            newest = text("SELECT max(position) FROM job WHERE batch_id = (SELECT min(id) FROM batch)")

            def lines_in() -> int:
                with engine.connect() as conn:
                    return int(conn.scalar(newest) or 0)

            run = watch(["bulk", "run", str(source), "--no-wait"], environment, lines_in)
            batch_id = run.printed.strip()
            with redis.Redis.from_url(broker.url) as connection:
                redis_mb = int(connection.info("memory")["used_memory"]) / 2**20
            began = time.monotonic()
            if work == "echo":
                end_by_worker(engine, batch_id, environment, folder / "worker.log")
            else:
                end_by_sql(engine, batch_id, lines)
            ended_s = time.monotonic() - began
            status = watch(["bulk", "status", batch_id, "--json"], environment)
            assert json.loads(status.printed)["counts"]["succeeded"] == lines, status.printed
            exports = {
                "in order": watch(["bulk", "export", batch_id, "-o", str(output)], environment),
            }
            check_output(output, lines)
            with engine.begin() as conn:  # the other order is a property of the batch
                source_json = json.loads(
                    conn.scalar(text("SELECT source FROM batch WHERE id = :id"), {"id": batch_id}) or "{}"
                )
                conn.execute(
                    text("UPDATE batch SET source = :source WHERE id = :id"),
                    {"source": json.dumps(source_json | {"order": "completion"}), "id": batch_id},
                )
            other = folder / "other.jsonl"
            exports["by completion"] = watch(["bulk", "export", batch_id, "-o", str(other)], environment)
            assert other.stat().st_size == output.stat().st_size
            with engine.connect() as conn:
                database_mb = (
                    conn.scalar(text("SELECT pg_database_size(current_database()) / 1048576.0")) or 0
                )
        finally:
            engine.dispose()
    sizes = {
        "input_mb": source.stat().st_size / 2**20,
        "output_mb": output.stat().st_size / 2**20,
        "database_mb": float(database_mb),
        "redis_mb": redis_mb,
    }
    return _tables(lines, work, ended_s, run, exports, sizes), {
        "lines": lines,
        "work": work,
        "ended_s": ended_s,
        **sizes,
        "status_s": status.wall_s,
        "run": asdict(run) | {"command": "bulk run --no-wait"},
        **{
            f"export_{name.replace(' ', '_')}": asdict(seen) | {"command": "bulk export"}
            for name, seen in exports.items()
        },
    }


def _tables(
    lines: int,
    work: str,
    ended_s: float,
    run: Watched,
    exports: dict[str, Watched],
    sizes: dict[str, float],
) -> list[Table]:
    how = "by an echo worker" if work == "echo" else "by SQL, with their result rows"
    table = Table("command", title=f"{lines:,} lines; the jobs were ended {how} in {ended_s:,.0f} s")
    columns = (
        "seconds",
        "lines/s, all in all",
        "lines/s it printed",
        "RSS MB, first tenth",
        "last tenth",
        "median",
    )
    for name in columns:
        table.add_column(name, justify="right")

    def row(label: str, seen: Watched, verb: str) -> None:
        first, last = seen.ends()
        median = statistics.median(mb for _, mb in seen.rss_mb)
        table.add_row(
            label,
            f"{seen.wall_s:,.1f}",
            f"{lines / seen.wall_s:,.0f}",
            seen.spoken_rate(verb),
            f"{first:.0f}",
            f"{last:.0f}",
            f"{median:.0f}",
        )

    row("bulk run --no-wait", run, "Submitted")
    for name, seen in exports.items():
        row(f"bulk export, {name}", seen, "Wrote")
    more = Table("what", "value", title="and beside that")
    for label, begin, end in (("first", 0.0, 0.1), ("last", 0.9, 1.0)):
        rate = run.rate_between(begin, end)
        shown = "too short to tell" if rate is None else f"{rate:,.0f}"
        more.add_row(f"lines/s into SQL and Redis, {label} tenth of the lines", shown)
    for label, name in (("input", "input_mb"), ("output", "output_mb"), ("database", "database_mb")):
        more.add_row(f"{label}, MB", f"{sizes[name]:,.0f}")
    more.add_row("Redis holding all messages, MB", f"{sizes['redis_mb']:,.0f}")
    return [table, more]


def main() -> None:
    """Make, run, write down, drop."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_server_option(parser)
    parser.add_argument("--lines", type=int, default=LINES)
    parser.add_argument("--work", choices=("echo", "sql"), help="how the jobs are ended")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for bulk.txt and bulk.json")
    options = parser.parse_args()
    work = options.work or ("echo" if options.lines <= ECHO_LINES else "sql")
    with (
        postgresql(options.server) as server,
        tempfile.TemporaryDirectory(prefix="tokenmill-bulk-") as folder,
    ):
        tables, data = measure(server, options.lines, work, Path(folder))
    command = f"python -m benchmarks.bulk --lines {options.lines} --work {work}"
    keep("bulk", command, tables, data, folder=options.results)


if __name__ == "__main__":
    main()
