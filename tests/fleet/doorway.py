"""A running ``tokenmill serve`` for tests: the application under Uvicorn, on a thread and a free port."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn

from tests.fleet.fleet import PATIENCE_S, wait_until
from workers.serve.app import make_app
from workers.settings import Settings


@contextmanager
def serving(settings: Settings, *, open_to_all: bool = True, timeout_s: float = 60.0) -> Iterator[str]:
    """Serve until the block ends; gives the address, such as ``http://127.0.0.1:40123``."""
    app = make_app(settings, open_to_all=open_to_all, timeout_s=timeout_s)
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    wait_until(lambda: server.started, PATIENCE_S, "the server to start")
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(PATIENCE_S)
