"""A real receiver of callbacks: an HTTP or HTTPS server on loopback that keeps what it gets and answers as told."""

from __future__ import annotations

import json
import ssl
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, Self


@dataclass(frozen=True, slots=True)
class Received:
    """One request. Header names are lower case."""

    path: str
    headers: Mapping[str, str]
    body: bytes

    @property
    def event(self) -> Any:
        return json.loads(self.body)

    @property
    def id(self) -> str:
        return self.headers["webhook-id"]


@dataclass(frozen=True, slots=True)
class Reply:
    """How to answer. ``before`` runs first, on the request's thread."""

    status: int = 204
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    before: Callable[[Received], object] = lambda request: None


class Receiver:
    """Answers with ``reply``, or first with the ``script``, one for each request."""

    def __init__(
        self,
        reply: Reply | None = None,
        *,
        script: Sequence[Reply] = (),
        certificate: tuple[Path, Path] | None = None,
    ) -> None:
        self.received: list[Received] = []
        self.at_once = 0
        self.most_at_once = 0
        self.reply = reply or Reply()
        self._script = list(script)
        self._news = threading.Condition()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                receiver._answer(self)

            do_GET = do_POST  # noqa: N815 - the name that http.server looks for

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        if certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(*certificate)
            self._server.socket = context.wrap_socket(
                self._server.socket, server_side=True, do_handshake_on_connect=False
            )
        self.port = int(self._server.server_port)
        self._scheme = "http" if certificate is None else "https"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    def url(self, path: str = "/hook", host: str = "127.0.0.1") -> str:
        return f"{self._scheme}://{host}:{self.port}{path}"

    @property
    def ids(self) -> list[str]:
        return [request.id for request in self.received]

    def wait_for(self, count: int, timeout_s: float = 30) -> list[Received]:
        """Wait until so many requests have come."""
        with self._news:
            assert self._news.wait_for(lambda: len(self.received) >= count, timeout_s), (
                f"{len(self.received)} of {count} requests came within {timeout_s:g}s"
            )
            return list(self.received)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)

    def _answer(self, handler: BaseHTTPRequestHandler) -> None:
        length = int(handler.headers.get("content-length") or 0)
        headers = {name.lower(): value for name, value in handler.headers.items()}
        request = Received(handler.path, headers, handler.rfile.read(length))
        with self._news:
            self.received.append(request)
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
            reply = self._script.pop(0) if self._script else self.reply
            self._news.notify_all()
        try:
            reply.before(request)
            handler.send_response(reply.status)
            for name, value in reply.headers.items():
                handler.send_header(name, value)
            if reply.status != 204:
                handler.send_header("content-length", str(len(reply.body)))
            handler.end_headers()
            handler.wfile.write(reply.body)
        except OSError:
            pass  # the sender has gone
        finally:
            with self._news:
                self.at_once -= 1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def make_certificate(folder: Path, name: str) -> tuple[Path, Path]:
    """A self-signed certificate for this host name, and its key."""
    certificate, key = folder / f"{name}.pem", folder / f"{name}.key"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"),
            *("-subj", f"/CN={name}", "-addext", f"subjectAltName=DNS:{name}"),
            *("-keyout", str(key), "-out", str(certificate)),
        ],
        check=True,
        capture_output=True,
    )
    return certificate, key
