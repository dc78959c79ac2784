"""Judges a run by what is in its database."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, select

from models_db.deaths import KILLED_ITS_WORKER, SOLO_LIMIT
from models_db.tables import Attempt, Job, JobState, Result, Worker
from tests.chaos import witness
from tests.chaos.jobs import Expected
from tests.chaos.recovery import Timeline
from tests.chaos.verdict import Verdict, killed_alone
from tests.chaos.witness import Change

_MISSED_S = 10.0  # after a freeze: whoever is found dead by then had not beaten since


@dataclass
class Harm:
    """What we did to a process: killed it, or froze it from ``begun`` to ``ended``, in seconds of the host's clock."""

    pid: int
    begun: float
    ended: float = math.inf


def victims(pids: Mapping[str, int], changes: Iterable[Change], harms: Sequence[Harm]) -> set[str]:
    """The workers whose death was our doing: found dead while the harm lasted, or just after it.

    One that got over a short freeze, and one that got the number of a process that we had killed, died of
    something else.

    Args:
        pids: the process of each worker.
        changes: of the workers' states.
    """
    born: dict[str, float] = {}
    died: dict[str, float] = {}
    for change in changes:
        born.setdefault(change.id, change.at)
        if change.after == "dead":
            died[change.id] = change.at
    return {
        worker
        for worker, pid in pids.items()
        for harm in harms
        if harm.pid == pid
        and born.get(worker, math.inf) <= harm.begun <= died.get(worker, math.inf)
        and (harm.ended == math.inf or died.get(worker, math.inf) <= harm.ended + _MISSED_S)
    }


def judge(
    conn: Connection,
    verdict: Verdict,
    expected: Mapping[str, Expected],
    harms: Sequence[Harm],
    timeline: Timeline,
    for_later: Collection[str] = (),
) -> None:
    """Compare every job with what is expected of it, and complete the verdict.

    ``for_later`` are jobs that only a newer version can run: one that was in the hand of a worker whose Redis took no
    note of it has got a row, and waits there.
    """
    rows = {row.id: row for row in conn.execute(select(Job.id, Job.state, Job.error_type, Job.error_message))}
    texts = {row.job_id: row.text for row in conn.execute(select(Result.job_id, Result.text))}
    outcomes: dict[str, list[str]] = {}
    runs = []
    query = select(Attempt.job_id, Attempt.worker_id, Attempt.outcome).order_by(Attempt.number)
    for job_id, worker_id, outcome in conn.execute(query):
        outcomes.setdefault(job_id, []).append(str(outcome or "open"))
        runs.append((job_id, worker_id, str(outcome or "open")))
    job_changes, worker_changes = witness.changes(conn, "job"), witness.changes(conn, "worker")
    pids = {row.id: row.pid for row in conn.execute(select(Worker.id, Worker.pid))}
    alone = killed_alone(runs, victims(pids, worker_changes, harms))
    verdict.jobs = len(rows.keys() | expected.keys())
    for job_id in expected.keys() - rows.keys():
        verdict.lost[job_id] = "has no row"
    for job_id, row in rows.items():
        ends = outcomes.get(job_id, [])
        wanted = expected.get(job_id)
        if job_id in for_later and row.state == JobState.QUEUED:
            continue
        if not JobState(row.state).terminal:
            verdict.lost[job_id] = f"is {row.state} after the attempts {ends}"
        elif row.error_type == KILLED_ITS_WORKER and not (wanted and wanted.kills):
            if wanted is not None and alone[job_id] >= SOLO_LIMIT:
                verdict.blamed[job_id] = (
                    f"{alone[job_id]} times alone with a worker that we killed, of {ends}"
                )
            else:
                verdict.wrong[job_id] = f"is blamed for deaths that were not its fault, after {ends}"
        elif complaint := _complaint(wanted, row, texts.get(job_id)):
            verdict.wrong[job_id] = f"{complaint}, after the attempts {ends}"
    verdict.double = witness.twice_ended(job_changes, witness.changes(conn, "result"))
    ended = {change.id for change in job_changes if change.after in witness.TERMINAL}
    if unseen := {job_id for job_id, row in rows.items() if JobState(row.state).terminal} - ended:
        verdict.wrong |= dict.fromkeys(unseen, "ended without the witness")
    for job_id, ends in outcomes.items():
        if ends.count("succeeded") > 1 or "open" in ends:
            verdict.wrong.setdefault(job_id, f"has the attempts {ends}")
        for end in ends:
            verdict.attempts[end] = verdict.attempts.get(end, 0) + 1
    verdict.recoveries = timeline.recoveries(job_changes, worker_changes)


def _complaint(wanted: Expected | None, row: Any, text: str | None) -> str | None:
    if wanted is None:
        return f"was never submitted ({row.state}: {row.error_type})"
    found = wanted.complaint(str(row.state), text)
    return found and f"{found} ({row.error_type}: {row.error_message})"
