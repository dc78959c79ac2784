"""Batches that came through ``/v1/batches``, and which server feeds them.

Every function works inside the caller's transaction and never commits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, insert, or_, select, update

from models_db.base import utcnow
from models_db.batches import BatchProgress, batches_progress
from models_db.door_tables import ApiBatch
from models_db.tables import TERMINAL_BATCH_STATES, Batch, BatchState


@dataclass(frozen=True, slots=True)
class ApiBatchRecord:
    """A batch with what the API adds to it."""

    batch_id: str
    tenant: str
    endpoint: str
    completion_window: str
    input_file_id: str
    output_file_id: str | None
    error_file_id: str | None
    answered: int | None  # lines of the files; unset until they are written
    unanswered: int | None
    labels: Mapping[str, Any] | None
    feeder: str | None
    feeder_beat: int
    created_at: datetime


_COLUMNS = tuple(getattr(ApiBatch, name) for name in ApiBatchRecord.__dataclass_fields__)


def add_api_batch(
    conn: Connection,
    batch_id: str,
    *,
    tenant: str,
    endpoint: str,
    completion_window: str,
    input_file_id: str,
    labels: Mapping[str, Any] | None,
    at: datetime | None = None,
) -> None:
    """Note what the API knows of a batch that has been created."""
    conn.execute(
        insert(ApiBatch).values(
            batch_id=batch_id,
            tenant=tenant,
            endpoint=endpoint,
            completion_window=completion_window,
            input_file_id=input_file_id,
            labels=None if labels is None else dict(labels),
            feeder_beat=0,
            created_at=at or utcnow(),
        )
    )


def find_api_batch(
    conn: Connection, batch_id: str, tenant: str
) -> tuple[ApiBatchRecord, BatchProgress] | None:
    """The tenant's batch. Its tokens are not counted: the API does not show them."""
    query = select(*_COLUMNS).where(ApiBatch.batch_id == batch_id, ApiBatch.tenant == tenant)
    found = _with_progress(conn, [ApiBatchRecord(*row) for row in conn.execute(query)])
    return found[0] if found else None


def list_api_batches(
    conn: Connection, tenant: str, *, after: str | None = None, limit: int = 20
) -> list[tuple[ApiBatchRecord, BatchProgress]]:
    """The tenant's batches, newest first, those behind the batch ``after``; as ``find_api_batch`` has them."""
    query = select(*_COLUMNS).where(ApiBatch.tenant == tenant)
    behind = select(ApiBatch.created_at).where(ApiBatch.batch_id == after, ApiBatch.tenant == tenant)
    if after is not None and (moment := conn.scalar(behind)) is not None:
        query = query.where(
            or_(ApiBatch.created_at < moment, (ApiBatch.created_at == moment) & (ApiBatch.batch_id < after))
        )
    query = query.order_by(ApiBatch.created_at.desc(), ApiBatch.batch_id.desc()).limit(limit)
    return _with_progress(conn, [ApiBatchRecord(*row) for row in conn.execute(query)])


def _with_progress(
    conn: Connection, records: Sequence[ApiBatchRecord]
) -> list[tuple[ApiBatchRecord, BatchProgress]]:
    by_id = {record.batch_id: record for record in records}
    return [(by_id[each.id], each) for each in batches_progress(conn, list(by_id), tokens=False)]


def open_api_batches(conn: Connection) -> list[ApiBatchRecord]:
    """Batches that are not done, or whose output is not written, the oldest first. One that failed has no output."""
    query = (
        select(*_COLUMNS)
        .join(Batch, Batch.id == ApiBatch.batch_id)
        .where(
            or_(Batch.state.not_in(TERMINAL_BATCH_STATES), ApiBatch.output_file_id.is_(None)),
            Batch.state != BatchState.FAILED,
        )
        .order_by(ApiBatch.created_at, ApiBatch.batch_id)
    )
    return [ApiBatchRecord(*row) for row in conn.execute(query)]


def take_feeding(conn: Connection, batch_id: str, feeder: str, seen_beat: int) -> bool:
    """Become the one that feeds the batch, unless someone has moved its counter since it was seen, or holds its row.

    A locked row is passed over: whoever feeds the batch lives, and writes its files.
    """
    seen = (ApiBatch.batch_id == batch_id, ApiBatch.feeder_beat == seen_beat)
    if conn.scalar(select(ApiBatch.batch_id).where(*seen).with_for_update(skip_locked=True)) is None:
        return False
    changed = conn.execute(update(ApiBatch).where(*seen).values(feeder=feeder, feeder_beat=seen_beat + 1))
    return changed.rowcount == 1


def beat_feeding(conn: Connection, batch_id: str, feeder: str) -> bool:
    """Show that this feeder lives; ``False`` when another has taken the batch over."""
    changed = conn.execute(
        update(ApiBatch)
        .where(ApiBatch.batch_id == batch_id, ApiBatch.feeder == feeder)
        .values(feeder_beat=ApiBatch.feeder_beat + 1)
    )
    return changed.rowcount == 1


def ended_at(conn: Connection, batch_id: str, *, lock: bool = False) -> datetime | None:
    """When the batch ended; ``None`` while it has not, or not again.

    Args:
        lock: keep it so until the transaction ends. To be taken before the row of ``beat_feeding``.
    """
    query = select(Batch.finished_at).where(Batch.id == batch_id)
    return conn.scalar(query.with_for_update() if lock else query)


def set_output(
    conn: Connection,
    batch_id: str,
    feeder: str,
    *,
    output_file_id: str,
    error_file_id: str | None,
    answered: int,
    unanswered: int,
) -> bool:
    """Note the files that were written, with their lines; ``False`` when another has taken the batch over."""
    changed = conn.execute(
        update(ApiBatch)
        .where(ApiBatch.batch_id == batch_id, ApiBatch.feeder == feeder)
        .values(
            output_file_id=output_file_id,
            error_file_id=error_file_id,
            answered=answered,
            unanswered=unanswered,
        )
    )
    return changed.rowcount == 1
