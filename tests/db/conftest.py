"""Every test that asks for ``db`` runs on SQLite, PostgreSQL and MariaDB, on empty tables."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import get_args

import pytest
from sqlalchemy import Engine, delete

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


@pytest.fixture(scope="session")
def running_server(kind: Kind) -> Iterator[Server | None]:
    """The server of this kind, ``None`` for SQLite, which needs none."""
    if kind == "sqlite":
        yield None
        return
    with ExitStack() as stack:
        try:
            running = stack.enter_context(server(kind))
        except ServerUnavailableError as exc:
            skip_or_fail(exc)
        yield running


@pytest.fixture(scope="session")
def migrated_url(running_server: Server | None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A database of this run's own, migrated."""
    with ExitStack() as stack:
        if running_server is None:
            url = f"sqlite:///{tmp_path_factory.mktemp('sqlite') / 'test.db'}"
        else:
            url = stack.enter_context(fresh_database(running_server))
        upgrade(url)
        yield url


@pytest.fixture(scope="session")
def shared_engine(migrated_url: str) -> Iterator[Engine]:
    engine = make_engine(migrated_url, pool_size=10)
    yield engine
    engine.dispose()


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
def empty_url(running_server: Server | None, tmp_path) -> Iterator[str]:
    """A database without tables, for this test alone."""
    if running_server is None:
        yield f"sqlite:///{tmp_path / 'empty.db'}"
        return
    with fresh_database(running_server) as url:
        yield url


def wipe(engine: Engine) -> None:
    """Delete every row."""
    with engine.begin() as conn:
        for table in reversed(Base.metadata.sorted_tables):
            conn.execute(delete(table))
