"""Batches and files whose commit is not answered: made once, or named so that one can look for them."""

from __future__ import annotations

import io
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from sqlalchemy import Engine, func, select

from models_db.callbacks import Callback, NewCallback
from models_db.door_tables import FileChunk, StoredFile
from models_db.errors import CommitUnknownError
from models_db.session import certain
from models_db.tables import Batch
from tests.db.outage import Outage
from workers import bulk
from workers.bulk import BulkRunner
from workers.client import Client
from workers.client.errors import CreationUnknownError
from workers.serve import files
from workers.serve.errors import from_exception
from workers.settings import load_settings

FATES = pytest.mark.parametrize("goes_through", [False, True], ids=["not committed", "committed"])
DATA = b"some lines\n" * 200_000  # of more than one piece
CALLBACK = NewCallback("https://receiver.example/", "receiver.example", False)


class NoBroker:
    """Nothing is published here."""

    def close(self) -> None:
        pass


class Source:
    """As much of a bulk file as making a batch needs."""

    lines = 3

    def to_json(self) -> str:
        return "{}"


@pytest.fixture
def runner(db: Engine, migrated_url: str) -> Iterator[BulkRunner]:
    settings = load_settings(model="echo", backend="echo", database_url=migrated_url)
    pauses: list[float] = []
    with Client(settings, broker=NoBroker(), sleep=pauses.append) as client:  # type: ignore[arg-type]
        client.engine()
        yield BulkRunner(client, broker=NoBroker(), sleep=pauses.append)  # type: ignore[arg-type]


def create(runner: BulkRunner) -> str:
    return runner.create("a name", Source(), callback=CALLBACK)  # type: ignore[arg-type]


def upload(engine: Engine) -> Any:
    return files.store_upload(engine, io.BytesIO(DATA), tenant="t", filename="lines.jsonl", purpose="batch")


def count(engine: Engine, table: Any) -> int:
    with engine.connect() as conn:
        return conn.scalar(select(func.count()).select_from(table)) or 0


def ids(engine: Engine, table: Any) -> list[str]:
    with engine.connect() as conn:
        return list(conn.scalars(select(table.id)))


@FATES
def test_a_batch_is_made_once(db: Engine, runner: BulkRunner, goes_through: bool) -> None:
    with Outage(runner._engine) as outage:
        outage.commit_goes_through, outage.commits, outage.away_after = goes_through, 2, 2
        batch_id = create(runner)
    assert ids(db, Batch) == [batch_id]
    assert count(db, Callback) == 1


@FATES
def test_a_batch_of_which_nobody_knows_is_named(
    db: Engine, runner: BulkRunner, goes_through: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bulk, "certain", partial(certain, patience_s=0.0))
    with Outage(runner._engine) as outage:
        outage.commit_goes_through, outage.commits, outage.away_after = goes_through, 1, 10**9
        with pytest.raises(CreationUnknownError, match="tokenmill bulk status") as caught:
            create(runner)
    assert caught.value.id in str(caught.value)
    assert ids(db, Batch) == ([caught.value.id] if goes_through else [])


@FATES
def test_a_file_is_stored_once(db: Engine, goes_through: bool) -> None:
    with Outage(db) as outage:
        outage.commit_goes_through, outage.commits, outage.away_after = goes_through, 2, 2
        record = upload(db)
    assert ids(db, StoredFile) == [record.id]
    assert record.bytes == len(DATA)
    with db.connect() as conn:
        pieces = conn.execute(select(FileChunk.data).order_by(FileChunk.number)).scalars()
        assert b"".join(map(bytes, pieces)) == DATA


@FATES
def test_a_file_of_which_nobody_knows_is_named(
    db: Engine, goes_through: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "certain", partial(certain, patience_s=0.0))
    with Outage(db) as outage:
        outage.commit_goes_through, outage.commits, outage.away_after = goes_through, 1, 10**9
        with pytest.raises(CreationUnknownError) as caught:
            upload(db)
    assert ids(db, StoredFile) == ([caught.value.id] if goes_through else [])
    answer = from_exception(caught.value)
    assert (answer.status, answer.headers()) == (503, {"x-should-retry": "false"})
    assert f"/v1/files/{caught.value.id}" in answer.message


def test_what_a_caller_of_the_api_is_told_names_no_host() -> None:
    lost = CommitUnknownError("the connection to secret-host was lost")
    cause = CreationUnknownError("file", "file-1", "Look", lost)
    assert "secret-host" in str(cause)
    assert "secret-host" not in from_exception(cause).message
