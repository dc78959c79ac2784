"""The demo: what it shows, what it leaves, and that it stops everything it started."""

from __future__ import annotations

import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from workers.cli.common import ExitCode
from workers.demo import PROMPTS, Demo, WorkerDiedError


def command(folder: Path) -> list[str]:
    return [sys.executable, "-m", "workers.cli", "demo", "--backend", "echo", "--folder", str(folder)]


def all_gone(folder: Path, processes: list[psutil.Process]) -> bool:
    """Nothing that was started still runs, and nothing answers on the port of the demo's Redis."""
    _, alive = psutil.wait_procs(processes, timeout=30)
    port = int((folder / "redis.log").read_text().split("port=", 1)[1].split(".", 1)[0].rstrip(","))
    with socket.socket() as probe:
        return not alive and probe.connect_ex(("127.0.0.1", port)) != 0


def test_the_shipped_prompts_are_real_and_varied() -> None:
    rows = [json.loads(line) for line in PROMPTS.read_text(encoding="utf-8").splitlines()]
    assert len(rows) >= 24
    assert len({row["prompt"] for row in rows}) == len(rows)
    assert len({row["category"] for row in rows}) >= 6
    assert len({row["max_tokens"] for row in rows}) >= 5


def test_the_demo_reports_leaves_its_answers_and_stops_everything(tmp_path: Path) -> None:
    folder = tmp_path / "demo-run"
    count = len(PROMPTS.read_text(encoding="utf-8").splitlines())
    done = subprocess.run(
        command(folder), capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0, done.stderr
    for part in (
        f"{count} (0 failed)",
        "new tokens/s",
        "time to first token",
        "device active",
        "fact-capital",
    ):
        assert part in done.stdout
    assert done.stdout.count("SELECT") == 3
    assert f"{count}/{count} done" in done.stderr
    results = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    assert len(results) == count
    with sqlite3.connect(folder / "tokenmill.db") as database:
        (jobs,) = database.execute("SELECT COUNT(*) FROM job WHERE state = 'succeeded'").fetchone()
        (sampled,) = database.execute("SELECT SUM(generated_tokens) FROM engine_sample").fetchone()
        workers = database.execute("SELECT state FROM worker").fetchall()
    assert jobs == count
    assert sampled == sum(result["completion_tokens"] for result in results)
    assert workers == [("stopped",)]
    assert all_gone(folder, [])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_demo_stops_everything(number: signal.Signals, tmp_path: Path) -> None:
    folder = tmp_path / "demo-run"
    environment = os.environ | {"TOKENMILL_ENGINE_ECHO_TOKENS_PER_S": "1", "TOKENMILL_SHUTDOWN_GRACE_S": "0"}
    process = subprocess.Popen(command(folder), env=environment, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    seen = ""
    while "done" not in seen:  # the first line of progress: the worker works
        seen = process.stderr.readline()
        assert seen, "the demo ended by itself"
    started = psutil.Process(process.pid).children(recursive=True)
    assert len(started) >= 2
    process.send_signal(number)
    _, said = process.communicate(timeout=120)
    assert process.returncode == ExitCode.INTERRUPTED, said
    assert all_gone(folder, started)


def test_a_worker_that_dies_is_shown_with_the_end_of_its_log(tmp_path: Path) -> None:
    with Demo(tmp_path / "run", backend="no-such-backend") as demo:
        demo.start_services()
        demo.start_worker()
        with pytest.raises(WorkerDiedError, match="no-such-backend"):
            demo.wait_for_worker()
