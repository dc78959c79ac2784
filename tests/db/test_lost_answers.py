"""A commit whose answer is lost: nobody may do the same twice, or believe that nothing was done."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from sqlalchemy import Engine, func, select, update

from models_db import batches
from models_db.base import utcnow
from models_db.claims import ClaimItem, FinishItem, ReleaseItem, claim
from models_db.errors import CommitUnknownError, DatabaseUnavailableError, TenantLimitError
from models_db.jobs import job_states, mark_callbacks_sent, request_cancel
from models_db.session import certain, transaction
from models_db.suspects import take_lock
from models_db.sweeping import mark_republished
from models_db.tables import Attempt, AttemptOutcome, EngineSample, Job, JobState, Result, Worker, WorkerState
from models_db.tenants import TenantUsage
from models_db.workers import set_worker_state
from models_db.writer import DatabaseThread
from tests.db.conftest import wipe
from tests.db.helpers import (
    T0,
    add_jobs,
    add_workers,
    at,
    claim_one,
    finish_one,
    new_job,
    new_result,
    new_sample,
)
from tests.db.outage import Outage
from workers.bulk_input import BulkLine, LineError
from workers.bulk_reuse import Reuser
from workers.bulk_store import LineStore
from workers.client import AsyncClient, Client, SubmissionUnknownError, sync
from workers.client.sync import Submission
from workers.serve.errors import from_exception
from workers.settings import load_settings
from workers.sweeper import _burial

LIMIT_S = 20
ENDS = [state for state in JobState if state.terminal]
FATES = pytest.mark.parametrize("goes_through", [False, True], ids=["not committed", "committed"])


class Taken:
    """A broker that notes what is published."""

    def __init__(self) -> None:
        self.ids: list[str] = []

    def push(self, deliveries) -> None:
        self.ids += [json.loads(data)["headers"]["id"] for _, data in deliveries]

    def close(self) -> None:
        pass


@pytest.fixture
def broker() -> Taken:
    return Taken()


@pytest.fixture
def client(db: Engine, migrated_url: str, broker: Taken) -> Iterator[Client]:
    settings = load_settings(model="echo", backend="echo", database_url=migrated_url, tenant_max_open_jobs=10)
    pauses: list[float] = []
    with Client(settings, broker=broker, sleep=pauses.append) as made:  # type: ignore[arg-type]
        made.engine()
        yield made


def stored(engine: Engine) -> list[str]:
    with engine.connect() as conn:
        return list(conn.scalars(select(Job.id).order_by(Job.id)))


@FATES
def test_a_job_is_accepted_once_and_published_when_the_answer_to_its_commit_is_lost(
    db, client, broker, goes_through
):
    with Outage(client.engine()) as outage:
        outage.commit_goes_through, outage.commits = goes_through, 2
        handle = client.submit("hello", tenant="t")
    assert (handle.created, handle.published) == (True, True)
    assert stored(db) == broker.ids == [handle.id]
    with db.connect() as conn:
        assert conn.scalar(select(TenantUsage.jobs)) == 1


@FATES
def test_the_database_may_stay_away_for_some_seconds_after_a_lost_answer(db, client, broker, goes_through):
    with Outage(client.engine()) as outage:
        outage.commit_goes_through, outage.commits = goes_through, 1
        outage.away_after = 4
        handle = client.submit("hello")
    assert stored(db) == broker.ids == [handle.id]


@FATES
def test_chunks_keys_and_tenants_come_out_as_if_nothing_had_happened(db, client, broker, goes_through):
    known = client.submit("known", idempotency_key="known")
    with Outage(client.engine()) as outage:
        outage.commit_goes_through, outage.commits = goes_through, 1
        handles = list(
            client.submit_many(
                [
                    {"prompt": "plain", "tenant": "t"},
                    {"prompt": "keyed", "tenant": "t", "idempotency_key": "new"},
                    {"prompt": "keyed", "tenant": "t", "idempotency_key": "new"},
                    {"prompt": "known", "idempotency_key": "known"},
                ]
            )
        )
    plain, keyed, twin, old = handles
    assert [handle.created for handle in handles] == [True, True, False, False]
    assert (twin.id, old.id) == (keyed.id, known.id)
    assert sorted(broker.ids) == stored(db) == sorted([known.id, plain.id, keyed.id])
    with db.connect() as conn:
        assert conn.scalar(select(TenantUsage.jobs).where(TenantUsage.tenant == "t")) == 2


def test_a_full_tenant_is_not_refused_what_the_lost_commit_has_stored(db, client, broker):
    with Outage(client.engine()) as outage:
        outage.commit_goes_through, outage.commits = True, 1
        handles = list(client.submit_many([{"prompt": f"{n}", "tenant": "t"} for n in range(10)]))
        with pytest.raises(TenantLimitError):
            client.submit("one too many", tenant="t")
    assert len(stored(db)) == len(broker.ids) == len(handles) == 10


@FATES
def test_whoever_cannot_be_told_gets_the_ids_to_look_for(db, client, broker, goes_through, monkeypatch):
    monkeypatch.setattr(sync, "certain", partial(certain, patience_s=0.0))
    with Outage(client.engine()) as outage:
        outage.commit_goes_through, outage.commits, outage.away_after = goes_through, 1, 10**9
        with pytest.raises(SubmissionUnknownError, match="may have been stored") as caught:
            client.submit("hello")
    assert broker.ids == []
    assert stored(db) == (caught.value.job_ids if goes_through else [])
    assert isinstance(caught.value, DatabaseUnavailableError)
    answer = from_exception(caught.value)
    assert (answer.status, answer.headers()) == (503, {"x-should-retry": "false"})


def test_an_outage_before_the_commit_is_told_at_once_and_stores_nothing(db, client, broker):
    with Outage(client.engine(), connects=1), pytest.raises(DatabaseUnavailableError) as caught:
        client.submit("hello")
    assert not isinstance(caught.value, CommitUnknownError)
    assert (stored(db), broker.ids) == ([], [])


@FATES
def test_a_cancellation_is_done_once(db, client, goes_through):
    add_jobs(db, "j")
    with Outage(client.engine()) as outage:
        outage.commit_goes_through, outage.commits = goes_through, 1
        assert client.cancel("j") is JobState.CANCELLED
    with db.connect() as conn:
        assert job_states(conn, ["j"]) == {"j": JobState.CANCELLED}


@FATES
def test_the_client_for_asyncio_is_the_same(db, client, broker, goes_through):
    async def submit() -> str:
        made = AsyncClient(client.settings)
        made.sync._broker = broker  # type: ignore[assignment]
        with Outage(made.sync.engine()) as outage:
            outage.commit_goes_through, outage.commits = goes_through, 1
            handle = await made.submit("hello")
        await made.close()
        return handle.id

    assert [asyncio.run(submit())] == stored(db) == broker.ids


@FATES
def test_lines_of_a_bulk_run_are_in_once(db, client, broker, goes_through):
    batch_id = transaction(db, lambda conn: batches.create_batch(conn, name="b"))
    store = LineStore(client, batch_id, now=utcnow, deadline_at=None, reuse_days=None)
    rows = [
        BulkLine(1, client.payload({"prompt": "one", "custom_id": "one"})),
        BulkLine(2, client.payload({"prompt": "two", "custom_id": "two"})),
        LineError(3, "no JSON", "bad_json"),
        LineError(4, "no JSON", "bad_json"),
    ]
    for step in store.steps(rows):
        with Outage(client.engine()) as outage:
            outage.commit_goes_through, outage.commits = goes_through, 1
            step()
    with db.connect() as conn:
        found = conn.execute(select(Job.position, Job.state).order_by(Job.position)).all()
    assert [tuple(row) for row in found] == [(1, "queued"), (2, "queued"), (3, "failed"), (4, "failed")]
    assert len(broker.ids) == 2


@FATES
def test_answers_that_are_taken_over_are_in_once(db, client, goes_through):
    now = utcnow
    add_workers(db, "w")
    payload = client.payload({"prompt": "same", "temperature": 0})
    reuser = Reuser(client, now)
    first = transaction(db, lambda conn: batches.create_batch(conn, name="first"))
    second = transaction(db, lambda conn: batches.create_batch(conn, name="second"))
    reuser.submit([Submission(payload, batch_id=first, position=1)], 1)
    (job_id,) = stored(db)
    job = client.new_jobs([Submission(payload)])[0]
    with db.begin() as conn:
        claim(conn, [ClaimItem(replace(job, id=job_id))], "w")
    assert finish_one(db, job_id, 1, "w", now=now())
    with Outage(client.engine()) as outage:
        outage.commit_goes_through, outage.commits = goes_through, 1
        reuser.submit([Submission(payload, batch_id=second, position=1)], 1)
    with db.connect() as conn:
        count = select(func.count()).select_from(Job).where(Job.batch_id == second)
        assert conn.scalar(count.where(Job.state == JobState.SUCCEEDED)) == conn.scalar(count) == 1


def test_work_that_is_in_its_own_way_is_looked_for_again(db):
    """The server may still be at the first commit when the second try begins."""
    tries = []

    def work(conn, replay):
        tries.append(replay)
        if len(tries) == 2:
            raise TenantLimitError("t", "jobs", 1, 1, 1)
        return "done"

    with Outage(db) as outage:
        outage.commit_goes_through, outage.commits = True, 1
        assert certain(db, work, sleep=lambda _s: None) == "done"
    assert tries == [False, True, True]


# As a sweeper saw them; of the second another one was quicker.
SEEN = {"unheard": at(90), "heard": at(90), "unheard yet": None}


def everything(thread: DatabaseThread) -> dict[str, Future[Any]]:
    """Every operation of the writer, with each of its answers, for one batch."""
    claims = {
        "fresh": thread.claim(ClaimItem(new_job("fresh"))),
        "bare": thread.claim(ClaimItem(new_job("bare"))),
        "twin": thread.claim(ClaimItem(new_job("bare"))),
        "here": thread.claim(ClaimItem(new_job("here"))),
        "elsewhere": thread.claim(ClaimItem(new_job("elsewhere"))),
        "orphan": thread.claim(ClaimItem(new_job("orphan"))),
        "late": thread.claim(ClaimItem(new_job("late"))),
        "old": thread.claim(ClaimItem(new_job("old"), max_age_s=50)),
        "unwanted": thread.claim(ClaimItem(new_job("unwanted"))),
        "ended": thread.claim(ClaimItem(new_job("ended"))),
        "suspect": thread.claim(ClaimItem(new_job("suspect"))),
        "gone": thread.claim(ClaimItem(new_job("gone"), stored=True)),
    }
    ends = {
        f"ends {state}": thread.finish(
            FinishItem(f"ends-{state}", 1, state, new_result(), None if state == "succeeded" else "boom")
        )
        for state in ENDS
    }
    others = {
        "ends late": thread.finish(FinishItem("elsewhere", 1, JobState.SUCCEEDED, new_result())),
        "released": thread.release(ReleaseItem("released", 1)),
        "lost": thread.release(ReleaseItem("lost", 1, AttemptOutcome.LOST, "its engine died")),
        "released late": thread.release(ReleaseItem("elsewhere", 1)),
        "beat": thread.heartbeat(7),
        "sample": thread.sample(new_sample("w")),
        "state": thread.call(lambda conn: set_worker_state(conn, "live", WorkerState.ONLINE)),
        "told": thread.call(lambda conn: mark_callbacks_sent(conn, ["ended"], at=at(3))),
        "cancel": thread.call(lambda conn: request_cancel(conn, ["queued"])),
        "lock": thread.call(lambda conn: take_lock(conn, "lock", "w")),
        "buried": thread.call(_burial("fallen", at(100))),
        "left": thread.call(_burial("stopped", at(100))),
        "republished": thread.call(lambda conn: mark_republished(conn, SEEN, now=at(100))),
    }
    return claims | ends | others


GONE = ("fallen", "stopped")  # workers that others bury
LEFT = ("plain", "cancelled", "suspect", "told")  # what each of them had


def prepared(engine: Engine) -> None:
    """A world in which each of them has something to do."""
    add_workers(engine, "w", "live", "dead", "fallen", "stopped")
    running = ["here", "released", "lost", *(f"ends-{state}" for state in ENDS)]
    fresh = ["fresh", "unwanted", "ended", "suspect", "queued", "elsewhere", "orphan", *running]
    add_jobs(engine, *fresh, created_at=at(90))
    add_jobs(engine, "late", created_at=at(90), deadline_at=at(95))
    add_jobs(engine, "old", created_at=at(10))
    for job_id in running:
        claim_one(engine, job_id, "w", now=at(91))
    claim_one(engine, "elsewhere", "live", now=at(91))
    claim_one(engine, "orphan", "dead", now=at(91))
    add_jobs(engine, *(f"{name} {worker}" for worker in GONE for name in LEFT), created_at=at(90))
    for worker in GONE:
        for name in LEFT:
            claim_one(engine, f"{name} {worker}", worker, now=at(91))
        finish_one(engine, f"told {worker}", 1, worker, now=T0)
    add_jobs(engine, *SEEN, created_at=at(90))
    claim_one(engine, "ended", "w", now=at(91))
    finish_one(engine, "ended", 1, "w", now=at(92))
    with engine.begin() as conn:
        conn.execute(update(Job).where(Job.id == "suspect").values(deaths=2))
        conn.execute(update(Job).where(Job.id == "unwanted").values(cancel_requested=True))
        for worker in GONE:
            named = {name: update(Job).where(Job.id == f"{name} {worker}") for name in LEFT}
            conn.execute(named["cancelled"].values(cancel_requested=True))
            conn.execute(named["suspect"].values(deaths=1))
        set_worker_state(conn, "stopped", WorkerState.STOPPED)
        for job_id, published_at in SEEN.items():
            conn.execute(update(Job).where(Job.id == job_id).values(published_at=published_at))
        conn.execute(update(Job).where(Job.id == "heard").values(published_at=at(95)))


def left_behind(engine: Engine) -> dict[str, Any]:
    """What the tables say, but for times that differ from run to run."""
    with engine.connect() as conn:
        jobs = select(Job.id, Job.state, Job.attempt, Job.owner, Job.deaths, Job.solo_deaths, Job.error_type)
        # The rest by our own clock.
        published = select(Job.id, Job.published_at).where(Job.published_at <= at(100))
        runs = select(Attempt.job_id, Attempt.number, Attempt.worker_id, Attempt.outcome, Attempt.ended_at)
        workers = select(Worker.id, Worker.state, Worker.heartbeat)
        return {
            "jobs": sorted(map(repr, conn.execute(jobs))),
            "published": sorted(map(repr, conn.execute(published))),
            "runs": sorted(map(repr, conn.execute(runs))),
            "workers": sorted(map(repr, conn.execute(workers))),
            "results": sorted(map(repr, conn.execute(select(Result.job_id, Result.text)))),
            "samples": conn.scalar(select(func.count()).select_from(EngineSample)),
        }


def at_once(engine: Engine, fate: bool | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """All operations in one batch; with a fate its commit is lost, twice. The answers, and what is left behind."""
    wipe(engine)
    prepared(engine)
    with Outage(engine) as outage:
        thread = DatabaseThread(
            engine, "w", dead_ids=lambda: {"dead"}, now=lambda: at(100), sleep=outage.delays.append
        )
        futures = everything(thread)  # before it starts, so that they go together
        outage.commit_goes_through = bool(fate)
        outage.commits = 0 if fate is None else 2
        thread.start()
        try:
            answers = {name: future.result(LIMIT_S) for name, future in futures.items()}
        finally:
            thread.stop(drain=False, timeout_s=LIMIT_S)
        assert len(outage.delays) == (0 if fate is None else 2)
    return answers, left_behind(engine)


@FATES
def test_every_operation_of_the_writer_answers_as_if_its_commit_had_not_been_lost(db, goes_through):
    answers, left = at_once(db, None)
    kinds = {name: answer.kind.value for name, answer in answers.items() if hasattr(answer, "kind")}
    assert kinds == {
        "fresh": "claimed",
        "bare": "claimed",
        "twin": "joined",
        "here": "joined",
        "elsewhere": "elsewhere",
        "orphan": "claimed",
        "late": "terminal",
        "old": "terminal",
        "unwanted": "terminal",
        "ended": "terminal",
        "suspect": "suspect",
        "gone": "gone",
    }
    assert [answers[name] for name in ("ends late", "released", "lost", "released late")] == [
        False,
        True,
        True,
        False,
    ]
    buried, left_there = answers["buried"], answers["left"]
    assert (buried.queued, buried.suspects) == (["plain fallen"], ["suspect fallen"])
    assert (buried.ended, buried.untold) == (["cancelled fallen"], ["told fallen"])
    assert left_there.queued == ["cancelled stopped", "plain stopped", "suspect stopped"]
    assert [message.id for message in answers["republished"]] == ["unheard", "unheard yet"]
    again, left_again = at_once(db, goes_through)
    assert left_again == left
    assert {name: _shown(answer) for name, answer in again.items()} == {
        name: _shown(answer) for name, answer in answers.items()
    }


def _shown(answer: Any) -> Any:
    return (
        (answer.kind, answer.attempt, answer.outcome and answer.outcome.state)
        if hasattr(answer, "kind")
        else answer
    )
