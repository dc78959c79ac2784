"""A job's life as a state machine: after any sequence of calls the tables say what a small model in Python says."""

from __future__ import annotations

from dataclasses import dataclass, field

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from sqlalchemy import select

from models_db.claims import ClaimItem, ClaimKind, FinishItem, ReleaseItem, claim, finish, release
from models_db.deaths import ALONE_DEATHS, SOLO_LIMIT, SUSPECT_DEATHS, absolve, bury
from models_db.jobs import insert_jobs, request_cancel, retry_failed
from models_db.suspects import claim_suspects, drop_lock, take_lock
from models_db.tables import Attempt, AttemptOutcome, Job, JobState, Result
from tests.db.conftest import wipe
from tests.db.helpers import add_workers, at, new_job, new_result

JOBS = st.sampled_from(["a", "b", "c"])
WORKERS = st.sampled_from(["w1", "w2", "w3"])
QUEUE = new_job("any").queue
SOME_WORKERS = st.frozensets(WORKERS, max_size=2)
TERMINAL = [state for state in JobState if state.terminal]


@dataclass
class Expected:
    """What the tables should say about one job."""

    state: JobState = JobState.QUEUED
    attempt: int = 0
    owner: str | None = None
    cancel: bool = False
    deadline: int | None = None
    text: str | None = None
    deaths: int = 0
    solo_deaths: int = 0
    history: list[tuple[str, AttemptOutcome | None]] = field(default_factory=list)
    # Deaths that may be taken back.
    counted: list[tuple[str, bool]] = field(default_factory=list, compare=False)

    def close(self, outcome):
        self.history[-1] = (self.history[-1][0], outcome)

    def end(self, state):
        self.state, self.owner = state, None

    def lose(self, alone):
        """Its worker died."""
        self.close(AttemptOutcome.LOST)
        self.deaths += 1
        self.solo_deaths += alone
        self.counted.append((self.history[-1][0], alone))
        if self.cancel:
            self.end(JobState.CANCELLED)
        elif self.solo_deaths >= SOLO_LIMIT:
            self.end(JobState.FAILED)
        else:
            self.state, self.owner = JobState.QUEUED, None

    def absolve(self, worker):
        """Its worker has not died; whether that made a difference."""
        taken = [alone for by, alone in self.counted if by == worker]
        self.counted = [(by, alone) for by, alone in self.counted if by != worker]
        if not taken or self.state.terminal:
            return False
        self.deaths = max(0, self.deaths - len(taken))
        self.solo_deaths = max(0, self.solo_deaths - sum(taken))
        return True

    def start(self, worker):
        self.state, self.owner, self.attempt = JobState.RUNNING, worker, self.attempt + 1
        self.history.append((worker, None))

    def claim(self, worker, dead, now, alone):
        if self.state.terminal:
            return ClaimKind.TERMINAL
        if self.owner == worker:
            return ClaimKind.JOINED
        if self.owner is not None and self.owner not in dead:
            return ClaimKind.ELSEWHERE
        if self.owner is not None:
            self.lose(alone)
            if self.state.terminal:
                return ClaimKind.TERMINAL
        if self.cancel:  # it was handed back while someone wanted it cancelled
            self.end(JobState.CANCELLED)
            return ClaimKind.TERMINAL
        if self.deadline is not None and self.deadline <= now:
            self.end(JobState.EXPIRED)
            return ClaimKind.TERMINAL
        if self.deaths >= SUSPECT_DEATHS:
            return ClaimKind.SUSPECT
        self.start(worker)
        return ClaimKind.CLAIMED

    def is_current(self, worker, attempt):
        return self.state is JobState.RUNNING and self.owner == worker and self.attempt == attempt


def machine(engine):
    class JobLife(RuleBasedStateMachine):
        def __init__(self):
            super().__init__()
            wipe(engine)
            add_workers(engine, "w1", "w2", "w3")
            self.now = 0
            self.jobs: dict[str, Expected] = {}

        def alone(self, worker):
            """Whether the worker had one job only when it died."""
            attempts = [attempt for job in self.jobs.values() for attempt in job.history]
            return (
                sum(attempt in ((worker, None), (worker, AttemptOutcome.LOST)) for attempt in attempts) == 1
            )

        @rule(job=JOBS, deadline=st.none() | st.integers(0, 6))
        def insert(self, job, deadline):
            if job in self.jobs:
                return
            self.jobs[job] = Expected(deadline=deadline)
            deadline_at = None if deadline is None else at(deadline)
            with engine.begin() as conn:
                insert_jobs(conn, [new_job(job, deadline_at=deadline_at)])

        @rule(worker=WORKERS, jobs=st.lists(JOBS, min_size=1, max_size=4), dead=SOME_WORKERS)
        def claim(self, worker, jobs, dead):
            with engine.begin() as conn:
                items = [ClaimItem(new_job(job)) for job in jobs]
                outcomes = claim(conn, items, worker, dead, now=at(self.now))
            seen = {}
            for job, outcome in zip(jobs, outcomes, strict=True):
                expected = self.jobs.setdefault(job, Expected())
                alone = self.alone(expected.owner)
                kind = seen.get(job) or expected.claim(worker, dead, self.now, alone)
                seen[job] = ClaimKind.JOINED if kind is ClaimKind.CLAIMED else kind
                assert (outcome.job_id, outcome.kind, outcome.attempt) == (job, kind, expected.attempt)
                stored = outcome.outcome
                assert (stored is None) == (kind is not ClaimKind.TERMINAL)
                if stored is not None:
                    text = stored.result and stored.result.text
                    assert (stored.state, text) == (expected.state, expected.text)

        @rule(
            worker=WORKERS,
            job=JOBS,
            back=st.integers(-1, 1),
            state=st.sampled_from(TERMINAL),
            with_result=st.booleans(),
        )
        def finish(self, worker, job, back, state, with_result):
            expected = self.jobs.get(job, Expected())
            attempt = expected.attempt - back
            text = f"{job}{attempt}" if with_result or state is JobState.SUCCEEDED else None
            item = FinishItem(job, attempt, state, None if text is None else new_result(text))
            with engine.begin() as conn:
                (committed,) = finish(conn, [item], worker, now=at(self.now))
            assert committed == expected.is_current(worker, attempt)
            if committed:
                expected.end(state)
                expected.close(AttemptOutcome(state))
                expected.text = text

        @rule(worker=WORKERS, job=JOBS, back=st.integers(0, 1), lost=st.booleans())
        def release(self, worker, job, back, lost):
            expected = self.jobs.get(job, Expected())
            attempt = expected.attempt - back
            outcome = AttemptOutcome.LOST if lost else AttemptOutcome.RELEASED
            with engine.begin() as conn:
                item = ReleaseItem(job, attempt, outcome)
                (released,) = release(conn, [item], worker, now=at(self.now))
            assert released == expected.is_current(worker, attempt)
            if released and lost:
                expected.lose(self.alone(worker))
            elif released:
                expected.state, expected.owner = JobState.QUEUED, None
                expected.close(AttemptOutcome.RELEASED)

        @rule(worker=WORKERS)
        def bury(self, worker):
            with engine.begin() as conn:
                burial = bury(conn, worker, now=at(self.now))
            alone = self.alone(worker)
            owned = {job for job, expected in self.jobs.items() if expected.owner == worker}
            for job in owned:
                self.jobs[job].lose(alone)
            assert set(burial.ended) == {job for job in owned if self.jobs[job].state.terminal}
            waiting = owned - set(burial.ended)
            assert set(burial.suspects) == {job for job in waiting if self.jobs[job].deaths >= SUSPECT_DEATHS}
            assert set(burial.queued) == waiting - set(burial.suspects)

        @rule(worker=WORKERS)
        def absolve(self, worker):
            with engine.begin() as conn:
                absolved = absolve(conn, worker)
            expected = {job for job, it in self.jobs.items() if it.absolve(worker)}
            assert set(absolved) == expected

        @rule(worker=WORKERS, limit=st.integers(1, 3), alone=st.booleans())
        def run_suspects(self, worker, limit, alone):
            with engine.begin() as conn:
                assert take_lock(conn, "suspects", worker)
                claimed = claim_suspects(
                    conn, QUEUE, "suspects", worker, limit, alone=alone, now=at(self.now)
                )
                drop_lock(conn, "suspects", worker)
            suspects = [
                job
                for job, expected in sorted(self.jobs.items())
                if expected.state is JobState.QUEUED
                and expected.deaths >= SUSPECT_DEATHS
                and (expected.deaths >= ALONE_DEATHS) == alone
            ]
            assert [suspect.job_id for suspect in claimed] == suspects[:limit]
            for suspect in claimed:
                self.jobs[suspect.job_id].start(worker)
                assert suspect.attempt == self.jobs[suspect.job_id].attempt

        @rule(jobs=st.lists(JOBS, max_size=3))
        def cancel(self, jobs):
            with engine.begin() as conn:
                states = request_cancel(conn, jobs, at=at(self.now))
            for job in set(jobs) & set(self.jobs):
                expected = self.jobs[job]
                expected.cancel |= not expected.state.terminal
                if expected.state is JobState.QUEUED:
                    expected.end(JobState.CANCELLED)
            assert states == {job: self.jobs[job].state for job in jobs if job in self.jobs}

        @rule(jobs=st.lists(JOBS, max_size=3), states=st.sets(st.sampled_from(TERMINAL), min_size=1))
        def retry(self, jobs, states):
            with engine.begin() as conn:
                retried = retry_failed(conn, ids=jobs, states=states, at=at(self.now))
            known = {job for job in jobs if job in self.jobs and self.jobs[job].state in states}
            assert set(retried) == known
            for job in known:
                expected = self.jobs[job]
                expected.state, expected.cancel, expected.text = JobState.QUEUED, False, None
                expected.deaths = expected.solo_deaths = 0
                if expected.deadline is not None and expected.deadline <= self.now:
                    expected.deadline = None

        @rule()
        def time_passes(self):
            self.now += 1

        @invariant()
        def the_tables_agree(self):
            with engine.connect() as conn:
                columns = (Job.id, Job.state, Job.attempt, Job.owner, Job.cancel_requested)
                rows = conn.execute(select(*columns, Job.deaths, Job.solo_deaths))
                actual = {
                    row.id: Expected(
                        row.state,
                        row.attempt,
                        row.owner,
                        row.cancel_requested,
                        deaths=row.deaths,
                        solo_deaths=row.solo_deaths,
                    )
                    for row in rows
                }
                numbers = {}
                for job, number, worker, outcome in conn.execute(
                    select(Attempt.job_id, Attempt.number, Attempt.worker_id, Attempt.outcome).order_by(
                        Attempt.job_id, Attempt.number
                    )
                ):
                    actual[job].history.append((worker, outcome))
                    numbers.setdefault(job, []).append(number)
                for job, text in conn.execute(select(Result.job_id, Result.text)):
                    actual[job].text = text
            for job, expected in self.jobs.items():
                actual[job].deadline = expected.deadline
            assert actual == self.jobs
            for job, of_job in numbers.items():
                assert of_job == list(range(1, self.jobs[job].attempt + 1))

    return JobLife


EXAMPLES = {"sqlite": 60, "postgresql": 15, "mariadb": 15}


@pytest.mark.timeout(240)
def test_no_sequence_of_calls_leads_the_tables_astray(db, kind):
    run_state_machine_as_test(
        machine(db),
        settings=settings(
            max_examples=EXAMPLES[kind],
            stateful_step_count=30,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
