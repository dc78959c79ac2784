"""Batches take lines until somebody cancels them or they have ended."""

from __future__ import annotations

from collections.abc import Iterable

from sqlalchemy import Connection, select

from models_db.errors import BatchClosedError
from models_db.tables import Batch, BatchState


def require_open(conn: Connection, batch_ids: Iterable[str | None]) -> None:
    """Have these batches take lines until the transaction ends: who cancels or ends one waits for that.

    So nothing goes into a batch after it was cancelled, where it would run all the same. Must come before other locks.

    Raises:
        BatchClosedError: one is being cancelled, or has ended.
    """
    wanted = sorted({batch_id for batch_id in batch_ids if batch_id is not None})
    if not wanted:
        return
    query = (
        select(Batch.id, Batch.state)
        .where(Batch.id.in_(wanted))
        .order_by(Batch.id)
        .with_for_update(read=True, key_share=True)
    )
    for batch_id, state in conn.execute(query):
        if state.terminal or state is BatchState.CANCELLING:
            raise BatchClosedError(batch_id, state)
