"""Exports of batches of which some lines are not in yet: they say so, and their exit status does."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from models_db.batches import BatchProgress, request_cancel_batch
from models_db.session import transaction
from workers.bulk import BulkRunner
from workers.bulk_input import LineOptions
from workers.bulk_source import validate_source
from workers.cli import app
from workers.cli.common import ExitCode
from workers.testing import LocalFleet

LINES = 30
NOWHERE = "redis://127.0.0.1:1/0"  # what is fed goes through the fleet's own client


@pytest.fixture
def fleet() -> Iterator[LocalFleet]:
    with LocalFleet(broker_url=NOWHERE) as running:
        yield running


def stopped_batch(fleet: LocalFleet, folder: Path) -> BatchProgress:
    """A batch whose feeder was interrupted after some lines."""
    source = folder / "in.jsonl"
    source.write_text(
        "".join(
            json.dumps({"custom_id": str(n), "prompt": "a", "max_tokens": 1}) + "\n" for n in range(LINES)
        )
    )
    stopped: list[BatchProgress] = []

    def interrupt(now: BatchProgress) -> None:
        if now.done:
            stopped.append(now)
            raise KeyboardInterrupt

    runner = BulkRunner(fleet.client, in_flight=5, report=interrupt)
    with source.open("rb") as file:
        made, _ = validate_source(str(source), file, LineOptions(defaults={"model": "smollm2"}))
        batch_id = runner.create("test", made)
        with pytest.raises(KeyboardInterrupt):
            runner.run(batch_id, made, file)
    return stopped[0]


def export(fleet: LocalFleet, batch_id: str, output: Path) -> Result:
    urls = ["--database-url", fleet.settings.database_url]
    return CliRunner().invoke(app, ["bulk", "export", batch_id, "-o", str(output), *urls])


def test_an_export_counts_the_lines_that_are_not_in_yet(fleet: LocalFleet, tmp_path: Path) -> None:
    batch = stopped_batch(fleet, tmp_path)
    output = tmp_path / "out.jsonl"
    done = export(fleet, batch.id, output)
    assert done.exit_code == ExitCode.FAILED
    said = " ".join(done.stderr.split())
    assert f"{LINES - batch.inserted} lines of the input are in neither file: not in yet." in said
    assert f"tokenmill bulk resume {batch.id} -o" in said


def test_an_export_counts_the_lines_that_never_came_in(fleet: LocalFleet, tmp_path: Path) -> None:
    batch = stopped_batch(fleet, tmp_path)
    transaction(fleet.client.engine(), lambda conn: request_cancel_batch(conn, batch.id))
    done = export(fleet, batch.id, tmp_path / "out.jsonl")
    assert done.exit_code == ExitCode.FAILED
    assert f"{LINES - batch.inserted} lines of the input are in neither file" in " ".join(done.stderr.split())


def test_a_model_among_the_parameters_is_the_one_that_is_asked(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"custom_id": "a", "prompt": "x"}\n')
    with LocalFleet(models=("other",)) as fleet:
        urls = ["--database-url", fleet.settings.database_url, "--broker-url", NOWHERE]
        command = ["bulk", "run", str(source), "--no-wait", *urls, "-p", "model=other"]
        other = CliRunner().invoke(app, command, env={"TOKENMILL_MODELS": "other"})
        assert other.exit_code == 0, other.stderr
        assert "1 line for other" in other.stderr
        refused = CliRunner().invoke(app, [*command[:-1], "model=nope"])
        assert refused.exit_code == ExitCode.USAGE
        assert "--param model: is not served here (got 'nope')" in refused.stderr
