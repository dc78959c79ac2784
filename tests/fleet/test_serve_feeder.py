"""Who feeds a batch of the doorway: one server at a time, which shows that it lives, and another when it has died."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import update

from models_db import api_batches, batches, files
from models_db.api_batches import ApiBatchRecord
from models_db.base import utcnow
from models_db.jobs import retry_failed
from models_db.session import reading, transaction
from models_db.tables import Batch, BatchState, Job, JobState
from tests.db.helpers import add_workers, claim_one, finish_one, new_result
from tests.fleet.conftest import MakeFleet
from tests.fleet.doorway import IDLE, api_batch
from tests.fleet.fleet import Fleet, wait_until
from workers.bulk_export import write_rows
from workers.client import Client
from workers.openai_lines import openai_lines
from workers.payload import GeneratePayload
from workers.serve.batches import batch_object
from workers.serve.feeder import BatchFeeder, _by_turns


@pytest.fixture(scope="module")
def fleet(module_fleet: MakeFleet) -> Fleet:
    running = module_fleet(models=[IDLE])
    running.worker()
    return running


@pytest.fixture
def client(fleet: Fleet) -> Iterator[Client]:
    with Client(fleet.settings) as made:
        yield made


def cancel(client: Client, batch_id: str) -> None:
    transaction(client.engine(), lambda conn: batches.request_cancel_batch(conn, batch_id))


LINES = 3000
PARTS = ["copying", "checking", "passing over", "writing"]


@pytest.mark.parametrize("part", PARTS)
def test_whoever_takes_long_over_a_part_of_a_batch_keeps_it(
    client: Client, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    """Each part takes a minute, by the clock that both servers have; the other one looks again and again."""
    moment, calls = [0.0], [0]
    mine = BatchFeeder(client, clock=lambda: moment[0])
    other = BatchFeeder(client, clock=lambda: moment[0])
    monkeypatch.setattr(files, "CHUNK_BYTES", 10_000)
    batch_id = api_batch(client, LINES)
    taken: list[bool] = []

    def slowed(work: Callable[..., Any], pause_s: float, begin: int = 0) -> Callable[..., Any]:
        """The same, which takes time from its call ``begin`` on."""

        def slow(*given: Any, **more: Any) -> Any:
            calls[0] += 1
            if calls[0] > begin:
                before, moment[0] = moment[0], moment[0] + pause_s
                if int(before) != int(moment[0]):
                    with reading(client.engine()) as conn:
                        found = {each.batch_id: each for each in api_batches.open_api_batches(conn)}
                    taken.append(other._is_mine(found[batch_id]))
            return work(*given, **more)

        return slow

    if part == "copying":
        monkeypatch.setattr(files, "read_chunk", slowed(files.read_chunk, 1.0))
    elif part == "checking":
        monkeypatch.setattr(GeneratePayload, "check_limits", slowed(GeneratePayload.check_limits, 0.02))
    else:
        mine.look()
        if part == "passing over":
            again = partial(batches.set_batch_state, batch_id=batch_id, state=BatchState.VALIDATING)
            transaction(client.engine(), again)
            slow_check = slowed(GeneratePayload.check_limits, 0.02, LINES)
            monkeypatch.setattr(GeneratePayload, "check_limits", slow_check)
        else:
            cancel(client, batch_id)

            def lines(created: int, endpoint: str) -> Callable[..., Any]:
                return slowed(openai_lines(created, endpoint), 0.02)

            monkeypatch.setattr("workers.serve.feeder.openai_lines", lines)
    mine.look()
    assert len(taken) >= 50
    assert not any(taken), "its feeder was alive"
    monkeypatch.undo()
    cancel(client, batch_id)
    mine.look()


def test_a_feeder_forgets_batches_that_are_done_with(fleet: Fleet) -> None:
    limited = fleet.settings.model_copy(update={"tenant_max_open_jobs": 1})
    with Client(limited) as client:
        mine, other = BatchFeeder(client), BatchFeeder(client)
        batch_id = api_batch(client, 3, tenant="acme")
        mine.look()
        other.look()
        assert (set(mine._limited), set(other._seen)) == ({batch_id}, {batch_id})
        cancel(client, batch_id)

        def forgotten() -> bool:
            mine.look()  # writes its files, once the thread beside has seen that it is over
            return not mine._limited

        wait_until(forgotten, 30, "the batch to be forgotten")
        mine.look()
        other.look()
        assert (mine._limited, mine._seen, other._limited, other._seen) == ({}, {}, {}, {})
        assert mine._next_beats.keys() <= {batch_id}
        mine.stop()


def test_a_batch_that_no_worker_takes_ends_when_its_time_is_over(client: Client) -> None:
    feeder = BatchFeeder(client)
    batch_id = api_batch(client, 3)
    feeder.look()
    with client.engine().begin() as conn:
        for table, column in ((Batch, Batch.id), (Job, Job.batch_id)):
            due = update(table).where(column == batch_id, table.deadline_at.is_not(None))
            changed = conn.execute(due.values(deadline_at=utcnow() - timedelta(seconds=1)))
            assert changed.rowcount == (1 if table is Batch else 3)
    feeder.look()
    feeder.look()
    with reading(client.engine()) as conn:
        record, progress = api_batches.find_api_batch(conn, batch_id, "") or pytest.fail("it is there")
    assert (progress.state, progress.counts[JobState.EXPIRED]) == (BatchState.EXPIRED, 3)
    assert (record.answered, record.unanswered) == (0, 3)


def test_a_limited_tenants_batch_goes_on_as_soon_as_its_jobs_end(fleet: Fleet) -> None:
    """Thirty jobs of which three may be open; each look for room would take seconds if it began from the start."""
    limited = fleet.settings.model_copy(update={"tenant_max_open_jobs": 3})
    with Client(limited) as client:
        batch_id = api_batch(client, 30, model="echo", tenant="brisk")
        feeder = BatchFeeder(client)
        feeder.start()
        try:
            wait_until(lambda: output_of(client, batch_id, "brisk"), 25, "the batch to end")
        finally:
            feeder.stop()
        with reading(client.engine()) as conn:
            progress = batches.batch_progress(conn, batch_id)
    assert progress is not None
    assert progress.counts[JobState.SUCCEEDED] == 30


def test_many_limited_batches_share_a_few_threads_and_all_live(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.serve.feeder._MOST_LIMITED", 2)
    limited = fleet.settings.model_copy(update={"tenant_max_open_jobs": 1})
    with Client(limited) as client:
        made = [api_batch(client, 3, model="echo", tenant=f"tenant-{n}") for n in range(5)]
        feeder = BatchFeeder(client)
        feeder.start()
        try:
            wait_until(
                lambda: all(output_of(client, each, f"tenant-{n}") for n, each in enumerate(made)),
                60,
                "all batches to end",
            )
        finally:
            feeder.stop()


def test_the_counts_of_a_batch_are_the_lines_of_its_files(client: Client) -> None:
    """An answer that a deadline cut off is in the error file, though its job has succeeded."""
    batch_id = api_batch(client, 4)
    feeder = BatchFeeder(client)
    feeder.look()
    engine = client.engine()
    add_workers(engine, "counted")
    with reading(engine) as conn:
        whole, cut_off, failed, _ = batches.last_queued(conn, batch_id, 4)
    ends = {
        whole: (JobState.SUCCEEDED, new_result()),
        cut_off: (JobState.SUCCEEDED, new_result(finish_reason="deadline")),
        failed: (JobState.FAILED, None),
    }
    for job_id, (state, result) in ends.items():
        claim_one(engine, job_id, "counted")
        assert finish_one(engine, job_id, 1, "counted", state, result)

    def shown() -> tuple[Any, Any, Any]:
        with reading(engine) as conn:
            found = api_batches.find_api_batch(conn, batch_id, "")
            assert found is not None
            held = [
                None if file_id is None else b"".join(files.read_file(conn, file_id)).count(b"\n")
                for file_id in (found[0].output_file_id, found[0].error_file_id)
            ]
        return batch_object(*found)["request_counts"], *held

    assert shown() == ({"total": 4, "completed": 2, "failed": 1}, None, None)
    cancel(client, batch_id)
    feeder.look()
    assert shown() == ({"total": 4, "completed": 1, "failed": 3}, 1, 3)
    # What runs again afterwards has the files written anew when it has ended.
    transaction(engine, lambda conn: retry_failed(conn, ids=[failed]))
    assert shown() == ({"total": 4, "completed": 2, "failed": 1}, None, None)
    claim_one(engine, failed, "counted")
    assert finish_one(engine, failed, 2, "counted", JobState.SUCCEEDED, new_result())
    feeder.look()
    assert shown() == ({"total": 4, "completed": 2, "failed": 2}, 2, 2)


def test_files_of_what_runs_again_meanwhile_are_not_kept(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch_id = api_batch(client, 2)
    feeder = BatchFeeder(client)
    feeder.look()
    cancel(client, batch_id)

    def again(*given: Any, **more: Any) -> Any:
        written = write_rows(*given, **more)
        retry = partial(retry_failed, batch_id=batch_id, states=[JobState.CANCELLED])
        assert len(transaction(client.engine(), retry)) == 2
        return written

    monkeypatch.setattr("workers.serve.feeder.write_rows", again)
    feeder.look()
    monkeypatch.undo()
    assert output_of(client, batch_id, "") is None
    cancel(client, batch_id)
    feeder.look()
    assert output_of(client, batch_id, "") is not None


@pytest.mark.parametrize("part", ["_checked", "_write"])
def test_a_small_batch_waits_for_no_large_one(
    client: Client, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    go_on, begun = threading.Event(), set[str]()
    work = getattr(BatchFeeder, part)

    def slow(self: BatchFeeder, record: ApiBatchRecord, *more: Any) -> Any:
        if record.tenant.startswith("large"):
            begun.add(record.tenant)
            assert go_on.wait(60)
        return work(self, record, *more)

    def ended(tenant: str) -> bool:
        return output_of(client, made[tenant], tenant) is not None

    monkeypatch.setattr(BatchFeeder, part, slow)
    monkeypatch.setattr("workers.serve.feeder._LARGE_BYTES", 1000)
    large, small = [[f"{size}-{part}-{n}" for n in range(3)] for size in ("large", "small")]
    made = {each: api_batch(client, 20, model="echo", tenant=each) for each in large}
    made |= {each: api_batch(client, 2, model="echo", tenant=each) for each in small}
    feeder = BatchFeeder(client)
    feeder.start()
    try:
        wait_until(lambda: len(begun) == 2, 30, "large batches to be at work")
        wait_until(lambda: all(map(ended, small)), 30, "the small ones to end")
        assert len(begun) == 2, "a place is kept for small ones"
        go_on.set()
        wait_until(lambda: all(map(ended, large)), 30, "the large ones to end")
    finally:
        go_on.set()
        feeder.stop()


def test_a_batch_that_meets_a_fault_holds_up_no_other(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = api_batch(client, 1, tenant="broken"), api_batch(client, 1, tenant="whole")
    checked = BatchFeeder._checked

    def broken(self: BatchFeeder, record: ApiBatchRecord, file: Any) -> Any:
        if record.tenant == "broken":
            raise RuntimeError("a fault")
        return checked(self, record, file)

    monkeypatch.setattr(BatchFeeder, "_checked", broken)
    feeder = BatchFeeder(client)
    with pytest.raises(RuntimeError, match="a fault"):
        feeder.look()
    monkeypatch.undo()
    with reading(client.engine()) as conn:
        assert batches.open_jobs(conn, first, 1) == (BatchState.VALIDATING, 0)
        assert batches.open_jobs(conn, second, 1) == (BatchState.IN_PROGRESS, 1)
    for batch_id in (first, second):
        cancel(client, batch_id)
    feeder.look()


def test_tenants_take_turns() -> None:
    held = [SimpleNamespace(tenant=tenant, batch_id=n) for n, tenant in enumerate("aaabac")]
    assert [each.batch_id for each in _by_turns(held)] == [0, 3, 5, 1, 2, 4]  # type: ignore[arg-type]


def output_of(client: Client, batch_id: str, tenant: str) -> str | None:
    with client.engine().connect() as conn:
        found = api_batches.find_api_batch(conn, batch_id, tenant)
    return None if found is None else found[0].output_file_id


def test_another_server_takes_a_batch_over_and_feeds_nothing_twice(fleet: Fleet) -> None:
    """The first server dies in the middle of feeding; its counter stands still."""

    class DiedError(Exception):
        pass

    moment = [0.0]
    with Client(fleet.settings) as client:
        batch_id = api_batch(client, 1200, model="echo")
        first = BatchFeeder(client, clock=lambda: moment[0])

        def die(batch_id: str, seconds: float) -> None:
            raise DiedError

        first._next_beats[batch_id] = float("inf")  # so that it comes as far as its first chunk
        first._between_chunks = die  # type: ignore[method-assign]
        with pytest.raises(DiedError):
            first.look()
        second = BatchFeeder(client, clock=lambda: moment[0])
        second.look()
        with client.engine().connect() as conn:
            held = api_batches.find_api_batch(conn, batch_id, "")
        assert held is not None
        assert held[1].inserted == 500, "the first one may still live"
        moment[0] += 16.0

        def written() -> str | None:
            second.look()
            with client.engine().connect() as conn:
                found = api_batches.find_api_batch(conn, batch_id, "")
            return found[0].output_file_id if found is not None else None

        output = wait_until(written, 60, "the output")
        assert output is not None
        with client.engine().connect() as conn:
            text = b"".join(files.read_file(conn, output)).decode()
    answers = [json.loads(row)["custom_id"] for row in text.splitlines()]
    assert answers == [f"q{n}" for n in range(1200)]
