"""Which PostgreSQL a benchmark runs on, and databases of its own there."""

from __future__ import annotations

import argparse
import secrets
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from sqlalchemy import make_url

from models_db.session import make_engine
from tests.servers import ServerUnavailableError, server


def add_server_option(parser: argparse.ArgumentParser) -> None:
    """The option ``--server``."""
    parser.add_argument(
        "--server",
        metavar="URL",
        help="PostgreSQL whose login may create databases, such as postgresql://USER@HOST/DATABASE; when unset, the "
        "one of TEST_POSTGRES_URL, one that runs here, or a private one",
    )


@contextmanager
def postgresql(named: str | None) -> Iterator[str]:
    """The URL of the server: the one named, or the one that the tests would take.

    Raises:
        SystemExit: there is none.
    """
    if named is not None:
        yield named
        return
    with ExitStack() as stack:
        try:
            found = stack.enter_context(server("postgresql"))
        except ServerUnavailableError as exc:
            sys.exit(
                f"--server: no PostgreSQL was found: {exc}. Give --server postgresql://USER@HOST/DATABASE"
            )
        yield found.url


@contextmanager
def postgresql_if_any() -> Iterator[str | None]:
    """The URL of a server that the tests would take, or nothing where there is none."""
    with ExitStack() as stack:
        try:
            url: str | None = stack.enter_context(server("postgresql")).url
        except ServerUnavailableError as exc:
            print(f"SQLite stands in for PostgreSQL: {exc}", file=sys.stderr)
            url = None
        yield url


@contextmanager
def own_database(on: str) -> Iterator[str]:
    """A new database on this server, with the server's own settings for durability, dropped afterwards."""
    name = f"tokenmill_bench_{secrets.token_hex(6)}"
    administer(on, f"CREATE DATABASE {name}")
    try:
        yield make_url(on).set(database=name).render_as_string(hide_password=False)
    finally:
        administer(on, f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")


@contextmanager
def database(on: str | None, folder: Path) -> Iterator[str]:
    """A new database on this server; a file in this folder where there is none."""
    if on is None:
        yield f"sqlite:///{folder / f'{secrets.token_hex(4)}.db'}"
        return
    with own_database(on) as url:
        yield url


def administer(on: str, *statements: str) -> None:
    """Run statements outside of a transaction."""
    engine = make_engine(on)
    try:
        with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as conn:
            for statement in statements:
                conn.exec_driver_sql(statement.replace("%", "%%"))
    finally:
        engine.dispose()
