"""What ``stats`` and ``top`` show in terminals of any size, and of names that mean harm."""

from __future__ import annotations

import io
import re
import warnings
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console, RenderableType
from typer.testing import CliRunner

from models_db.errors import DatabaseUnavailableError
from models_db.fleet_now import BatchNow, FleetNow, WorkerNow
from models_db.migrate import upgrade
from models_db.queries import ThroughputRow
from models_db.tables import WorkerState
from models_db.workers import WorkerRecord
from workers.cli import app
from workers.cli.course import over_time, sparkline
from workers.cli.plot import draw
from workers.cli.stats import sparklines, stats_table
from workers.cli.top import picture

AT = datetime(2026, 3, 1, 12, tzinfo=UTC)
HARM = ["$\\frac{$", "a$b$c_{", "[red]x[/red]", "\x1b[31mX\x07", "=1+1\nx", "\u65e5\u672c", ""]


def row(key: str, tokens: int = 12_345_678) -> ThroughputRow:
    counts = {"succeeded": 99_999, "failed": 1234, "cancelled": 0, "expired": 0}
    return ThroughputRow(
        key=key,
        jobs=101_233,
        **counts,
        prompt_tokens=987_654_321,
        cached_tokens=0,
        completion_tokens=tokens,
        period_s=3600.0,
        tokens_per_s=tokens / 3600,
        span_s=3600.0,
        span_tokens_per_s=tokens / 3600,
        latency_p50_s=1234.56,
        latency_p95_s=2345.67,
        ttft_p50_s=0.12,
        ttft_p95_s=0.34,
        active_fraction=0.97,
    )


def lines_of(shown: RenderableType, width: int) -> list[str]:
    screen = io.StringIO()
    Console(file=screen, width=width, force_terminal=True, color_system=None, highlight=False).print(shown)
    return screen.getvalue().splitlines()


def fleet(workers: int, queues: int, batches: int) -> FleetNow:
    def worker(number: int) -> WorkerNow:
        record = WorkerRecord(
            id=f"w{number}",
            name=f"gpu-node-{number:03}.rack7.example.internal",
            host="h",
            pid=1,
            version="1",
            backend="async",
            model="meta-llama/Llama-3.1-8B-Instruct",
            device="cuda:0",
            dtype="bfloat16",
            slots=64,
            state=WorkerState.ONLINE,
            heartbeat=1,
            started_at=AT,
            heartbeat_at=AT,
            stopped_at=None,
            silent_s=3600.0 if number == workers - 1 else 0.0,
        )
        return WorkerNow(record, number == workers - 1, 60, 3, 2469.1, 0.97, 0.5)

    return FleetNow(
        at=AT,
        workers=[worker(number) for number in range(workers)],
        queued=[(f"tokenmill.model-{number}", 123_456, AT) for number in range(queues)],
        running=60,
        batches=[BatchNow(f"batch {n}", "in_progress", 9, 1, 0, 0, 0, AT) for n in range(batches)],
        rolled_until=AT,
    )


@given(st.integers(20, 200))
def test_a_number_is_shown_whole_or_its_column_is_left_out(width: int) -> None:
    lines = lines_of(stats_table([row("2026-03-01 12:00")], "hour", width), width)
    lines += lines_of(picture(fleet(3, 2, 1), [], width), width)
    known = {
        "101,233",
        "1,234",
        "987,654,321",
        "12,345,678",
        "3,429.4",
        "1,234.56",
        "2,345.67",
        "0.12",
        "97%",
        "2,469.1",
    }
    known |= {"60/64", "3", "50%", "123,456", "0", "1", "9", "0s"}
    table = [line for line in lines if re.match(r" (2026-|gpu-|tokenmill|batch \d)", line)]
    numbers = {word for line in table for word in line.split()[1:] if re.match(r"\d", word)}
    assert numbers <= known | {"12:00", *"012", "3600s", "60m"}
    assert all(len(line) <= width for line in lines)


def test_what_has_no_room_is_named_and_nothing_is_left_out_of_a_pipe() -> None:
    narrow = "\n".join(lines_of(stats_table([row("small")], "model", 60), 60))
    assert re.search(r"no room for: [a-z0-9 ,]*in span", narrow)
    assert "tok/s" in narrow
    name = "m" * 255
    assert name in "".join(lines_of(stats_table([row(name)], "model"), 400))


@pytest.mark.parametrize(("workers", "queues", "batches"), [(40, 6, 8), (40, 1, 0), (0, 30, 8), (2, 1, 1)])
@pytest.mark.parametrize(("width", "height"), [(80, 24), (160, 30), (200, 70)])
def test_no_part_of_top_hides_another_and_silent_workers_come_first(
    workers: int, queues: int, batches: int, width: int, height: int
) -> None:
    lines = lines_of(picture(fleet(workers, queues, batches), [1.0, 2.0], width, height), width)
    assert len(lines) <= height
    text = "\n".join(lines)
    counts = {"gpu-n": workers, "tokenmill.model-": queues, "batch ": batches}
    for begin, count in counts.items():
        found = len(re.findall(rf"^ {begin}", text, re.MULTILINE)) - (begin == "batch " and batches > 0)
        assert found >= min(count, 1)
        assert found == count or f"and {count - found} more" in text
    if workers:
        assert "silent 60m" in text


def test_a_course_has_every_hour_and_gaps_where_nothing_ended() -> None:
    rows = [row("2026-03-01 22:00"), row("2026-03-02 01:00", tokens=6_172_839)]
    entries = over_time(rows, "hour")
    assert [key[-5:] for key, _ in entries] == ["22:00", "23:00", "00:00", "01:00"]
    assert [entry for _, entry in entries] == [rows[0], None, None, rows[1]]
    tokens, latency, active = sparklines(rows, "hour")
    assert tokens == "  tok/s █▁▁▅  up to 3,429"
    assert latency == "  p95 s █  █  up to 2,346"
    assert active == " active █  █  up to 0.97"
    nights = [row("2026-02-27"), row("2026-03-02")]
    assert len(over_time(nights, "night")) == 4
    assert over_time([], "day") == []


@given(st.lists(st.none() | st.floats(0, 1e9), max_size=900), st.integers(50, 200))
def test_a_sparkline_fits_its_terminal_and_loses_no_peak(values: list[float | None], width: int) -> None:
    drawn = sparkline(values, width)
    assert len(drawn) <= width
    assert ("█" in drawn) == any(values)


@pytest.mark.parametrize("kind", ["png", "svg"])
def test_names_in_plots_are_no_formulas(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"a.{kind}"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        draw(path, [row(name) for name in HARM], "tenant")
    assert path.stat().st_size > 5_000


def test_names_in_tables_are_neither_markup_nor_commands_to_the_terminal() -> None:
    text = "\n".join(lines_of(stats_table([row(name) for name in HARM], "tenant"), 200))
    assert "[red]x[/red]" in text
    assert "\N{REPLACEMENT CHARACTER}[31mX\N{REPLACEMENT CHARACTER}" in text
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", text)


def test_a_plot_over_time_has_a_place_for_every_hour(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.axes import Axes

    courses: list[tuple[list[int], list[float]]] = []
    plot = Axes.plot

    def noted(self: Axes, places: list[int], numbers: list[float], **options: Any) -> Any:
        courses.append((places, numbers))
        return plot(self, places, numbers, **options)

    monkeypatch.setattr(Axes, "plot", noted)
    draw(tmp_path / "a.svg", [row("2026-03-01 22:00"), row("2026-03-02 01:00")], "hour")
    assert len(courses) == 4
    assert {tuple(places) for places, _ in courses} == {(0, 1, 2, 3)}
    assert courses[0][1][1:3] == [0.0, 0.0], "where no job ended there was no token"
    assert all(number != number for _, numbers in courses[1:] for number in numbers[1:3]), "unknown"


def test_top_waits_for_a_database_that_goes_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"sqlite:///{tmp_path / 'fleet.db'}"
    upgrade(url)
    screen, looks = io.StringIO(), []
    terminal = Console(file=screen, force_terminal=True, highlight=False, width=120, height=40)
    monkeypatch.setattr("workers.cli.top.console", lambda: terminal)

    def look(*arguments: object) -> FleetNow:
        looks.append(screen.getvalue())
        if len(looks) == 2:
            raise DatabaseUnavailableError("database x is not available")
        return fleet(2, 1, 1)

    def pause(seconds: float) -> None:
        if len(looks) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr("models_db.fleet_now.look", look)
    monkeypatch.setattr("workers.cli.top._sleep", pause)
    done = CliRunner().invoke(app, ["top", "--database-url", url])
    assert (done.exit_code, done.output, len(looks)) == (0, "", 3)
    assert "database x is not available" in looks[2]
    assert screen.getvalue().rindex("60 jobs running") > screen.getvalue().rindex("not available")
