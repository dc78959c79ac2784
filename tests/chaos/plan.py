"""The schedule of a combined run: a pure function of the seed, so that a run can be made again.

What is scheduled is what is done to the fleet and when; how its processes interleave is theirs.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.chaos.jobs import request

LONGEST_TOKENS = 300  # of one job: 15 s at the pace of the run; in a short run less
LONG_RUN_S = 300.0
VERY_LONG_JOBS = 4  # of a long run
VERY_LONG_TOKENS = 900  # 45 s, more than four visibility timeouts
_LEAD_S = 3.0  # load alone, before the first fault
_QUIET_S = 9.5  # a kill is over by then, so that its recovery is measured alone
_TAIL_S = 2.0
SHORT_RUN_S = 30.0  # shorter than this, a run has no room for what takes long, and no quiet times
_SHORT_FAULT_S = 3.0

# name: (seconds that it lasts at least and at most, whether a quiet time must follow)
FAULTS: dict[str, tuple[float, float, bool]] = {
    "kill_one": (0.0, 0.0, True),
    "kill_all": (0.0, 0.0, True),
    "freeze_past_death": (9.0, 12.0, False),
    "freeze_shortly": (1.0, 4.0, False),
    "redis_kill": (0.5, 3.0, False),
    "redis_wipe": (0.5, 3.0, False),
    "redis_cuts": (3.0, 3.0, False),
    "redis_held": (9.0, 12.0, False),
    "database_stop": (4.0, 60.0, False),
    "database_cuts": (3.0, 3.0, False),
    "database_hang": (2.0, 9.0, False),
    "database_disk": (4.0, 12.0, False),
    "warm_restart": (1.0, 1.0, False),
    "cold_restart": (1.0, 1.0, False),
    "wrong_clock": (1.0, 1.0, False),
    "sweepers": (6.0, 6.0, False),
    "duplicates": (0.0, 0.0, False),
    "revokes": (0.0, 0.0, False),
    "cancels": (0.0, 0.0, False),
    "garbage": (0.0, 0.0, False),
    "newer": (0.0, 0.0, False),
    "lost_messages": (0.0, 0.0, False),
    "unpublished": (0.0, 0.0, False),
    "poison": (0.0, 0.0, True),
}


class NotDoneError(Exception):
    """A step could not be carried out, and nothing is out of order because of it; the message says why."""


@dataclass(frozen=True, slots=True)
class Step:
    """A fault: begun at ``at`` seconds after the start, over after ``lasts``; ``draw`` decides what is left open."""

    at: float
    kind: str
    lasts: float
    draw: int

    def __str__(self) -> str:
        lasting = f" for {self.lasts:.1f}s" if self.lasts else ""
        return f"{self.at:6.1f}s {self.kind}{lasting}"


@dataclass(frozen=True, slots=True)
class Arrival:
    """Jobs that are submitted together."""

    at: float
    requests: tuple[dict[str, Any], ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that a run does by itself."""

    seed: int
    seconds: float
    steps: tuple[Step, ...] = field(repr=False)
    arrivals: tuple[Arrival, ...] = field(repr=False)


def make_plan(seed: int, seconds: float, jobs: int, kinds: Iterable[str] = FAULTS) -> Plan:
    """Draw a plan. Every kind comes up once before any comes up again; short runs begin with a kill.

    One that is shorter than ``SHORT_RUN_S`` draws from what is soon over, and close together, so that some meet.

    Args:
        seconds: during which jobs arrive and faults begin.
        jobs: how many arrive, in groups, with some bursts.
        kinds: which of ``FAULTS`` to use.
    """
    rng = random.Random(seed)
    names = sorted(kinds)
    return Plan(seed, seconds, tuple(_steps(rng, seconds, names)), tuple(_arrivals(rng, seconds, jobs)))


def _steps(rng: random.Random, seconds: float, names: Sequence[str]) -> list[Step]:
    steps: list[Step] = []
    bag: list[str] = []
    short = seconds < SHORT_RUN_S
    if short:
        names = [name for name in names if name == "kill_one" or _is_short(name)] or names
    at = _LEAD_S + rng.random()
    while True:
        if not bag:
            bag = rng.sample(names, len(names))
            if not steps and "kill_one" in bag:
                bag.append(bag.pop(bag.index("kill_one")))  # popped first
        kind = bag.pop()
        least, most, quiet = FAULTS[kind]
        lasts = least + (min(most, max(least, seconds / 10)) - least) * rng.random() ** 3  # most are short
        draw = rng.randrange(1 << 32)
        if at + lasts + _TAIL_S > seconds:
            return steps
        steps.append(Step(round(at, 3), kind, round(lasts, 3), draw))
        # Often the next one falls into this one, or into the time that the fleet needs to get over it.
        if short:
            at += rng.choice((rng.uniform(0, lasts), lasts)) + rng.uniform(0.2, 1.0)
        elif quiet and rng.random() < 0.7:
            at += _QUIET_S
        else:
            at += rng.choice((rng.uniform(0, lasts), lasts, lasts)) + rng.uniform(0.2, 5.0)


def _is_short(kind: str) -> bool:
    least, _, quiet = FAULTS[kind]
    return least <= _SHORT_FAULT_S and not quiet


def _arrivals(rng: random.Random, seconds: float, jobs: int) -> list[Arrival]:
    groups: list[list[dict[str, Any]]] = []
    very_long = VERY_LONG_JOBS if seconds >= LONG_RUN_S else 0
    longest = max(25, min(LONGEST_TOKENS, int(6 * seconds)))
    number = 0
    while number < jobs - very_long:
        size = min(jobs - very_long - number, rng.choice((1, 1, 2, 3, 5, 20)))
        groups.append([request(rng, number + n, longest=longest) for n in range(size)])
        number += size
    for n in range(very_long):
        alone = {"prompt": f"very long {n}", "max_tokens": VERY_LONG_TOKENS}
        groups.insert(rng.randrange(len(groups) // 2), [alone])
    times = sorted(rng.uniform(0, seconds - _TAIL_S) for _ in groups)
    times[0] = 0.0
    return [Arrival(round(at, 3), tuple(requests)) for at, requests in zip(times, groups, strict=True)]
