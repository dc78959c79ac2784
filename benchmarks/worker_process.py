"""A worker process under measurement: started, watched and stopped."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from workers.demo import stop_group

TIMEOUT_S = 600.0
LOOK_S = 0.25


class WorkerProcess:
    """A worker and its log. The context stops it."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self._process = process
        self._log = log
        self.pid = process.pid

    def check(self) -> None:
        """Raise when it has ended."""
        if self._process.poll() is not None:
            tail = "\n".join(self._log.read_text(errors="replace").splitlines()[-10:])
            raise RuntimeError(
                f"the worker ended with {self._process.returncode}. Its log ends with:\n{tail}"
            )

    def __enter__(self) -> WorkerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        stop_group(self._process)


def start_process(arguments: list[str], variables: dict[str, str], log: Path) -> WorkerProcess:
    """Start Python with these arguments and more variables; the context that it is stops it."""
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, *arguments],
            env=os.environ | variables,
            cwd=Path(__file__).resolve().parent.parent,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return WorkerProcess(process, log)


def wait(until: Callable[[], bool], worker: WorkerProcess, what: str) -> None:
    """Look until it is so.

    Raises:
        RuntimeError: the worker has ended, or it takes too long.
    """
    limit = time.monotonic() + TIMEOUT_S
    while not until():
        worker.check()
        if time.monotonic() > limit:
            raise RuntimeError(f"waited {TIMEOUT_S:g} s for {what}")
        time.sleep(LOOK_S)


def _processes(pid: int) -> list[list[str]]:
    """``/proc``'s numbers of a process and all below it, from its state on; none where there is no ``/proc``."""
    found: dict[int, list[str]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has just ended
            found[int(stat.parent.name)] = stat.read_text().rpartition(")")[2].split()
    tree = [pid] if pid in found else []
    for parent in tree:  # grows while it is walked
        tree.extend(child for child, numbers in found.items() if int(numbers[1]) == parent)
    return [found[each] for each in tree]


def cpu_s(pid: int) -> float | None:
    """CPU seconds of a worker: its supervisor and its process."""
    ticks = [int(numbers[11]) + int(numbers[12]) for numbers in _processes(pid)]
    return sum(ticks) / os.sysconf("SC_CLK_TCK") if ticks else None


def rss_mib(pid: int) -> float:
    """Resident memory of a worker's largest process."""
    pages = max((int(numbers[21]) for numbers in _processes(pid)), default=0)
    return float(pages * os.sysconf("SC_PAGE_SIZE") / 2**20)
