"""The measurements of bulk and of the statistics' cost count right, and notice what is wrong."""

from __future__ import annotations

import json
from inspect import signature
from pathlib import Path

import pytest

from benchmarks import bulk, history_cost
from benchmarks.bulk import Watched
from benchmarks.history_cost import Window
from workers.incarnation import Incarnation


def test_memory_is_compared_between_the_first_and_the_last_tenth() -> None:
    seen = Watched(
        "x", rss_mb=[(0.5, 10.0), (3.0, 90.0), (4.0, 95.0), (8.0, 300.0), (12.5, 110.0), (13.0, 99.0)]
    )
    assert seen.ends() == (95.0, 110.0)
    assert Watched("x", rss_mb=[(0.1, 5.0), (0.2, 7.0)]).ends() == (5.0, 7.0), "shorter than the imports"


def test_speed_is_read_from_what_the_command_said_and_from_the_database() -> None:
    fed = [(float(second), 100 * second) for second in range(1, 101)]
    seen = Watched("x", said="Submitted 10,000 lines in 100.0 s\n(1,234 lines/s).", fed=fed)
    assert seen.spoken_rate("Submitted") == "1,234"
    assert seen.spoken_rate("Wrote") == "not printed"
    assert seen.rate_between(0.9, 1.0) == 100.0
    assert Watched("x", fed=fed[:1]).rate_between(0.0, 0.1) is None


def test_an_output_out_of_order_or_too_short_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    bulk.write_input(path, 3)
    bulk.check_output(path, 3)
    with pytest.raises(AssertionError, match="3 lines came out of 4"):
        bulk.check_output(path, 4)
    lines = path.read_text(encoding="utf-8").splitlines()
    path.write_text("\n".join([lines[1], lines[0], lines[2]]), encoding="utf-8")
    with pytest.raises(AssertionError, match="line 1 is line-00000002"):
        bulk.check_output(path, 3)
    assert json.loads(lines[0])["row"] == 1


def test_windows_are_compared_with_their_neighbours() -> None:
    jobs = (90, 100, 110, 121)
    windows = [Window(on, 1.0, count, 0, 0.5) for on, count in zip(history_cost.PAIRS, jobs, strict=True)]
    ratios, control = history_cost.compared(windows, lambda window: window.jobs / window.seconds)
    assert ratios == [0.9, 1.1]
    assert control == [1.1]


def test_what_the_worker_is_switched_off_takes_no_arguments() -> None:
    """The measurement puts functions of its own in their places."""
    for replaced in (Incarnation._sample, Incarnation._roll_up):
        assert list(signature(replaced).parameters) == ["self"]
