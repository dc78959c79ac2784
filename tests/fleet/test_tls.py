"""A Redis and databases that speak TLS alone and want a password: submit, run, stream, and no credential anywhere."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
import redis
from sqlalchemy import URL, make_url, text

from models_db.errors import DatabaseError
from models_db.session import make_engine
from models_db.tables import JobState
from tests.fleet.fleet import PATIENCE_S, Fleet, RedisServer, wait_until
from tests.servers import ServerUnavailableError, free_port, fresh_database, private_server, skip_or_fail
from workers.broker import BrokerUnavailableError
from workers.client import Client

PASSWORD = "correct-horse-battery"


class TlsRedisServer(RedisServer):
    """As ``RedisServer``, but nothing gets in without TLS and the password."""

    def __init__(self, folder: Path, certificate: Path, key: Path) -> None:
        program = shutil.which("redis-server")
        assert program is not None
        self.port = free_port()
        self.certificate = certificate
        self.folder = folder
        options = {
            "port": "0",
            "tls-port": str(self.port),
            "bind": "127.0.0.1",
            "tls-cert-file": str(certificate),
            "tls-key-file": str(key),
            "tls-ca-cert-file": str(certificate),
            "tls-auth-clients": "no",
            "requirepass": PASSWORD,
            "save": "",
            "dir": str(folder),
        }
        command = [program, *(part for name, value in options.items() for part in (f"--{name}", value))]
        self._log = (folder / "redis.log").open("wb")
        self._process = subprocess.Popen(command, stdout=self._log, stderr=self._log)
        self.client = redis.Redis(
            port=self.port, password=PASSWORD, ssl=True, ssl_ca_certs=str(certificate), host="localhost"
        )
        wait_until(self._answers, PATIENCE_S, "Redis to answer")

    @property
    def url(self) -> str:
        return (
            f"rediss://:{PASSWORD}@localhost:{self.port}/0"
            f"?ssl_cert_reqs=required&ssl_ca_certs={self.certificate}"
        )


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TlsRedisServer]:
    folder = tmp_path_factory.mktemp("tls")
    running = TlsRedisServer(folder, *make_certificate(folder))
    yield running
    running.stop()


def make_certificate(folder: Path) -> tuple[Path, Path]:
    """One for ``localhost`` that has signed itself, and its key."""
    certificate, key = folder / "cert.pem", folder / "key.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"),
            *("-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"),
            *("-keyout", str(key), "-out", str(certificate)),
        ],
        check=True,
        capture_output=True,
    )
    return certificate, key


def test_a_fleet_works_over_tls_and_prints_no_credential(server: TlsRedisServer, tmp_path: Path) -> None:
    fleet = Fleet(server, f"sqlite:///{tmp_path / 'fleet.db'}")
    try:
        worker = fleet.worker()
        with Client(fleet.settings) as client:
            job = client.submit("one two three", max_tokens=3, stream=True)
            assert job.wait(timeout_s=30).text == "one two three"
            assert "".join(event.text for event in job.stream(timeout_s=30)) == "one two three"
        assert fleet.send(prompt="four five").get(timeout=30)["text"].startswith("four five")
        fleet.wait_drained()
        stats = wait_until(fleet.app.control.inspect(timeout=2, limit=1).stats, PATIENCE_S, "an answer")
        assert PASSWORD not in str(stats)
        assert worker.stop() == 0
        assert PASSWORD not in worker.log
    finally:
        fleet.close()


def test_a_certificate_that_is_not_trusted_is_an_error_without_the_password(
    server: TlsRedisServer, tmp_path: Path
) -> None:
    url = f"rediss://:{PASSWORD}@localhost:{server.port}/0?ssl_cert_reqs=required"
    with Client(broker_url=url, database_url=None) as client, pytest.raises(BrokerUnavailableError) as caught:
        client.submit("one")
    assert "certificate" in str(caught.value)
    assert PASSWORD not in str(caught.value)


@dataclass(frozen=True)
class TlsDatabase:
    """A database that lets nobody in over TCP without TLS and the password."""

    url: str  # without what TLS needs
    certificate: Path  # of the server, which has signed it itself

    def trusting(self, certificate: Path) -> str:
        """The URL of a client that trusts this certificate, in the words of ``docs/hardening.md``."""
        verify = "ssl_ca=" if self.url.startswith("mysql") else "sslmode=verify-full&sslrootcert="
        return f"{self.url}?{verify}{certificate}"

    @property
    def in_clear(self) -> str:
        """The URL of a client that wants no TLS."""
        return f"{self.url}?{'ssl_disabled=true' if self.url.startswith('mysql') else 'sslmode=disable'}"


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("postgresql", marks=pytest.mark.postgres),
        pytest.param("mariadb", marks=pytest.mark.mysql),
    ],
)
def tls_database(request: pytest.FixtureRequest) -> Iterator[TlsDatabase]:
    """An empty database on a server of our own, for each kind."""
    kind = request.param
    with ExitStack() as stack:
        try:
            running = stack.enter_context(private_server(kind))
        except ServerUnavailableError as exc:
            skip_or_fail(exc)
        assert running.folder is not None
        certificate, key = make_certificate(running.folder)
        for file in (certificate, key):
            if running.user is not None:
                shutil.chown(file, running.user)
            file.chmod(0o600)
        database = stack.enter_context(fresh_database(running))
        engine = make_engine(database)
        with engine.begin() as conn:
            if kind == "postgresql":
                conn.execute(text(f"CREATE ROLE tls LOGIN SUPERUSER PASSWORD '{PASSWORD}'"))
            else:
                conn.execute(text(f"CREATE USER tls@'%' IDENTIFIED BY '{PASSWORD}'"))
                conn.execute(text("GRANT ALL ON *.* TO tls@'%'"))
        engine.dispose()
        running.stop()
        if kind == "postgresql":
            running.command += ["--ssl=on", f"--ssl_cert_file={certificate}", f"--ssl_key_file={key}"]
            rules = ["hostssl all tls 127.0.0.1/32 scram-sha-256", "host all tokenmill 127.0.0.1/32 trust"]
            (running.folder / "data" / "pg_hba.conf").write_text("\n".join(rules) + "\n")
            port = make_url(running.url).port
            url = URL.create("postgresql+psycopg", "tls", PASSWORD, "localhost", port)
        else:
            running.command += [
                "--require-secure-transport=ON",
                f"--ssl-cert={certificate}",
                f"--ssl-key={key}",
            ]
            (port,) = [int(part[7:]) for part in running.command if part.startswith("--port=")]
            url = URL.create("mysql+pymysql", "tls", PASSWORD, "localhost", port)
        running.start()
        url = url.set(database=make_url(database).database)
        yield TlsDatabase(url.render_as_string(hide_password=False), certificate)


def test_a_database_takes_jobs_over_tls(server: TlsRedisServer, tls_database: TlsDatabase) -> None:
    fleet = Fleet(server, tls_database.trusting(tls_database.certificate))
    try:
        with fleet.engine.connect() as conn:
            if fleet.engine.dialect.name == "postgresql":
                query = "SELECT ssl FROM pg_stat_ssl WHERE pid = pg_backend_pid()"
            else:
                query = "SELECT variable_value <> '' FROM information_schema.session_status "
                query += "WHERE variable_name = 'Ssl_cipher'"
            assert conn.scalar(text(query)), "the connection is encrypted"
        with Client(fleet.settings) as client:
            job = client.submit("one two three", max_tokens=3)
            assert fleet.state(job.id) is JobState.QUEUED
            if fleet.engine.dialect.name == "postgresql":  # a worker connects in the same way to both
                worker = fleet.worker()
                assert job.wait(timeout_s=30).text == "one two three"
                assert worker.stop() == 0
                assert PASSWORD not in worker.log
    finally:
        fleet.close()


@pytest.mark.parametrize("how", ["another certificate", "no TLS"])
def test_a_database_that_is_not_trusted_gets_no_job(
    server: TlsRedisServer, tls_database: TlsDatabase, tmp_path: Path, how: str
) -> None:
    server.client.flushall()
    url = tls_database.in_clear if how == "no TLS" else tls_database.trusting(make_certificate(tmp_path)[0])
    with Client(broker_url=server.url, database_url=url) as client, pytest.raises(DatabaseError) as caught:
        client.submit("one")
    assert PASSWORD not in str(caught.value)
    if how == "another certificate":
        assert "certificate" in str(caught.value)
    assert not [key for key in server.client.scan_iter() if server.client.type(key) == b"list"], "no message"
