"""Files that appear whole or not at all: what killed writers leave of them, and two writers at once."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from workers.atomic_files import atomic_write, check_writable

KILLED = """
import os, signal, sys
from pathlib import Path
from workers.atomic_files import atomic_write

with atomic_write(*map(Path, sys.argv[1:])) as files:
    files[0].write("half")
    files[0].flush()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def drafts(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob(".*.part"))


def test_an_atomic_file_shows_nothing_before_its_end(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with atomic_write(path) as (file,):
        file.write("whole")
        assert not path.exists()
    assert path.read_text() == "whole"
    assert [*tmp_path.iterdir()] == [path]


def test_the_next_writer_of_a_file_removes_what_a_killed_one_left(tmp_path: Path) -> None:
    path, beside, other = tmp_path / "out.jsonl", tmp_path / "out.errors.jsonl", tmp_path / "out.jsonl.x"
    for targets in ((path, beside), (other,)):
        done = subprocess.run([sys.executable, "-c", KILLED, *map(str, targets)], check=False)
        assert done.returncode == -signal.SIGKILL
    assert len(drafts(tmp_path)) == 3
    with atomic_write(path, beside) as files:
        assert len(drafts(tmp_path)) == 3  # its own two, and that of the other file
        files[0].write("whole")
    assert path.read_text() == "whole"
    assert [name.startswith(".out.jsonl.x.") for name in drafts(tmp_path)] == [True]


def test_a_draft_whose_writer_may_live_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    # Of another host, which may not show its locks; of a writer that does not lock; and no draft of ours.
    strange = [".out.jsonl.000000000000abcdef.part", ".out.jsonl.4711.part", ".out.jsonl.part"]
    for name in strange:
        (tmp_path / name).write_text("half")
    with atomic_write(path) as (first,):
        first.write("first")
        living = drafts(tmp_path)
        with atomic_write(path) as (second,):
            second.write("second")
        assert drafts(tmp_path) == living
        assert path.read_text() == "second"
    assert path.read_text() == "first"
    assert drafts(tmp_path) == sorted(strange)


def test_a_draft_that_was_removed_before_it_was_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    removed: list[Path] = []
    lock = fcntl.flock

    def late(file: object, how: int) -> None:
        if not removed:
            removed.extend(tmp_path.glob(".*.part"))
            removed[0].unlink()
        lock(file, how)  # type: ignore[arg-type]

    monkeypatch.setattr("workers.atomic_files.fcntl.flock", late)
    path = tmp_path / "file"
    with atomic_write(path) as (file,):
        file.write("whole")
    assert len(removed) == 1
    assert path.read_text() == "whole"


def test_of_two_writers_that_end_at_once_all_files_are_those_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [tmp_path / name for name in ("errors", "results", "manifest")]
    came = threading.Event()
    lock, replace = fcntl.flock, os.replace

    def write(who: str) -> None:
        with atomic_write(*paths) as files:
            for file in files:
                file.write(who)

    def second_writer() -> None:
        try:
            write("second")
        finally:
            came.set()

    second = threading.Thread(target=second_writer)

    def flock(file: object, how: int) -> None:
        if threading.current_thread() is second and os.path.isdir(f"/dev/fd/{file}"):
            came.set()
        lock(file, how)  # type: ignore[arg-type]

    def put(draft: Path, path: Path) -> None:
        replace(draft, path)
        if not second.is_alive() and not came.is_set():
            second.start()
            assert came.wait(60)

    monkeypatch.setattr("workers.atomic_files.fcntl.flock", flock)
    monkeypatch.setattr("workers.atomic_files.os.replace", put)
    write("first")
    second.join()
    assert len({path.read_text() for path in paths}) == 1
    assert drafts(tmp_path) == []


def test_a_name_that_leaves_no_room_for_a_draft_is_found_before_the_work(tmp_path: Path) -> None:
    check_writable(tmp_path / "out.jsonl")
    assert [*tmp_path.iterdir()] == []
    with pytest.raises(OSError, match="name too long"):
        check_writable(tmp_path / f"{'n' * 245}.jsonl")
