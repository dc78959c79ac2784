"""What a scheduler sees of commands whose output goes nowhere, or that crash: a status that says so."""

from __future__ import annotations

import errno
import os
import sqlite3
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner

from models_db.migrate import upgrade
from models_db.scratch import scratch_file
from workers.cli import app
from workers.cli.common import ExitCode

COMMAND = (sys.executable, "-m", "workers.cli")
CRASHING = """
import sys
from workers import bulk_export
from workers.cli import main

def broken(*_, **__):
    raise LookupError("a fault of ours")

bulk_export.export_batch = broken
main()
"""


@pytest.fixture
def bulk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sequence[str]:
    """The arguments of a run that has nothing to do, and tells about it."""
    url = f"sqlite:///{tmp_path / 'a.db'}"
    upgrade(url)
    monkeypatch.setenv("TOKENMILL_DATABASE_URL", url)
    (tmp_path / "in.jsonl").touch()
    return ["bulk", "run", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl")]


def test_a_crash_does_not_look_like_failed_lines(bulk: Sequence[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CRASHING, *bulk], stderr=subprocess.PIPE, text=True, check=False
    )
    assert "LookupError: a fault of ours" in done.stderr
    assert done.returncode == ExitCode.CRASHED


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_streams_that_are_closed_cost_nothing(bulk: Sequence[str], tmp_path: Path, closed: str) -> None:
    done = subprocess.run(["sh", "-c", f'exec "$@" {closed}', "sh", *COMMAND, *bulk], check=False)
    assert done.returncode == ExitCode.OK
    assert (tmp_path / "out.manifest.json").exists()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no device that is always full")
def test_a_log_that_takes_nothing_leaves_the_status_as_it_is(bulk: Sequence[str]) -> None:
    with open("/dev/full", "w") as full:
        assert subprocess.run([*COMMAND, *bulk], stderr=full, check=False).returncode == ExitCode.UNAVAILABLE
        missing = [*bulk[:2], "nowhere.jsonl", *bulk[3:]]
        assert subprocess.run([*COMMAND, *missing], stderr=full, check=False).returncode == ExitCode.USAGE


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_pipe_that_nobody_reads_is_no_failed_line(bulk: Sequence[str], stream: str) -> None:
    read, write = os.pipe()
    os.close(read)
    with open(write, "w") as broken:
        arguments = ["bulk", "status"] if stream == "stdout" else bulk
        streams = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL} | {stream: broken}
        done = subprocess.run([*COMMAND, *arguments], check=False, **streams)  # type: ignore[call-overload]
    assert done.returncode == ExitCode.UNAVAILABLE


def test_an_input_that_can_be_read_once_only_says_how_to_give_it(bulk: Sequence[str], tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    keeps = os.open(pipe, os.O_RDWR)
    try:
        command = [*COMMAND, *bulk[:2], str(pipe), *bulk[3:]]
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False, timeout=60)
    finally:
        os.close(keeps)
    assert "is a pipe, which is read once only. Save it in a file, or give - and pipe it in" in done.stderr
    assert done.returncode == ExitCode.USAGE


def test_no_room_for_temporary_files_is_said_before_anything_starts(
    bulk: Sequence[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tiny() -> sqlite3.Connection:
        made = scratch_file()
        made.execute("PRAGMA max_page_count = 4")
        return made

    source = "".join(f'{{"custom_id": "{n:0200}", "prompt": "x"}}\n' for n in range(200))
    (tmp_path / "in.jsonl").write_text(source)
    with monkeypatch.context() as patch:
        patch.setattr("workers.bulk_input.scratch_file", tiny)
        done = CliRunner().invoke(app, bulk)
    assert done.exit_code == ExitCode.UNAVAILABLE
    assert "a temporary file cannot be written (database or disk is full)" in done.stderr

    def full(**_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("workers.bulk_files.tempfile.TemporaryFile", full)
    done = CliRunner().invoke(app, [*bulk[:2], "-", *bulk[3:]], input=source)
    assert done.exit_code == ExitCode.UNAVAILABLE
    assert "a temporary file cannot be written (No space left on device)" in done.stderr
