"""Batches that came through ``/v1/batches``, and which server feeds them.

Every function works inside the caller's transaction and never commits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, insert, or_, select, update

from models_db.base import utcnow
from models_db.batches import BatchProgress, batch_progress
from models_db.door_tables import ApiBatch
from models_db.tables import TERMINAL_BATCH_STATES, Batch


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
    """The tenant's batch."""
    query = select(*_COLUMNS).where(ApiBatch.batch_id == batch_id, ApiBatch.tenant == tenant)
    row = conn.execute(query).one_or_none()
    progress = None if row is None else batch_progress(conn, batch_id)
    return None if row is None or progress is None else (ApiBatchRecord(*row), progress)


def list_api_batches(
    conn: Connection, tenant: str, *, after: str | None = None, limit: int = 20
) -> list[tuple[ApiBatchRecord, BatchProgress]]:
    """The tenant's batches, newest first, those behind the batch ``after``."""
    query = select(*_COLUMNS).where(ApiBatch.tenant == tenant)
    if after is not None and (last := find_api_batch(conn, after, tenant)) is not None:
        moment = last[0].created_at
        query = query.where(
            or_(ApiBatch.created_at < moment, (ApiBatch.created_at == moment) & (ApiBatch.batch_id < after))
        )
    query = query.order_by(ApiBatch.created_at.desc(), ApiBatch.batch_id.desc()).limit(limit)
    records = [ApiBatchRecord(*row) for row in conn.execute(query)]
    found = [(record, batch_progress(conn, record.batch_id)) for record in records]
    return [(record, progress) for record, progress in found if progress is not None]


def open_api_batches(conn: Connection) -> list[ApiBatchRecord]:
    """Batches that are not done, or whose output is not written, the oldest first."""
    query = (
        select(*_COLUMNS)
        .join(Batch, Batch.id == ApiBatch.batch_id)
        .where(or_(Batch.state.not_in(TERMINAL_BATCH_STATES), ApiBatch.output_file_id.is_(None)))
        .order_by(ApiBatch.created_at, ApiBatch.batch_id)
    )
    return [ApiBatchRecord(*row) for row in conn.execute(query)]


def take_feeding(conn: Connection, batch_id: str, feeder: str, seen_beat: int) -> bool:
    """Become the one that feeds the batch, unless someone has moved its counter since it was seen."""
    changed = conn.execute(
        update(ApiBatch)
        .where(ApiBatch.batch_id == batch_id, ApiBatch.feeder_beat == seen_beat)
        .values(feeder=feeder, feeder_beat=seen_beat + 1)
    )
    return changed.rowcount == 1


def beat_feeding(conn: Connection, batch_id: str, feeder: str) -> bool:
    """Show that this feeder lives; ``False`` when another has taken the batch over."""
    changed = conn.execute(
        update(ApiBatch)
        .where(ApiBatch.batch_id == batch_id, ApiBatch.feeder == feeder)
        .values(feeder_beat=ApiBatch.feeder_beat + 1)
    )
    return changed.rowcount == 1


def set_output(
    conn: Connection, batch_id: str, feeder: str, *, output_file_id: str, error_file_id: str | None
) -> bool:
    """Note the files that were written; ``False`` when another has taken the batch over."""
    changed = conn.execute(
        update(ApiBatch)
        .where(ApiBatch.batch_id == batch_id, ApiBatch.feeder == feeder)
        .values(output_file_id=output_file_id, error_file_id=error_file_id)
    )
    return changed.rowcount == 1
