"""``python -m tests.chaos.lost``: how long a job waits whose message is lost, with the settings of production.

Measured on two live, idle workers, from the moment at which the message is nowhere to the claim.
"""

from __future__ import annotations

import argparse
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from models_db.tables import JobState
from tests.chaos import witness
from tests.chaos.world import World, world
from tests.fleet.fleet import wait_until

_LIMIT_S = 60.0
_WIPED_JOBS = 50


def lost_message(fleet: World) -> float:
    """Seconds until the only message of a job is missed: popped and never noted, evicted, or never published."""
    (job_id,) = fleet.insert_only([{"prompt": "lost", "max_tokens": 1}])
    return _last_claim(fleet, [job_id]) - _accepted_at(fleet, job_id)


def wiped_redis(fleet: World) -> float:
    """Redis is killed with 50 jobs waiting and comes back empty: seconds until the last is claimed."""
    # For less than a death takes: so that all wait.
    pids = [seat.signal(signal.SIGSTOP) for seat in fleet.seats]
    assert None not in pids
    jobs = fleet.submit_words(_WIPED_JOBS, 1)
    fleet.redis.kill(keep=False)
    fleet.redis.start()
    assert fleet.redis.queued(fleet.queue) == 0
    back = time.time()
    for seat in fleet.seats:
        seat.signal(signal.SIGCONT)
    return _last_claim(fleet, jobs) - back


def _last_claim(fleet: World, ids: Sequence[str]) -> float:
    """When the last of these was claimed for the first time."""
    wanted = set(ids)
    wait_until(
        lambda: all(fleet.states()[job_id] is JobState.SUCCEEDED for job_id in ids), _LIMIT_S, "their ends"
    )
    first: dict[str, float] = {}
    for change in fleet.read(lambda conn: witness.changes(conn, "job")):
        if change.id in wanted and change.after == "running":
            first.setdefault(change.id, change.at)
    return max(first.values())


def _accepted_at(fleet: World, job_id: str) -> float:
    changes = fleet.read(lambda conn: witness.changes(conn, "job"))
    return next(change.at for change in changes if change.id == job_id)


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.lost", description=__doc__)
    parser.add_argument("--times", type=int, default=10, help="how often each (default 10)")
    times = parser.parse_args().times
    with tempfile.TemporaryDirectory() as folder, world(Path(folder) / "world") as fleet:
        fleet.workers(2)
        lost = []
        for _ in range(times):
            time.sleep(random.uniform(0, 2))  # at any moment between two looks of the sweeper
            lost.append(lost_message(fleet))
        wiped = []
        for _ in range(times):
            time.sleep(random.uniform(1, 3))
            wiped.append(wiped_redis(fleet))
    for name, seconds in (("a lost message", lost), ("an emptied Redis", wiped)):
        print(f"{name}: median {statistics.median(seconds):.1f}s, longest {max(seconds):.1f}s of {times}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
