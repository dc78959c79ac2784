"""The supervisor: restarts with back-off, stops with rising force, one process for each GPU."""

from __future__ import annotations

import errno
import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from workers.exits import EXIT_TRY_AGAIN
from workers.settings import Settings, load_settings
from workers.supervisor import Supervisor, describe_exit, start_process, visible_gpus, wants_every_gpu


class FakeProcess:
    def __init__(self, code: int | None) -> None:
        self.code = code
        self.signals: list[int] = []

    def poll(self) -> int | None:
        return self.code

    def send_signal(self, number: int) -> None:
        self.signals.append(number)


class World:
    """A supervisor whose processes end as told and whose time passes with each look at the clock."""

    def __init__(
        self, codes: list[int | None], *, life_s: float = 1.0, once: bool = False, **environ: str
    ) -> None:
        self.codes = codes
        self.started: list[tuple[float, Mapping[str, str]]] = []
        self.processes: list[FakeProcess] = []
        self.seconds = 0.0
        self.life_s = life_s
        self.supervisor = Supervisor(
            load_settings(backend="echo", restart_backoff_s=1, restart_backoff_max_s=4),
            once=once,
            spawn=self.spawn,
            clock=self.clock,
            wait=self.wait,
            environ=environ,
        )

    def clock(self) -> float:
        return self.seconds

    def wait(self, timeout_s: float) -> None:
        self.seconds += 0.25
        if len(self.processes) >= len(self.codes) and self.processes[-1].code is None:
            self.supervisor.stop()
            if self.processes[-1].signals:
                self.processes[-1].code = 0

    def spawn(self, settings: Settings, environment: Mapping[str, str]) -> Any:
        self.started.append((self.seconds, environment))
        self.processes.append(FakeProcess(self.codes[len(self.processes)]))
        self.seconds += self.life_s
        return self.processes[-1]


def test_a_dead_process_is_started_again_with_growing_pauses(caplog: pytest.LogCaptureFixture) -> None:
    world = World([-9, 70, 1, 1, 1, None])
    assert world.supervisor.run() == 0
    starts = [at for at, _ in world.started]
    pauses = [round(later - earlier) for earlier, later in itertools.pairwise(starts)]
    assert pauses == [2, 3, 5, 5, 5], "one second of life, then 1, 2, 4, 4, 4 of pause"
    assert "worker was killed by SIGKILL; starting again in 1s (failure 1)" in caplog.text
    assert "ended with exit code 70 (its engine died); starting again in 2s" in caplog.text


def test_a_long_life_starts_the_pauses_anew() -> None:
    world = World([1, 1, 1, None], life_s=100)
    world.supervisor.run()
    starts = [at for at, _ in world.started]
    assert [round(b - a - 100) for a, b in itertools.pairwise(starts)] == [1, 1, 1]


@pytest.mark.parametrize("code", [0, 78])
def test_a_clean_end_and_a_wrong_configuration_are_final(code: int) -> None:
    world = World([code])
    assert world.supervisor.run() == code
    assert len(world.started) == 1


def test_a_process_that_cannot_be_started_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    world = World([1, None])
    tries: list[float] = []
    real = world.spawn

    def spawn(settings: Settings, environment: Mapping[str, str]) -> Any:
        tries.append(world.seconds)
        if len(tries) in (1, 3):
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return real(settings, environment)

    world.supervisor._spawn = spawn
    assert world.supervisor.run() == 0
    assert len(tries) == 4
    assert "worker could not be started ([Errno 11] Resource temporarily unavailable); starting again" in (
        caplog.text
    )
    once = World([1], once=True)
    once.supervisor._spawn = spawn
    tries[:] = []
    assert once.supervisor.run() == EXIT_TRY_AGAIN


def test_a_process_that_dies_before_it_reads_its_settings_says_how_it_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\nexec 0<&-\nexit 78\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    large = load_settings(backend="echo", models=tuple(f"model-{n}" for n in range(50_000)))  # fills the pipe
    assert start_process(large, {}).wait(60) == 78
    monkeypatch.setattr(sys, "executable", str(tmp_path / "missing"))
    with pytest.raises(FileNotFoundError):
        start_process(large, {})


def test_once_returns_the_exit_code() -> None:
    assert World([70], once=True).supervisor.run() == 70
    assert World([-9], once=True).supervisor.run() == 137


def test_each_further_stop_is_harder() -> None:
    world = World([None])
    supervisor = world.supervisor
    supervisor._tend(supervisor._seats[0])
    for expected in (signal.SIGTERM, signal.SIGQUIT, signal.SIGKILL, signal.SIGKILL):
        supervisor.stop()
        supervisor._forward_stops()
        assert world.processes[0].signals[-1] == expected


def test_a_cold_stop_is_as_hard_as_two_and_signals_that_come_together_count_by_the_hardest() -> None:
    for stops, expected in (
        ([True], [signal.SIGQUIT]),
        ([True, False], [signal.SIGQUIT, signal.SIGKILL]),
        ([False, True], [signal.SIGTERM, signal.SIGQUIT]),
        ([False, True, True], [signal.SIGTERM, signal.SIGQUIT, signal.SIGKILL]),
    ):
        world = World([None])
        supervisor = world.supervisor
        supervisor._tend(supervisor._seats[0])
        for cold in stops:
            supervisor.stop(cold=cold)
            supervisor._forward_stops()
        assert world.processes[0].signals == expected
    together = World([None])
    together.supervisor._tend(together.supervisor._seats[0])
    together.supervisor.stop()
    together.supervisor.stop()
    for _ in range(2):
        together.supervisor._forward_stops()
    assert together.processes[0].signals == [signal.SIGQUIT]


STOPPED_ALL_THE_TIME = """
import signal
from workers.settings import load_settings
from workers.supervisor import Supervisor

class Process:
    def poll(self):
        return 0 if seen > 2000 else None

    def send_signal(self, number):
        pass

def stop(*_):
    global seen
    seen += 1
    supervisor.stop()

seen = 0
supervisor = Supervisor(load_settings(backend="echo"), spawn=lambda *_: Process())
signal.signal(signal.SIGALRM, stop)
signal.setitimer(signal.ITIMER_REAL, 1e-4, 1e-4)
code = supervisor.run()
signal.setitimer(signal.ITIMER_REAL, 0)
print(code)
"""


def test_a_signal_is_heard_at_whatever_moment_it_comes() -> None:
    """A lock that is held while the handler runs would be waited for without an end."""
    done = subprocess.run(
        [sys.executable, "-c", STOPPED_ALL_THE_TIME], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout == "0\n"


def test_one_process_for_each_gpu() -> None:
    settings = load_settings(backend="async")
    assert wants_every_gpu(settings)
    assert not wants_every_gpu(load_settings(backend="echo"))
    assert not wants_every_gpu(load_settings(backend="async", engine={"device": "cuda:1"}))
    assert not wants_every_gpu(load_settings(backend="async", engine={"device": "cpu"}))
    supervisor = Supervisor(settings, environ={"CUDA_VISIBLE_DEVICES": "3,5"}, spawn=lambda *_: None)
    assert [(seat.label, dict(seat.environment)) for seat in supervisor._seats] == [
        ("GPU 3", {"CUDA_VISIBLE_DEVICES": "3"}),
        ("GPU 5", {"CUDA_VISIBLE_DEVICES": "5"}),
    ]


def test_gpus_are_found_without_touching_them(tmp_path: Path) -> None:
    for name in ("0000:1a:00.0", "0000:3b:00.0"):
        (tmp_path / name).mkdir()
    assert visible_gpus({}, tmp_path) == ["0", "1"]
    assert visible_gpus({}, tmp_path / "none") == []
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": ""}, tmp_path) == []
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "-1"}, tmp_path) == []


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (-9, "killed by SIGKILL"),
        (-250, "killed by signal 250"),
        (3, "exit code 3"),
        (78, "configuration is wrong"),
    ],
)
def test_exits_in_words(code: int, words: str) -> None:
    assert words in describe_exit(code)
