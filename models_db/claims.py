"""Claim, finish, release: who may run a job, and whose result counts.

A delivery runs only when it wins a claim, and a result counts only while its attempt is still the current one.
Every function works inside the caller's transaction, takes many jobs in few statements, and never commits.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from sqlalchemy import Connection

from models_db.jobs import NewJob, StoredResult
from models_db.tables import AttemptOutcome, JobState


class ClaimKind(StrEnum):
    """What a delivery may do."""

    CLAIMED = "claimed"  # run it: this incarnation owns it now
    JOINED = "joined"  # this incarnation runs it already
    ELSEWHERE = "elsewhere"  # a live worker runs it; acknowledge
    TERMINAL = "terminal"  # it has ended, perhaps by this very claim; deliver the stored outcome


@dataclass(frozen=True, slots=True)
class StoredOutcome:
    """How a terminal job ended."""

    state: JobState
    result: StoredResult | None
    error_type: str | None
    error_message: str | None
    callbacks_sent_at: datetime | None


@dataclass(frozen=True, slots=True)
class ClaimItem:
    """One delivery that wants to run. ``job`` is inserted if no row has its id, as for a bare ``send_task``."""

    job: NewJob


@dataclass(frozen=True, slots=True)
class ClaimOutcome:
    """The answer to one delivery. ``attempt`` is the job's current attempt, ``outcome`` is set when terminal,
    ``cancel_requested`` when joined and someone wants it cancelled."""

    job_id: str
    kind: ClaimKind
    attempt: int
    outcome: StoredOutcome | None = None
    cancel_requested: bool = False
    deadline_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class FinishItem:
    """The end of one attempt. ``state`` is terminal; a result may come with any of them (a partial text)."""

    job_id: str
    attempt: int
    state: JobState
    result: StoredResult | None = None
    error_type: str | None = None
    error_message: str | None = None


@dataclass(frozen=True, slots=True)
class ReleaseItem:
    """An attempt that this worker hands back."""

    job_id: str
    attempt: int
    outcome: AttemptOutcome = AttemptOutcome.RELEASED  # LOST when its engine died
    error: str | None = None


def claim(
    conn: Connection,
    items: Sequence[ClaimItem],
    worker_id: str,
    dead_ids: Collection[str] = (),
    *,
    now: datetime | None = None,
    replay: bool = False,
) -> list[ClaimOutcome]:
    """Try to win each delivery for ``worker_id``; one outcome an item, in their order.

    ``dead_ids`` names the worker incarnations whose jobs may be taken over. ``replay`` says that an earlier commit
    of this very call, with the same ``now``, may have gone through: what it won is then reported as claimed.
    """
    raise NotImplementedError


def finish(
    conn: Connection,
    items: Sequence[FinishItem],
    worker_id: str,
    *,
    now: datetime | None = None,
    replay: bool = False,
) -> list[bool]:
    """Store results and terminal states where the attempt is still current, running, and owned by ``worker_id``.

    Returns:
        For each item whether it counts. ``False`` is a duplicate: it changed nothing.
    """
    raise NotImplementedError


def release(
    conn: Connection,
    items: Sequence[ReleaseItem],
    worker_id: str,
    *,
    now: datetime | None = None,
    replay: bool = False,
) -> list[bool]:
    """Queue running jobs again, for a hand-back; for each item whether it was still this worker's attempt."""
    raise NotImplementedError
