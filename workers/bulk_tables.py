"""Rows of CSV and Parquet files, one at a time. Each row of the file comes out: as its cells, or with what is wrong."""

from __future__ import annotations

import base64
import csv
import io
import json
import math
import numbers
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta
from typing import IO, Any

from backend.api import ConfigurationError, RequestError

MAX_CELL = 16 * 1024 * 1024  # characters
_SEPARATORS = {";": "semicolons", "\t": "tabs", "|": "bars"}
_ROWS_AT_ONCE = 1000  # of a Parquet file
_NOT_UTF8 = re.compile("[\udc80-\udcff]")  # what ``surrogateescape`` makes of such bytes


@dataclass(frozen=True, slots=True)
class TableRow:
    """One row. With a ``fault`` it cannot be run, and ``cells`` holds what could be read of it."""

    cells: Mapping[str, Any]
    fault: str | None = None


def column_names(kind: str, file: IO[bytes]) -> Sequence[str]:
    """The names of a table's columns; the file is at its beginning afterwards.

    Raises:
        RequestError: they cannot be read, or one comes twice.
    """
    if kind == "parquet":
        names: Sequence[str] = list(_parquet(file).schema_arrow.names)
    else:
        with _text_of(file) as text:
            names = _header(csv.reader(_Lines(text), strict=True))
    file.seek(0)
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise RequestError(f"the column {twice[0]!r} comes twice", field="INPUT", fix="Rename one of them")
    return names


def other_separator(names: Sequence[str]) -> str | None:
    """What seems to stand between a CSV file's cells where its only column's name shows that no comma does."""
    if len(names) != 1:
        return None
    return next((called for sign, called in _SEPARATORS.items() if sign in names[0]), None)


def table_rows(kind: str, file: IO[bytes]) -> Iterator[TableRow]:
    """The rows below the header, from the file's beginning.

    Raises:
        RequestError: the file cannot be read any further.
    """
    return _parquet_rows(file) if kind == "parquet" else _csv_rows(file)


def as_text(value: Any) -> str:
    """A cell as a part of a prompt, or as an id.

    Raises:
        ValueError: it is binary and no text.
    """
    if isinstance(value, bytes):
        return value.decode("utf-8")
    safe = json_safe(value)
    return json.dumps(safe, ensure_ascii=False) if isinstance(safe, list | dict) else str(safe)


def json_safe(value: Any) -> Any:
    """A cell as JSON can hold it: moments by ISO 8601, lengths of time in seconds, decimals as text, bytes in base64.

    What is not a number is ``None``.
    """
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, bytes):
        return base64.b64encode(value).decode("ascii")
    if isinstance(value, datetime | date | time):
        return value.isoformat()
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, Mapping):
        return {str(name): json_safe(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [json_safe(each) for each in value]
    if isinstance(value, numbers.Real):
        return float(value) if math.isfinite(value) else None
    return str(value)


# ------------------------------------------------------------------------------------------------------------ CSV


class _Lines:
    """Lines of a text for a CSV reader; of one that would fill the memory only the beginning."""

    def __init__(self, text: IO[str]) -> None:
        self._text = text
        self.cut = False

    def __iter__(self) -> _Lines:
        return self

    def __next__(self) -> str:
        line = self._text.readline(4 * MAX_CELL)
        if not line:
            raise StopIteration
        if len(line) == 4 * MAX_CELL and not line.endswith(("\n", "\r")):
            self.cut = True
            while (rest := self._text.readline(MAX_CELL)) and not rest.endswith(("\n", "\r")):
                pass
        return line


def _header(reader: Any) -> list[str]:
    """The names in the first line that is not blank; a column without one is called by its number."""
    csv.field_size_limit(MAX_CELL)
    try:
        names: list[str] = next(filter(None, reader), [])
    except csv.Error as error:
        raise RequestError(
            f"the header is not readable as CSV: {error}", field="INPUT", fix="Correct the first line"
        ) from None
    if any(map(_NOT_UTF8.search, names)):
        raise RequestError("the header is not UTF-8", field="INPUT", fix="Re-encode the file as UTF-8")
    return [name or f"column_{number}" for number, name in enumerate(names, 1)]


def _csv_rows(file: IO[bytes]) -> Iterator[TableRow]:
    file.seek(0)
    with _text_of(file) as text:
        lines = _Lines(text)
        reader = csv.reader(lines, strict=True)
        names = _header(reader)
        while True:
            before, lines.cut = reader.line_num, False
            try:
                cells = next(reader, None)
            except csv.Error as error:
                yield TableRow({}, f"is not readable as CSV: {error}{_where(before, reader.line_num)}")
                continue
            if cells is None:
                return
            if cells:
                fault = _fault(names, cells, cut=lines.cut)
                where = "" if fault is None else _where(before, reader.line_num)
                row = {
                    name: cell for name, cell in zip(names, cells, strict=False) if not _NOT_UTF8.search(cell)
                }
                yield TableRow(row, fault and f"{fault}{where}")


def _fault(names: Sequence[str], cells: Sequence[str], *, cut: bool) -> str | None:
    """What is wrong with a row."""
    if cut:
        return f"has a line of more than {4 * MAX_CELL:,} characters"
    if len(cells) > len(names):
        return "has more cells than there are columns. Quote cells that hold a comma"
    for name, cell in zip(names, cells, strict=False):
        if _NOT_UTF8.search(cell):
            return f"is not UTF-8 in the column {name!r}. Re-encode the file"
    return None


def _where(before: int, last: int) -> str:
    """Which lines of the file a row was read from: cells may hold line breaks, so that rows are no lines."""
    return f" (line {last:,} of the file)" if last <= before + 1 else f" (lines {before + 1:,} to {last:,})"


@contextmanager
def _text_of(file: IO[bytes]) -> Iterator[io.TextIOWrapper]:
    """The file as text; it stays open when the text is done with, and its position is the caller's matter.

    A byte that is not UTF-8 spoils its own cell, not all that follows.
    """
    text = io.TextIOWrapper(file, encoding="utf-8-sig", errors="surrogateescape", newline="")
    try:
        yield text
    finally:
        if not file.closed:  # a reader that is given up in the middle may outlive its file
            text.detach()


# -------------------------------------------------------------------------------------------------------- Parquet


def _parquet(file: IO[bytes]) -> Any:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise ConfigurationError(
            "reading Parquet needs pyarrow. Install it: pip install 'tokenmill[parquet]'"
        ) from None
    try:
        return ParquetFile(file)
    except (ArrowException, OSError) as error:
        raise _unreadable(error) from None


def _unreadable(error: Exception) -> RequestError:
    return RequestError(f"is no readable Parquet file: {error}", field="INPUT", fix="Check the file")


def _parquet_rows(file: IO[bytes]) -> Iterator[TableRow]:
    file.seek(0)
    batches = _parquet(file).iter_batches(batch_size=_ROWS_AT_ONCE)
    while (batch := _next_batch(batches)) is not None:
        try:
            rows = batch.to_pylist()
        except Exception:  # of any kind: what Python's types cannot hold, time zones that are not known
            yield from (_cell_by_cell(batch, number) for number in range(batch.num_rows))
        else:
            yield from map(TableRow, rows)


def _next_batch(batches: Iterator[Any]) -> Any:
    from pyarrow import ArrowException

    try:
        return next(batches, None)
    except (ArrowException, OSError) as error:
        raise _unreadable(error) from None


def _cell_by_cell(batch: Any, number: int) -> TableRow:
    """A row of a batch in which some value is beyond what Python's types can hold."""
    cells, fault = {}, None
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        try:
            cells[name] = _value(column[number])
        except Exception as error:  # whatever Arrow makes of it, it is this row's matter alone
            fault = fault or f"the column {name!r} holds what cannot be read: {error}"
    return TableRow(cells, fault)


def _value(scalar: Any) -> Any:
    """A value, by Arrow's own spelling where Python has none: nanoseconds, years beyond 9999."""
    import pyarrow as pa

    try:
        return scalar.as_py()
    except UnicodeDecodeError:
        raise ValueError("text that is not UTF-8") from None
    except Exception:
        if isinstance(scalar, pa.StructScalar):
            return {name: _value(each) for name, each in scalar.items()}
        if isinstance(scalar, pa.ListScalar):
            return [_value(each) for each in scalar.values or ()]
        if isinstance(scalar, pa.DurationScalar):
            per_second = {"s": 1, "ms": 1e3, "us": 1e6, "ns": 1e9}[scalar.type.unit]
            return scalar.value / per_second
        text: str = scalar.cast(pa.string()).as_py()
        if text.startswith("<"):
            raise ValueError(text.strip("<>")) from None
        return text.replace(" ", "T", 1)
