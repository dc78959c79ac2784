"""How lines are accepted when their tenant has room for some only, and when they come late."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from sqlalchemy import select

from models_db.callbacks import Callback, CallbackState
from models_db.errors import TenantLimitError
from models_db.migrate import upgrade
from models_db.session import reading
from models_db.tables import Job, JobState
from workers.bulk import BulkRunner
from workers.bulk_input import BulkLine, LineOptions
from workers.bulk_source import validate_source
from workers.bulk_store import Accepting
from workers.client import Client
from workers.payload import GeneratePayload
from workers.settings import TenantLimit, load_settings


def test_as_many_as_fit_go_in_at_the_second_try() -> None:
    lines = [
        BulkLine(n, GeneratePayload.parse({"model": "m", "prompt": "x", "custom_id": str(n)}))
        for n in range(500)
    ]
    tries: list[int] = []
    present = 3

    def accept(some: Sequence[BulkLine]) -> None:
        nonlocal present
        tries.append(len(some))
        if present + len(some) > 100:
            raise TenantLimitError("t", "jobs", 100, present, len(some))
        present += len(some)

    accepting = Accepting(lines, accept)
    with pytest.raises(TenantLimitError):
        accepting()
    assert (tries, len(accepting.left)) == ([500, 97, 97], 403)


@pytest.mark.parametrize("reuse_days", [None, 1.0])
def test_lines_that_waited_for_their_tenant_are_of_the_moment_they_went_in(
    tmp_path: Path, reuse_days: float | None
) -> None:
    url = f"sqlite:///{tmp_path / 'w.db'}"
    upgrade(url)
    settings = load_settings(
        model="m",
        database_url=url,
        broker_url="redis://127.0.0.1:1/0",
        callback_hosts=("example.com",),
        tenant_limits={"t": TenantLimit(jobs=1)},
    )
    rows = [
        {
            "custom_id": f"c{n}",
            "prompt": "x",
            "tenant": "t",
            "deadline_s": 1000,
            "callback_url": "https://example.com/",
        }
        for n in range(3)
    ]
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    began = datetime.now(UTC)
    now = [began]
    pauses: list[float] = []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) in (6, 12):
            now[0] += timedelta(seconds=60)
            with reading(client.engine()) as conn:
                queued = list(conn.scalars(select(Job.id).where(Job.state == JobState.QUEUED)))
            for job_id in queued:
                client.cancel(job_id)

    with Client(settings, clock=lambda: now[0]) as client, source.open("rb") as file:
        made, _ = validate_source(
            str(source), file, LineOptions(defaults={"model": "m"}), reuse_days=reuse_days
        )
        runner = BulkRunner(client, now=lambda: now[0], sleep=sleep, waiting=lambda error: None)
        batch_id = runner.create("waits", made, deadline_s=100)
        runner.feed(batch_id, made, file)
        with reading(client.engine()) as conn:
            query = select(Job).where(Job.batch_id == batch_id).order_by(Job.position)
            found = conn.execute(query).all()
            told = {row.job_id: row.state for row in conn.execute(select(Callback.job_id, Callback.state))}
    assert [(job.created_at - began).total_seconds() for job in found[:2]] == [0, 60]
    assert [(job.deadline_at - began).total_seconds() for job in found[:2]] == [100, 100]
    assert (found[2].state, found[2].tenant) == (JobState.EXPIRED, "t")
    assert told[found[2].id] is CallbackState.DUE
    assert 1.0 < max(pauses) <= 2.0  # it asks less and less often
