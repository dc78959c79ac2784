"""Cancelling a batch of any size, in small transactions, so that a running fleet hardly notices.

The batch is marked as ``cancelling`` first: from then on no line of it goes in any more, and who was cut off half-way,
or anybody else, takes it up again by doing the same. The jobs follow in pieces, in the order of their lines. What a
worker starts meanwhile is flagged for it when its piece comes, as all that runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import datetime
from functools import partial

from sqlalchemy import Connection, Engine, func, select, true

from models_db.batches import finish_batch_if_done, set_batch_state
from models_db.errors import UnknownBatchError
from models_db.jobs import request_cancel
from models_db.session import reading, transaction
from models_db.tables import Batch, BatchState, Job, JobState

PIECE = 1000
"""Lines whose jobs are cancelled in one transaction: less than workers wait for a lock, also on a slow database."""

_REST = 0.25  # of the time of a piece, for others: SQLite lets in who happens to look while nobody writes


def mark_cancelling(conn: Connection, batch_id: str, *, at: datetime | None = None) -> BatchState:
    """The first step: have nothing more go in. Returns the state afterwards; an ended batch stays as it is.

    Raises:
        UnknownBatchError: there is no such batch.
    """
    set_batch_state(conn, batch_id, BatchState.CANCELLING, at=at)
    state = conn.scalar(select(Batch.state).where(Batch.id == batch_id))
    if state is None:
        raise UnknownBatchError(batch_id)
    return state


def cancel_batch(
    engine: Engine,
    batch_id: str,
    *,
    piece: int = PIECE,
    at: datetime | None = None,
    report: Callable[[int, int], None] = lambda done, lines: None,
    pause: Callable[[float], object] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> BatchState:
    """Cancel a batch: queued jobs end at once, running ones are flagged, it is ``cancelling`` until all ended.

    Any number of processes may do this at once. Takes an engine, because it commits by itself. An exception of
    ``report`` or ``pause`` ends it between two transactions, to be taken up again.

    Args:
        piece: lines a transaction.
        at: when the jobs end; each at the present of its transaction when unset.
        report: called after each piece with the lines that are done with, of how many.
        pause: lets others have the database for so many seconds, after each piece.
        clock: monotonic seconds.

    Returns:
        The batch's state afterwards.

    Raises:
        UnknownBatchError: there is no such batch.
        DatabaseUnavailableError, CommitUnknownError: some pieces may be done. Do it again.
    """
    state = transaction(engine, partial(mark_cancelling, batch_id=batch_id, at=at))
    if state.terminal:
        return state
    with reading(engine) as conn:
        last = conn.scalar(select(func.max(Job.position)).where(Job.batch_id == batch_id))
    lines = 0 if last is None else last + 1

    def do(step: Callable[[Connection], int], done: int) -> int:
        began = clock()
        count = transaction(engine, step)
        report(done, lines)
        pause(_REST * (clock() - began) if count else 0.0)
        return count

    for begin in range(0, lines, piece):
        end = min(begin + piece, lines)
        do(partial(_cancel_lines, batch_id=batch_id, begin=begin, end=end, at=at), end)
    # What has been handed back or queued again meanwhile: next to nothing.
    while do(partial(_cancel_rest, batch_id=batch_id, limit=piece, at=at), lines):
        pass
    return transaction(engine, partial(finish_batch_if_done, batch_id=batch_id, at=at)) or state


def _cancel_lines(conn: Connection, batch_id: str, begin: int, end: int, at: datetime | None) -> int:
    ids = open_lines(conn, batch_id, begin, end)
    request_cancel(conn, ids, at=at)
    return len(ids)


def open_lines(conn: Connection, batch_id: str, begin: int, end: int) -> list[str]:
    """Ids of the jobs that wait or run, of the lines from ``begin`` to before ``end``."""
    query = select(Job.id).where(
        Job.batch_id == batch_id,
        Job.position >= begin,
        Job.position < end,
        # Written so that no index on the state is used, which would go through all that wait for each piece.
        func.lower(Job.state).in_([JobState.QUEUED.value, JobState.RUNNING.value]),
    )
    return list(conn.scalars(query))


def _cancel_rest(conn: Connection, batch_id: str, limit: int, at: datetime | None) -> int:
    ids = to_cancel(conn, batch_id, limit)
    request_cancel(conn, ids, at=at)
    return len(ids)


def to_cancel(conn: Connection, batch_id: str, limit: int) -> list[str]:
    """Ids of jobs of the batch that wait, or that run and are not flagged; so many at most.

    It costs as much as that is, however many lines the batch has.
    """
    ids: list[str] = []
    # One state at a time, as the index has them.
    for state, wanted in (
        (JobState.QUEUED, true()),
        (JobState.RUNNING, Job.cancel_requested.is_(False)),
    ):
        query = (
            select(Job.id)
            .where(Job.batch_id == batch_id, Job.state == state, wanted)
            .order_by(Job.published_at)  # which the index has, too
            .limit(limit - len(ids))
        )
        ids.extend(conn.scalars(query))
    return ids
