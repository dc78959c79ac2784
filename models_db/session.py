"""Engines and transactions."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from sqlalchemy import URL, Connection, Engine, create_engine, event, make_url
from sqlalchemy.engine.interfaces import ExceptionContext
from sqlalchemy.exc import ArgumentError, DBAPIError, IntegrityError
from sqlalchemy.orm import Session, sessionmaker

from models_db.base import dump_json
from models_db.errors import CommitUnknownError, DatabaseError, DatabaseUnavailableError, DatabaseUrlError
from models_db.faults import Fault, classify, summary

T = TypeVar("T")

CONNECT_TIMEOUT_S = 5
SQLITE_BUSY_TIMEOUT_S = 15
_REFUSALS = 3  # of work that may be in its own way, before they are believed

_EXAMPLES = "sqlite:///tokenmill.db, postgresql://user@host/name or mariadb://user@host/name"
_READ_ONLY = "tokenmill_read_only"
_POOLED = "tokenmill_pooled"  # in what SQLAlchemy keeps about a connection

_DRIVERS = {
    "sqlite": ("sqlite+pysqlite", ""),
    "postgres": ("postgresql+psycopg", "pip install 'tokenmill[postgres]'"),
    "postgresql": ("postgresql+psycopg", "pip install 'tokenmill[postgres]'"),
    "mysql": ("mysql+pymysql", "pip install 'tokenmill[mysql]'"),
    "mariadb": ("mysql+pymysql", "pip install 'tokenmill[mysql]'"),
}


def make_engine(
    url: str,
    *,
    echo: bool = False,
    pool_size: int = 5,
    idle_in_transaction_s: float | None = None,
    lock_wait_s: float | None = None,
) -> Engine:
    """An engine with the settings that Tokenmill relies on. Nothing is connected yet.

    Args:
        idle_in_transaction_s: PostgreSQL and MariaDB end a transaction, with its locks, in which they have heard
            nothing for so long. A process that is frozen, or whose host has vanished, holds nobody up for longer.
        lock_wait_s: PostgreSQL and MariaDB let a statement wait for a lock for so long (MariaDB in whole seconds);
            it is to be run again then. Unset, PostgreSQL waits for ever and MariaDB 15 s, as SQLite always does.

    Raises:
        DatabaseUrlError: the URL is unreadable, its database unsupported or the driver not installed.

    Connecting later raises ``DatabaseUnavailableError`` when the database does not answer.
    """
    parsed, hint = _parse(url)
    options: dict[str, Any] = {}
    match parsed.get_backend_name():
        case "sqlite":
            options["connect_args"] = {"timeout": SQLITE_BUSY_TIMEOUT_S, "check_same_thread": False}
        case "postgresql":
            options["isolation_level"] = "READ COMMITTED"
            # A database host that vanishes must be noticed, or the writer would wait for it for ever.
            options["connect_args"] = {
                "connect_timeout": CONNECT_TIMEOUT_S,
                "keepalives_idle": 10,
                "keepalives_interval": 5,
                "keepalives_count": 3,
                "tcp_user_timeout": 20_000,
            }
        case _:
            # Gap locks of the default level would make concurrent claims deadlock on rows that do not exist yet.
            options["isolation_level"] = "READ COMMITTED"
            options["connect_args"] = {
                "connect_timeout": CONNECT_TIMEOUT_S,
                "read_timeout": 60,
                "write_timeout": 60,
                "charset": "utf8mb4",
                "init_command": "SET SESSION time_zone = '+00:00', sql_mode = "
                "'STRICT_ALL_TABLES,ERROR_FOR_DIVISION_BY_ZERO,NO_ENGINE_SUBSTITUTION', "
                "innodb_lock_wait_timeout = 15",
            }
    try:
        engine = create_engine(
            parsed,
            echo=echo,
            pool_size=pool_size,
            pool_pre_ping=parsed.get_backend_name() != "sqlite",
            json_serializer=dump_json,
            hide_parameters=True,  # prompts and answers stay out of logs and tracebacks
            **options,
        )
    except ImportError as exc:
        raise DatabaseUrlError(f"the driver for {redact(url)} is not installed. Run: {hint}") from exc
    event.listen(engine, "handle_error", _name_the_unavailable)
    if engine.dialect.name == "postgresql":
        event.listen(engine, "connect", _notice_pooler)
    limits = _Limits(idle_in_transaction_s, lock_wait_s)
    if limits != _Limits(None, None) and engine.dialect.name != "sqlite":
        event.listen(engine, "connect", limits.of_session(engine))
        if engine.dialect.name == "postgresql":
            event.listen(engine, "begin", limits.of_transaction)
    if engine.dialect.name == "sqlite":
        event.listen(engine, "connect", _configure_sqlite)
        event.listen(engine, "begin", _begin_sqlite)
    return engine


def session_factory(engine: Engine) -> sessionmaker[Session]:
    """Sessions on ``engine`` that keep their objects usable after a commit."""
    return sessionmaker(engine, expire_on_commit=False)


@contextmanager
def reading(engine: Engine) -> Iterator[Connection]:
    """A transaction that only reads: on SQLite it takes no write lock, so it never waits for a writer."""
    with engine.connect().execution_options(**{_READ_ONLY: True}) as conn, conn.begin():
        yield conn


def transaction(
    engine: Engine,
    work: Callable[[Connection], T],
    *,
    tries: int = 6,
    sleep: Callable[[float], None] = time.sleep,
) -> T:
    """Run ``work`` in a transaction and commit; again where a statement lost a race or was cut short.

    Raises:
        CommitUnknownError: the connection was lost at the commit: all of it is stored, or nothing.
        DatabaseUnavailableError: the database does not answer, or every try met a lock or a limit; nothing is
            stored.
    """
    for number in range(1, tries + 1):
        committing = False
        try:
            with engine.begin() as conn:
                value = work(conn)
                committing = True
            return value
        except (DatabaseUnavailableError, DBAPIError) as exc:
            fault = classify(exc)
            if fault is Fault.AWAY and committing:
                raise CommitUnknownError(
                    f"the connection to database {redact(engine.url)} was lost during a commit ({summary(exc)}): what "
                    "it was to store may be there or not. Look before you do it again"
                ) from exc
            if fault is not Fault.TRANSIENT:
                raise
            if number == tries:
                raise DatabaseUnavailableError(
                    f"database {redact(engine.url)} is too busy: {tries} tries met a lock or a limit ({summary(exc)}). "
                    "Try again later, or look for a long transaction there"
                ) from exc
            sleep(0.01 * 2**number)
    raise ValueError(f"tries: must be at least 1 (got {tries})")


def certain(
    engine: Engine,
    work: Callable[[Connection, bool], T],
    *,
    patience_s: float = 10.0,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> T:
    """``transaction`` for work that must not be done twice, and whose caller must know whether it was done.

    When the answer to a commit is lost, ``work`` runs again, on a new connection, for as long as ``patience_s``. Its
    second argument is then true: it must look for what it may have stored before, and store only what is not there.

    Raises:
        CommitUnknownError: the database did not come back in time, so that nobody can tell.
        DatabaseUnavailableError: as above; nothing is stored.
    """
    unknown: CommitUnknownError | None = None
    give_up, pause_s, refusals = 0.0, 0.05, 0
    while True:
        try:
            return transaction(engine, partial(_again, work, unknown is not None), sleep=sleep)
        except CommitUnknownError as exc:
            if unknown is None:
                give_up = clock() + patience_s
            unknown = exc
        except DatabaseUnavailableError:
            if unknown is None:
                raise
        except (DatabaseError, IntegrityError):
            # The server may still be at the commit whose answer was lost, and what it stores is in its own way.
            refusals += 1
            if unknown is None or refusals > _REFUSALS:
                raise
        except DBAPIError as exc:
            if unknown is None or classify(exc) is not Fault.AWAY:
                raise
        if clock() >= give_up:
            raise unknown
        sleep(pause_s)
        pause_s = min(2 * pause_s, 1.0)


def _again(work: Callable[[Connection, bool], T], replay: bool, conn: Connection) -> T:
    return work(conn, replay)


def redact(url: str | URL) -> str:
    """The URL for people: no password, no query."""
    try:
        parsed = make_url(url)
    except ArgumentError:
        return "(unreadable database URL)"
    return parsed.set(query={}).render_as_string(hide_password=True)


def _parse(url: str) -> tuple[URL, str]:
    # SQLAlchemy accepts "postgres://" no longer, but many hosting services still hand it out.
    scheme, separator, rest = url.partition("://")
    backend, _, driver = scheme.partition("+")
    if backend not in _DRIVERS or not separator:
        raise DatabaseUrlError(
            f"database_url: {redact(url) if separator else url[:20]!r} names no supported database. "
            f"Use one like {_EXAMPLES}"
        )
    default, hint = _DRIVERS[backend]
    try:
        parsed = make_url(f"{default}://{rest}")
    except (ArgumentError, ValueError):
        raise DatabaseUrlError(f"database_url: cannot be read. Use one like {_EXAMPLES}") from None
    if driver and parsed.get_driver_name() != driver:
        raise DatabaseUrlError(
            f"database_url: the driver {driver!r} is not supported. Write {default}://… or leave it out"
        )
    if backend == "sqlite" and (parsed.database in (None, "", ":memory:") or "mode=memory" in rest):
        raise DatabaseUrlError(
            "database_url: an SQLite database in memory cannot be shared between threads and processes. "
            "Name a file: sqlite:///tokenmill.db"
        )
    return parsed, hint


def _configure_sqlite(connection: Any, _record: Any) -> None:
    # The driver's own implicit BEGIN is off, so that ours decides what kind of transaction starts.
    connection.isolation_level = None
    connection.execute("PRAGMA foreign_keys = ON")
    connection.execute("PRAGMA synchronous = NORMAL")
    if connection.execute("PRAGMA journal_mode").fetchone()[0] != "wal":
        connection.execute("PRAGMA journal_mode = WAL")


def _notice_pooler(connection: Any, record: Any) -> None:
    """See whether a pooler, such as PgBouncer, is between us and the server.

    It names a process of its own at the start, and may run each transaction on another connection of the server: what
    a session keeps, such as prepared statements, is not there for the next one, but for somebody else.
    """
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_backend_pid()", prepare=False)
        (backend,) = cursor.fetchone()
    connection.rollback()
    if backend != connection.info.backend_pid:
        record.info[_POOLED] = True
        connection.prepare_threshold = None


@dataclass(frozen=True, slots=True)
class _Limits:
    """How long the server lets a connection wait in a transaction: for its next statement, and for a lock."""

    idle_s: float | None
    lock_s: float | None

    def of_transaction(self, conn: Connection) -> None:
        """Set them for this transaction, where a pooler may give the session to somebody else afterwards."""
        if conn.info.get(_POOLED):
            conn.exec_driver_sql(self._postgres(local=True))

    def of_session(self, engine: Engine) -> Callable[[Any, Any], None]:
        """Sets them for a new connection."""

        def configure(connection: Any, record: Any) -> None:
            if record.info.get(_POOLED):
                return  # they would be the next client's, too; each transaction has them from its start instead
            if engine.dialect.name == "postgresql":
                # Not as options of the connection, which poolers between us and the server refuse.
                statement = self._postgres(local=False)
            else:
                statement = self._mysql(is_mariadb=getattr(engine.dialect, "is_mariadb", False))
            if statement:
                with connection.cursor() as cursor:
                    cursor.execute(statement)
                connection.commit()  # a rollback would undo it

        return configure

    def _postgres(self, *, local: bool) -> str:
        limits = {"idle_in_transaction_session_timeout": self.idle_s, "lock_timeout": self.lock_s}
        calls = [
            f"set_config('{name}', '{math.ceil(seconds * 1000)}', {str(local).lower()})"
            for name, seconds in limits.items()
            if seconds is not None
        ]
        return f"SELECT {', '.join(calls)}"

    def _mysql(self, *, is_mariadb: bool) -> str:
        values = []
        if self.idle_s is not None and is_mariadb:
            values.append(f"idle_transaction_timeout = {math.ceil(self.idle_s)}")
        if self.lock_s is not None:  # of rows, and of tables that a migration changes
            values += [
                f"{name} = {math.ceil(self.lock_s)}"
                for name in ("innodb_lock_wait_timeout", "lock_wait_timeout")
            ]
        return f"SET SESSION {', '.join(values)}" if values else ""


def _begin_sqlite(conn: Connection) -> None:
    # A transaction that starts by reading could not become a writer once another one has written.
    read_only = conn.get_execution_options().get(_READ_ONLY, False)
    conn.exec_driver_sql("BEGIN" if read_only else "BEGIN IMMEDIATE")


def _name_the_unavailable(context: ExceptionContext) -> None:
    if not isinstance(context.original_exception, Exception):
        return  # Ctrl-C breaks a connection, too, and must stay what it is
    if context.is_pre_ping or not (context.is_disconnect or context.connection is None):
        return
    url = context.dialect and context.engine and context.engine.url
    reason = str(context.original_exception).strip().split("\n")[0]
    where = redact(url) if url else "the database"
    if context.dialect.name == "sqlite":
        fix = "Check that the file's folder exists and may be written, and that no other file has its name"
    else:
        fix = "Start the server, or correct the database URL (TOKENMILL_DATABASE_URL)"
    raise DatabaseUnavailableError(f"database {where} is not available ({reason}). {fix}")
