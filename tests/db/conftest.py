"""Every test that asks for ``db`` runs on SQLite, PostgreSQL and MariaDB, on empty tables."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import get_args

import pytest
from sqlalchemy import Engine, delete, exists, literal, select, union_all

from models_db.base import Base
from models_db.migrate import upgrade
from models_db.session import make_engine
from tests.db.helpers import add_workers
from tests.servers import Kind, Server, ServerUnavailableError, fresh_database, server, skip_or_fail

MARKS = {"sqlite": (), "postgresql": (pytest.mark.postgres,), "mariadb": (pytest.mark.mysql,)}
KINDS = [pytest.param(kind, id=kind, marks=MARKS[kind]) for kind in get_args(Kind)]


@pytest.fixture(scope="session", params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    """One of the three databases."""
    return request.param


class Databases:
    """Of each kind one server and one migrated database, made when first asked for and kept for the whole run.

    A fixture that depends on ``kind`` would make them anew at each change from one kind to the next, which is three
    times a file.
    """

    def __init__(self, stack: ExitStack, folder: Path) -> None:
        self._stack = stack
        self._folder = folder
        self._servers: dict[Kind, Server] = {}
        self._engines: dict[Kind, Engine] = {}

    def server(self, kind: Kind) -> Server | None:
        """The server of this kind, ``None`` for SQLite, which needs none."""
        if kind == "sqlite":
            return None
        if kind not in self._servers:
            try:
                self._servers[kind] = self._stack.enter_context(server(kind))
            except ServerUnavailableError as exc:
                skip_or_fail(exc)
        return self._servers[kind]

    def engine(self, kind: Kind) -> Engine:
        """An engine on a migrated database of this run's own."""
        if kind not in self._engines:
            running = self.server(kind)
            if running is None:
                url = f"sqlite:///{self._folder / 'test.db'}"
            else:
                url = self._stack.enter_context(fresh_database(running))
            upgrade(url)
            self._engines[kind] = engine = make_engine(url, pool_size=10)
            self._stack.callback(engine.dispose)
        return self._engines[kind]


@pytest.fixture(scope="session")
def databases(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Databases]:
    with ExitStack() as stack:
        yield Databases(stack, tmp_path_factory.mktemp("sqlite"))


@pytest.fixture(scope="session")
def running_server(kind: Kind, databases: Databases) -> Server | None:
    """The server of this kind, ``None`` for SQLite, which needs none."""
    return databases.server(kind)


@pytest.fixture(scope="session")
def shared_engine(kind: Kind, databases: Databases) -> Engine:
    return databases.engine(kind)


@pytest.fixture(scope="session")
def migrated_url(shared_engine: Engine) -> str:
    """A database of this run's own, migrated."""
    return shared_engine.url.render_as_string(hide_password=False)


@pytest.fixture
def db(shared_engine: Engine) -> Engine:
    """An engine on the migrated database, its tables empty."""
    wipe(shared_engine)
    return shared_engine


@pytest.fixture
def world(db: Engine) -> Engine:
    """``db`` with a worker."""
    add_workers(db, "w")
    return db


@pytest.fixture
def fleet(db: Engine) -> Engine:
    """``db`` with two workers."""
    add_workers(db, "w", "other")
    return db


@pytest.fixture
def empty_url(running_server: Server | None, tmp_path) -> Iterator[str]:
    """A database without tables, for this test alone."""
    if running_server is None:
        yield f"sqlite:///{tmp_path / 'empty.db'}"
        return
    with fresh_database(running_server) as url:
        yield url


def wipe(engine: Engine) -> None:
    """Delete every row. Most tables have none, which one question tells of all of them."""
    tables = {table.name: table for table in reversed(Base.metadata.sorted_tables)}
    filled = [select(literal(name)).where(exists().select_from(table)) for name, table in tables.items()]
    with engine.begin() as conn:
        found = set(conn.scalars(union_all(*filled)))
        for name, table in tables.items():
            if name in found:
                conn.execute(delete(table))
