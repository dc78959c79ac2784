"""The plain Celery application that ``benchmarks.fleet`` compares with: one thread a job, Celery's own results."""

from __future__ import annotations

import os

from celery import Celery

BROKER = "PEER_BROKER_URL"
RESULTS = "PEER_RESULT_URL"
PREFETCH = "PEER_PREFETCH"  # deliveries a thread

app = Celery("peer", broker=os.environ.get(BROKER), backend=os.environ.get(RESULTS))
app.conf.update(
    task_acks_late=True,  # as ours: a job is acknowledged when its result is stored
    worker_prefetch_multiplier=int(os.environ.get(PREFETCH, "4")),
    broker_connection_retry_on_startup=True,
    result_expires=86_400,
    database_engine_options={"pool_size": 20, "pool_pre_ping": False},
)


@app.task(name="peer.echo")  # type: ignore[untyped-decorator, unused-ignore]
def echo(prompt: str, max_tokens: int) -> dict[str, object]:
    """Repeat the prompt's words, as the echo backend does."""
    words = prompt.split()
    said = [words[number % len(words)] for number in range(max_tokens)]
    return {"text": " ".join(said), "completion_tokens": max_tokens}
