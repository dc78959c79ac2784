"""What a chaos run found, and the one line that says so."""

from __future__ import annotations

import json
import re
import threading
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from tests.chaos.recovery import Recovery

_DUPLICATE = re.compile(r"was taken over; attempt \d+ does not count")
_TRACEBACK = re.compile(r"^Traceback \(most recent call last\)", re.MULTILINE)
_ENGINE_DIED = "the engine has died"
_SHOWN = 5


@dataclass
class Tally:
    """How often each kind of fault happened, and why it did not."""

    done: Counter[str] = field(default_factory=Counter)
    undone: dict[str, list[str]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def happened(self, kind: str) -> None:
        """From any thread."""
        with self._lock:
            self.done[kind] += 1

    def missed(self, kind: str, why: str) -> None:
        """From any thread."""
        with self._lock:
            self.undone.setdefault(kind, []).append(why)

    def lines(self) -> list[str]:
        """All of it, for people."""
        counts = ", ".join(f"{count} {kind}" for kind, count in sorted(self.done.items()))
        found = [f"faults that happened: {self.done.total()}: {counts or 'none'}"]
        for kind, reasons in sorted(self.undone.items()):
            whys = "; ".join(f"{count} x {why}" for why, count in Counter(reasons).items())
            planned = len(reasons) + self.done[kind]
            found.append(f"did not happen: {len(reasons)} of {planned} {kind}: {whys}")
        return found


@dataclass
class Verdict:
    """The findings. ``ok`` is what ``make chaos`` exits by."""

    jobs: int = 0
    lost: dict[str, str] = field(default_factory=dict)  # accepted, and not ended
    double: dict[str, list[str]] = field(default_factory=dict)  # ended more than once, by the witness
    wrong: dict[str, str] = field(default_factory=dict)  # ended, and not as it should
    # Workers that hold blocks or run something with nothing to do.
    busy: list[str] = field(default_factory=list)
    unacked: int = 0  # deliveries and messages left in Redis
    duplicates: int = 0  # ends that lost the fence: late, and not counted
    attempts: dict[str, int] = field(default_factory=dict)  # by outcome
    recoveries: list[Recovery] = field(default_factory=list)
    exit_codes: list[int] = field(default_factory=list)
    # Innocent, and failed all the same, with the reason: we killed ``SOLO_LIMIT`` workers each of which ran this job
    # and nothing else. Nobody can tell that from a prompt that kills. Counted; any other innocent that fails is wrong.
    blamed: dict[str, str] = field(default_factory=dict)
    tracebacks: dict[str, int] = field(default_factory=dict)  # by worker; told, not judged
    tally: Tally = field(default_factory=Tally)  # of a combined run; told, not judged

    @property
    def ok(self) -> bool:
        return not (self.lost or self.double or self.wrong or self.busy or self.unacked)

    @property
    def recovery_max_s(self) -> float | None:
        """The longest recovery that nothing else disturbed; none when none was measured."""
        return max((one.seconds for one in self.recoveries if not one.disturbed), default=None)

    def note_log(self, worker: str, log: str) -> None:
        """Take from a worker's log what only it knows."""
        self.duplicates += len(_DUPLICATE.findall(log))
        if _ENGINE_DIED in log:  # as one does that holds blocks when it stops
            self.busy.append(f"{worker}: {_ENGINE_DIED}, see its log")
        if count := len(_TRACEBACK.findall(log)):
            self.tracebacks[worker] = count

    def assert_ok(self, *, may_blame: bool = False) -> Self:
        """Raise an AssertionError that shows what is wrong.

        ``may_blame``: faults come at random, so that an innocent may be alone with two workers that we killed.
        """
        assert self.ok, "\n".join(self.complaints())
        assert may_blame or not self.blamed, f"blamed though innocent: {self.blamed}"
        return self

    def complaints(self) -> list[str]:
        """Everything that is wrong, a line each, the first few of a kind."""
        found = []
        for title, entries in (("lost", self.lost), ("double", self.double), ("wrong", self.wrong)):
            found += [f"{title}: {job_id} {what}" for job_id, what in list(entries.items())[:_SHOWN]]
            if len(entries) > _SHOWN:
                found.append(f"{title}: {len(entries)} in all")
        found += [f"not idle: {line}" for line in self.busy]
        if self.unacked:
            found.append(f"unacked: {self.unacked}")
        return found

    def figures(self) -> dict[str, Any]:
        """The numbers, for ``add_figures``."""
        return {
            "jobs": self.jobs,
            "lost": len(self.lost),
            "double": len(self.double),
            "wrong": len(self.wrong) + len(self.busy),
            "duplicates": self.duplicates,
            "unacked": self.unacked,
            "recovery_max_s": self.recovery_max_s,
            "blamed": len(self.blamed),
        }


def killed_alone(attempts: Iterable[tuple[str, str, str]], harmed: Collection[str]) -> Counter[str]:
    """How often each job was all that a worker ran when we killed it.

    Args:
        attempts: job, worker and outcome (``lost``, or ``open``, where the worker died with it) of each attempt.
        harmed: the workers that we killed, or froze until they counted as dead.
    """
    died_with: dict[str, list[str]] = {}
    for job_id, worker_id, outcome in attempts:
        if worker_id in harmed and outcome in ("lost", "open"):
            died_with.setdefault(worker_id, []).append(job_id)
    return Counter(jobs[0] for jobs in died_with.values() if len(jobs) == 1)


def line(figures: dict[str, Any]) -> str:
    """``chaos: jobs=… lost=… double=… duplicates=… unacked=… recovery_max_s=… blamed=…``."""
    names = ("jobs", "lost", "double", "duplicates", "unacked")
    slowest = figures["recovery_max_s"]
    shown = "none" if slowest is None else f"{slowest:.1f}"
    counts = " ".join(f"{name}={figures[name]}" for name in names)
    return f"chaos: {counts} recovery_max_s={shown} blamed={figures['blamed']}"


def add_figures(all_figures: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The sum of several runs; of recoveries the longest."""
    total: dict[str, Any] = dict.fromkeys(Verdict().figures(), 0) | {"recovery_max_s": None}
    for figures in all_figures:
        for name, value in figures.items():
            if name != "recovery_max_s":
                total[name] += value
            elif value is not None:
                total[name] = max(value, total[name] or 0.0)
    return total


def write_figures(path: Path, figures: dict[str, Any]) -> None:
    """Append one run's numbers."""
    with path.open("a") as file:
        file.write(json.dumps(figures) + "\n")


def read_figures(path: Path) -> list[dict[str, Any]]:
    """What ``write_figures`` has written; nothing where there is no such file."""
    if not path.exists():
        return []
    return [json.loads(text) for text in path.read_text().splitlines()]
