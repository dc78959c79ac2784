"""The declarative base and the column types that behave the same on SQLite, PostgreSQL and MariaDB."""

from __future__ import annotations

import json
import math
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

from sqlalchemy import JSON, DateTime, Dialect, Enum, MetaData, String, Text, TypeDecorator
from sqlalchemy.dialects import mysql
from sqlalchemy.orm import DeclarativeBase
from sqlalchemy.types import TypeEngine

NAMING_CONVENTION = {
    "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    "ck": "ck_%(table_name)s_%(constraint_name)s",
    "fk": "fk_%(table_name)s_%(column_0_N_name)s_%(referred_table_name)s",
    "pk": "pk_%(table_name)s",
}

# Ids and names must compare byte for byte on every database. MariaDB's default collation ignores case, and its
# plain binary one ignores trailing spaces.
MARIADB_TABLE = {
    "mysql_engine": "InnoDB",
    "mysql_default_charset": "utf8mb4",
    "mysql_collate": "utf8mb4_nopad_bin",
}


class Base(DeclarativeBase):
    """Base of all tables."""

    metadata = MetaData(naming_convention=NAMING_CONVENTION)


def utcnow() -> datetime:
    """The present as an aware UTC time, the default wherever a function takes a time."""
    return datetime.now(UTC)


class UTCDateTime(TypeDecorator[datetime]):
    """An aware time, stored in UTC with microseconds, read back as aware UTC.

    SQLite and MariaDB keep no zone, so what they hold is UTC by this type's promise. Naive times are refused.
    """

    impl = DateTime
    cache_ok = True

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[Any]:
        if dialect.name in ("mysql", "mariadb"):
            return dialect.type_descriptor(mysql.DATETIME(fsp=6))
        return dialect.type_descriptor(DateTime(timezone=dialect.name == "postgresql"))

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        if value.tzinfo is None:
            raise ValueError(f"naive time {value.isoformat()}: use an aware one, such as datetime.now(UTC)")
        value = value.astimezone(UTC)
        return value if dialect.name == "postgresql" else value.replace(tzinfo=None)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


# Made once: json.dumps with options makes an encoder a call.
_DUMP = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False)


class JsonText(str):
    """JSON that is text already: a JSON column takes it as it is. Only for what is valid and ASCII."""

    __slots__ = ()


def dump_json(value: Any) -> str:
    """JSON that people can read in a query tool.

    Text that is no valid Unicode stays escaped. Infinite and undefined numbers, which JSON lacks and PostgreSQL
    refuses, become null.
    """
    if isinstance(value, JsonText):
        return str(value)
    try:
        text = _DUMP.encode(value)
    except ValueError:
        return dump_json(_finite(value))
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(value, separators=(",", ":"))
    return text


def _finite(value: Any) -> Any:
    match value:
        case float():
            return value if math.isfinite(value) else None
        case dict():
            return {key: _finite(item) for key, item in value.items()}
        case list() | tuple():
            return [_finite(item) for item in value]
        case _:
            return value


class JSONType(TypeDecorator[Any]):
    """JSON; on MariaDB plain LONGTEXT, because its JSON is an alias that Alembic sees as a difference forever.

    ``None`` is stored as SQL NULL.
    """

    impl = JSON
    cache_ok = True

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[Any]:
        if dialect.name in ("mysql", "mariadb"):
            return dialect.type_descriptor(mysql.LONGTEXT())
        return dialect.type_descriptor(JSON(none_as_null=True))

    def process_bind_param(self, value: Any, dialect: Dialect) -> Any:
        if value is None or dialect.name not in ("mysql", "mariadb"):
            return value
        return dump_json(value)

    def process_result_value(self, value: Any, dialect: Dialect) -> Any:
        if value is None or dialect.name not in ("mysql", "mariadb"):
            return value
        return json.loads(value)


LongText = Text().with_variant(mysql.LONGTEXT(), "mysql", "mariadb")
"""Text of any length; MariaDB's TEXT would end at 64 KiB."""


def enum_column(enum: type[StrEnum]) -> Enum:
    """A column type that stores a ``StrEnum`` as its value in a short VARCHAR, so that plain SQL reads well."""
    return Enum(
        enum,
        native_enum=False,
        create_constraint=False,
        length=16,
        validate_strings=True,
        values_callable=lambda members: [member.value for member in members],
    )


Id = String(155)
"""A job id: Celery accepts any text, and its own database backend uses this length."""

Uuid = String(36)
"""An id that Tokenmill makes itself, see ``models_db.ids``."""
