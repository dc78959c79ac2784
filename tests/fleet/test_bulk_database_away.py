"""The database goes away while a batch is fed, watched or written: the command says how to go on."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from models_db.errors import DatabaseUnavailableError
from workers.cli import app
from workers.cli.common import ExitCode
from workers.testing import LocalFleet

NOWHERE = "redis://127.0.0.1:1/0"


@pytest.mark.parametrize(
    ("place", "mode"),
    [
        ("workers.bulk.BulkRunner.feed", "--no-wait"),
        ("workers.bulk.BulkRunner.feed", "-o out.jsonl"),
        ("workers.bulk.BulkRunner.watch", "-o out.jsonl"),
        ("workers.bulk_export.export_batch", "-o out.jsonl"),
    ],
)
def test_a_command_that_lost_its_database_says_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, mode: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.jsonl").touch()

    def away(*_: object, **__: object) -> None:
        raise DatabaseUnavailableError("postgresql://db/x", "connection refused")

    with LocalFleet(broker_url=NOWHERE) as fleet:
        urls = ["--database-url", fleet.settings.database_url, "--broker-url", NOWHERE]
        command = ["bulk", "run", "in.jsonl", *mode.split(), *urls]
        with monkeypatch.context() as patch:
            patch.setattr(place, away)
            done = CliRunner().invoke(app, command)
        batch_id = done.stderr.split("Batch ", 1)[1].split(":", 1)[0]
        assert done.exit_code == ExitCode.UNAVAILABLE
        assert f"tokenmill bulk resume {batch_id} {mode}" in " ".join(done.stderr.split())
        assert CliRunner().invoke(app, ["bulk", "resume", batch_id, *mode.split(), *urls]).exit_code == 0
