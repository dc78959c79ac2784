"""Old files go with the batches that needed them, in small pieces and into the archive; on every database."""

from __future__ import annotations

import base64
import gzip
import io
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from pyarrow import parquet
from sqlalchemy import Engine, event, func, select, true, update
from typer.testing import CliRunner

from models_db import files, retention_files
from models_db.api_batches import add_api_batch
from models_db.archive import in_order
from models_db.batches import create_batch, set_batch_state
from models_db.callbacks import insert_batch_callback
from models_db.door_tables import ApiBatch, FileChunk, StoredFile
from models_db.files import FileRecord, find_file, list_files, read_file
from models_db.jobs import insert_jobs, request_cancel
from models_db.retention import PruneReport, prune
from models_db.session import transaction
from models_db.tables import Batch, BatchState, Job
from tests.db.callback_world import CALLBACK
from tests.db.helpers import at, new_job
from workers.cli import app

HOUR = 3600
NOW = at(10 * HOUR)
CUT = at(5 * HOUR)
LIMIT_S = 20.0


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "CHUNK_BYTES", 10)


def store(db: Engine, name: str, *, when: datetime | None = None, data: bytes = b"") -> FileRecord:
    return transaction(
        db,
        lambda conn: files.store_file(
            conn,
            io.BytesIO(data or name.encode()),
            tenant="t",
            filename=name,
            purpose="batch",
            at=when or at(0),
            file_id=name,
        ),
    )


def serve(
    db: Engine,
    name: str,
    *,
    ended: datetime | None,
    state: BatchState = BatchState.COMPLETED,
    written: bool = True,
    callback: bool = False,
) -> None:
    """A batch of a job, with an input file and, where they are written, an output and an error file."""
    store(db, f"{name}-in")
    with db.begin() as conn:
        create_batch(conn, name=name, batch_id=name, state=BatchState.IN_PROGRESS, at=at(0))
        insert_jobs(conn, [new_job(f"{name}-job", batch_id=name, position=0)])
        add_api_batch(
            conn,
            name,
            tenant="t",
            endpoint="/v1/completions",
            completion_window="24h",
            input_file_id=f"{name}-in",
            labels={"of": name},
            at=at(0),
        )
        if callback:
            insert_batch_callback(conn, name, CALLBACK)
        if ended is not None:
            request_cancel(conn, [f"{name}-job"], at=ended)
            assert set_batch_state(conn, name, state, at=ended)
    if written:
        for kind in ("out", "err"):
            store(db, f"{name}-{kind}")
        with db.begin() as conn:
            values = {"output_file_id": f"{name}-out", "error_file_id": f"{name}-err"}
            conn.execute(update(ApiBatch).where(ApiBatch.batch_id == name).values(values))


def left(db: Engine) -> set[str]:
    with db.connect() as conn:
        pieces = set(conn.scalars(select(FileChunk.file_id)))
        assert pieces == set(conn.scalars(select(StoredFile.id)))
        return {record.id for record in list_files(conn, "t")}


def pruned(db: Engine, **options: Any) -> PruneReport:
    """Prune, and compare with what a dry run has said."""
    said = {name: value for name, value in options.items() if name == "files_older_than"}
    dry = prune(db, CUT, now=NOW, dry_run=True, **said)
    report = prune(db, CUT, now=NOW, **options)
    names = ("jobs", "batches", "api_batches", "files", "kept")
    assert [getattr(dry, name) for name in names] == [getattr(report, name) for name in names]
    return report


def of(*batches: str) -> set[str]:
    return {f"{name}-{kind}" for name in batches for kind in ("in", "out", "err")}


@pytest.fixture
def served(db: Engine) -> Engine:
    store(db, "unused")
    store(db, "fresh", when=at(6 * HOUR))
    serve(db, "old", ended=at(1))
    serve(db, "failed", ended=at(1), state=BatchState.FAILED, written=False)
    serve(db, "running", ended=None, written=False)
    serve(db, "unwritten", ended=at(1), written=False)
    serve(db, "recent", ended=at(6 * HOUR))
    serve(db, "untold", ended=at(1), callback=True)
    return db


@pytest.mark.parametrize("chunk", [1, 500])
def test_files_go_once_they_are_old_and_no_batch_needs_them(served: Engine, chunk: int) -> None:
    report = pruned(served, chunk=chunk)
    kept = of("recent", "untold") | {"fresh", "running-in", "unwritten-in"}
    assert (report.batches, report.api_batches, report.files, report.kept) == (2, 2, 5, 4)
    assert left(served) == kept
    with served.connect() as conn:
        batches = ["recent", "running", "untold", "unwritten"]
        assert sorted(conn.scalars(select(Batch.id))) == batches
        assert sorted(conn.scalars(select(ApiBatch.batch_id))) == batches
        assert sorted(conn.scalars(select(Job.id))) == [f"{name}-job" for name in batches]
    assert pruned(served, chunk=chunk).files == 0
    with served.begin() as conn:
        conn.execute(
            update(ApiBatch).where(ApiBatch.batch_id == "unwritten").values(output_file_id="elsewhere")
        )
    report = pruned(served, chunk=chunk)
    assert (report.jobs, report.api_batches, report.files) == (1, 1, 1)
    assert left(served) == kept - {"unwritten-in"}


def test_files_may_have_an_age_of_their_own(served: Engine) -> None:
    report = pruned(served, files_older_than=at(8 * HOUR))
    assert report.files == 9, "the batch is there, and its files are older than files are to be"
    assert left(served) == of("untold") | {"running-in", "unwritten-in"}
    with served.connect() as conn:
        assert conn.scalar(select(ApiBatch.output_file_id).where(ApiBatch.batch_id == "recent"))


def test_the_command_takes_the_age_of_files(served: Engine, migrated_url: str) -> None:
    words = [
        "db",
        "prune",
        "--older-than",
        "5200w",
        "--files-older-than",
        "1h",
        "--database-url",
        migrated_url,
    ]
    for more, verb in ((["--dry-run"], "would delete"), ([], "deleted")):
        done = CliRunner().invoke(app, [*words, *more])
        assert done.exit_code == 0, done.output
        assert done.stdout.startswith(f"{verb} 0 jobs, ")
        assert ", 0 batches, 0 api batches, 9 files, " in done.stdout
    assert left(served) == of("untold") | {"running-in", "unwritten-in"}
    refused = CliRunner().invoke(app, [*words[:4], "--files-older-than", "soon"])
    assert "--files-older-than: is no age" in refused.output


def rows_of(path: Path, table: str) -> list[dict[str, Any]]:
    if path.suffix == ".parquet":
        return parquet.read_table(path / f"{table}.parquet").to_pylist()
    with gzip.open(path, "rt") as lines:
        rows = [row for row in map(json.loads, lines) if row["table"] == table]
    return [row | ({"data": base64.b64decode(row["data"])} if "data" in row else {}) for row in rows]


@pytest.mark.parametrize("name", ["old.jsonl.gz", "old.parquet"])
def test_the_archive_has_files_and_batches_whole(served: Engine, tmp_path: Path, name: str) -> None:
    data = bytes(range(256)) * 3
    store(served, "large", data=data)
    pruned(served, archive=tmp_path / name, chunk=2)
    kept = {row["id"]: row for row in rows_of(tmp_path / name, "stored_file")}
    assert kept.keys() == of("old") | {"unused", "failed-in", "large"}
    assert (kept["large"]["purpose"], kept["large"]["bytes"]) == ("batch", len(data))
    pieces = [row for row in rows_of(tmp_path / name, "file_chunk") if row["file_id"] == "large"]
    assert [row["number"] for row in pieces] == list(range(77))
    assert b"".join(row["data"] for row in pieces) == data
    batches = {row["batch_id"]: row for row in rows_of(tmp_path / name, "api_batch")}
    assert batches.keys() == {"old", "failed"}
    assert (batches["old"]["input_file_id"], batches["old"]["output_file_id"]) == ("old-in", "old-out")


def test_rows_are_archived_in_the_order_of_their_key() -> None:
    """Databases give them in any, now and then in another than usual."""
    assert str(in_order(FileChunk, true())).endswith("ORDER BY file_chunk.file_id, file_chunk.number")


def test_a_file_that_is_half_gone_is_gone_for_everybody_and_goes_wholly_with_the_next_run(
    db: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    store(db, "half", data=bytes(200))
    step = retention_files._delete_pieces

    def pulled(conn: Any, *args: Any, **options: Any) -> int | None:
        if (conn.scalar(select(func.count()).select_from(FileChunk)) or 0) <= 12:
            raise KeyboardInterrupt
        return step(conn, *args, **options)

    monkeypatch.setattr(retention_files, "_delete_pieces", pulled)
    with pytest.raises(KeyboardInterrupt):
        prune(db, CUT, now=NOW)
    with db.connect() as conn:
        assert len(list(read_file(conn, "half"))) == 0, "the first pieces went first"
        assert conn.scalar(select(func.count()).select_from(FileChunk)) == 12
        assert find_file(conn, "half", "t") is None
        assert list_files(conn, "t") == []
    monkeypatch.setattr(retention_files, "_delete_pieces", step)
    assert prune(db, at(-HOUR), now=NOW).files == 1, "however old it is"
    assert left(db) == set()


def use(db: Engine, at_that_moment: Any = None) -> bool:
    """Make a batch of the old file, as the server does; whether the file was there."""

    def make(conn: Any) -> bool:
        if find_file(conn, "used", "t", hold=True) is None:
            return False
        if at_that_moment is not None:
            at_that_moment()
        create_batch(conn, name="new", batch_id="new", at=at(HOUR))
        add_api_batch(
            conn,
            "new",
            tenant="t",
            endpoint="/v1/completions",
            completion_window="24h",
            input_file_id="used",
            labels=None,
            at=at(HOUR),
        )
        return True

    return transaction(db, make)


def test_a_file_that_a_batch_is_made_of_at_the_same_moment_stays(db: Engine) -> None:
    store(db, "used")
    with ThreadPoolExecutor(1) as beside:
        pruning: list[Any] = []
        reached = threading.Event()

        def reach(_conn: Any, _cursor: Any, statement: str, *_: Any) -> None:
            if "stored_file.created_at <" in statement:
                reached.set()

        def start() -> None:
            pruning.append(beside.submit(prune, db, CUT, now=NOW))
            if db.dialect.name != "sqlite":  # where it waits from its first step on
                assert reached.wait(LIMIT_S)

        event.listen(db, "before_cursor_execute", reach)
        try:
            assert use(db, start)
            assert pruning[0].result(LIMIT_S).files == 0
        finally:
            event.remove(db, "before_cursor_execute", reach)
    assert left(db) == {"used"}


def test_a_batch_is_not_made_of_a_file_that_goes_at_the_same_moment(db: Engine) -> None:
    store(db, "used")
    with ThreadPoolExecutor(1) as beside:
        making: list[Any] = []

        def start(_conn: Any, _cursor: Any, statement: str, *_: Any) -> None:
            if statement.startswith("UPDATE stored_file") and not making:
                making.append(beside.submit(use, db))

        event.listen(db, "after_cursor_execute", start)
        try:
            assert prune(db, CUT, now=NOW).files == 1
            assert making[0].result(LIMIT_S) is False
        finally:
            event.remove(db, "after_cursor_execute", start)
    with db.connect() as conn:
        assert conn.scalar(select(func.count()).select_from(ApiBatch)) == 0
    assert left(db) == set()
