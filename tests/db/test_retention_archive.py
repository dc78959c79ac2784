"""A pruned row is in the archive once, however often its transaction had to begin anew; on every database."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from pyarrow import parquet
from sqlalchemy import Engine, event, select

from models_db import faults, session
from models_db.jobs import request_cancel
from models_db.retention import prune
from models_db.tables import EngineSample
from models_db.workers import add_samples
from tests.db.helpers import add_jobs, add_workers, at, new_sample

NAMES = ["old.jsonl", "old.jsonl.gz", "old.parquet"]
JOBS = [f"j{number}" for number in range(7)]


def kept_jobs(path: Path) -> list[str]:
    if path.suffix == ".parquet":
        file = path / "job.parquet"
        return parquet.read_table(file).column("id").to_pylist() if file.exists() else []
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
        return [row["id"] for row in map(json.loads, lines) if row["table"] == "job"]


def kept_times(path: Path) -> list[datetime]:
    if path.suffix == ".parquet":
        return parquet.read_table(path / "engine_sample.parquet").column("sampled_at").to_pylist()
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
        rows = map(json.loads, lines)
        return [datetime.fromisoformat(row["sampled_at"]) for row in rows if row["table"] == "engine_sample"]


@pytest.fixture
def old_jobs(db: Engine) -> Engine:
    add_jobs(db, *JOBS)
    with db.begin() as conn:
        request_cancel(conn, JOBS, at=at(0))
    return db


class LostRaceError(session.DBAPIError):
    """A deadlock, as a driver would say it."""

    def __init__(self) -> None:
        super().__init__("DELETE", None, Exception("deadlock"))


@contextmanager
def lost_races(monkeypatch: pytest.MonkeyPatch, db: Engine, where: str, times: int) -> Iterator[list[str]]:
    """The first transactions that delete jobs lose a race: at the delete, or only at the commit."""
    classify = faults.classify
    monkeypatch.setattr(
        session,
        "classify",
        lambda exc: faults.Fault.TRANSIENT if isinstance(exc, LostRaceError) else classify(exc),
    )
    lost: list[str] = []
    deleting: set[Any] = set()

    def on_statement(conn: Any, cursor: Any, statement: str, *rest: Any) -> None:
        if not statement.startswith("DELETE FROM job WHERE"):
            return
        deleting.add(conn)
        if where == "delete" and len(lost) < times:
            lost.append(where)
            raise LostRaceError

    def on_commit(conn: Any) -> None:
        if conn in deleting and where == "commit" and len(lost) < times:
            deleting.discard(conn)
            lost.append(where)
            raise LostRaceError

    event.listen(db, "before_cursor_execute", on_statement)
    event.listen(db, "commit", on_commit)
    try:
        yield lost
    finally:
        event.remove(db, "before_cursor_execute", on_statement)
        event.remove(db, "commit", on_commit)


@pytest.mark.parametrize("where", ["delete", "commit"])
@pytest.mark.parametrize("name", NAMES)
def test_a_lock_that_was_lost_leaves_no_row_twice(
    old_jobs: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, where: str
) -> None:
    path = tmp_path / name
    with lost_races(monkeypatch, old_jobs, where, 2) as lost:
        report = prune(old_jobs, at(7200), archive=path, chunk=3, now=at(7200))
    assert len(lost) == 2
    assert report.jobs == 7
    assert sorted(kept_jobs(path)) == JOBS


@pytest.mark.parametrize("name", NAMES)
def test_a_sample_that_comes_between_keeping_and_deleting_is_in_the_archive_if_it_goes(
    db: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """From a worker that was cut off for long. On SQLite nobody can write in between."""
    add_workers(db, "w")
    with db.begin() as conn:
        add_samples(conn, [new_sample("w", sampled_at=at(n)) for n in range(0, 10, 2)])
    late: list[int] = []

    def before_delete(conn: Any, cursor: Any, statement: str, *rest: Any) -> None:
        if (
            statement.startswith("DELETE FROM engine_sample")
            and len(late) < 2
            and db.dialect.name != "sqlite"
        ):
            late.append(2 * len(late) + 1)
            with db.begin() as other:
                add_samples(other, [new_sample("w", sampled_at=at(late[-1]))])

    event.listen(db, "before_cursor_execute", before_delete)
    try:
        report = prune(db, at(7200), archive=tmp_path / name, now=at(7200))
    finally:
        event.remove(db, "before_cursor_execute", before_delete)
    with db.connect() as conn:
        left = conn.scalars(select(EngineSample.sampled_at)).all()
    expected = sorted([*range(0, 10, 2), *late])
    assert len(late) == (0 if db.dialect.name == "sqlite" else 2)
    assert (left, report.samples) == ([], len(expected))
    assert sorted(kept_times(tmp_path / name)) == [at(n) for n in expected]


@pytest.mark.parametrize("name", NAMES)
def test_an_archive_of_nothing_can_be_read(db: Engine, tmp_path: Path, name: str) -> None:
    prune(db, at(7200), archive=tmp_path / name, now=at(7200))
    assert kept_jobs(tmp_path / name) == []
