"""How long a fleet takes from a kill to the first claim of something that the victim held."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.chaos.witness import Change


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that was out of order from ``begun`` to ``ended``, in seconds of the host's clock."""

    kind: str
    begun: float
    ended: float


@dataclass(frozen=True, slots=True)
class Kill:
    """A SIGKILL of some workers at one moment: who they were, and which jobs they ran."""

    at: float
    incarnations: frozenset[str]
    held: frozenset[str]


@dataclass(frozen=True, slots=True)
class Recovery:
    """``seconds`` from the kill, or from when a worker was there to recover it, to the first claim; ``disturbed``
    when another fault fell into that time."""

    kill: Kill
    seconds: float
    disturbed: bool


@dataclass
class Timeline:
    """What was done to the fleet, and when."""

    faults: list[Fault] = field(default_factory=list)
    kills: list[Kill] = field(default_factory=list)

    def killed(self, kill: Kill) -> Kill:
        """Note a kill."""
        self.kills.append(kill)
        return kill

    def recoveries(self, jobs: Sequence[Change], workers: Sequence[Change]) -> list[Recovery]:
        """One for each kill whose victim held jobs of which some were claimed again."""
        found = []
        for kill in self.kills:
            claims = (
                change.at
                for change in jobs
                if change.id in kill.held
                and change.after == "running"
                and change.at > kill.at
                and change.owner not in kill.incarnations
            )
            claimed = min(claims, default=None)
            if claimed is None:
                continue
            since = max(kill.at, _someone_there(kill, workers))
            others = [Fault("kill", other.at, other.at) for other in self.kills if other is not kill]
            disturbed = any(
                fault.begun < claimed and fault.ended > kill.at - 1 for fault in [*self.faults, *others]
            )
            found.append(Recovery(kill, max(0.0, claimed - since), disturbed))
        return found


def _someone_there(kill: Kill, workers: Sequence[Change]) -> float:
    """Since when a worker that was not killed has been online: before the kill, or the first one after it."""
    online: set[str] = set()
    for change in workers:
        if change.at > kill.at and online - kill.incarnations:
            return kill.at
        if change.after == "online":
            if change.at > kill.at:
                return change.at
            online.add(change.id)
        else:
            online.discard(change.id)
    return kill.at
