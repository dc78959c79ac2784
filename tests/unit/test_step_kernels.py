"""The account of a decode step's kernels, from a made-up trace."""

from __future__ import annotations

import pytest

from benchmarks.gpu_works import uniform
from benchmarks.step_kernels import kernel_times, report

EVENTS = [
    ("attention", 320, 3200.0),
    ("Memcpy DtoH (Device -> Pinned)", 10, 20.0),
    ("a_product" + "_" * 80, 40, 4000.0),
    ("cudaGraphLaunch", 10, 0.0),  # of the host
]


def test_times_are_those_of_one_step() -> None:
    steps, times = kernel_times(EVENTS)
    assert steps == 10
    assert [(each.name[:9], each.launches, each.us) for each in times] == [
        ("a_product", 4.0, 400.0),
        ("attention", 32.0, 320.0),
        ("Memcpy Dt", 1.0, 2.0),
    ]


def test_the_report_names_the_longest_and_sums_up_the_rest() -> None:
    many = [(f"kernel {number}", 10, 10.0) for number in range(20)]
    lines = report(uniform(32, 1024), *kernel_times(EVENTS + many)).splitlines()
    assert "32 rows: 0.742 ms" in lines[0]
    assert "mean of 10 steps" in lines[0]
    assert lines[1].split()[-6:] == ["400.0", "µs", "53.9%", "4.0", "x", "100.00"]
    assert lines[-1].split() == ["7", "others", "7.0", "µs", "0.9%"]
    assert len({line.index("µs") for line in lines[1:]}) == 1


def test_a_trace_without_a_step_is_refused() -> None:
    with pytest.raises(RuntimeError, match="no step"):
        kernel_times(EVENTS[:1])
