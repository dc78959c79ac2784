"""Cancelling large batches: by the command, cut off and repeated; while lines still go in; over HTTP."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from sqlalchemy import Engine
from typer.testing import CliRunner, Result

from models_db import api_batches, batches
from models_db.batch_cancel import PIECE, cancel_batch, mark_cancelling
from models_db.batches import batch_progress, create_batch, set_batch_state
from models_db.jobs import insert_jobs
from models_db.migrate import upgrade
from models_db.session import make_engine, reading, transaction
from models_db.tables import BatchState, JobState
from tests.db.helpers import add_workers, claim_one, new_job
from tests.fleet.conftest import MakeFleet
from tests.fleet.doorway import IDLE, api_batch, line, serving
from tests.fleet.fleet import Fleet, wait_until
from workers.bulk import BulkRunner
from workers.bulk_input import LineOptions
from workers.bulk_source import validate_source
from workers.cli import app
from workers.cli.bulk_work import cancel_shown
from workers.client import Client
from workers.serve import batches as doorway_batches
from workers.serve import feeder as feeders
from workers.serve.feeder import BatchFeeder

LINES = 2 * PIECE + 500


@pytest.fixture(scope="module")
def fleet(module_fleet: MakeFleet) -> Fleet:
    """A fleet without workers: what waits goes on waiting."""
    return module_fleet(models=[IDLE])


@pytest.fixture
def large(any_database_url: str) -> Iterator[Engine]:
    """A batch ``b`` on each database, one of whose lines runs."""
    upgrade(any_database_url)
    engine = make_engine(any_database_url)
    add_workers(engine, "w")
    with engine.begin() as conn:
        create_batch(conn, name="nightly", batch_id="b")
        for begin in range(1, LINES + 1, 500):
            insert_jobs(
                conn, [new_job(f"{n:05}", batch_id="b", position=n) for n in range(begin, begin + 500)]
            )
        set_batch_state(conn, "b", BatchState.IN_PROGRESS, total=LINES)
    claim_one(engine, "00003", "w")
    yield engine
    engine.dispose()


def bulk(engine: Engine, *arguments: str) -> Result:
    url = engine.url.render_as_string(hide_password=False)
    return CliRunner().invoke(app, ["bulk", *arguments, "--database-url", url])


class Interrupted:
    """Signals, of which one comes after the first piece."""

    def sleep(self, seconds: float) -> None:
        raise KeyboardInterrupt


def test_the_command_shows_how_far_it_is_and_goes_on_when_it_is_repeated(
    large: Engine, capsys: pytest.CaptureFixture[str]
) -> None:
    signals: Any = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        cancel_shown(large, "b", signals)
    assert "Repeat: tokenmill bulk cancel b" in capsys.readouterr().err
    shown = json.loads(bulk(large, "status", "b", "--json").stdout)
    assert shown["state"] == "cancelling"
    assert (shown["counts"]["cancelled"], shown["counts"]["running"]) == (PIECE - 2, 1)
    again = bulk(large, "cancel", "b")
    assert again.stdout == f"{LINES - PIECE + 1:,} jobs cancelled, 1 still running are told to end\n"
    assert f"cancel: {LINES + 1:,}/{LINES + 1:,} done" in again.stderr
    assert bulk(large, "cancel", "b").stdout.startswith("0 jobs cancelled, 1 still running")


def test_whoever_watches_a_batch_whose_cancel_was_cut_off_takes_it_up(fleet: Fleet, tmp_path: Path) -> None:
    with Client(fleet.settings) as client:
        batch_id = fed(client, tmp_path, 60)
        transaction(client.engine(), lambda conn: mark_cancelling(conn, batch_id))
        ended = BulkRunner(client).watch(batch_id)
    assert (ended.state, ended.counts[JobState.CANCELLED]) == (BatchState.CANCELLED, 60)


def fed(client: Client, folder: Path, lines: int) -> str:
    runner, batch_id = BulkRunner(client), ""
    with source_of(folder, lines).open("rb") as file:
        made, _ = validate_source("in.jsonl", file, LineOptions(defaults={"model": IDLE}))
        batch_id = runner.create("fed", made)
        runner.feed(batch_id, made, file, bounded=False)
    return batch_id


def source_of(folder: Path, lines: int) -> Path:
    path = folder / "in.jsonl"
    path.write_text("".join(json.dumps({"custom_id": f"{n}", "prompt": "word"}) + "\n" for n in range(lines)))
    return path


def test_what_is_cancelled_while_all_of_a_file_goes_in_at_once_leaves_nothing_behind(
    fleet: Fleet, tmp_path: Path
) -> None:
    """Somebody cancels between two chunks; who feeds has not looked at the batch since."""
    ended: list[BatchState] = []
    with Client(fleet.settings) as client, source_of(tmp_path, 3000).open("rb") as file:
        made, _ = validate_source("in.jsonl", file, LineOptions(defaults={"model": IDLE}))

        def between(seconds: float) -> None:
            with reading(client.engine()) as conn:
                progress = batch_progress(conn, batch_id)
            assert progress is not None
            if progress.inserted and not ended:
                ended.append(cancel_batch(client.engine(), batch_id))

        runner = BulkRunner(client, sleep=between)
        batch_id = runner.create("all at once", made)
        runner.feed(batch_id, made, file, bounded=False)
        progress = runner.progress(batch_id)
    assert ended == [BatchState.CANCELLED]
    assert progress.state is BatchState.CANCELLED
    assert 0 < progress.inserted < 3000
    with reading(client.engine()) as conn:
        assert batches.open_jobs(conn, batch_id, 10) == (BatchState.CANCELLED, 0)


def test_the_doorway_answers_before_a_large_batch_is_cancelled(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    answered = threading.Event()

    def cancel_later(*given: Any, **more: Any) -> BatchState:
        answered.wait(30)
        return cancel_batch(*given, **more)

    monkeypatch.setattr(doorway_batches, "PIECE", 10)
    monkeypatch.setattr(feeders, "cancel_batch", cancel_later)
    with (
        serving(fleet.settings) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0) as client,
    ):
        rows = "\n".join(line(f"q{n}", "x", model=IDLE) for n in range(40)).encode()
        file = client.files.create(file=("in.jsonl", rows), purpose="batch")
        made = client.batches.create(
            input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
        )
        wait_until(lambda: client.batches.retrieve(made.id).status == "in_progress", 30, "all lines")
        assert client.batches.cancel(made.id).status == "cancelling"
        with reading(fleet.engine) as conn:
            assert batches.open_jobs(conn, made.id.removeprefix("batch_"), 100)[1] == 40
        answered.set()
        wait_until(lambda: client.batches.retrieve(made.id).status == "cancelled", 30, "the end")
        counts = client.batches.retrieve(made.id).request_counts
        assert (counts.total, counts.completed, counts.failed) == (40, 0, 40)


def test_a_server_takes_up_a_cancel_that_another_one_left(fleet: Fleet) -> None:
    with Client(fleet.settings) as client:
        batch_id = api_batch(client, 40)
        feeder = BatchFeeder(client)
        feeder.look()
        transaction(client.engine(), lambda conn: mark_cancelling(conn, batch_id))

        def ended() -> bool:
            feeder.look()
            with reading(client.engine()) as conn:
                found = api_batches.find_api_batch(conn, batch_id, "")
            assert found is not None
            return found[1].state is BatchState.CANCELLED and found[0].output_file_id is not None

        wait_until(ended, 30, "the files of what was cancelled")
        feeder.stop()
