"""Callbacks for tests: jobs that have one, receivers that are none, and senders without chance."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from sqlalchemy import Engine, update

from models_db.callbacks import (
    Callback,
    CallbackRecord,
    CallbackState,
    DueCallback,
    NewCallback,
    claim_due,
    database_now,
    due_hosts,
    list_callbacks,
)
from models_db.tables import JobState
from tests.db.helpers import add_jobs, at, claim_one, finish_one
from workers.callbacks.schedule import Answer
from workers.callbacks.sender import CallbackSender, SenderLimits
from workers.callbacks.signing import new_secret, verify_callback
from workers.callbacks.urls import CallbackRules, CallbackUrl, HostRule

HOST = "hooks.example.com"
CALLBACK = NewCallback(f"https://{HOST}/done?token=x", HOST)
LEASE = timedelta(seconds=60)
SECRET = new_secret()


def add_with_callback(db: Engine, *ids: str, callback: NewCallback = CALLBACK, **fields: Any) -> None:
    add_jobs(db, *ids, callback=callback, **fields)


def run_to_end(db: Engine, job_id: str, state: JobState = JobState.SUCCEEDED, attempt: int = 1) -> None:
    claim_one(db, job_id, "w")
    assert finish_one(db, job_id, attempt, "w", state)


def of_job(db: Engine, job_id: str) -> CallbackRecord:
    with db.connect() as conn:
        (record,) = list_callbacks(conn, ids=[job_id])
    return record


def states(db: Engine) -> dict[str | None, CallbackState]:
    with db.connect() as conn:
        return {it.job_id or it.batch_id: it.state for it in list_callbacks(conn, limit=1000)}


def take(db: Engine, limit: int = 10, host: str = HOST, lease: timedelta = LEASE) -> list[DueCallback]:
    with db.begin() as conn:
        return claim_due(conn, host, limit, database_now(conn), lease)


def hosts(db: Engine, **options: Any) -> tuple[list[str], str]:
    with db.connect() as conn:
        return due_hosts(conn, database_now(conn), **options)


class Hooks:
    """Stands for the receivers: keeps what comes, and answers."""

    def __init__(self, *answers: Answer) -> None:
        self.sent: list[tuple[CallbackUrl, Mapping[str, str], bytes]] = []
        self._answers = list(answers)

    async def post(self, url: CallbackUrl, headers: Mapping[str, str], body: bytes) -> Answer:
        self.sent.append((url, headers, body))
        return self._answers.pop(0) if self._answers else Answer(204)

    def events(self) -> list[dict[str, Any]]:
        return [verify_callback(SECRET, headers, body) for _, headers, body in self.sent]


def sender_for(
    db: Engine,
    hooks: Hooks,
    *,
    hosts: tuple[str, ...] = (HOST,),
    secrets: tuple[str, ...] = (SECRET,),
    allow_http: bool = False,
    **limits: Any,
) -> CallbackSender:
    rules = CallbackRules(tuple(map(HostRule.parse, hosts)), allow_http)
    # Chance takes the shortest pause and leaves hosts in their order; the host's own pauses are over at once.
    clock = iter(range(0, 10**9, 1000))
    spread = random.Random(1)
    spread.uniform = lambda low, high: low  # type: ignore[method-assign]
    spread.shuffle = lambda rows: None  # type: ignore[method-assign]
    return CallbackSender(
        db, rules, secrets, hooks, SenderLimits(**limits), monotonic=lambda: next(clock), spread=spread
    )


def send(sender: CallbackSender) -> None:
    asyncio.run(sender.send_due())


def make_due(db: Engine) -> None:
    """Let the time of all that waits for its next try come."""
    with db.begin() as conn:
        conn.execute(update(Callback).where(Callback.state == "due").values(due_at=at(0)))
