"""A disk with no room left: commands say what they could not write and how to go on, without a traceback."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from models_db.migrate import upgrade
from workers.bulk import BulkRunner
from workers.bulk_input import LineOptions
from workers.bulk_source import validate_source
from workers.cli import app
from workers.cli.common import ExitCode
from workers.testing import LocalFleet


def test_answers_that_find_no_room_are_written_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"custom_id": "a", "prompt": "x", "max_tokens": 2}\n')

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with LocalFleet(broker_url="redis://127.0.0.1:1/0") as fleet:
        runner = BulkRunner(fleet.client)
        with source.open("rb") as file:
            made, _ = validate_source(str(source), file, LineOptions(defaults={"model": "smollm2"}))
            batch_id = runner.create("test", made)
            runner.run(batch_id, made, file)
        command = ["bulk", "export", batch_id, "-o", str(output)]
        command += ["--database-url", fleet.settings.database_url]
        with monkeypatch.context() as patch:
            patch.setattr("workers.atomic_files.os.fsync", full)
            done = CliRunner().invoke(app, command)
        assert done.exit_code == ExitCode.UNAVAILABLE
        said = " ".join(done.stderr.split())
        assert f"tokenmill bulk export {batch_id}" in said
        assert f"out.jsonl cannot be written ({os.strerror(errno.ENOSPC)})" in said.replace(".errors", "")
        assert list(tmp_path.iterdir()) == [source]  # not half a file
        assert CliRunner().invoke(app, command).exit_code == 0
    assert [json.loads(line)["text"] for line in output.read_text().splitlines()] == ["x x"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no device that is always full")
def test_standard_output_that_takes_nothing_is_no_traceback(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'a.db'}"
    upgrade(url)
    command = [sys.executable, "-m", "workers.cli", "stats", "--json", "--database-url", url]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert "Traceback" not in done.stderr
    assert "standard output or a temporary file cannot be written" in done.stderr
    assert done.returncode == ExitCode.UNAVAILABLE
