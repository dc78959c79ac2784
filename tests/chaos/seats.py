"""Worker processes that are killed, frozen, stopped and started again."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.fleet.fleet import WorkerProcess
from workers.settings import load_settings

START_S = 200.0  # of patience with a busy machine
ROOT = str(Path(__file__).resolve().parents[2])


def environment(settings: Mapping[str, Any]) -> dict[str, str]:
    """Settings as the variables that ``tokenmill worker`` reads."""
    found = {}
    for name, value in settings.items():
        if isinstance(value, Mapping):
            found |= {f"TOKENMILL_{name}_{part}".upper(): str(item) for part, item in value.items()}
        elif value is not None:
            found[f"TOKENMILL_{name.upper()}"] = str(value)
    return found


class Seat:
    """A place for one worker: ``tokenmill worker``, which starts it again when it dies, or (not ``supervised``)
    the bare worker process, which stays dead until ``start``."""

    def __init__(
        self, name: str, settings: Mapping[str, Any], *, supervised: bool, variables: Mapping[str, str] = {}
    ) -> None:
        self.name = name
        self.supervised = supervised
        self._settings = dict(settings) | {"worker_name": name}
        self._variables = {"PYTHONPATH": ROOT, **variables}
        self.processes: list[WorkerProcess] = []

    @property
    def current(self) -> WorkerProcess:
        return self.processes[-1]

    @property
    def log(self) -> str:
        return "\n".join(process.log for process in self.processes)

    def start(self, variables: Mapping[str, str] = {}) -> WorkerProcess:
        """Start a (further) process in this seat, with variables for it alone."""
        if self.supervised:
            command = [sys.executable, "-m", "workers.cli", "worker"]
            theirs = environment(self._settings) | self._variables
            process = WorkerProcess(command, environment=theirs | dict(variables))
        else:
            command = [sys.executable, "-m", "workers.process"]
            process = WorkerProcess(
                command, load_settings(**self._settings), self._variables | dict(variables)
            )
        self.processes.append(process)
        return process

    def ready(self) -> None:
        """Wait until the process that was started last takes jobs."""
        self.current.wait_for(" ready.", START_S)

    def pid(self) -> int | None:
        """The process that works, when there is one at this moment."""
        if not self.processes or self.current.process.poll() is not None:
            return None
        return self.worker_pid(self.current)

    @property
    def frozen(self) -> bool:
        """Whether the process that works is stopped, by SIGSTOP or so."""
        try:
            stat = Path(f"/proc/{self.pid()}/stat").read_text()
        except OSError:
            return False
        return stat.rpartition(")")[2].split()[0] == "T"

    def worker_pid(self, process: WorkerProcess) -> int | None:
        """The worker behind this process, which may be its supervisor."""
        pid = process.process.pid
        if not self.supervised:
            return pid
        try:
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        except OSError:
            return None
        return int(children[0]) if children else None

    def signal(self, number: int) -> int | None:
        """Send a signal to the process that works; returns its id."""
        pid = self.pid()
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        return pid

    def kill(self) -> int | None:
        """SIGKILL to the worker; a bare one is waited for."""
        pid = self.signal(signal.SIGKILL)
        if not self.supervised and pid is not None:
            self.current.process.wait(10)
        return pid

    def replace(self, variables: Mapping[str, str] = {}, *, cold: bool = False) -> bool:
        """A rolling restart: a warm shutdown of what runs, beside which its successor starts.

        ``cold`` means a second signal soon after, which has everything handed back at once. Returns whether there was
        anything to shut down.
        """
        old = self.current
        self.start(variables)
        ran = old.process.poll() is None
        if ran:
            old.signal(signal.SIGTERM)
        if cold and old.process.poll() is None:
            with contextlib.suppress(AssertionError):
                old.wait_for("Draining", 2)  # nothing is said where nothing runs
            old.signal(signal.SIGTERM)
        return ran

    def stop(self, timeout_s: float = 60) -> list[int]:
        """Warm shutdown of everything in the seat; the exit codes."""
        for process in self.processes:
            if process.process.poll() is None:
                process.signal(signal.SIGTERM)
        end = time.monotonic() + timeout_s
        return [process.wait(max(1.0, end - time.monotonic())) for process in self.processes]

    def destroy(self) -> None:
        """Kill what is left, worker first: a supervisor would start it again."""
        for process in self.processes:
            if process.process.poll() is None:
                worker = self.worker_pid(process) if self.supervised else None
                process.process.kill()
                if worker is not None:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(worker, signal.SIGKILL)
                process.process.wait(10)
