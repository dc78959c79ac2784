"""How soon urgent jobs start while bulk fills every slot, and where the latest of them had been."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from workers.client import Client


@dataclass(frozen=True, slots=True)
class Urgent:
    """The beginning of an urgent job, in seconds since it was submitted."""

    at_done: int  # bulk jobs that had ended then
    accepted_s: float  # committed and published, as the client saw it
    claimed_s: float  # the worker's transaction that claimed it began
    slot_s: float  # and it had its slot; without that transaction's own time, which nobody notes
    ended_s: float  # the transaction that stored its result began

    def stages(self) -> str:
        """For people."""
        return (
            f"accepted after {self.accepted_s:.2f} s, claimed after {self.claimed_s:.2f}, in its slot after "
            f"{self.slot_s:.2f}, ended after {self.ended_s:.2f}; {self.at_done:,} bulk jobs were done then"
        )


def start_of(client: Client, job_id: str, at_done: int, accepted_s: float) -> Urgent:
    """Of a job that was submitted when so many bulk jobs were done, and accepted in so many seconds."""
    result, status = client.wait(job_id, timeout_s=60), client.status(job_id)
    assert status.started_at is not None
    assert status.finished_at is not None
    claimed_s = (status.started_at - status.created_at).total_seconds()
    ended_s = (status.finished_at - status.created_at).total_seconds()
    return Urgent(at_done, accepted_s, claimed_s, claimed_s + result.queue_time_s, ended_s)


def told(urgent: Sequence[Urgent], limit_s: float = 1.0) -> list[tuple[str, str]]:
    """How soon urgent jobs had a slot, how many too late, and where the latest of them had been."""
    ordered = sorted(urgent, key=lambda one: one.slot_s)
    late = sum(one.slot_s > limit_s for one in ordered)
    times = [one.slot_s for one in ordered]
    nearly_all = times[math.ceil(0.99 * len(times)) - 1]
    return [
        (
            f"start of an urgent job, {len(urgent):,} of them",
            f"{statistics.median(times):.2f} s (99 % within {nearly_all:.2f}, longest {times[-1]:.2f})",
        ),
        (f"of these after more than {limit_s:g} s", f"{late:,}"),
        ("the longest", ordered[-1].stages()),
    ]
