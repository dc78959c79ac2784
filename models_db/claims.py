"""Claim, finish, release: who may run a job, and whose result counts.

A delivery runs only when it wins a claim, and a result counts only while its attempt is still the current one.
Every function works inside the caller's transaction, takes many jobs in few statements, and never commits.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Protocol, TypeVar

from sqlalchemy import Connection, select

from models_db.base import utcnow
from models_db.callbacks import insert_job_callbacks
from models_db.deaths import DIED, SUSPECT_DEATHS, lose
from models_db.dialects import chunked, insert_or_ignore, insert_rows
from models_db.errors import DatabaseError, InvalidValueError
from models_db.faults import refusal
from models_db.jobs import LockedJob, job_results, lock_jobs
from models_db.records import NewJob, StoredResult
from models_db.tables import Attempt, AttemptOutcome, Job, JobState, Result
from models_db.text import clean_text, clip
from models_db.transitions import close_attempts, end_jobs, queue_jobs, start_jobs

ERROR_TYPE_LENGTH = 128
EXPIRED_BEFORE_START = "its deadline passed before a worker could start it"
WAITED_TOO_LONG = "it waited in the queue for longer than max_queue_age_s"


class ClaimKind(StrEnum):
    """What a delivery may do."""

    CLAIMED = "claimed"  # run it: this incarnation owns it now
    JOINED = "joined"  # this incarnation runs it already
    ELSEWHERE = "elsewhere"  # a live worker runs it; acknowledge
    SUSPECT = "suspect"  # queued, but its turn comes without a delivery (models_db.suspects); acknowledge
    GONE = "gone"  # it was accepted once, and its row has been deleted since; acknowledge
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
    """One delivery that wants to run. ``job`` is inserted if no row has its id, as for a bare ``send_task``.

    A job that was created more than ``max_age_s`` ago and has never run expires instead. One that is ``stored``,
    because its row was committed before its message was published, is never inserted: without a row it has ended and
    was pruned.
    """

    job: NewJob
    max_age_s: float | None = None
    stored: bool = False


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
    """The end of one attempt. ``state`` is terminal; a result may come with any of them (a partial text).

    ``callback`` is false where it is known that nobody wants to be told of the end, which spares looking for that.
    """

    job_id: str
    attempt: int
    state: JobState
    result: StoredResult | None = None
    error_type: str | None = None
    error_message: str | None = None
    callback: bool = True

    def __post_init__(self) -> None:
        if not self.state.terminal:
            raise InvalidValueError("state", "must be terminal", value=self.state)
        if self.state is JobState.SUCCEEDED and (self.result is None or self.error_type is not None):
            raise InvalidValueError("result", "a success needs a result and no error")


def refused_end(item: FinishItem, error: BaseException) -> FinishItem:
    """The least that can be stored instead of an end that the database refuses: a failure with no text of the job's."""
    why = f"the database refused the end of this job ({refusal(error)}); the worker's log says more"
    return FinishItem(
        item.job_id,
        item.attempt,
        JobState.FAILED,
        None,
        type(error).__name__.encode("ascii", "replace").decode(),
        why,
        item.callback,
    )


@dataclass(frozen=True, slots=True)
class ReleaseItem:
    """An attempt that this worker hands back."""

    job_id: str
    attempt: int
    outcome: AttemptOutcome = AttemptOutcome.RELEASED  # LOST when its engine died
    error: str | None = None

    def __post_init__(self) -> None:
        if self.outcome not in (AttemptOutcome.RELEASED, AttemptOutcome.LOST):
            raise InvalidValueError("outcome", "must be released or lost", value=self.outcome)


def accept(conn: Connection, job: NewJob, *, now: datetime | None = None) -> None:
    """Insert the row of a job whose message came without one, as a claim does, and leave it queued."""
    _lock_or_insert(conn, {job.id: job}, (), now or utcnow())


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

    ``dead_ids`` names the worker incarnations whose jobs may be taken over. ``replay`` says that an earlier
    commit of this very call, with the same ``now``, may have gone through: what it won is reported as claimed.
    """
    now = now or utcnow()
    wanted = {item.job.id: item for item in reversed(items)}
    stored_ids = {item.job.id for item in items if item.stored}
    locked = _lock_or_insert(conn, {job_id: item.job for job_id, item in wanted.items()}, stored_ids, now)
    orphans = [job for job in locked.values() if job.owner in dead_ids and job.owner != worker_id]
    locked |= {job.id: job for job in lose(conn, orphans, now, DIED)}

    kinds: dict[str, ClaimKind] = {}
    won: list[LockedJob] = []
    ended: dict[str, tuple[JobState, str | None]] = {}
    for job in locked.values():
        if job.state.terminal:
            kinds[job.id] = ClaimKind.TERMINAL
        elif job.owner == worker_id:
            ours = replay and job.started_at == now
            kinds[job.id] = ClaimKind.CLAIMED if ours else ClaimKind.JOINED
        elif job.owner is not None:
            kinds[job.id] = ClaimKind.ELSEWHERE
        elif end := _end_before_start(job, wanted[job.id].max_age_s, now):
            kinds[job.id] = ClaimKind.TERMINAL
            ended[job.id] = end
        elif job.deaths >= SUSPECT_DEATHS:
            kinds[job.id] = ClaimKind.SUSPECT
        else:
            kinds[job.id] = ClaimKind.CLAIMED
            won.append(job)

    start_jobs(conn, won, worker_id, now)
    for end in set(ended.values()):
        end_jobs(conn, [job_id for job_id in ended if ended[job_id] == end], end[0], now, *_end_error(*end))
    attempts = {job.id: job.attempt for job in locked.values()} | {job.id: job.attempt + 1 for job in won}

    terminal = {job_id: job for job_id, job in locked.items() if kinds[job_id] is ClaimKind.TERMINAL}
    stored = _stored_outcomes(conn, terminal, ended)
    outcomes = []
    seen: set[str] = set()
    for item in items:
        job_id = item.job.id
        if job_id not in locked:
            outcomes.append(ClaimOutcome(job_id, ClaimKind.GONE, 0))
            continue
        kind = kinds[job_id]
        if kind is ClaimKind.CLAIMED and job_id in seen:
            kind = ClaimKind.JOINED  # a second delivery of the same job in this very batch
        seen.add(job_id)
        job = locked[job_id]
        outcomes.append(
            ClaimOutcome(
                job_id, kind, attempts[job_id], stored.get(job_id), job.cancel_requested, job.deadline_at
            )
        )
    return outcomes


def finish(
    conn: Connection,
    items: Sequence[FinishItem],
    worker_id: str,
    *,
    now: datetime | None = None,
    replay: bool = False,
) -> list[bool]:
    """Store results and terminal states where the attempt is still current, running, and owned by ``worker_id``.

    Texts are cleaned of what databases refuse. ``replay`` says that an earlier commit of this very call, with the
    same ``now``, may have gone through: what it stored counts.

    Returns:
        For each item whether it counts. ``False`` is a duplicate: it changed nothing.
    """
    now = now or utcnow()
    counts, committed = _fence(conn, items, worker_id, now if replay else None)
    groups: dict[tuple[JobState, str | None, str | None, bool], list[str]] = {}
    for item in committed:
        message = None if item.error_message is None else clean_text(item.error_message)
        key = (item.state, clip(item.error_type, ERROR_TYPE_LENGTH), message, item.callback)
        groups.setdefault(key, []).append(item.job_id)
    for (state, error_type, message, callback), ids in groups.items():
        end_jobs(conn, ids, state, now, error_type, message, announce=callback)
        close_attempts(conn, ids, AttemptOutcome(state), now, message)
    insert_rows(
        conn, Result, [item.result.row(item.job_id, now) for item in committed if item.result is not None]
    )
    return counts


def release(
    conn: Connection,
    items: Sequence[ReleaseItem],
    worker_id: str,
    *,
    now: datetime | None = None,
    replay: bool = False,
) -> list[bool]:
    """Queue running jobs again, for a hand-back; for each item whether it was still this worker's attempt."""
    now = now or utcnow()
    counts, released = _fence(conn, items, worker_id, now if replay else None)
    groups: dict[tuple[AttemptOutcome, str | None], list[str]] = {}
    for item in released:
        error = None if item.error is None else clean_text(item.error)
        groups.setdefault((item.outcome, error), []).append(item.job_id)
    for (outcome, error), ids in groups.items():
        if outcome is AttemptOutcome.LOST:
            lose(conn, list(lock_jobs(conn, ids).values()), now, error or DIED)
        else:
            close_attempts(conn, ids, outcome, now, error)
            queue_jobs(conn, ids)
    return counts


# --------------------------------------------------------------------------------------------------- the pieces


def _lock_or_insert(
    conn: Connection, jobs: Mapping[str, NewJob], stored_ids: Collection[str], now: datetime
) -> dict[str, LockedJob]:
    """The rows of these jobs; without those that had one and have it no more."""
    locked = lock_jobs(conn, jobs)
    missing = [
        job for job_id, job in sorted(jobs.items()) if job_id not in locked and job_id not in stored_ids
    ]
    if missing:
        # A delivery is proof enough that the message was published.
        rows = [job.row() | {"published_at": job.published_at or now} for job in missing]
        insert_or_ignore(conn, Job, rows, [Job.id])
        locked |= lock_jobs(conn, [job.id for job in missing])
    if absent := [job.id for job in missing if job.id not in locked]:
        raise DatabaseError(
            f"id: job {absent[0]} cannot be inserted, because another job has its idempotency key or custom id. "
            "Send it without them"
        )
    insert_job_callbacks(conn, ((job.id, job.callback) for job in missing))
    return locked


def _end_before_start(
    job: LockedJob, max_age_s: float | None, now: datetime
) -> tuple[JobState, str | None] | None:
    """The end, with its reason, of a queued job that is not to start any more."""
    if job.cancel_requested:
        return JobState.CANCELLED, None
    if job.deadline_at is not None and job.deadline_at <= now:
        return JobState.EXPIRED, EXPIRED_BEFORE_START
    # What has run before waits again for another reason, such as a restart of its worker.
    never_ran = job.attempt == 0
    if never_ran and max_age_s is not None and job.created_at + timedelta(seconds=max_age_s) <= now:
        return JobState.EXPIRED, WAITED_TOO_LONG
    return None


def _end_error(state: JobState, reason: str | None) -> tuple[str | None, str | None]:
    return ("deadline", reason) if state is JobState.EXPIRED else (None, None)


class _OfAttempt(Protocol):
    @property
    def job_id(self) -> str: ...
    @property
    def attempt(self) -> int: ...


T = TypeVar("T", bound=_OfAttempt)


def _fence(
    conn: Connection, items: Sequence[T], worker_id: str, replayed_at: datetime | None
) -> tuple[list[bool], list[T]]:
    """Which items are of an attempt that ``worker_id`` still runs; all verdicts, and those to act on."""
    locked = lock_jobs(conn, (item.job_id for item in items))
    before = _ended_at(conn, items, worker_id, replayed_at)
    verdicts: list[bool] = []
    current: list[T] = []
    seen: set[str] = set()
    for item in items:
        job = locked.get(item.job_id)
        is_current = (
            job is not None
            and job.state is JobState.RUNNING
            and job.owner == worker_id
            and job.attempt == item.attempt
            and item.job_id not in seen
        )
        already = (item.job_id, item.attempt) in before and item.job_id not in seen
        if is_current:
            current.append(item)
        if is_current or already:
            seen.add(item.job_id)
        verdicts.append(is_current or already)
    return verdicts, current


def _ended_at(
    conn: Connection, items: Iterable[_OfAttempt], worker_id: str, at: datetime | None
) -> set[tuple[str, int]]:
    """Attempts of ``worker_id`` that were closed at exactly that time, by a commit whose answer was lost."""
    if at is None:
        return set()
    query = select(Attempt.job_id, Attempt.number).where(
        Attempt.worker_id == worker_id, Attempt.ended_at == at
    )
    ids = sorted({item.job_id for item in items})
    return {
        (job_id, number)
        for some in chunked(ids)
        for job_id, number in conn.execute(query.where(Attempt.job_id.in_(some)))
    }


def _stored_outcomes(
    conn: Connection, terminal: Mapping[str, LockedJob], ended: Mapping[str, tuple[JobState, str | None]]
) -> dict[str, StoredOutcome]:
    results = job_results(conn, list(terminal))
    stored = {}
    for job_id, job in terminal.items():
        end = ended.get(job_id)
        if end is None:
            stored[job_id] = StoredOutcome(
                job.state, results.get(job_id), job.error_type, job.error_message, job.callbacks_sent_at
            )
        else:
            stored[job_id] = StoredOutcome(end[0], None, *_end_error(*end), None)
    return stored
