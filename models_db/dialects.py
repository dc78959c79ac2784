"""The few places where SQLite, PostgreSQL and MariaDB need different SQL."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

from sqlalchemy import ColumnElement, Connection, FunctionElement, String, insert
from sqlalchemy.dialects import mysql, postgresql, sqlite
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.orm import InstrumentedAttribute
from sqlalchemy.sql.compiler import SQLCompiler

from models_db.base import Base

T = TypeVar("T")

CHUNK = 500
"""Values in one IN list or rows in one look-up: far below every database's limit on parameters."""


def chunked(values: Sequence[T], size: int = CHUNK) -> Iterator[Sequence[T]]:
    """``values`` in pieces of at most ``size``."""
    for start in range(0, len(values), size):
        yield values[start : start + size]


def insert_or_ignore(
    conn: Connection,
    table: type[Base],
    rows: Sequence[Mapping[str, Any]],
    key: Sequence[InstrumentedAttribute[Any]],
) -> None:
    """Insert ``rows``, leaving alone those whose ``key`` exists already.

    On MariaDB a conflict on any other unique key is ignored, too: it cannot name one. (Its ``INSERT IGNORE`` would
    also turn bad data into warnings, so a no-op update stands in.)
    """
    if not rows:
        return
    payload = [dict(row) for row in rows]
    match conn.dialect.name:
        case "postgresql":
            conn.execute(postgresql.insert(table).on_conflict_do_nothing(index_elements=key), payload)
        case "sqlite":
            conn.execute(sqlite.insert(table).on_conflict_do_nothing(index_elements=key), payload)
        case "mysql" | "mariadb":
            column = key[0]
            conn.execute(mysql.insert(table).on_duplicate_key_update({column.key: column}), payload)
        case other:  # make_engine lets no other database through
            raise NotImplementedError(f"no conflict clause for {other}; first row: {insert(table)}")


class hour_of(FunctionElement[str]):  # noqa: N801 - reads as a SQL function
    """The UTC hour of a time column as text, ``2026-11-29 21:00``, equal on every database."""

    type = String()
    inherit_cache = True

    def __init__(self, column: ColumnElement[Any] | InstrumentedAttribute[Any]) -> None:
        super().__init__(column)


@compiles(hour_of, "sqlite")
def _hour_sqlite(element: hour_of, compiler: SQLCompiler, **kw: Any) -> str:
    return f"strftime('%Y-%m-%d %H:00', {compiler.process(element.clauses, **kw)})"


@compiles(hour_of, "postgresql")
def _hour_postgresql(element: hour_of, compiler: SQLCompiler, **kw: Any) -> str:
    return f"to_char({compiler.process(element.clauses, **kw)} AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:00')"


@compiles(hour_of, "mysql")
@compiles(hour_of, "mariadb")
def _hour_mariadb(element: hour_of, compiler: SQLCompiler, **kw: Any) -> str:
    # Doubled, because the drivers' parameter style is "format".
    return f"date_format({compiler.process(element.clauses, **kw)}, '%%Y-%%m-%%d %%H:00')"
