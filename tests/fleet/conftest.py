"""Fleets of real processes: one private Redis for the session, one database for each test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import pytest
from sqlalchemy import Engine

from models_db.session import make_engine
from tests.fleet.fleet import Fleet, RedisServer
from tests.fleet.table_world import World
from tests.servers import (
    Kind,
    Server,
    ServerUnavailableError,
    fresh_database,
    migrate,
    server,
    skip_or_fail,
)

if TYPE_CHECKING:
    import openai

MARKS = {"sqlite": (), "postgresql": (pytest.mark.postgres,), "mariadb": (pytest.mark.mysql,)}
KINDS = [pytest.param(kind, id=kind, marks=MARKS[kind]) for kind in get_args(Kind)]

# Short times, so that a death is certain within a second or two.
FAST = {
    "heartbeat_interval_s": 0.3,
    "dead_after_s": 1.5,
    "visibility_timeout_s": 2.0,
    "lease_interval_s": 0.5,
}

MakeFleet = Callable[..., Fleet]


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """A Redis of this run's own."""
    running = RedisServer(tmp_path_factory.mktemp("redis"))
    yield running
    running.stop()


@pytest.fixture(scope="session")
def database_servers() -> Iterator[Callable[[Kind], Server]]:
    """Servers by kind, each started when first asked for."""
    running: dict[Kind, Server] = {}
    with ExitStack() as stack:

        def of(kind: Kind) -> Server:
            if kind not in running:
                assert kind != "sqlite"
                try:
                    running[kind] = stack.enter_context(server(kind))
                except ServerUnavailableError as exc:
                    skip_or_fail(exc)
            return running[kind]

        yield of


@pytest.fixture(params=KINDS)
def any_database_url(
    request: pytest.FixtureRequest, database_servers: Callable[[Kind], Server], tmp_path: Path
) -> Iterator[str]:
    """An empty database on each of the three kinds in turn."""
    kind: Kind = request.param
    if kind == "sqlite":
        yield f"sqlite:///{tmp_path / 'fleet.db'}"
        return
    with fresh_database(database_servers(kind)) as url:
        yield url


@pytest.fixture
def make_fleet(redis_server: RedisServer, tmp_path: Path) -> Iterator[MakeFleet]:
    """Makes a fleet on SQLite, or on the database given."""
    made: list[Fleet] = []

    def make(database_url: str | None = None, **settings: Any) -> Fleet:
        url = database_url or f"sqlite:///{tmp_path / f'fleet-{len(made)}.db'}"
        made.append(Fleet(redis_server, url, **(FAST | settings)))
        return made[-1]

    yield make
    for fleet in made:
        fleet.close()


@pytest.fixture(scope="module")
def module_fleet(redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[MakeFleet]:
    """Makes a fleet on SQLite that the tests of a module share, with the times that settings have by default."""
    with ExitStack() as stack:

        def make(**settings: Any) -> Fleet:
            url = f"sqlite:///{tmp_path_factory.mktemp('fleet') / 'fleet.db'}"
            fleet = Fleet(redis_server, url, **settings)
            stack.callback(fleet.close)
            return fleet

        yield make


@pytest.fixture(scope="module")
def url(fleet: Fleet) -> Iterator[str]:
    """The address of a doorway to the ``fleet`` that a module has."""
    from tests.fleet.doorway import serving  # web servers, which most modules do without

    with serving(fleet.settings) as address:
        yield address


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    """OpenAI's own client of the doorway."""
    import openai

    with openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0) as made:
        yield made


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    """A migrated SQLite database, for delivery tables without processes."""
    url = f"sqlite:///{tmp_path / 'table.db'}"
    migrate(url)
    engine = make_engine(url)
    yield engine
    engine.dispose()


@pytest.fixture
def world(engine: Engine) -> World:
    """Delivery tables of one database, see ``table_world``."""
    return World(engine)
