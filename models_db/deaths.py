"""What the death of a worker does to the jobs that it had in flight: they are queued again, and it is counted.

Which of them was to blame nobody knows, so suspicion grows with the deaths that a job was present at:

* after one it runs again as any other: most deaths have other causes;
* from ``SUSPECT_DEATHS`` on it is a suspect: no delivery may claim it, suspects run in small groups, one group at a
  time in the fleet (``models_db.suspects``);
* from ``ALONE_DEATHS`` on it runs alone in a worker that runs nothing else meanwhile.

Only a job that was alone with the worker ``SOLO_LIMIT`` times fails. So one deadly job among any number of others
costs at most ``ALONE_DEATHS + SOLO_LIMIT`` workers, and the others lose nothing but time.

A worker that was only cut off, or stood still, is taken for dead as well. When it finds that out it lives, so nothing
that it ran has killed it, and it takes that back (``absolve``).

Every function works inside the caller's transaction and never commits.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import Connection, func, or_, select, update

from models_db.clock import database_time
from models_db.dialects import chunked
from models_db.faults import Fault, classify, summary
from models_db.jobs import LockedJob, lock_jobs
from models_db.tables import SUSPECT_DEATHS, Attempt, AttemptOutcome, Job, JobState, Worker, WorkerState
from models_db.transitions import close_attempts, end_jobs, queue_jobs

logger = logging.getLogger(__name__)

__all__ = [
    "ALONE_DEATHS",
    "DIED",
    "HELD_FOR_DEAD",
    "KILLED_ITS_WORKER",
    "SOLO_LIMIT",
    "SUSPECT_DEATHS",
    "Burial",
    "absolve",
    "bury",
    "lose",
]

ALONE_DEATHS = 3
SOLO_LIMIT = 2

KILLED_ITS_WORKER = "WorkerDiedError"
DIED = "the worker died"
HELD_FOR_DEAD = "other workers saw no heartbeat and take the jobs of this one over"
LIVED = "the worker was taken for dead, and lived"
_ALONE = ", and ran nothing else"  # said of attempts whose death counted as a solo death

_LAST_WORDS = timedelta(seconds=5)


@dataclass(frozen=True, slots=True)
class Burial:
    """What a worker left behind, by job id."""

    queued: list[str] = field(default_factory=list)  # to be published again
    suspects: list[str] = field(default_factory=list)  # queued, but not for everyone
    ended: list[str] = field(default_factory=list)  # failed or cancelled by this; Celery has to hear of it
    refused: list[str] = field(default_factory=list)  # left as they are: the database refuses to end them
    # Ended just before; if links follow, they may not have run.
    untold: list[str] = field(default_factory=list)


def bury(conn: Connection, worker_id: str, *, now: datetime | None = None, replay: bool = False) -> Burial:
    """Take everything from a worker that is dead or has stopped, and mark it dead unless it has stopped.

    Doing it again finds nothing more, so several may do it at once. Jobs of a worker that stopped by itself are
    queued again without suspicion.

    ``replay`` says that an earlier commit of this very call, with the same ``now``, may have gone through: what it
    did is reported, as nobody else would publish it.
    """
    now = now or database_time(conn)
    buried = _closed_at(conn, worker_id, now) if replay else []
    dead = (
        update(Worker)
        .where(Worker.id == worker_id, Worker.state.not_in((WorkerState.STOPPED, WorkerState.DEAD)))
        .values(state=WorkerState.DEAD, stopped_at=now)
    )
    first = conn.execute(dead).rowcount == 1
    worker = conn.execute(
        select(Worker.state, Worker.heartbeat_at, Worker.stopped_at).where(Worker.id == worker_id)
    ).one_or_none()
    if replay and worker is not None and worker.state is WorkerState.DEAD and worker.stopped_at == now:
        first = True
    owned = conn.scalars(select(Job.id).where(Job.owner == worker_id).order_by(Job.id)).all()
    locked = [job for job in lock_jobs(conn, owned).values() if job.owner == worker_id]
    if worker is not None and worker.state is WorkerState.STOPPED:
        close_attempts(conn, [job.id for job in locked], AttemptOutcome.RELEASED, now, "its worker stopped")
        queue_jobs(conn, [job.id for job in locked])
        after = locked
    else:
        after = lose(conn, locked, now, DIED)
    burial = Burial()
    handled = {job.id for job in after}
    burial.refused.extend(job.id for job in locked if job.id not in handled)
    for job in [*buried, *after]:
        if job.state.terminal:
            burial.ended.append(job.id)
        elif job.deaths >= SUSPECT_DEATHS:
            burial.suspects.append(job.id)
        else:
            burial.queued.append(job.id)
    for some in chunked(burial.queued):
        conn.execute(update(Job).where(Job.id.in_(some)).values(published_at=now))
    if first and worker is not None:
        burial.untold.extend(_untold(conn, worker_id, worker.heartbeat_at))
    return burial


def _closed_at(conn: Connection, worker_id: str, at: datetime) -> list[LockedJob]:
    """Jobs of which this worker's attempt was closed at exactly that time, unless they run again."""
    query = select(Attempt.job_id).where(Attempt.worker_id == worker_id, Attempt.ended_at == at)
    jobs = lock_jobs(conn, conn.scalars(query.distinct()).all()).values()
    return [job for job in jobs if job.state is not JobState.RUNNING]


def lose(conn: Connection, jobs: Sequence[LockedJob], now: datetime, error: str) -> list[LockedJob]:
    """Queue these locked running jobs again, because their owners died; returns them as they are now.

    Ends instead as ``cancelled`` what someone wants cancelled, and as ``failed`` what was alone with its dead worker
    too often. One whose end the database refuses for a reason of its own stays as it is, and is not returned: to run
    it again would cost one worker after the other, and an error would keep the others with it.
    """
    company = _in_flight(conn, {job.owner for job in jobs if job.owner is not None})
    queued: dict[bool, list[str]] = {}
    after = []
    for job in jobs:
        alone = job.owner is not None and company.get(job.owner, 0) == 1
        solo_deaths = job.solo_deaths + alone
        state, message = JobState.QUEUED, None
        if job.cancel_requested:
            state = JobState.CANCELLED
        elif solo_deaths >= SOLO_LIMIT:
            state, message = JobState.FAILED, _verdict(job, error)
        lost = replace(
            job,
            state=state,
            owner=None,
            started_at=None if state is JobState.QUEUED else job.started_at,
            deaths=job.deaths + 1,
            solo_deaths=solo_deaths,
            error_type=None if message is None else KILLED_ITS_WORKER,
            error_message=message,
        )
        if state is JobState.QUEUED:
            queued.setdefault(alone, []).append(job.id)
        elif not _ended(conn, lost, now, error, alone):
            continue
        after.append(lost)
    for alone, ids in queued.items():
        close_attempts(conn, ids, AttemptOutcome.LOST, now, _of_attempt(error, alone))
        queue_jobs(conn, ids, **_counted(alone))
    return after


def absolve(conn: Connection, worker_id: str) -> list[str]:
    """Take back that jobs were present at the death of this worker, which lives; returns those that had not ended.

    Doing it again finds what has been counted since. Not of what it lost itself, as when its engine died.
    """
    query = select(Attempt.job_id, Attempt.number, Attempt.error).where(
        Attempt.worker_id == worker_id, Attempt.outcome == AttemptOutcome.LOST
    )
    lost = [row for row in conn.execute(query) if (row.error or "").startswith((DIED, HELD_FOR_DEAD))]
    jobs = lock_jobs(conn, [row.job_id for row in lost])
    for row in lost:
        attempt = update(Attempt).where(Attempt.job_id == row.job_id, Attempt.number == row.number)
        conn.execute(attempt.values(error=LIVED))
        job = jobs.get(row.job_id)
        if job is None or job.state.terminal:
            continue  # only a retry leaves an end
        solo = row.error.endswith(_ALONE)
        jobs[job.id] = replace(
            job, deaths=max(0, job.deaths - 1), solo_deaths=max(0, job.solo_deaths - int(solo))
        )
    open_jobs = [job for job in jobs.values() if not job.state.terminal]
    for job in open_jobs:
        counts = {"deaths": job.deaths, "solo_deaths": job.solo_deaths}
        conn.execute(update(Job).where(Job.id == job.id).values(**counts))
    return [job.id for job in open_jobs]


def _of_attempt(error: str, alone: bool) -> str:
    return error + _ALONE if alone else error


def _counted(alone: bool) -> dict[str, Any]:
    return {"deaths": Job.deaths + 1, "solo_deaths": Job.solo_deaths + int(alone)}


def _ended(conn: Connection, lost: LockedJob, now: datetime, error: str, alone: bool) -> bool:
    """End a job as it is given; false when the database refuses that, and then nothing has happened."""
    savepoint = conn.begin_nested()
    try:
        close_attempts(conn, [lost.id], AttemptOutcome.LOST, now, _of_attempt(error, alone))
        end_jobs(conn, [lost.id], lost.state, now, lost.error_type, lost.error_message, **_counted(alone))
    except Exception as exc:
        if classify(exc) is not Fault.OTHER:
            raise
        savepoint.rollback()
        logger.error(
            "The database refuses the end of job %s, which stays as it is: %s", lost.id, summary(exc)
        )
        return False
    savepoint.commit()
    return True


def _verdict(job: LockedJob, error: str) -> str:
    return (
        f"{SOLO_LIMIT} workers died while they ran this job and nothing else (attempts {job.attempt} and before; "
        f"the last time: {error}). Change the request, or look into the workers' logs and retry it"
    )


def _in_flight(conn: Connection, owners: Collection[str]) -> dict[str, int]:
    """How many jobs each of these workers died with. What was lost before it was asked counts, too."""
    query = (
        select(Attempt.worker_id, func.count())
        .where(
            Attempt.worker_id.in_(sorted(owners)),
            or_(Attempt.outcome.is_(None), Attempt.outcome == AttemptOutcome.LOST),
        )
        .group_by(Attempt.worker_id)
    )
    if not owners:
        return {}
    return {worker_id: count for worker_id, count in conn.execute(query)}  # noqa: C416 - mypy knows no dict(rows)


def _untold(conn: Connection, worker_id: str, last_beat: datetime) -> list[str]:
    """Jobs that the worker ended so shortly before its death that their links may not have been run.

    Both times were written by its own clock.
    """
    ended = tuple(AttemptOutcome(state) for state in JobState if state.terminal)
    query = (
        select(Attempt.job_id)
        .join(Job, Job.id == Attempt.job_id)
        .where(
            Attempt.worker_id == worker_id,
            Attempt.outcome.in_(ended),
            Attempt.ended_at > last_beat - _LAST_WORDS,
            Job.callbacks_sent_at.is_(None),
            # The others are found by untold_ends.
            or_(Job.deaths < SUSPECT_DEATHS, Job.published_at.is_not(None)),
        )
    )
    return list(conn.scalars(query))
