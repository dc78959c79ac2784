"""The servers under a chaos run: a Redis that may be killed and brought back, databases of each kind."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import redis
from sqlalchemy import Engine, make_url, text
from sqlalchemy.exc import DBAPIError

from models_db.session import make_engine
from tests.fleet.fleet import wait_until
from tests.servers import Kind, Server, fresh_database, private_server
from workers.private_redis import find_redis_server, free_port

UNACKED = ("unacked", "unacked_index")


class ChaosRedis:
    """A redis-server on a port that stays the same; with ``persistent`` an append-only file outlives a kill."""

    def __init__(self, folder: Path, *, persistent: bool = False) -> None:
        self._data = folder / "redis"
        self._data.mkdir(parents=True)
        self.port = free_port()
        self.persistent = persistent
        self._process: subprocess.Popen[bytes] | None = None
        self.client = redis.Redis(port=self.port, socket_timeout=5)

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def running(self) -> bool:
        """Whether it has been started, and not been killed since."""
        return self._process is not None

    def start(self) -> None:
        """Start it and wait until it has loaded what it keeps."""
        keep = ["--appendonly", "yes" if self.persistent else "no"]
        command = [str(find_redis_server()), "--port", str(self.port), "--bind", "127.0.0.1", "--save", ""]
        with (self._data / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [*command, "--dir", str(self._data), *keep], stdout=log, stderr=log, start_new_session=True
            )
        wait_until(self._answers, 30, "Redis to answer")

    def kill(self, *, keep: bool = True) -> None:
        """SIGKILL. Without ``keep`` its file is lost, too."""
        assert self._process is not None
        self._process.kill()
        self._process.wait(30)
        self._process = None
        if not keep:
            shutil.rmtree(self._data / "appendonlydir", ignore_errors=True)

    def cut(self) -> int:
        """Close every connection of a client; returns how many there were."""
        count = 0
        for kind in ("normal", "pubsub"):
            with contextlib.suppress(redis.RedisError):
                count += int(self.client.execute_command("CLIENT", "KILL", "TYPE", kind, "SKIPME", "yes"))
        return count

    def unacked(self) -> int:
        """Deliveries that some worker has not acknowledged; the larger of the two records of them."""
        return max(int(self.client.hlen(UNACKED[0])), int(self.client.zcard(UNACKED[1])))

    def queued(self, queue: str) -> int:
        """Messages in this queue, of all priorities."""
        keys = [key for key in self.client.scan_iter(f"{queue}*", count=1000) if b"tag" not in key]
        return sum(int(self.client.llen(key)) for key in keys if self.client.type(key) == b"list")

    def stop(self) -> None:
        self.client.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait(30)
            self._process = None

    def _answers(self) -> bool:
        try:
            return bool(self.client.ping())
        except redis.RedisError:  # also while it loads its file
            return False


@contextlib.contextmanager
def database(kind: Kind, folder: Path) -> Iterator[tuple[str, Server | None]]:
    """An empty database of its own on a server of its own: its URL, and the server where it is one.

    Raises:
        ServerUnavailableError: its programs are not installed.
    """
    if kind == "sqlite":
        yield f"sqlite:///{folder / 'chaos.db'}", None
        return
    with private_server(kind) as server:
        # What is committed must outlive the server's death, as it does in production.
        durable = {"postgresql": "--synchronous_commit=on", "mariadb": "--innodb-flush-log-at-trx-commit=1"}
        server.command.append(durable[kind])
        with fresh_database(server) as url:
            if kind == "postgresql":
                _keep_commits(url)
            try:
                yield url, server
            finally:
                if server.process is None:  # left stopped; the clean-up needs it
                    server.start()


def drop_clients(engine: Engine) -> int:
    """Have the server close all its other clients' connections, as an administrator or a pooler does; how many."""
    postgres = engine.dialect.name == "postgresql"
    others = (
        "SELECT pid FROM pg_stat_activity WHERE pid <> pg_backend_pid() AND backend_type = 'client backend'"
        if postgres
        else "SELECT id FROM information_schema.processlist WHERE id <> connection_id() AND user <> 'system user'"
    )
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as conn:
        numbers = list(conn.scalars(text(others)))
        for number in numbers:
            with contextlib.suppress(DBAPIError):  # it has gone by itself
                conn.execute(text(f"SELECT pg_terminate_backend({number})" if postgres else f"KILL {number}"))
    return len(numbers)


def _keep_commits(url: str) -> None:
    engine = make_engine(url)
    name = make_url(url).database
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as conn:
        conn.execute(text(f"ALTER DATABASE {name} SET synchronous_commit = on"))
    engine.dispose()
