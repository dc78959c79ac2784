"""An engine that hangs is told from one that is idle, slow, or in a process that stood still."""

from __future__ import annotations

from backend.api import BackendStats
from workers.watchdog import StallWatch

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
