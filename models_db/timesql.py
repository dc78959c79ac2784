"""Arithmetic with times in SQL, alike on SQLite, PostgreSQL and MariaDB. Everything is UTC."""

from __future__ import annotations

from datetime import date, datetime
from typing import Any

from sqlalchemy import Date, Double, FunctionElement
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.compiler import SQLCompiler

from models_db.base import UTCDateTime


class minute_of(FunctionElement[datetime]):  # noqa: N801 - these read as SQL functions
    """The time at which the minute of a time began."""

    type = UTCDateTime()
    inherit_cache = True


class hour_start_of(FunctionElement[datetime]):  # noqa: N801
    """The time at which the hour of a time began."""

    type = UTCDateTime()
    inherit_cache = True


class day_of(FunctionElement[date]):  # noqa: N801
    """The day of a time."""

    type = Date()
    inherit_cache = True


class night_of(FunctionElement[date]):  # noqa: N801
    """The day on which the night of a time began. A night goes from noon to noon."""

    type = Date()
    inherit_cache = True


class seconds_between(FunctionElement[float]):  # noqa: N801
    """From the first time to the second; negative when that lies before it."""

    type = Double()
    inherit_cache = True


class database_now(FunctionElement[datetime]):  # noqa: N801
    """The present by the database's own clock, on which hosts agree whatever their clocks say."""

    type = UTCDateTime()
    inherit_cache = True


_SQL: dict[type[FunctionElement[Any]], dict[str, str]] = {
    minute_of: {
        "sqlite": "strftime('%Y-%m-%d %H:%M:00.000000', {})",
        "postgresql": "date_trunc('minute', {})",
        "mysql": "CAST(date_format({}, '%%Y-%%m-%%d %%H:%%i:00') AS DATETIME(6))",
    },
    hour_start_of: {
        "sqlite": "strftime('%Y-%m-%d %H:00:00.000000', {})",
        "postgresql": "date_trunc('hour', {}, 'UTC')",
        "mysql": "CAST(date_format({}, '%%Y-%%m-%%d %%H:00:00') AS DATETIME(6))",
    },
    day_of: {
        "sqlite": "date({})",
        "postgresql": "CAST({} AT TIME ZONE 'UTC' AS DATE)",
        "mysql": "DATE({})",
    },
    night_of: {
        "sqlite": "date({}, '-12 hours')",
        "postgresql": "CAST({} AT TIME ZONE 'UTC' - INTERVAL '12 hours' AS DATE)",
        "mysql": "DATE({} - INTERVAL 12 HOUR)",
    },
    database_now: {
        "sqlite": "strftime('%Y-%m-%d %H:%M:%f000', 'now')",
        "postgresql": "clock_timestamp()",
        "mysql": "UTC_TIMESTAMP(6)",
    },
    seconds_between: {
        "sqlite": "ROUND((julianday({1}) - julianday({0})) * 86400.0, 3)",  # exact to 0.04 ms
        "postgresql": "CAST(EXTRACT(EPOCH FROM {1} - {0}) AS DOUBLE PRECISION)",
        "mysql": "(TIMESTAMPDIFF(MICROSECOND, {0}, {1}) / 1000000e0)",
    },
}


@compiles(minute_of)
@compiles(hour_start_of)
@compiles(day_of)
@compiles(night_of)
@compiles(database_now)
@compiles(seconds_between)
def _compile(element: FunctionElement[Any], compiler: SQLCompiler, **kw: Any) -> str:
    dialect = "mysql" if compiler.dialect.name == "mariadb" else compiler.dialect.name
    arguments = [compiler.process(clause, **kw) for clause in element.clauses]
    return _SQL[type(element)][dialect].format(*arguments)
