"""Which database errors pass by themselves."""

from __future__ import annotations

import re
import sqlite3
from enum import StrEnum

from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

from models_db.errors import DatabaseUnavailableError


class Fault(StrEnum):
    """What to do about an error."""

    AWAY = "away"  # the database cannot be reached or cannot write: wait, then do the same again
    # This statement met a lock, a limit or an operator: roll back and do the same again.
    TRANSIENT = "transient"
    OTHER = "other"  # doing the same again would fail the same way


# Classes and codes of PostgreSQL's SQLSTATE.
_PG_TRANSIENT = (
    "26000",  # no such prepared statement, and 42P05, one too many: a pooler has given the session to others
    "42P05",
    "40",  # serialization failure, deadlock
    "53200",  # out of memory, also of that for locks
    "53400",  # a limit of the configuration, such as of temporary files
    "55006",  # the object is in use
    "55P03",  # lock not available
    "57014",  # cancelled: statement_timeout, pg_cancel_backend
    "72000",  # snapshot too old
)
_PG_AWAY = (
    "08",  # connection
    "25006",  # read-only: a stand-by, or a primary that has become one
    "25P03",  # ended for its idleness in a transaction, or (25P04) for the transaction's age
    "25P04",
    "53",  # disk full, too many connections
    "57",  # shutdown, crash, start
    "58",  # errors of the system beneath it
)

# Error numbers of MariaDB's and MySQL's servers (1xxx, 3xxx, 4xxx), of their clients (2xxx) and of files (below 100).
_MARIADB_TRANSIENT = {
    1,  # a file cannot be made, and 5: no memory
    5,
    1020,  # the record has changed since it was read
    1028,  # a sort was aborted
    1030,  # the engine's own error, such as 28 for a full disk
    1037,  # out of memory, of that for sorting, of any resource
    1038,
    1041,
    1180,  # an error during the commit
    1205,  # lock wait timeout
    1206,  # no room for more locks
    1213,  # deadlock; also a conflict between Galera's nodes
    1297,  # temporary error of the engine
    1317,  # interrupted: KILL QUERY
    1412,  # the table's definition has changed
    1615,  # a prepared statement has to be prepared again
    1637,  # too many transactions at once
    1878,  # a temporary file cannot be written
    1969,  # max_statement_time, and 3024 of MySQL
    3024,
    3572,  # NOWAIT met a lock
}
_MARIADB_AWAY = {
    0,  # the client has closed the connection
    3,  # a file cannot be written, and 20, 1021, 1026, 1114: the disk or the table is full
    20,
    1021,
    1026,
    1114,
    1040,  # too many connections, of the server, 1203 and 1226 of the user
    1203,
    1226,
    1042,  # a connection cannot be begun
    1043,
    1047,  # a node of Galera that is not ready
    1053,  # shutdown
    1077,
    1079,
    1080,
    1129,  # the host is blocked after too many errors
    1135,  # no thread for the connection
    1152,  # the connection was cut, in various ways
    1158,
    1159,
    1160,
    1161,
    1184,
    1927,
    3169,
    4031,
    1290,  # read-only: the server, 1792 the transaction, 1836 and 1874 the engine
    1792,
    1836,
    1874,
    2002,
    2003,
    2005,
    2006,
    2013,
    2014,
    2055,
}
_MARIADB_TOO_LARGE = 1153  # it hangs up afterwards, but would do so again

_SQLITE_TRANSIENT = {
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_LOCKED,
    sqlite3.SQLITE_INTERRUPT,
    sqlite3.SQLITE_NOMEM,
    sqlite3.SQLITE_PROTOCOL,  # a race for the lock of the write-ahead log
    sqlite3.SQLITE_SCHEMA,  # which has changed meanwhile
}
_SQLITE_AWAY = {
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_PERM,
    sqlite3.SQLITE_READONLY,
}

# What servers quote of a row within the first line of a message.
_QUOTED = (
    re.compile(r"(\b(?:entry|value:?) )(?:'.*'(?= for (?:key|column) )|'.*)", re.IGNORECASE),
    re.compile(r"(\b(?:invalid|malformed|out of range)\b[^\"]*: )\".*", re.IGNORECASE),
)


def classify(error: BaseException) -> Fault:
    """Sort an error raised by a statement, a commit or a connection attempt."""
    if isinstance(error, DatabaseUnavailableError):
        return Fault.AWAY
    if isinstance(error, PoolTimeoutError):
        return Fault.TRANSIENT  # every connection of this process is in use
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
    """The error for a log: its type and first line, without what that quotes of a row; further lines may quote more."""
    first_line = str(error).strip().split("\n", 1)[0]
    for quoted in _QUOTED:
        first_line = quoted.sub(r"\1...", first_line)
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
    """The narrower one where both are true."""
    return Fault.TRANSIENT if transient else Fault.AWAY if away else Fault.OTHER
