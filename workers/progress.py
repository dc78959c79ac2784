"""How far a piece of work is: a live bar on a terminal, a line now and then in a log file."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

_WINDOW_S = 10.0  # over which speed is measured
_LOG_EVERY_S = 10.0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Where the work stands. ``tokens`` are generated ones."""

    done: int
    total: int
    failed: int = 0
    running: int = 0
    tokens: int = 0


class Speed:
    """Tokens and jobs per second over the last seconds, and the time left."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, window_s: float = _WINDOW_S) -> None:
        self._clock = clock
        self._window_s = window_s
        self._seen: deque[tuple[float, Snapshot]] = deque()

    def add(self, now: Snapshot) -> None:
        """Note where the work stands at this moment."""
        moment = self._clock()
        self._seen.append((moment, now))
        while len(self._seen) > 2 and moment - self._seen[1][0] >= self._window_s:
            self._seen.popleft()

    def tokens_per_s(self) -> float:
        """0 until two snapshots lie apart."""
        return self._rate(lambda snapshot: snapshot.tokens)

    def left_s(self) -> float | None:
        """Seconds until everything is done at this speed; ``None`` while that cannot be known."""
        jobs_per_s = self._rate(lambda snapshot: snapshot.done)
        if not self._seen or not jobs_per_s:
            return None
        latest = self._seen[-1][1]
        return (latest.total - latest.done) / jobs_per_s

    def _rate(self, of: Callable[[Snapshot], int]) -> float:
        if len(self._seen) < 2:
            return 0.0
        (began, first), (ended, last) = self._seen[0], self._seen[-1]
        return (of(last) - of(first)) / (ended - began) if ended > began else 0.0


class Reporter(Protocol):
    """Shows progress within a ``with`` block."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def update(self, now: Snapshot) -> None:
        """Show where the work stands."""


def reporter(console: Console, what: str, clock: Callable[[], float] = time.monotonic) -> Reporter:
    """The kind that suits the console."""
    if console.is_terminal:
        return BarReporter(console, what, clock)
    return LineReporter(console, what, clock)


class BarReporter:
    """A live bar with speed and time left."""

    def __init__(self, console: Console, what: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed:.0f}/{task.total:.0f} done"),
            TextColumn("{task.fields[details]}"),
            TimeElapsedColumn(),
            console=console,
        )
        self._speed = Speed(clock)
        self._task: TaskID = self._progress.add_task(what, total=1, details="")

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def update(self, now: Snapshot) -> None:
        """Move the bar."""
        self._speed.add(now)
        self._progress.update(
            self._task, completed=now.done, total=max(now.total, 1), details=details(now, self._speed)
        )


class LineReporter:
    """One whole line every ten seconds, and at the first and the last moment; for log files."""

    def __init__(self, console: Console, what: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._what = what
        self._clock = clock
        self._speed = Speed(clock)
        self._next = clock()
        self._last: Snapshot | None = None
        self._shown: Snapshot | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._last is not None and self._last != self._shown:
            self._print(self._last)

    def update(self, now: Snapshot) -> None:
        """Print a line when it is time for one."""
        self._speed.add(now)
        self._last = now
        if self._clock() >= self._next:
            self._next = self._clock() + _LOG_EVERY_S
            self._print(now)

    def _print(self, now: Snapshot) -> None:
        self._shown = now
        parts = [f"{self._what}: {now.done:,}/{now.total:,} done", details(now, self._speed)]
        self._console.print(", ".join(part for part in parts if part), markup=False, soft_wrap=True)


def details(now: Snapshot, speed: Speed) -> str:
    """``"3 failed, 16 running, 118 tok/s, 1:05 left"``, without what does not apply."""
    parts = []
    if now.failed:
        parts.append(f"{now.failed:,} failed")
    if now.running:
        parts.append(f"{now.running:,} running")
    if rate := speed.tokens_per_s():
        parts.append(f"{rate:,.0f} tok/s")
    left = speed.left_s()
    if left and now.done < now.total:
        parts.append(f"{duration(left)} left")
    return ", ".join(parts)


def duration(seconds: float) -> str:
    """``"9.2 s"``, ``"42 s"``, ``"1:05"`` (minutes) or ``"2:03:00"`` (hours)."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
