"""The plain Celery application that ``benchmarks.fleet`` compares with: one thread a job, result into SQL."""

from __future__ import annotations

import os

from celery import Celery

BROKER = "PEER_BROKER_URL"
RESULTS = "PEER_RESULT_URL"

app = Celery("peer", broker=os.environ.get(BROKER), backend=os.environ.get(RESULTS))
app.conf.update(
    task_acks_late=True,  # as ours: a job is acknowledged when its result is stored
    worker_prefetch_multiplier=4,
    broker_connection_retry_on_startup=True,
    database_engine_options={"connect_args": {"timeout": 60}},
)


@app.task(name="peer.echo")  # type: ignore[untyped-decorator, unused-ignore]
def echo(prompt: str, max_tokens: int) -> dict[str, object]:
    """Repeat the prompt's words, as the echo backend does."""
    words = prompt.split()
    said = [words[number % len(words)] for number in range(max_tokens)]
    return {"text": " ".join(said), "completion_tokens": max_tokens}
