"""A Redis that speaks TLS alone and wants a password: submit, run, stream, and no credential anywhere."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from tests.fleet.fleet import PATIENCE_S, Fleet, RedisServer, wait_until
from tests.servers import free_port
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
    running = TlsRedisServer(folder, certificate, key)
    yield running
    running.stop()


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
