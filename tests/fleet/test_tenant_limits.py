"""Limits of tenants through everything that submits: clients, bulk, and the OpenAI-compatible doorway."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from sqlalchemy import Connection, event, func, select
from typer.testing import CliRunner

from backend.api import RequestError
from models_db import batches, keys
from models_db.errors import TenantLimitError
from models_db.session import transaction
from models_db.tables import BatchState, Job, JobState
from tests.fleet.doorway import api_batch, serving
from tests.fleet.echo_fleet import echo_fleet
from tests.fleet.fleet import wait_until
from workers.bulk import BulkRunner
from workers.bulk_input import LineOptions
from workers.bulk_source import validate_source
from workers.cli import app
from workers.client import AsyncClient, Client
from workers.demo import Demo
from workers.serve.feeder import BatchFeeder
from workers.settings import Settings, TenantLimit

IDLE = "nobody-serves-this"


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Demo]:
    with echo_fleet(tmp_path_factory.mktemp("fleet")) as running:
        yield running


def limited(fleet: Demo, **limits: Any) -> Settings:
    return fleet.settings.model_copy(update={"models": (IDLE,)} | limits)


def source_of(path: Path, count: int, **fields: Any) -> Path:
    rows = [{"custom_id": f"l{n}", "prompt": f"word{n}", "max_tokens": 1} | fields for n in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_client_is_told_who_has_how_much_and_what_to_do(fleet: Demo) -> None:
    with Client(limited(fleet, tenant_max_open_jobs=2)) as client:
        first = client.submit("x", model=IDLE, tenant="one")
        client.submit("x", model=IDLE, tenant="one")
        with pytest.raises(TenantLimitError, match=r"'one' has 2 jobs open .* Wait until some have ended"):
            client.submit("x", model=IDLE, tenant="one")
        client.submit("x", model=IDLE, tenant="two")
        for _ in range(4):
            client.submit("x", model=IDLE)  # nobody's
        first.cancel()
        client.submit("x", model=IDLE, tenant="one")


def test_one_tenant_may_have_limits_of_its_own(fleet: Demo) -> None:
    own = {"big": TenantLimit(jobs=3), "free": TenantLimit()}
    with Client(limited(fleet, tenant_max_open_jobs=1, tenant_limits=own)) as client:
        for tenant, most in (("big", 3), ("small", 1)):
            for _ in range(most):
                client.submit("x", model=IDLE, tenant=tenant)
            with pytest.raises(TenantLimitError):
                client.submit("x", model=IDLE, tenant=tenant)
        for _ in range(5):
            client.submit("x", model=IDLE, tenant="free")


def test_a_job_that_can_never_fit_is_a_bad_request(fleet: Demo) -> None:
    with Client(limited(fleet, tenant_max_open_tokens=100)) as client:
        client.submit("x" * 40, model=IDLE, tenant="t", max_tokens=90)
        with pytest.raises(TenantLimitError, match="100 tokens open and asks for 2 more"):
            client.submit(token_ids=[1], model=IDLE, tenant="t", max_tokens=1)
        with pytest.raises(
            RequestError, match="max_tokens: with the prompt comes to more than the 100 tokens"
        ):
            client.submit("x" * 41, model=IDLE, tenant="t", max_tokens=90)


def test_the_asyncio_client_raises_the_same(fleet: Demo) -> None:
    async def ask() -> None:
        async with AsyncClient(limited(fleet, tenant_max_open_jobs=1)) as client:
            await client.submit("x", model=IDLE, tenant="async")
            with pytest.raises(TenantLimitError):
                await client.submit("x", model=IDLE, tenant="async")

    asyncio.run(ask())


def test_a_file_of_a_limited_tenant_runs_to_its_end_a_few_lines_at_a_time(
    fleet: Demo, tmp_path: Path
) -> None:
    told: list[TenantLimitError] = []
    seen: list[int] = []
    unended = select(func.count()).where(
        Job.tenant == "file", Job.state.in_((JobState.QUEUED, JobState.RUNNING))
    )

    def look(conn: Connection) -> None:
        """Before a commit of the feeding: what it has just put in cannot have ended."""
        seen.append(conn.scalar(unended) or 0)

    source = source_of(tmp_path / "in.jsonl", 60, tenant="file")
    with Client(limited(fleet, tenant_max_open_jobs=7)) as client, source.open("rb") as file:
        made, _ = validate_source(str(source), file, LineOptions(defaults={"model": "smollm2"}))
        runner = BulkRunner(client, waiting=told.append)
        batch_id = runner.create("limited", made)
        event.listen(client.engine(), "commit", look)
        ended = runner.run(batch_id, made, file)
    assert (ended.state, ended.counts[JobState.SUCCEEDED]) == (BatchState.COMPLETED, 60)
    assert max(seen) == 7
    assert [error.limit for error in told] == [7]  # once, not at each look


def test_bulk_says_that_it_waits_and_for_whom(fleet: Demo, tmp_path: Path) -> None:
    source = source_of(tmp_path / "in.jsonl", 30, tenant="cli")
    urls = ["--database-url", fleet.settings.database_url, "--broker-url", fleet.settings.broker_url]
    done = CliRunner().invoke(
        app,
        ["bulk", "run", str(source), "--no-wait", *urls],
        env={"TOKENMILL_TENANT_LIMITS": '{"cli": {"jobs": 4}}'},
    )
    assert done.exit_code == 0, done.output
    assert done.stderr.count("The rest of the file waits: tenant: 'cli' has") == 1


def test_a_batch_that_is_cancelled_while_it_waits_for_its_tenant_ends(fleet: Demo, tmp_path: Path) -> None:
    source = source_of(tmp_path / "in.jsonl", 30, tenant="gone")
    with Client(limited(fleet, tenant_max_open_jobs=4)) as client, source.open("rb") as file:
        made, _ = validate_source(str(source), file, LineOptions(defaults={"model": IDLE}))
        cancelled: list[TenantLimitError] = []

        def cancel(error: TenantLimitError) -> None:
            cancelled.append(error)
            transaction(client.engine(), lambda conn: batches.request_cancel_batch(conn, batch_id))

        runner = BulkRunner(client, waiting=cancel)
        batch_id = runner.create("limited", made)
        ended = runner.run(batch_id, made, file)
    assert (ended.state, ended.inserted, len(cancelled)) == (BatchState.CANCELLED, 4, 1)


def test_the_doorway_answers_429_and_says_when_to_come_back(fleet: Demo) -> None:
    settings = limited(fleet, tenant_max_open_jobs=1)
    with Client(settings) as client:
        _, key = transaction(client.engine(), lambda conn: keys.create_key(conn, tenant="door", name="k"))
        held = client.submit("x", model=IDLE, tenant="door")
        with serving(settings, open_to_all=False) as url:
            ask = {"model": "smollm2", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
            call = {
                "url": f"{url}/v1/chat/completions",
                "json": ask,
                "headers": {"Authorization": f"Bearer {key}"},
            }
            answer = httpx.post(**call)
            assert (answer.status_code, answer.headers["Retry-After"]) == (429, "2")
            error = answer.json()["error"]
            assert (error["type"], error["code"], error["param"]) == ("jobs", "rate_limit_exceeded", None)
            assert "'door' has 1 jobs open" in error["message"]
            held.cancel()
            assert httpx.post(**call).status_code == 200


def test_a_limited_tenants_batch_of_the_doorway_waits_for_room_and_lets_others_pass(fleet: Demo) -> None:
    settings = limited(fleet, tenant_limits={"slow": TenantLimit(jobs=2)})
    with Client(settings) as client:

        def inserted(batch_id: str) -> int:
            with client.engine().connect() as conn:
                progress = batches.batch_progress(conn, batch_id)
            assert progress is not None
            return progress.inserted

        slow, other = (api_batch(client, 5, model=IDLE, tenant=tenant) for tenant in ("slow", "other"))
        feeder = BatchFeeder(client)
        feeder.look()
        assert (inserted(slow), inserted(other)) == (2, 5)
        with client.engine().connect() as conn:
            rows = list(conn.scalars(select(Job.id).where(Job.batch_id == slow)))
        for job_id in rows:
            client.cancel(job_id)
        wait_until(lambda: inserted(slow) == 4, 30, "the batch to go on in the room there is")
        feeder.stop()
