"""Pruned rows as Parquet: a folder with one file for each table, ``job.parquet``, ``result.parquet`` and so on.

A Parquet file can be read once it is complete, and each row must be on disk before it is deleted. So rows are first
written as small complete files, ``job/000001.parquet`` and on, which become one file for each table at the end. After a
crash the small ones are what there is, and they can be read as they are: ``read_parquet('FOLDER/job/*.parquet')``.
"""

from __future__ import annotations

import json
import os
import shutil
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date, datetime
from pathlib import Path
from typing import Any

from sqlalchemy import Boolean, ColumnElement, Connection, Date, Float, Integer, LargeBinary

from models_db.archive import PARQUET, in_order
from models_db.base import Base, JSONType, UTCDateTime
from models_db.errors import InvalidValueError

_GROUP_ROWS = 50_000  # of a row group of the final file, at most …
_GROUP_BYTES = 64 * 2**20  # … and at least about so large, unless it ends before


@contextmanager
def parquet_archive(folder: Path) -> Iterator[ParquetArchive]:
    """Gives what writes the rows; joins its pieces when the block ends well.

    Raises:
        InvalidValueError: the folder exists or cannot be made, or pyarrow is not installed.
    """
    try:
        import pyarrow.parquet  # noqa: F401
    except ImportError:
        raise InvalidValueError(
            "archive",
            "Parquet needs the package pyarrow",
            value=str(folder),
            fix="Install it: pip install 'tokenmill[parquet]', or name a .jsonl.gz file",
        ) from None
    try:
        folder.mkdir()
    except OSError as exc:
        reason = "exists already" if isinstance(exc, FileExistsError) else f"cannot be made ({exc.strerror})"
        raise InvalidValueError("archive", reason, value=str(folder), fix="Name a new folder") from exc
    archive = ParquetArchive(folder)
    yield archive
    archive.join()


class ParquetArchive:
    """See the module; a piece is a file for each table that has rows in it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._pieces: defaultdict[str, list[Path]] = defaultdict(list)
        self._collected: list[tuple[str, Any]] = []
        self._written: list[Path] = []  # since the last piece that stays

    def begin(self) -> None:
        """See ``models_db.archive.Archive``."""
        self._collected.clear()
        for path in self._written:
            path.unlink()
        self._written.clear()

    def keep(self, conn: Connection, table: type[Base], condition: ColumnElement[bool]) -> int:
        """See ``models_db.archive.Archive``."""
        import pyarrow as pa

        columns = list(table.__table__.columns)
        rows = conn.execute(in_order(table, condition)).all()
        if not rows:
            return 0
        values = zip(*rows, strict=True)
        arrays = [
            pa.array((_plain(about, value) for value in column), type=_type_of(about))
            for about, column in zip(columns, values, strict=True)
        ]
        made = pa.Table.from_arrays(arrays, names=[column.name for column in columns])
        self._collected.append((table.__tablename__, made))
        return len(rows)

    def write(self) -> None:
        """See ``models_db.archive.Archive``."""
        from pyarrow import parquet

        for name, rows in self._collected:
            folder = self._folder / name
            folder.mkdir(exist_ok=True)
            path = folder / f"{len(self._pieces[name]) + 1:06}{PARQUET}"
            with path.open("xb") as file:
                self._written.append(path)
                parquet.write_table(rows, file, compression="zstd")
                file.flush()
                os.fsync(file.fileno())
            _sync_folder(folder)

    def settle(self) -> None:
        """See ``models_db.archive.Archive``."""
        for path in self._written:
            self._pieces[path.parent.name].append(path)
        self._written.clear()

    def join(self) -> None:
        """Make one file of each table's pieces; these go only when it is on disk."""
        for name, pieces in self._pieces.items():
            _join(pieces, self._folder / f"{name}{PARQUET}")
            shutil.rmtree(self._folder / name)
        _sync_folder(self._folder)


def _join(pieces: list[Path], target: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    draft = target.with_name(f".{target.name}.part")
    try:
        with draft.open("wb") as file:
            with parquet.ParquetWriter(file, parquet.read_schema(pieces[0]), compression="zstd") as writer:
                waiting: list[Any] = []
                for piece in pieces:
                    waiting.append(parquet.read_table(piece))
                    if sum(each.nbytes for each in waiting) >= _GROUP_BYTES:
                        writer.write_table(pa.concat_tables(waiting), row_group_size=_GROUP_ROWS)
                        waiting = []
                if waiting:
                    writer.write_table(pa.concat_tables(waiting), row_group_size=_GROUP_ROWS)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, target)
    finally:
        draft.unlink(missing_ok=True)
    _sync_folder(target.parent)


def _type_of(column: ColumnElement[Any]) -> Any:
    """The same for every piece, also for one whose values are all missing."""
    import pyarrow as pa

    match column.type:
        case UTCDateTime():
            return pa.timestamp("us", tz="UTC")
        case Date():
            return pa.date32()
        case LargeBinary():
            return pa.binary()
        case Boolean():
            return pa.bool_()
        case Integer():
            return pa.int64()
        case Float():
            return pa.float64()
        case _:
            return pa.string()  # texts, names of states, ids, and JSON as it is written


def _plain(column: ColumnElement[Any], value: object) -> object:
    """As Arrow takes it: names instead of members, JSON as text."""
    if value is None:
        return None
    if isinstance(column.type, JSONType):
        return json.dumps(value, ensure_ascii=False)
    return value if isinstance(value, bool | int | float | datetime | date | bytes) else str(value)


def _sync_folder(folder: Path) -> None:
    """Have the names in a folder on disk, too."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
