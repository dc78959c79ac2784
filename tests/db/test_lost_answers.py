"""A commit whose answer is lost: nobody may do the same twice, or believe that nothing was done."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import pytest
from sqlalchemy import Engine, func, select

from models_db import batches
from models_db.base import utcnow
from models_db.claims import ClaimItem, claim
from models_db.errors import CommitUnknownError, DatabaseUnavailableError, TenantLimitError
from models_db.jobs import job_states
from models_db.session import certain, transaction
from models_db.tables import Job, JobState
from models_db.tenants import TenantUsage
from tests.db.helpers import add_jobs, add_workers, finish_one
from tests.db.outage import Outage
from workers.bulk_input import BulkLine, LineError
from workers.bulk_reuse import Reuser
from workers.bulk_store import LineStore
from workers.client import AsyncClient, Client, SubmissionUnknownError, sync
from workers.client.sync import Submission
from workers.serve.errors import from_exception
from workers.settings import load_settings

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
