"""The faults of a combined run: what did not happen is told as such, and what happened is undone whatever comes."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.chaos import faults as faults_module
from tests.chaos.combined import Run
from tests.chaos.disks import SmallDisk
from tests.chaos.faults import Faults
from tests.chaos.judge import Harm
from tests.chaos.plan import FAULTS, NotDoneError, Plan, Step
from tests.chaos.recovery import Timeline
from tests.chaos.verdict import Tally, Verdict
from tests.chaos.world import World

pytestmark = pytest.mark.chaos


class Nothing:
    """A world in which no worker runs, nobody is connected and no job was submitted; ``done`` is what was asked."""

    def __init__(self) -> None:
        self.done: list[str] = []
        seat = SimpleNamespace(pid=lambda: None, signal=lambda number: None, replace=lambda *_, **__: False)
        self.seats = [seat]
        self.expected: dict[str, Any] = {}
        self.harm = lambda *pids: [Harm(pid, 0.0) for pid in pids]
        self.timeline = Timeline()
        client = SimpleNamespace(rpop=lambda queue: None)
        self.redis = SimpleNamespace(
            cut=lambda: 0, client=client, running=True, kill=self._kill, start=self._start
        )
        self.redis_proxy = SimpleNamespace(
            cut=lambda: 0, hold=lambda marker: threading.Event(), release=lambda: self.done.append("released")
        )
        self.database_proxy = SimpleNamespace(cut=lambda: 0, connections=0, forward=lambda: None)
        self.server = SimpleNamespace(
            process=None, stop=lambda: self.done.append("stopped"), start=self._start
        )
        self.engine, self.queue, self.model = object(), "q", "echo"
        self.fault = lambda kind: World.fault(self, kind)  # type: ignore[arg-type]
        self.states: Callable[[], dict[str, Any]] = dict
        self.finish: Callable[..., Verdict] = lambda *_, **__: Verdict()

    def _kill(self, *, keep: bool) -> None:
        self.redis.running = False

    def _start(self) -> None:
        self.done.append("started")


NOT_HERE = [
    "kill_one",
    "kill_all",
    "freeze_shortly",
    "warm_restart",
    "cold_restart",
    "redis_held",
    "redis_cuts",
    "database_cuts",
    "database_hang",
    "database_disk",
    "duplicates",
    "revokes",
    "cancels",
    "lost_messages",
]


@pytest.fixture(autouse=True)
def no_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults_module, "drop_clients", lambda engine: 0)


def test_each_kind_of_fault_has_its_method() -> None:
    assert all(callable(getattr(Faults, kind)) for kind in FAULTS)


@pytest.mark.parametrize("kind", NOT_HERE)
def test_a_fault_that_cannot_happen_says_so(kind: str) -> None:
    world: Any = Nothing()
    with pytest.raises(NotDoneError):
        Faults(world).do(Step(0.0, kind, 0.01, 1))
    assert "stopped" not in world.done, "no other fault instead"


def test_a_run_counts_what_happened_and_what_did_not() -> None:
    world: Any = Nothing()
    kinds = ["kill_one", "kill_one", "redis_kill", "database_disk", "freeze_shortly"]
    plan = Plan(1, 1.0, tuple(Step(0.0, kind, 0.01, 1) for kind in kinds), ())
    said: list[str] = []
    verdict = Run(world, plan, said.append).carry_out()
    assert dict(verdict.tally.done) == {"redis_kill": 1}
    lines = verdict.tally.lines()
    assert lines[0] == "faults that happened: 1: 1 redis_kill"
    assert "did not happen: 2 of 2 kill_one: 2 x no worker was there at that moment" in lines
    assert any("1 of 1 database_disk: 1 x NOT TESTED: A FULL DISK" in line for line in lines)
    assert sum("did not happen" in line for line in said) == 4
    assert [fault.kind for fault in world.timeline.faults] == ["redis_kill"], "the others disturb no recovery"


class FullDisk:
    """A disk that is full between ``fill`` and ``clear``."""

    full = False

    def fill(self) -> None:
        self.full = True

    def clear(self) -> None:
        self.full = False


def test_whatever_goes_wrong_meanwhile_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    world: Any = Nothing()
    disk: Any = FullDisk()
    seen: list[bool] = []

    def interrupted(seconds: float) -> None:
        seen.append(disk.full)
        raise OSError("a fault in the fault")

    monkeypatch.setattr(time, "sleep", interrupted)
    faults = Faults(world, disk)
    with pytest.raises(OSError, match="a fault in the fault"):
        faults.database_disk(Step(0.0, "database_disk", 1.0, 1), random.Random(1))
    assert (seen, disk.full, world.done) == ([True], False, ["stopped", "started"])
    with pytest.raises(OSError, match="a fault in the fault"):
        faults.redis_wipe(Step(0.0, "redis_wipe", 1.0, 1), random.Random(1))
    assert world.done[2:] == ["started"]
    signals: list[int] = []
    world.seats = [SimpleNamespace(pid=lambda: 7, signal=lambda number: signals.append(number) or 7)]
    with pytest.raises(OSError, match="a fault in the fault"):
        faults.freeze_past_death(Step(0.0, "freeze_past_death", 1.0, 1), random.Random(1))
    assert len(signals) == 2, "stopped, and continued"


def test_a_disk_that_took_everything_was_not_full(tmp_path: Path) -> None:
    assert not SmallDisk(tmp_path).full
    world: Any = Nothing()
    disk: Any = SimpleNamespace(fill=lambda: None, full=False, clear=lambda: world.done.append("cleared"))
    with pytest.raises(NotDoneError, match="took all"):
        Faults(world, disk).do(Step(0.0, "database_disk", 0.01, 1))
    assert world.done == ["cleared"]


def test_the_tally_adds_up_from_many_threads() -> None:
    tally = Tally()
    threads = [
        threading.Thread(target=lambda: [tally.happened("a") or tally.missed("b", "why") for _ in range(500)])
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert tally.done["a"] == len(tally.undone["b"]) == 2000
    assert Tally().lines() == ["faults that happened: 0: none"]
