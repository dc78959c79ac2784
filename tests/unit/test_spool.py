"""Results on disk: private, whole, locked while their process lives, and found by the next one of the name."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from models_db.claims import FinishItem
from models_db.records import StoredResult
from models_db.tables import JobState
from workers.spool import OutageBook, Spool, default_folder, leftovers

LARGE = 1_000_000


def item(number: int, text: str = "an answer \x00 🌍 \n with lines") -> FinishItem:
    result = StoredResult(
        text,
        "stop",
        3,
        2,
        token_ids=[1, 2],
        logprobs=[{"a": -0.5}],
        stop_reason=7,
        seed=2**62,
        latency_s=0.25,
    )
    return FinishItem(f"job-{number}", 1, JobState.SUCCEEDED, result)


def failure(number: int) -> FinishItem:
    return FinishItem(f"job-{number}", 2, JobState.FAILED, None, "RequestError", "max_tokens: is too large")


def left(folder: Path, name: str = "gpu.1") -> dict[str, list[FinishItem]]:
    with leftovers(folder, name) as found:
        return {leftover.worker_id: leftover.items for leftover in found}


def test_what_a_dead_process_left_is_found_once_by_its_name(tmp_path: Path) -> None:
    folder = tmp_path / "state" / "spool"
    spool = Spool(folder, "gpu.1", "a", LARGE)
    items = [item(1), failure(2)]
    assert all(spool.add(each) for each in items)
    (path,) = folder.iterdir()
    assert (path.stat().st_mode & 0o777, folder.stat().st_mode & 0o777) == (0o600, 0o700)
    assert left(folder) == {}, "its process lives"
    spool.close()
    assert left(folder, "gpu") == left(folder, "gpu.2") == {}
    assert left(folder) == {"a": items}
    assert left(folder) == {}
    assert list(folder.iterdir()) == []


def test_a_failed_replay_keeps_the_file(tmp_path: Path) -> None:
    spool = Spool(tmp_path, "w", "a", LARGE)
    spool.add(item(1))
    spool.close()
    with pytest.raises(ConnectionError), leftovers(tmp_path, "w"):
        raise ConnectionError
    assert left(tmp_path, "w") == {"a": [item(1)]}


def test_nothing_is_left_after_everything_was_committed(tmp_path: Path) -> None:
    spool = Spool(tmp_path, "w", "a", LARGE)
    spool.add(item(1))
    spool.clear()
    spool.add(item(2))
    spool.clear()
    spool.close()
    assert list(tmp_path.iterdir()) == []
    Spool(tmp_path / "unused", "w", "b", LARGE).close()
    assert not (tmp_path / "unused").exists()
    assert left(tmp_path / "unused", "w") == {}


def test_a_half_line_costs_only_itself(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    spool = Spool(tmp_path, "w", "a", LARGE)
    spool.add(item(1))
    spool.close()
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:40])
    assert left(tmp_path, "w") == {"a": [item(1)]}
    assert "cannot be read" in caplog.text
    assert "an answer" not in caplog.text


def test_a_full_disk_warns_once_and_leaves_no_half_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    spool = Spool(tmp_path, "w", "a", LARGE)
    assert spool.add(item(1))

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        assert not spool.add(item(2))
        assert not spool.add(item(3))
    assert caplog.text.count("wait in memory only") == 1
    assert spool.add(item(4))
    spool.close()
    assert left(tmp_path, "w") == {"a": [item(1), item(4)]}


def test_a_limit_and_a_folder_that_cannot_be_made_leave_the_results_in_memory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    small = Spool(tmp_path, "w", "a", 1500)
    assert small.add(item(1, "x" * 1000))
    assert not small.add(item(2, "x" * 1000))
    assert "spool_max_mb" in caplog.text
    small.close()
    (tmp_path / "file").write_text("")
    assert not Spool(tmp_path / "file" / "folder", "w", "b", LARGE).add(item(1))


def test_the_book_writes_during_an_outage_only_and_clears_when_all_is_committed(tmp_path: Path) -> None:
    book = OutageBook(spool := Spool(tmp_path, "w", "a", LARGE))
    book.waits(item(1))
    assert list(tmp_path.iterdir()) == []
    book.database(False)
    book.waits(item(2))
    (path,) = tmp_path.iterdir()
    assert path.read_bytes().count(b"\n") == 2
    book.database(True)
    book.settled(item(1))
    assert path.read_bytes().count(b"\n") == 2
    book.settled(item(2))
    assert path.read_bytes() == b""
    spool.close()


def test_the_spool_is_cleared_under_a_load_that_never_pauses(tmp_path: Path) -> None:
    book = OutageBook(spool := Spool(tmp_path, "w", "a", LARGE))
    book.waits(item(0))
    book.database(False)
    book.database(True)
    book.database(False)
    (path,) = tmp_path.iterdir()
    assert path.read_bytes().count(b"\n") == 1, "once is enough"
    book.database(True)
    for number in range(1, 20):
        book.waits(item(number))
        book.settled(item(number - 1))
        assert path.read_bytes() == b""
    spool.close()


def test_the_folder_follows_the_systems_convention() -> None:
    assert default_folder({"XDG_STATE_HOME": "/state"}.get) == Path("/state/tokenmill/spool")
    assert default_folder({}.get) == Path.home() / ".local/state/tokenmill/spool"
