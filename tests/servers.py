"""Database servers for tests: one that is named, one that already runs, or a private one from installed programs.

``TEST_POSTGRES_URL`` and ``TEST_MYSQL_URL`` name servers whose login may create databases. Otherwise a server on the
standard port that lets us in is used, otherwise a private one is started in a temporary folder on a free port and
stopped afterwards. Every test run works in databases of its own with random names, dropped at the end.
"""

from __future__ import annotations

import contextlib
import functools
import getpass
import glob
import os
import pwd
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NoReturn

import pytest
from sqlalchemy import make_url, text
from sqlalchemy.exc import DBAPIError

from models_db.errors import DatabaseError
from models_db.migrate import upgrade
from models_db.session import make_engine

Kind = Literal["sqlite", "postgresql", "mariadb"]

START_TIMEOUT_S = 60.0


class ServerUnavailableError(Exception):
    """No server of this kind runs here, and none can be started; the message says what was tried."""


def skip_or_fail(error: ServerUnavailableError) -> NoReturn:
    """Skip the test with a reason nobody can miss; in CI (``CI=true``) fail it."""
    if os.environ.get("CI", "").lower() in ("true", "1"):
        pytest.fail(f"CI needs this database: {error}", pytrace=False)
    pytest.skip(f"NOT TESTED ON THIS DATABASE: {error}")


@dataclass
class Server:
    """A server that may be connected to at ``url``. Only a private one has a process."""

    kind: Kind
    url: str
    folder: Path | None = None
    command: list[str] = field(default_factory=list)
    user: str | None = None
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start a private server (again) and wait until it lets us in."""
        assert self.folder is not None
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                self.command,
                stdout=log,
                stderr=log,
                cwd=self.folder,
                start_new_session=True,
                **_as(self.user),
            )
        deadline = time.monotonic() + START_TIMEOUT_S
        while (refusal := _refusal(self.url)) is not None:
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.stop()
                log_tail = (self.folder / "log").read_text(errors="replace")[-800:]
                raise ServerUnavailableError(
                    f"a private {self.kind} server did not start: {refusal}\n{log_tail}"
                )
            time.sleep(0.05)

    def stop(self) -> None:
        """Stop a private server; its data stays, so that it can be started again."""
        if self.process is None:
            return
        # SIGINT is PostgreSQL's fast shutdown, SIGTERM would wait for clients; MariaDB knows SIGTERM only.
        self.process.send_signal(signal.SIGINT if self.kind == "postgresql" else signal.SIGTERM)
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process = None


# ------------------------------------------------------------------------------------------------------- servers


@contextlib.contextmanager
def server(kind: Literal["postgresql", "mariadb"]) -> Iterator[Server]:
    """The named, running or private server, in this order.

    Raises:
        ServerUnavailableError: there is none and none can be started.
    """
    variable = "TEST_POSTGRES_URL" if kind == "postgresql" else "TEST_MYSQL_URL"
    if named := os.environ.get(variable):
        if (refusal := _refusal(named)) is not None:
            raise ServerUnavailableError(f"{variable} names a server that refuses: {refusal}")
        yield Server(kind, named)
        return
    for url in _standard_urls(kind):
        if _refusal(url) is None:
            yield Server(kind, url)
            return
    with private_server(kind) as private:
        yield private


@contextlib.contextmanager
def private_server(kind: Literal["postgresql", "mariadb"]) -> Iterator[Server]:
    """A server of our own, without durability, that may be stopped and started by the test.

    Raises:
        ServerUnavailableError: its programs are not installed, or it does not start.
    """
    folder = Path(tempfile.mkdtemp(prefix=f"tokenmill-{kind}-"))
    user = _unprivileged_user(kind)
    if user is not None:
        entry = pwd.getpwnam(user)
        os.chown(folder, entry.pw_uid, entry.pw_gid)
    own: Server | None = None
    try:
        own = (_prepare_postgresql if kind == "postgresql" else _prepare_mariadb)(folder, user)
        own.start()
        yield own
    finally:
        if own is not None:
            own.stop()
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def fresh_database(on: Server) -> Iterator[str]:
    """The URL of a new, empty database on this server, dropped afterwards."""
    name = f"tokenmill_test_{secrets.token_hex(6)}"
    _execute(on.url, f"CREATE DATABASE {name}")
    try:
        if on.kind == "postgresql":  # nothing in a test database needs to survive a power cut
            _execute(on.url, f"ALTER DATABASE {name} SET synchronous_commit = off")
        yield make_url(on.url).set(database=name).render_as_string(hide_password=False)
    finally:
        force = " WITH (FORCE)" if on.kind == "postgresql" else ""
        _execute(on.url, f"DROP DATABASE IF EXISTS {name}{force}")


def migrate(url: str) -> None:
    """Migrate a new database. An SQLite file becomes a copy of one that was migrated before, in a tenth of the time."""
    path = make_url(url).database
    if not url.startswith("sqlite:///") or path is None or Path(path).exists():
        upgrade(url)
        return
    Path(path).write_bytes(_migrated_file())


@functools.cache
def _migrated_file() -> bytes:
    """What an SQLite file without rows holds at the newest revision."""
    with tempfile.TemporaryDirectory(prefix="tokenmill-template-") as folder:
        path = Path(folder) / "template.db"
        upgrade(f"sqlite:///{path}")
        assert [each.name for each in path.parent.iterdir()] == [path.name], "nothing is in a log beside it"
        return path.read_bytes()


@contextlib.contextmanager
def fresh_database_url(kind: Kind, folder: Path) -> Iterator[str]:
    """The URL of a new, empty database of this kind; SQLite's file lies in ``folder``.

    Raises:
        ServerUnavailableError: see ``server``.
    """
    if kind == "sqlite":
        yield f"sqlite:///{folder / f'{secrets.token_hex(6)}.db'}"
        return
    with server(kind) as running, fresh_database(running) as url:
        yield url


# -------------------------------------------------------------------------------------------------------- pieces


def free_port() -> int:
    """A TCP port of the loopback interface that nobody listens on now.

    Below those that systems give to connections, or one of another test's could take it before a server does.
    """
    while True:
        port = 12_000 + secrets.randbelow(20_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def _standard_urls(kind: Literal["postgresql", "mariadb"]) -> list[str]:
    me = getpass.getuser()
    if kind == "postgresql":
        return [
            f"postgresql://{user}@127.0.0.1:5432/{database}"
            for user in dict.fromkeys([me, "postgres"])
            for database in ("postgres", "test")
        ]
    sockets = [path for path in ("/run/mysqld/mysqld.sock", "/tmp/mysql.sock") if Path(path).exists()]
    users = list(dict.fromkeys([me, "root"]))
    return [f"mariadb://{user}@127.0.0.1:3306/" for user in users] + [
        f"mariadb://{user}@localhost/?unix_socket={path}" for user in users for path in sockets
    ]


def _refusal(url: str) -> str | None:
    """Why this login cannot create a database, or ``None`` when it can."""
    name = f"tokenmill_probe_{secrets.token_hex(6)}"
    try:
        _execute(url, f"CREATE DATABASE {name}")
        _execute(url, f"DROP DATABASE {name}")
    except (DatabaseError, DBAPIError) as exc:
        return str(exc).split("\n")[0]
    return None


def _execute(url: str, statement: str) -> None:
    engine = make_engine(url)
    try:
        with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as conn:
            conn.execute(text(statement))
    finally:
        engine.dispose()


def _unprivileged_user(kind: str) -> str | None:
    """Whom to run a server as when we are root, which PostgreSQL refuses to be run by."""
    if os.geteuid() != 0:
        return None
    for name in ("postgres" if kind == "postgresql" else "mysql", "nobody"):
        with contextlib.suppress(KeyError):
            return pwd.getpwnam(name).pw_name
    raise ServerUnavailableError(f"{kind}: running as root, and there is no user to drop to")


def _as(user: str | None) -> dict[str, object]:
    if user is None:
        return {}
    return {"user": user, "group": pwd.getpwnam(user).pw_gid, "extra_groups": []}


def _program(*names: str) -> str:
    folders = sorted(glob.glob("/usr/lib/postgresql/*/bin"), key=lambda path: -float(path.split("/")[4]))
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), *folders, "/usr/sbin", "/usr/local/sbin"])
    for name in names:
        if found := shutil.which(name, path=path):
            return os.path.realpath(found)
    raise ServerUnavailableError(f"no server answers on its standard port, and {names[0]} is not installed")


def _run(command: list[str], folder: Path, user: str | None) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, **_as(user))
    if done.returncode:
        raise ServerUnavailableError(f"{command[0]} failed: {(done.stderr or done.stdout)[-800:]}")


def _prepare_postgresql(folder: Path, user: str | None) -> Server:
    data, port = folder / "data", free_port()
    postgres = Path(_program("postgres"))
    initdb = postgres.with_name("initdb")
    options = ["-A", "trust", "-U", "tokenmill", "-E", "UTF8", "--no-locale", "--no-sync"]
    _run([str(initdb), "-D", str(data), *options], folder, user)
    settings = {
        "listen_addresses": "127.0.0.1",
        "port": str(port),
        "unix_socket_directories": str(folder),
        "fsync": "off",
        "synchronous_commit": "off",
        "full_page_writes": "off",
    }
    command = [str(postgres), "-D", str(data), *(f"--{key}={value}" for key, value in settings.items())]
    return Server("postgresql", f"postgresql://tokenmill@127.0.0.1:{port}/postgres", folder, command, user)


def _prepare_mariadb(folder: Path, user: str | None) -> Server:
    data, port = folder / "data", free_port()
    daemon = _program("mariadbd", "mysqld")
    install = _program("mariadb-install-db", "mysql_install_db")
    options = ["--auth-root-authentication-method=normal", "--skip-test-db", f"--tmpdir={folder}"]
    _run([install, "--no-defaults", f"--datadir={data}", *options], folder, user)
    command = [
        daemon,
        "--no-defaults",
        f"--datadir={data}",
        f"--tmpdir={folder}",
        f"--port={port}",
        f"--socket={folder / 'socket'}",
        f"--pid-file={folder / 'pid'}",
        "--bind-address=127.0.0.1",
        "--innodb-flush-log-at-trx-commit=0",
        "--innodb-buffer-pool-size=32M",
        "--innodb-log-file-size=16M",
    ]
    url = f"mariadb://root@localhost/?unix_socket={folder / 'socket'}"
    return Server("mariadb", url, folder, command, user)
