"""A PgBouncer of our own between programs and a PostgreSQL server: transactions share few connections."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import URL, make_url
from sqlalchemy.exc import DBAPIError

from models_db.errors import DatabaseError
from models_db.session import make_engine
from tests.servers import free_port

SERVER_CONNECTIONS = 3  # fewer than clients have: theirs are handed round
START_TIMEOUT_S = 20.0


class PgBouncer:
    """Pools by transaction; ``stop`` drops every connection of its clients, ``start`` comes back on the same port."""

    def __init__(self, program: str, folder: Path, server: URL) -> None:
        self._program = program
        self._folder = folder
        self.port = free_port()
        self._user = None if os.geteuid() else "nobody"  # it refuses to be run by root
        login = f"host={server.host or '127.0.0.1'} port={server.port or 5432} user={server.username or ''}"
        password = f" password='{server.password}'" if server.password else ""
        self._config = folder / "pgbouncer.ini"
        self._config.write_text(
            f"[databases]\n* = {login}{password}\n"
            "[pgbouncer]\n"
            f"listen_addr = 127.0.0.1\nlisten_port = {self.port}\nunix_socket_dir =\n"
            "auth_type = any\n"
            "pool_mode = transaction\n"
            f"default_pool_size = {SERVER_CONNECTIONS}\n"
            "server_round_robin = 1\n"  # no client keeps what it had by chance
        )
        if self._user is not None:
            for path in (folder, self._config):
                os.chown(path, pwd.getpwnam(self._user).pw_uid, -1)
        self._process: subprocess.Popen[bytes] | None = None

    def url(self, direct: str) -> str:
        """The same database, through this."""
        through = make_url(direct).set(host="127.0.0.1", port=self.port, password=None, query={})
        return through.render_as_string(hide_password=False)

    def start(self, probe: str | None = None) -> None:
        """Start it, and wait until the database of ``probe``, a direct URL, answers through it."""
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [self._program, str(self._config)],
                stdout=log,
                stderr=log,
                start_new_session=True,
                user=self._user,
                extra_groups=None if self._user is None else [],
            )
        if probe is not None:
            self._wait(self.url(probe))

    def stop(self) -> None:
        """At once, as when it is killed: its clients are in the middle of something."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(10)
            self._process = None

    def _wait(self, url: str) -> None:
        engine = make_engine(url)
        end = time.monotonic() + START_TIMEOUT_S
        try:
            while True:
                try:
                    with engine.connect():
                        return
                except (DatabaseError, DBAPIError) as exc:
                    assert self._process is not None
                    if self._process.poll() is not None or time.monotonic() > end:
                        log = (self._folder / "log").read_text(errors="replace")[-800:]
                        raise AssertionError(f"PgBouncer does not answer: {exc}\n{log}") from exc
                    time.sleep(0.05)
        finally:
            engine.dispose()


@contextlib.contextmanager
def pgbouncer(direct: str) -> Iterator[PgBouncer]:
    """One in front of the server of this database; the test is skipped where it is not installed."""
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/usr/local/sbin"])
    program = shutil.which("pgbouncer", path=path)
    if program is None:
        pytest.skip("NOT TESTED: A CONNECTION POOLER: pgbouncer is not installed (apt-get install pgbouncer)")
    folder = Path(tempfile.mkdtemp(prefix="tokenmill-pgbouncer-"))
    made = PgBouncer(program, folder, make_url(direct))
    try:
        made.start(direct)
        yield made
    finally:
        made.stop()
        shutil.rmtree(folder, ignore_errors=True)
