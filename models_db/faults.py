"""Which database errors pass by themselves."""

from __future__ import annotations

import sqlite3
from enum import StrEnum

from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError

from models_db.errors import DatabaseUnavailableError


class Fault(StrEnum):
    """What to do about an error."""

    AWAY = "away"  # the database cannot be reached or cannot write: wait, then do the same again
    TRANSIENT = "transient"  # lost a race for locks: roll back and do the same again
    OTHER = "other"  # doing the same again would fail the same way


# Classes and codes of PostgreSQL's SQLSTATE.
_PG_AWAY = ("08", "53", "57P", "58", "25006")  # connection, resources, shutdown, system, read-only stand-by
_PG_TRANSIENT = ("40", "55P03")  # serialization failure or deadlock, lock not available

# Error numbers of MariaDB's server (1xxx) and of its clients (2xxx).
_MARIADB_AWAY = {
    1021,
    1040,
    1053,
    1077,
    1129,
    1158,
    1159,
    1160,
    1161,
    1203,
    1290,
    1792,
    1927,
    2003,
    2006,
    2013,
}
_MARIADB_TRANSIENT = {1020, 1205, 1213}
_MARIADB_TOO_LARGE = 1153  # it hangs up afterwards, but would do so again

_SQLITE_AWAY = {sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_FULL, sqlite3.SQLITE_READONLY}
_SQLITE_TRANSIENT = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}


def classify(error: BaseException) -> Fault:
    """Sort an error raised by a statement, a commit or a connection attempt."""
    if isinstance(error, DatabaseUnavailableError):
        return Fault.AWAY
    if not isinstance(error, DBAPIError):
        return Fault.OTHER
    original = error.orig
    if original is not None and original.args[:1] == (_MARIADB_TOO_LARGE,):
        return Fault.OTHER
    if error.connection_invalidated:
        return Fault.AWAY
    if isinstance(original, sqlite3.Error):
        code = getattr(original, "sqlite_errorcode", 0) & 0xFF  # the primary code of an extended one
        return _pick(code in _SQLITE_AWAY, code in _SQLITE_TRANSIENT)
    # The number first: MariaDB's driver may give a state besides, which is HY000 for most of them.
    number = original.args[0] if original is not None and original.args else None
    if isinstance(number, int):
        return _pick(number in _MARIADB_AWAY, number in _MARIADB_TRANSIENT)
    state = getattr(original, "sqlstate", None)
    if isinstance(state, str):
        return _pick(state.startswith(_PG_AWAY), state.startswith(_PG_TRANSIENT))
    # A driver that cannot even name the error has lost its connection.
    return _pick(isinstance(error, (OperationalError, InterfaceError)), False)


def summary(error: BaseException) -> str:
    """The error for a log: its type and first line. Further lines of a driver may quote a row, with its texts."""
    first_line = str(error).strip().split("\n", 1)[0]
    return f"{type(error).__name__}: {first_line[:300]}"


def refusal(error: BaseException) -> str:
    """The kind of the error and the database's own code for it, in ASCII and without anything of a row."""
    original = getattr(error, "orig", None)
    names = [type(error).__name__]
    if original is not None:
        number = original.args[0] if original.args and isinstance(original.args[0], int) else None
        code = getattr(original, "sqlstate", None) or getattr(original, "sqlite_errorname", None) or number
        names += [type(original).__name__] if type(original).__name__ != names[0] else []
        names += [str(code)] if code is not None else []
    return " ".join(names).encode("ascii", "replace").decode()[:200]


def _pick(away: bool, transient: bool) -> Fault:
    return Fault.AWAY if away else Fault.TRANSIENT if transient else Fault.OTHER
