"""``tokenmill stats`` and ``top`` on the sample history, and a worker's metrics."""

from __future__ import annotations

import csv
import io
import json
import socket
import sys
import urllib.request
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from backend.api import BackendInfo, BackendStats, ConfigurationError
from models_db import sample_history
from models_db.migrate import upgrade
from models_db.session import make_engine, transaction
from workers.cli import app
from workers.cli.common import ExitCode
from workers.cli.stats import sparkline
from workers.metrics import MetricsServer


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    made = f"sqlite:///{tmp_path_factory.mktemp('history') / 'sample.db'}"
    upgrade(made)
    engine = make_engine(made)
    transaction(engine, sample_history.load)
    engine.dispose()
    return made


def run(url: str, *arguments: str) -> Result:
    return CliRunner().invoke(app, [*arguments, "--database-url", url], env={"COLUMNS": "200"})


def test_nights_come_from_rollups_with_a_sparkline(url: str) -> None:
    done = run(url, "stats", "--by", "night")
    assert done.exit_code == 0, done.output
    assert [line.split()[0] for line in done.stdout.splitlines() if line.strip().startswith("2026-")] == [
        "2026-03-02",
        "2026-03-03",
        "2026-03-04",
    ]
    assert "tok/s ███" in done.stdout
    assert "complete until 2026-03-05 12:00 UTC" in done.stderr


def test_json_and_csv_say_the_same(url: str) -> None:
    as_json = json.loads(run(url, "stats", "--by", "tenant", "--json").stdout)
    as_csv = list(csv.DictReader(io.StringIO(run(url, "stats", "--by", "tenant", "--csv").stdout)))
    assert [row["key"] for row in as_csv] == [row["key"] for row in as_json] == ["reports", "search", "web"]
    assert [int(row["completion_tokens"]) for row in as_csv] == [row["completion_tokens"] for row in as_json]
    assert run(url, "stats", "--json", "--csv").exit_code == ExitCode.USAGE


def test_the_peak_is_the_busiest_hour_wherever_it_is_read(url: str) -> None:
    peaks = []
    for source in ("jobs", "rollups"):
        rows = json.loads(run(url, "stats", "--source", source, "--json").stdout)
        busiest = max(rows, key=lambda row: row["completion_tokens"])
        assert busiest["tokens_per_s"] == max(row["tokens_per_s"] for row in rows)
        assert {row["period_s"] for row in rows} == {3600.0}
        peaks.append((busiest["key"], busiest["tokens_per_s"]))
        table = run(url, "stats", "--source", source).stdout
        assert f"up to {busiest['tokens_per_s']:,.4g}" in table
        assert ("in span" in table) == (source == "jobs")
    assert peaks[0] == peaks[1]


def test_few_jobs_are_read_exactly_and_old_or_many_from_rollups(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "roll-ups" not in run(url, "stats").stderr
    monkeypatch.setattr("workers.cli.stats.MANY_JOBS", 100)
    assert "roll-ups" in run(url, "stats").stderr
    assert "roll-ups" not in run(url, "stats", "--source", "jobs").stderr
    assert (
        "--by: is only in the jobs (got 'worker')"
        in run(url, "stats", "--by", "worker", "--source", "rollups").stderr
    )


@pytest.mark.parametrize(("name", "begin"), [("a.png", b"\x89PNG"), ("a.svg", b"<?xml")])
@pytest.mark.parametrize("by", ["hour", "tenant"])
def test_plots(url: str, tmp_path: Path, name: str, begin: bytes, by: str) -> None:
    done = run(url, "stats", "--by", by, "--plot", str(tmp_path / name))
    assert done.exit_code == 0, done.output
    assert (tmp_path / name).read_bytes().startswith(begin)


def test_a_plot_that_cannot_be_drawn_is_refused(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "must be a .png or .svg" in run(url, "stats", "--plot", "a.pdf").stderr
    assert "Make the folder first" in run(url, "stats", "--plot", str(tmp_path / "no" / "a.svg")).stderr
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    done = run(url, "stats", "--plot", str(tmp_path / "a.svg"))
    assert done.exit_code == ExitCode.UNAVAILABLE
    assert "pip install 'tokenmill[plot]'" in done.stderr


def test_a_sparkline_goes_from_zero_to_the_largest() -> None:
    assert sparkline([0.0, 4.0, None, 8.0]) == "▁▅ █  up to 8"
    assert sparkline([0.0, 0.0]) == "▁▁  up to 0"
    assert sparkline([None]) == "   up to 0"


def test_top_prints_one_look_where_there_is_no_terminal(url: str) -> None:
    done = run(url, "top")
    assert done.exit_code == 0, done.output
    assert "0 workers, 3 more silent   2 jobs running, 5 queued" in done.stdout
    assert "No worker is alive. Start one: tokenmill worker" in done.stdout
    for word in ("gpu-2", "tokenmill.large", "reports-0305"):
        assert word in done.stdout


def test_top_looks_again_and_again_until_ctrl_c_which_leaves_the_terminal_as_it_was(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen, pauses = io.StringIO(), []
    terminal = Console(file=screen, force_terminal=True, highlight=False, width=120, height=40)
    monkeypatch.setattr("workers.cli.top.console", lambda: terminal)

    def pause(seconds: float) -> None:
        pauses.append((seconds, screen.getvalue()))
        if len(pauses) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr("workers.cli.top._sleep", pause)
    done = run(url, "top", "--interval", "0.5")
    assert (done.exit_code, done.output) == (0, "")
    assert [seconds for seconds, _ in pauses] == [0.5] * 3
    looks = [shown.count("2 jobs running, 5 queued") for _, shown in pauses]
    assert looks == [1, 2, 3], "one look a pause"
    assert [shown.count("up to") for _, shown in pauses] == [0, 1, 2], "the course, once there is one"
    opened, closed = "\x1b[?1049h", "\x1b[?1049l"
    assert (screen.getvalue().count(opened), screen.getvalue().count(closed)) == (1, 1)
    assert screen.getvalue().rindex(closed) > screen.getvalue().rindex("queued")


INFO = BackendInfo(
    backend="echo", model="m", device="cpu", dtype="float32", max_model_len=8, slots=4, vocab_size=9
)


def serve(port: int = 0) -> MetricsServer:
    stats = BackendStats(generated_tokens=42, busy_s=1.5, running=2)
    return MetricsServer(
        "127.0.0.1", port, worker="w", info=INFO, stats=lambda: stats, database=lambda: (True, 3)
    )


def test_metrics_are_counters_and_gauges_with_the_process_as_their_only_label() -> None:
    server = serve()
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=5) as answer:
            lines = answer.read().decode().splitlines()
    finally:
        server.close()
    labels = '{device="cpu",model="m",worker="w"}'
    values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    assert values[f"tokenmill_generated_tokens_total{labels}"] == "42.0"
    assert values[f"tokenmill_device_busy_seconds_total{labels}"] == "1.5"
    assert values[f"tokenmill_running_requests{labels}"] == "2.0"
    assert values[f"tokenmill_database_pending{labels}"] == "3.0"
    assert all(name.startswith("tokenmill_") and name.endswith(labels) for name in values)


def test_metrics_that_cannot_be_served_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ConfigurationError, match=r"cannot listen on 127.0.0.1:\d+ .*Name a free port"):
            serve(taken.getsockname()[1])
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'tokenmill\[metrics\]'"):
        serve()
