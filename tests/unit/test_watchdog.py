"""An engine that hangs is told from one that is idle, slow, or in a process that stood still."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import cast

import pytest

from backend.api import Backend, BackendStats
from workers.watchdog import StallWatch, stop_backend

WORK = BackendStats(running=1, steps=7)


def test_an_engine_with_work_and_no_step_hangs() -> None:
    watch = StallWatch(10, 3)
    assert [watch.look(WORK, now) for now in range(12)] == [False] * 10 + [True] * 2


def test_work_that_only_waits_counts_too() -> None:
    watch = StallWatch(10, 3)
    assert [watch.look(BackendStats(waiting=1), now) for now in range(11)][-1]


def test_an_idle_engine_does_not_hang_and_gets_its_full_time_with_new_work() -> None:
    watch = StallWatch(10, 3)
    assert not any(watch.look(BackendStats(steps=7), now) for now in range(100))
    assert not any(watch.look(WORK, now) for now in range(100, 109))
    assert watch.look(WORK, 109)


def test_any_step_is_enough() -> None:
    watch = StallWatch(10, 3)
    assert not any(watch.look(BackendStats(running=1, steps=now // 9), now) for now in range(100))


def test_a_process_that_stood_still_gets_its_full_time_again() -> None:
    watch = StallWatch(10, 3)
    assert not watch.look(WORK, 0)
    assert not watch.look(WORK, 60)
    assert [watch.look(WORK, now) for now in range(61, 71)] == [False] * 9 + [True]


class _Backend:
    """Only what a shutdown needs."""

    def __init__(self, end: Callable[[], object]) -> None:
        self._end = end

    def shutdown(self, *, drain: bool, timeout_s: float | None = None) -> None:
        assert not drain
        self._end()


def test_a_backend_that_does_not_stop_is_left() -> None:
    hanging = threading.Event()
    assert not stop_backend(cast(Backend, _Backend(hanging.wait)), 0.05)
    hanging.set()
    assert stop_backend(cast(Backend, _Backend(hanging.wait)), 30)


def test_what_goes_wrong_in_a_shutdown_is_raised() -> None:
    def fail() -> None:
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        stop_backend(cast(Backend, _Backend(fail)), 30)
