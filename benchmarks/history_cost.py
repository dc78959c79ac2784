"""What writing the statistics costs a worker in throughput: the same worker with them and without, in turn.

    python -m benchmarks.history_cost                      the echo backend: as many jobs a second as the worker can
    python -m benchmarks.history_cost --backend async      SmolLM2 on the CPU: tokens a second of a busy engine

One worker process works through jobs that were queued before, so that nothing else runs. Inside it, windows with the
samples (one row in five seconds) and the roll-ups (once a minute) alternate with windows without either, in the order
with, without, without, with; the two in the middle show what chance alone does. The windows with statistics also roll
up the minutes of those without, so that the cost is rather more than it is in daily work. Writes
results/history_cost-BACKEND.txt. Needs PostgreSQL, and a quiet machine for differences below one per cent.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table
from sqlalchemy import text

from benchmarks.report import RESULTS, keep
from benchmarks.servers import add_server_option, own_database, postgresql
from models_db.migrate import upgrade
from models_db.session import make_engine
from workers.client import Client
from workers.private_redis import PrivateRedis
from workers.settings import load_settings

PAIRS = (True, False, False, True)  # with statistics or without
WARM_S = 10.0
LIMIT = 0.005
_MARGIN = 1.3
PLAN = "TOKENMILL_HISTORY_COST"  # tells the worker's process what to do


@dataclass(frozen=True, slots=True)
class Window:
    """What a worker did in one stretch of time."""

    statistics: bool
    seconds: float
    jobs: int
    tokens: int
    cpu_s: float


def work(plan: dict[str, Any]) -> int:
    """The worker's process: a worker like any other, but for a switch at its statistics."""
    from backend.api import Backend, BackendStats
    from workers import incarnation
    from workers.process import run_process

    on = threading.Event()
    on.set()
    sample, roll_up = incarnation.Incarnation._sample, incarnation.Incarnation._roll_up
    ready: list[Backend] = []

    def sampled(self: incarnation.Incarnation) -> None:
        if self._backend is not None and not ready:
            ready.append(self._backend)
            threading.Thread(target=measure, args=(self._backend,), daemon=True).start()
        if on.is_set():
            sample(self)

    def rolled_up(self: incarnation.Incarnation) -> None:
        if on.is_set():
            roll_up(self)

    def counted(backend: Backend) -> tuple[float, float, BackendStats]:
        return time.monotonic(), time.process_time(), backend.stats()

    def measure(backend: Backend) -> None:
        while not backend.stats().requests_finished:
            time.sleep(0.1)
        time.sleep(WARM_S)
        windows = []
        for wanted in itertools.chain.from_iterable([PAIRS] * plan["repetitions"]):
            if wanted:
                on.set()
            else:
                on.clear()
            before = counted(backend)
            time.sleep(plan["window_s"])
            after = counted(backend)
            windows.append(
                Window(
                    wanted,
                    after[0] - before[0],
                    after[2].requests_finished - before[2].requests_finished,
                    after[2].generated_tokens - before[2].generated_tokens,
                    after[1] - before[1],
                )
            )
        draft = Path(plan["output"]).with_suffix(".part")
        draft.write_text(json.dumps([asdict(window) for window in windows]), encoding="utf-8")
        draft.replace(plan["output"])

    incarnation.Incarnation._sample = sampled  # type: ignore[method-assign]
    incarnation.Incarnation._roll_up = rolled_up  # type: ignore[method-assign]
    return run_process(load_settings())


def run(
    server: str, backend: str, repetitions: int, window_s: float, jobs: int, folder: Path
) -> list[Window]:
    """Queue the jobs, run the worker, read what it measured.

    Raises:
        RuntimeError: the worker ended before, or there were not enough jobs.
    """
    output = folder / "windows.json"
    with own_database(server) as url, PrivateRedis(folder) as broker:
        upgrade(url)
        model = "echo" if backend == "echo" else "smollm2"
        variables = {
            "TOKENMILL_BROKER_URL": broker.url,
            "TOKENMILL_DATABASE_URL": url,
            "TOKENMILL_BACKEND": backend,
            "TOKENMILL_MODEL": model,
            "TOKENMILL_LOG_LEVEL": "warning",
            "TOKENMILL_SPOOL_DIR": str(folder / "spool"),
        }
        plan = {"repetitions": repetitions, "window_s": window_s, "output": str(output)}
        request: dict[str, Any] = {"model": model, "prompt": "Name three colours, slowly.", "priority": 9}
        request |= {"max_tokens": 4} if backend == "echo" else {"max_tokens": 64, "ignore_eos": True}
        with Client(load_settings(broker_url=broker.url, database_url=url, model=model)) as client:
            for _ in client.submit_each(request for _ in range(jobs)):
                pass
        _count(url)
        log = folder / "worker.log"
        with log.open("wb") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.history_cost"],
                env=os.environ | variables | {PLAN: json.dumps(plan)},
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        try:
            while not output.exists():
                if process.poll() is not None:
                    raise RuntimeError(f"the worker ended:\n{log.read_text(errors='replace')[-2000:]}")
                time.sleep(1)
        finally:
            process.kill()
            process.wait(60)
        engine = make_engine(url)
        try:
            with engine.connect() as conn:
                left = conn.scalar(text("SELECT count(*) FROM job WHERE state = 'queued'"))
        finally:
            engine.dispose()
    if not left:
        raise RuntimeError(f"{jobs:,} jobs were too few. Give more with --jobs")
    return [Window(**each) for each in json.loads(output.read_text(encoding="utf-8"))]


def _count(url: str) -> None:
    """Have PostgreSQL count its tables now: by itself it would in some window or, without autovacuum, never."""
    engine = make_engine(url)
    try:
        with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as conn:
            conn.execute(text("VACUUM (ANALYZE)"))
    finally:
        engine.dispose()


def compared(windows: list[Window], rate: Callable[[Window], float]) -> tuple[list[float], list[float]]:
    """Ratios of neighbours: with statistics to without, and without to without."""
    ratios, control = [], []
    for first in range(0, len(windows), len(PAIRS)):
        on, off, still_off, on_again = map(rate, windows[first : first + len(PAIRS)])
        ratios += [on / off, on_again / still_off]
        control.append(still_off / off)
    return ratios, control


def _table(backend: str, windows: list[Window], ratios: list[float], control: list[float]) -> Table:
    title = f"{backend}: {len(ratios)} pairs of windows of {windows[0].seconds:.0f} s"
    table = Table("what", title=title)
    for name in ("with", "without", "ratio, median", "least", "most", "st. deviation"):
        table.add_column(name, justify="right")

    def row(label: str, rate: Callable[[Window], float], found: list[float] | None, form: str) -> None:
        sides = [
            f"{statistics.median(rate(w) for w in windows if w.statistics is on):{form}}"
            for on in (True, False)
        ]
        if found is None:
            table.add_row(label, *sides, "", "", "", "")
            return
        spread = f"{statistics.stdev(found):.4f}" if len(found) > 1 else ""
        table.add_row(
            label,
            *sides,
            f"{statistics.median(found):.4f}",
            f"{min(found):.4f}",
            f"{max(found):.4f}",
            spread,
        )

    unit = "jobs/s" if backend == "echo" else "tokens/s"
    row(unit, _rate_of(backend), ratios, ",.1f")
    row("CPU seconds of the process, a second", lambda w: w.cpu_s / w.seconds, None, ".3f")
    shown = [f"{value:.4f}" for value in (statistics.median(control), min(control), max(control))]
    table.add_row("without to without: chance alone", "", "", *shown, "")
    return table


def _rate_of(backend: str) -> Callable[[Window], float]:
    if backend == "echo":
        return lambda window: window.jobs / window.seconds
    return lambda window: window.tokens / window.seconds


def main() -> int:
    """Measure and write down; or, as the worker's process, work."""
    if PLAN in os.environ:
        return work(json.loads(os.environ[PLAN]))
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_server_option(parser)
    parser.add_argument("--backend", choices=("echo", "async"), default="echo")
    parser.add_argument("--repetitions", type=int, default=3, help="each of two pairs of windows")
    parser.add_argument("--window", type=float, default=60.0, help="seconds; a roll-up comes once in 60")
    parser.add_argument(
        "--jobs", type=int, help="to queue; enough for 1,000 a second (echo) or 10 when unset"
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for the results")
    options = parser.parse_args()
    seconds = options.repetitions * len(PAIRS) * options.window + WARM_S
    jobs = options.jobs or round(seconds * _MARGIN * (1000 if options.backend == "echo" else 10))
    with (
        postgresql(options.server) as server,
        tempfile.TemporaryDirectory(prefix="tokenmill-cost-") as folder,
    ):
        windows = run(server, options.backend, options.repetitions, options.window, jobs, Path(folder))
    ratios, control = compared(windows, _rate_of(options.backend))
    command = (
        f"python -m benchmarks.history_cost --backend {options.backend} --repetitions {options.repetitions} "
        f"--window {options.window:g} --jobs {jobs}"
    )
    data = {
        "windows": [asdict(window) for window in windows],
        "ratios": ratios,
        "control": control,
        "limit": 1 - LIMIT,
    }
    table = _table(options.backend, windows, ratios, control)
    keep(f"history_cost-{options.backend}", command, [table], data, folder=options.results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
