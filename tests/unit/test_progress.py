"""Progress: speed and time left from snapshots, and lines that read well in a log file."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from workers.progress import BarReporter, LineReporter, Snapshot, Speed, duration, reporter


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_speed_is_measured_over_the_last_seconds_only() -> None:
    clock = Clock()
    speed = Speed(clock, window_s=10)
    for second in range(31):
        clock.now = 100.0 + second
        fast = max(0, second - 10)  # nothing happens in the first ten seconds
        speed.add(Snapshot(done=fast, total=100, tokens=50 * fast))
    assert speed.tokens_per_s() == pytest.approx(50)
    assert speed.left_s() == pytest.approx(80)


def test_no_speed_is_claimed_before_it_is_known() -> None:
    speed = Speed(Clock())
    assert (speed.tokens_per_s(), speed.left_s()) == (0.0, None)
    speed.add(Snapshot(0, 10))
    assert (speed.tokens_per_s(), speed.left_s()) == (0.0, None)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.44, "0.4 s"), (9.96, "10 s"), (59.4, "59 s"), (65, "1:05"), (7380, "2:03:00"), (59.6, "1:00")],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_a_log_file_gets_whole_lines_now_and_then_and_the_last_state() -> None:
    clock = Clock()
    file = io.StringIO()
    with reporter(Console(file=file, width=40), "bulk", clock) as shown:
        assert isinstance(shown, LineReporter)
        for second in range(25):
            clock.now = 100.0 + second
            shown.update(Snapshot(done=second, total=25, failed=1, running=4, tokens=10 * second))
    lines = file.getvalue().splitlines()
    assert lines[0] == "bulk: 0/25 done, 1 failed, 4 running"
    assert lines[1] == "bulk: 10/25 done, 1 failed, 4 running, 10 tok/s, 15 s left"
    assert lines[-1].startswith("bulk: 24/25 done")
    assert len(lines) == 4


def test_a_terminal_gets_a_bar() -> None:
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=100)
    with reporter(console, "bulk", Clock()) as shown:
        assert isinstance(shown, BarReporter)
        shown.update(Snapshot(done=3, total=10, tokens=30))
    assert "3/10 done" in file.getvalue()
