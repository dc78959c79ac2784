"""The few places where SQLite, PostgreSQL and MariaDB need different SQL."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import cache
from operator import itemgetter
from typing import Any, TypeVar, cast

from sqlalchemy import (
    Boolean,
    ColumnElement,
    Connection,
    Dialect,
    Enum,
    FunctionElement,
    String,
    Table,
    Text,
    TextClause,
    TypeDecorator,
    bindparam,
    insert,
    text,
)
from sqlalchemy.dialects import mysql, postgresql, sqlite
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.orm import InstrumentedAttribute
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.operators import OperatorType
from sqlalchemy.types import TypeEngine

from models_db.base import Base, JSONType, UTCDateTime, dump_json

T = TypeVar("T")

CHUNK = 500
"""Values in one IN list or rows in one look-up: far below every database's limit on parameters."""

_COPY_FROM = 20  # rows; fewer do not pay for the further round trips


def chunked(values: Sequence[T], size: int = CHUNK) -> Iterator[Sequence[T]]:
    """``values`` in pieces of at most ``size``."""
    for start in range(0, len(values), size):
        yield values[start : start + size]


def insert_rows(conn: Connection, table: type[Base], rows: Sequence[Mapping[str, Any]]) -> None:
    """Insert rows that all have the same columns.

    PostgreSQL gets few rows as one JSON document, because a parameter a statement instead of one a value costs its
    client a third of the time of ``executemany``; and many by ``COPY``, which halves the server's time.
    """
    if not rows:
        return
    if conn.dialect.name != "postgresql":
        conn.execute(insert(table), [dict(row) for row in rows])
        return
    if len(rows) >= _COPY_FROM and _copied(conn, cast(Table, table.__table__), rows):
        return
    statement, nested = _insert_document(cast(Table, table.__table__), tuple(rows[0]))
    # JSON columns travel as text inside the document, because PostgreSQL reads a nested value more strictly than
    # a column of type json does.
    document = json.dumps(
        [
            row | {name: None if row[name] is None else dump_json(row[name]) for name in nested}
            for row in map(dict, rows)
        ],
        ensure_ascii=False,
        default=_aware,
        separators=(",", ":"),
    )
    conn.execute(statement, {"rows": document})


def _copied(conn: Connection, table: Table, rows: Sequence[Mapping[str, Any]]) -> bool:
    """Send the rows by ``COPY``; false after a refusal, which the caller meets again in a statement.

    The driver's own errors are not SQLAlchemy's, which name the constraint and know a lost connection; a statement's
    are.
    """
    names = tuple(rows[0])
    values = itemgetter(*names)
    texts = [
        (at, _COPIED[kind]) for at, name in enumerate(names) if (kind := type(table.c[name].type)) in _COPIED
    ]
    driver: Any = conn.connection.driver_connection
    statement = f"COPY {table.name} ({', '.join(names)}) FROM STDIN"
    savepoint = conn.begin_nested()
    try:
        with driver.cursor() as cursor, cursor.copy(statement) as copy:
            for row in rows:
                line = list(values(row))
                for at, text in texts:
                    line[at] = text(line[at])
                copy.write_row(line)
    except conn.dialect.loaded_dbapi.Error:
        savepoint.rollback()
        return False
    savepoint.commit()
    return True


def _copied_json(value: Any) -> str | None:
    return None if value is None else dump_json(value)


def _copied_time(value: datetime | None) -> str | None:
    return None if value is None else _aware(value)


def _copied_enum(value: Any) -> str | None:
    return None if value is None else str(value)


_COPIED: dict[type[TypeEngine[Any]], Callable[[Any], Any]] = {
    JSONType: _copied_json,
    UTCDateTime: _copied_time,
    Enum: _copied_enum,
}


def _aware(value: object) -> str:
    if not isinstance(value, datetime) or value.tzinfo is None:
        raise ValueError(f"{value!r} has no place in a row: times must be aware, such as datetime.now(UTC)")
    return value.isoformat()


@cache
def _insert_document(table: Table, names: tuple[str, ...]) -> tuple[TextClause, frozenset[str]]:
    dialect = postgresql.dialect()  # type: ignore[no-untyped-call]
    nested = frozenset(name for name in names if isinstance(table.c[name].type, JSONType))
    taken = ", ".join(f"CAST({name} AS json)" if name in nested else name for name in names)
    typed = ", ".join(
        f"{name} {'text' if name in nested else table.c[name].type.compile(dialect)}" for name in names
    )
    listed = ", ".join(names)
    statement = (
        f"INSERT INTO {table.name} ({listed}) SELECT {taken} FROM json_to_recordset(CAST(:rows AS json)) "
        f"AS listed({typed})"
    )
    return text(statement), nested


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


class _Listed(TypeDecorator[Sequence[str]]):
    """Many texts as one parameter: an array on PostgreSQL, JSON on SQLite."""

    impl = Text
    cache_ok = True

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[Any]:
        return dialect.type_descriptor(postgresql.ARRAY(Text()) if dialect.name == "postgresql" else Text())

    def process_bind_param(self, value: Sequence[str] | None, dialect: Dialect) -> Any:
        return json.dumps(value) if dialect.name == "sqlite" else value


class among(FunctionElement[bool]):  # noqa: N801 - reads as a SQL function
    """``column IN (…)`` over the parameter ``ids``, a list of texts.

    The statement is the same for any number of them, so that it is compiled, parsed and planned once; SQLAlchemy
    and the databases take most of their time over lists that are written out.
    """

    type = Boolean()
    inherit_cache = True

    def __init__(self, column: ColumnElement[Any] | InstrumentedAttribute[Any]) -> None:
        super().__init__(column, bindparam("ids", type_=_Listed()))

    def self_group(self, against: OperatorType | None = None) -> among:
        """Itself: it is a condition. SQLAlchemy would write ``… = 1`` for SQLite and MariaDB, which uses no index."""
        return self


@compiles(among, "postgresql")
def _among_postgresql(element: among, compiler: SQLCompiler, **kw: Any) -> str:
    column, ids = element.clauses
    return f"{compiler.process(column, **kw)} = ANY ({compiler.process(ids, **kw)})"


@compiles(among, "sqlite")
def _among_sqlite(element: among, compiler: SQLCompiler, **kw: Any) -> str:
    column, ids = element.clauses
    return f"{compiler.process(column, **kw)} IN (SELECT value FROM json_each({compiler.process(ids, **kw)}))"


@compiles(among, "mysql")
@compiles(among, "mariadb")
def _among_mariadb(element: among, compiler: SQLCompiler, **kw: Any) -> str:
    # Its JSON_TABLE would be a join, which locks more rows than are named.
    column = next(iter(element.clauses))
    return str(compiler.process(column.in_(bindparam("ids", expanding=True)), **kw))


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
