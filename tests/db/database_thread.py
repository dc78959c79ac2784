"""A database thread at work in a test: started, held up so that operations wait together, its commits counted."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from contextlib import contextmanager

from sqlalchemy import event

from models_db.claims import FinishItem
from models_db.tables import JobState
from models_db.writer import DatabaseThread
from tests.db.helpers import new_result

LIMIT_S = 20


@contextmanager
def running(engine, **kw):
    """The thread of worker "w", stopped in the end, whatever it still has."""
    thread = DatabaseThread(engine, "w", **kw)
    thread.start()
    try:
        yield thread
    finally:
        thread.stop(drain=False, timeout_s=LIMIT_S)


def success(job_id, attempt=1, text="text"):
    """The end of a job with this text."""
    return FinishItem(job_id, attempt, JobState.SUCCEEDED, new_result(text))


def get(future: Future):
    """The answer to an operation, which comes in time."""
    return future.result(LIMIT_S)


@contextmanager
def commits(engine):
    """Count the commits of an engine."""
    count = []

    def note(_conn):
        count.append(1)

    event.listen(engine, "commit", note)
    try:
        yield count
    finally:
        event.remove(engine, "commit", note)


@contextmanager
def held_up(thread):
    """Keep the thread busy inside a transaction of its own, so that what is submitted now waits together."""
    entered, let_go = threading.Event(), threading.Event()

    def work(_conn):
        entered.set()
        assert let_go.wait(LIMIT_S)

    blocker = thread.call(work)
    assert entered.wait(LIMIT_S)
    try:
        yield
    finally:
        let_go.set()
        get(blocker)
