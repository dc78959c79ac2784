"""Deleting old files of ``/v1/files``, a few pieces at a time."""

from __future__ import annotations

from datetime import datetime
from functools import partial

from sqlalchemy import (
    ColumnElement,
    CompoundSelect,
    Connection,
    Engine,
    and_,
    delete,
    exists,
    or_,
    select,
    union_all,
    update,
)

from models_db.archive import Archive, Keep, archived, move
from models_db.callbacks import Callback, CallbackState
from models_db.door_tables import ApiBatch, FileChunk, StoredFile
from models_db.files import PRUNED
from models_db.session import reading
from models_db.tables import TERMINAL_BATCH_STATES, Batch, BatchState

_PIECES = 4  # of a megabyte, in a transaction


def old_file(older_than: datetime) -> ColumnElement[bool]:
    """Whether a file is as old as that and no batch needs it, or has begun to go.

    A batch needs its files while it is open or they are still to be written, while its callback is due, and for as long
    after its end as files are kept.
    """
    needed = StoredFile.id.in_(_needed(older_than))
    return or_(StoredFile.purpose == PRUNED, and_(StoredFile.created_at < older_than, ~needed))


def unwritten(batch: type[Batch]) -> ColumnElement[bool]:
    """Whether the answers of a batch of ``/v1/batches``, joined with its row here, are still to go into a file."""
    return and_(ApiBatch.output_file_id.is_(None), batch.state != BatchState.FAILED)


def prune_files(engine: Engine, archive: Archive | None, older_than: datetime, chunk: int) -> int:
    """Delete the old files; how many.

    First they are gone for everybody else, then their pieces are deleted. After a crash the next run goes on.
    """
    after = ""
    while True:
        take = partial(_take, older_than=older_than, after=after, chunk=chunk)
        looked_at = archived(engine, archive, take)
        if looked_at:
            after = looked_at[-1]
        if len(looked_at) < chunk:
            break
    with reading(engine) as conn:
        going = conn.scalars(select(StoredFile.id).where(StoredFile.purpose == PRUNED)).all()
    gone = 0
    for file_id in going:
        while (left := archived(engine, archive, partial(_delete_pieces, file_id=file_id))) is None:
            pass
        gone += left
    return gone


def _needed(older_than: datetime) -> CompoundSelect[tuple[str | None]]:
    untold = exists().where(Callback.batch_id == Batch.id, Callback.state == CallbackState.DUE)
    running = Batch.state.not_in(TERMINAL_BATCH_STATES)
    batch_needs = or_(running, unwritten(Batch), Batch.finished_at >= older_than, untold)
    return union_all(
        *(
            select(column).join(Batch, Batch.id == ApiBatch.batch_id).where(column.is_not(None), batch_needs)
            for column in (ApiBatch.input_file_id, ApiBatch.output_file_id, ApiBatch.error_file_id)
        )
    )


def _take(conn: Connection, keep: Keep, *, older_than: datetime, after: str, chunk: int) -> list[str]:
    """Mark the old ones of the next files; those that were looked at."""
    # Locked before they are judged: whoever makes a batch of one at the same moment is there, or finds it gone.
    query = (
        select(StoredFile.id)
        .where(StoredFile.created_at < older_than, StoredFile.purpose != PRUNED, StoredFile.id > after)
        .order_by(StoredFile.id)
        .limit(chunk)
        .with_for_update()
    )
    found = list(conn.scalars(query))
    ids = conn.scalars(select(StoredFile.id).where(StoredFile.id.in_(found), old_file(older_than))).all()
    if ids:
        keep(conn, StoredFile, StoredFile.id.in_(ids))
        conn.execute(update(StoredFile).where(StoredFile.id.in_(ids)).values(purpose=PRUNED))
    return found


def _delete_pieces(conn: Connection, keep: Keep, *, file_id: str) -> int | None:
    """Delete a few pieces: ``None``, or after the last ones with the file itself: 1, or 0 where somebody else did."""
    if conn.scalar(select(StoredFile.id).where(StoredFile.id == file_id).with_for_update()) is None:
        return 0
    query = select(FileChunk.number).where(FileChunk.file_id == file_id).order_by(FileChunk.number)
    numbers = conn.scalars(query.limit(_PIECES)).all()
    if numbers:
        pieces = and_(FileChunk.file_id == file_id, FileChunk.number.in_(numbers))
        move(conn, keep, FileChunk, pieces)
    if len(numbers) == _PIECES:
        return None
    return conn.execute(delete(StoredFile).where(StoredFile.id == file_id)).rowcount
