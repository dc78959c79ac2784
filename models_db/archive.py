"""Where pruned rows are kept: a file of JSON lines, or a folder of Parquet files (``models_db.archive_parquet``).

A row must be on disk before it is deleted, and be there once, however often its transaction has to begin anew. So the
rows of a transaction are collected while it deletes them and written as one piece just before it commits; where it is
rolled back after that, the next attempt takes the piece away again.
"""

from __future__ import annotations

import base64
import gzip
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import date, datetime
from pathlib import Path
from typing import IO, Any, Protocol, TypeVar

from sqlalchemy import ColumnElement, Connection, Engine, Select, delete, select

from models_db.base import Base
from models_db.errors import InvalidValueError
from models_db.session import transaction

PARQUET = ".parquet"

T = TypeVar("T")
Keep = Callable[[Connection, type[Base], ColumnElement[bool]], int | None]
"""Collects the rows of a table that are about to be deleted, and says how many; ``None`` where nothing is kept."""


class ArrivedMeanwhileError(Exception):
    """Somebody added rows, such as late samples, between keeping and deleting: the transaction begins anew."""


class Archive(Protocol):
    """One piece after the other."""

    def begin(self) -> None:
        """Start a piece; what has been collected or written since the last ``settle`` is taken back."""

    def keep(self, conn: Connection, table: type[Base], condition: ColumnElement[bool]) -> int:
        """Collect these rows; how many."""

    def write(self) -> None:
        """Have the piece on disk."""

    def settle(self) -> None:
        """The piece stays: its rows are deleted."""


def archived(engine: Engine, archive: Archive | None, work: Callable[[Connection, Keep], T]) -> T:
    """Run ``work`` as ``transaction`` does; what it keeps is in the archive before the commit, and once."""
    if archive is None:
        return transaction(engine, lambda conn: work(conn, _keep_nothing))

    def attempt(conn: Connection) -> T:
        archive.begin()
        result = work(conn, archive.keep)
        archive.write()
        return result

    while True:
        try:
            result = transaction(engine, attempt)
        except ArrivedMeanwhileError:
            continue
        archive.settle()
        return result


def move(conn: Connection, keep: Keep, table: type[Base], condition: ColumnElement[bool]) -> int:
    """Keep the rows and delete them, just these; how many.

    Raises:
        ArrivedMeanwhileError: see there; for ``archived``.
    """
    kept = keep(conn, table, condition)
    gone = conn.execute(delete(table).where(condition)).rowcount
    if kept is not None and gone != kept:
        raise ArrivedMeanwhileError
    return gone


@contextmanager
def open_archive(path: Path | None) -> Iterator[Archive | None]:
    """The archive that this name asks for; ``None`` for none.

    Raises:
        InvalidValueError: it exists, is named otherwise, or cannot be made.
    """
    if path is None:
        yield None
        return
    if path.suffix == PARQUET:
        from models_db.archive_parquet import parquet_archive

        with parquet_archive(path) as parquet:
            yield parquet
        return
    if not path.name.endswith((".jsonl", ".jsonl.gz")):
        raise InvalidValueError(
            "archive",
            "must be a .jsonl or .jsonl.gz file, or a .parquet folder",
            value=str(path),
            fix="For example old.jsonl.gz",
        )
    try:
        file = path.open("xb")
    except OSError as exc:
        reason = (
            "exists already" if isinstance(exc, FileExistsError) else f"cannot be written ({exc.strerror})"
        )
        raise InvalidValueError("archive", reason, value=str(path), fix="Name a new file") from exc
    with file:
        lines = LineArchive(file, compressed=path.suffix == ".gz")
        yield lines
        lines.close()


class LineArchive:
    """A line of JSON for each row, ``"table"`` naming where it was, bytes as Base64.

    Each piece is compressed by itself, as gzip allows.
    """

    def __init__(self, file: IO[bytes], *, compressed: bool) -> None:
        self._file = file
        self._compressed = compressed
        self._lines: list[bytes] = []
        self._end = 0  # of what stays

    def begin(self) -> None:
        """See ``Archive``."""
        self._lines.clear()
        if self._file.tell() != self._end:
            self._file.seek(self._end)
            self._file.truncate()

    def keep(self, conn: Connection, table: type[Base], condition: ColumnElement[bool]) -> int:
        """See ``Archive``."""
        before = len(self._lines)
        for row in conn.execute(in_order(table, condition)).mappings():
            line = {"table": table.__tablename__} | dict(row)
            self._lines.append(json.dumps(line, ensure_ascii=True, default=_plain).encode() + b"\n")
        return len(self._lines) - before

    def write(self) -> None:
        """See ``Archive``."""
        if not self._lines:
            return
        piece = b"".join(self._lines)
        self._file.write(gzip.compress(piece, 6) if self._compressed else piece)
        self._file.flush()
        os.fsync(self._file.fileno())

    def settle(self) -> None:
        """See ``Archive``."""
        self._end = self._file.tell()

    def close(self) -> None:
        """An archive of nothing can be unpacked as well."""
        if self._compressed and not self._end:
            self._file.write(gzip.compress(b""))


def in_order(table: type[Base], condition: ColumnElement[bool]) -> Select[Any]:
    """The rows of a piece, in the order of their key: databases give them in any, and pieces of a file have one."""
    return select(table.__table__).where(condition).order_by(*table.__table__.primary_key)


def _keep_nothing(conn: Connection, table: type[Base], condition: ColumnElement[bool]) -> None:
    pass


def _plain(value: object) -> str:
    if isinstance(value, date | datetime):
        return value.isoformat()
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    raise TypeError(f"{type(value).__name__} has no place in an archive")
