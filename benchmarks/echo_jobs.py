"""Jobs that only echo, for measurements without a model: their settings, their submission, a worker for them."""

from __future__ import annotations

import time
from pathlib import Path

from sqlalchemy import Engine, text

from benchmarks.worker_process import WorkerProcess, start_process
from models_db.jobs import insert_jobs
from workers.client import Client
from workers.client.sync import Submission
from workers.payload import BULK_PRIORITY
from workers.settings import Settings, load_settings

PROMPT = "the quick brown fox jumps over the lazy dog and runs away"
MAX_TOKENS = 32
_CHUNK = 500


def settings_for(broker_url: str, database_url: str, slots: int) -> Settings:
    """Of the client, and what ``worker`` tells its process of."""
    return load_settings(
        broker_url=broker_url,
        database_url=database_url,
        backend="echo",
        model="echo",
        log_level="warning",
        engine={"max_num_seqs": slots, "max_num_batched_tokens": max(512, slots)},
    )


def submit(client: Client, jobs: int) -> None:
    """Submit bulk jobs as ``tokenmill bulk run`` does."""
    request = {"model": "echo", "prompt": PROMPT, "max_tokens": MAX_TOKENS, "priority": BULK_PRIORITY}
    for _ in client.submit_each(request for _ in range(jobs)):
        pass


def database_alone(client: Client, engine: Engine, jobs: int) -> float:
    """Rows a second of ready jobs in transactions of the client's size. They are removed again."""
    payload = client.payload({"model": "echo", "prompt": PROMPT, "max_tokens": MAX_TOKENS})
    rows = client.new_jobs([Submission(payload)] * jobs)
    began = time.monotonic()
    for start in range(0, jobs, _CHUNK):
        with engine.begin() as connection:
            insert_jobs(connection, rows[start : start + _CHUNK])
    rate = jobs / (time.monotonic() - began)
    with engine.begin() as connection:
        connection.execute(text("DELETE FROM job"))
    return rate


def worker(settings: Settings, folder: Path) -> WorkerProcess:
    """Start one with these settings; its log goes into the folder."""
    slots = settings.engine.max_num_seqs
    variables = {
        "TOKENMILL_BROKER_URL": settings.broker_url,
        "TOKENMILL_DATABASE_URL": settings.database_url,
        "TOKENMILL_BACKEND": "echo",
        "TOKENMILL_MODEL": "echo",
        "TOKENMILL_LOG_LEVEL": settings.log_level,
        "TOKENMILL_ENGINE__MAX_NUM_SEQS": str(slots),
        "TOKENMILL_ENGINE__MAX_NUM_BATCHED_TOKENS": str(settings.engine.max_num_batched_tokens),
    }
    return start_process(["-m", "workers.cli", "worker", "--once"], variables, folder / "tokenmill.log")
