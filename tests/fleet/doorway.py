"""``tokenmill serve`` for tests: the application under Uvicorn, on a thread and a free port; batches of its API."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import uvicorn

from models_db import api_batches, batches, files
from models_db.base import utcnow
from models_db.session import transaction
from tests.fleet.fleet import PATIENCE_S, wait_until
from workers.client import Client
from workers.serve.app import make_app
from workers.settings import Settings

IDLE = "nobody"  # a model without workers


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


def line(custom_id: str, words: str, **body: Any) -> str:
    """A line of a batch of chats."""
    whole = {"model": "echo", "messages": [{"role": "user", "content": words}], "temperature": 0} | body
    return json.dumps(
        {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": whole}
    )


def api_batch(client: Client, lines: int, *, model: str = IDLE, tenant: str = "") -> str:
    """A batch of the API with so many lines that nobody feeds yet."""
    rows = "\n".join(line(f"q{n}", f"word{n}", max_tokens=1, model=model) for n in range(lines)).encode()

    def create(conn: Any) -> str:
        file = files.store_file(conn, io.BytesIO(rows), tenant=tenant, filename="in.jsonl", purpose="batch")
        due = utcnow() + timedelta(hours=24)
        batch_id = batches.create_batch(conn, name="in.jsonl", deadline_at=due)
        api_batches.add_api_batch(
            conn,
            batch_id,
            tenant=tenant,
            endpoint="/v1/chat/completions",
            completion_window="24h",
            input_file_id=file.id,
            labels=None,
        )
        return batch_id

    return transaction(client.engine(), create)
