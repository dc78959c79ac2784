"""What the commands for files of prompts refuse before any work: to lose the input, to run what nobody would see."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from models_db.jobs import insert_jobs
from models_db.tables import BatchState, JobState
from tests.db.helpers import add_workers, claim_one, finish_one, new_job
from tests.fleet.bulk_world import rows, write
from tests.fleet.doorway import api_batch
from workers.bulk import BulkRunner
from workers.bulk_input import LineOptions
from workers.bulk_source import validate_source
from workers.cli import app
from workers.cli.common import ExitCode
from workers.testing import LocalFleet

NOWHERE = "redis://127.0.0.1:1/0"  # nothing is published


@pytest.fixture(scope="module")
def fleet() -> Iterator[LocalFleet]:
    with LocalFleet(broker_url=NOWHERE) as running:
        yield running


def bulk(fleet: LocalFleet, command: str, *arguments: str | Path) -> Result:
    urls = ["--database-url", fleet.settings.database_url]
    urls += [] if command == "export" else ["--broker-url", NOWHERE]
    return CliRunner().invoke(app, ["bulk", command, *map(str, arguments), *urls])


@pytest.mark.parametrize("name", ["x.jsonl", "x.errors.jsonl", "x.manifest.json"])
def test_no_command_writes_over_the_input(fleet: LocalFleet, tmp_path: Path, name: str) -> None:
    """Each of the three files that are written counts, and so does another way to the same file."""
    source = write(tmp_path / name, rows(3))
    before = source.read_bytes()
    link = tmp_path / "link"
    link.symlink_to(tmp_path, target_is_directory=True)
    runner = BulkRunner(fleet.client)
    with source.open("rb") as file:
        made, _ = validate_source(str(source), file, LineOptions(defaults={"model": "smollm2"}))
    batch_id = runner.create("mine", made)
    for output in (tmp_path / "x.jsonl", link / "x.jsonl"):
        for command, what in (
            ("run", source),
            *((each, batch_id) for each in ("resume", "retry-failed", "export")),
        ):
            done = bulk(fleet, command, what, "-o", output)
            assert done.exit_code == ExitCode.USAGE, (command, done.output)
            assert "would overwrite the input" in done.stderr
            if name != "x.jsonl":
                assert f"by {name}, which goes beside it" in done.stderr
    assert source.read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", name]
    assert (runner.progress(batch_id).state, runner.progress(batch_id).inserted) == (BatchState.VALIDATING, 0)
    # No line is in.
    assert bulk(fleet, "export", batch_id, "-o", tmp_path / "other.jsonl").exit_code == ExitCode.FAILED


def test_failed_lines_of_the_http_api_are_not_run_again_in_vain(fleet: LocalFleet, tmp_path: Path) -> None:
    """The API's files are written once: the new answers would reach nobody."""
    engine = fleet.client.engine()
    batch_id = api_batch(fleet.client, 1)
    with engine.begin() as conn:
        insert_jobs(conn, [new_job("j", batch_id=batch_id, position=1)])
    add_workers(engine, "w")
    claim_one(engine, "j", "w")
    assert finish_one(engine, "j", 1, "w", JobState.FAILED, None)
    for output in ([], ["-o", tmp_path / "out.jsonl"]):
        done = bulk(fleet, "retry-failed", batch_id, *output)
        assert done.exit_code == ExitCode.USAGE
        assert "BATCH_ID: came over HTTP" in done.stderr
        assert "as a new batch to /v1/batches" in done.stderr
    assert fleet.client.status("j").state is JobState.FAILED
