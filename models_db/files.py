"""Files of ``tokenmill serve``, in the database so that every server sees them: written and read in pieces.

Every function works inside the caller's transaction and never commits.
"""

from __future__ import annotations

import operator
import secrets
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import IO

from sqlalchemy import Connection, Row, delete, insert, select, update

from models_db.base import utcnow
from models_db.door_tables import FileChunk, StoredFile
from models_db.text import check_name

CHUNK_BYTES = 1 << 20
PRUNED = "pruned"
"""The purpose of a file that retention is deleting, piece by piece: for everybody else there is none such."""

_COLUMNS = (
    StoredFile.id,
    StoredFile.tenant,
    StoredFile.filename,
    StoredFile.purpose,
    StoredFile.bytes,
    StoredFile.created_at,
)


@dataclass(frozen=True, slots=True)
class FileRecord:
    """A file without its bytes."""

    id: str
    tenant: str
    filename: str
    purpose: str
    bytes: int
    created_at: datetime


def new_file_id() -> str:
    """An id for ``store_file``, where it must be known before the file is stored."""
    return f"file-{secrets.token_hex(16)}"


def store_file(
    conn: Connection,
    file: IO[bytes],
    *,
    tenant: str,
    filename: str,
    purpose: str,
    at: datetime | None = None,
    file_id: str | None = None,
) -> FileRecord:
    """Store all that the file holds from its present position on, under a new id unless one is given.

    Raises:
        InvalidValueError: the name is empty, too long, or holds text that a database refuses.
    """
    check_name("filename", filename, 255)
    file_id = file_id or new_file_id()
    moment = at or utcnow()
    row = {
        "id": file_id,
        "tenant": tenant,
        "filename": filename,
        "purpose": purpose,
        "bytes": 0,
        "created_at": moment,
    }
    conn.execute(insert(StoredFile), [row])
    size = 0
    for number, data in enumerate(iter(lambda: file.read(CHUNK_BYTES), b"")):
        conn.execute(insert(FileChunk), [{"file_id": file_id, "number": number, "data": data}])
        size += len(data)
    conn.execute(update(StoredFile).where(StoredFile.id == file_id).values(bytes=size))
    return FileRecord(file_id, tenant, filename, purpose, size, moment)


def find_file(conn: Connection, file_id: str, tenant: str, *, hold: bool = False) -> FileRecord | None:
    """The tenant's file.

    Args:
        hold: nobody deletes it before the transaction ends.
    """
    query = select(*_COLUMNS).where(
        StoredFile.id == file_id, StoredFile.tenant == tenant, StoredFile.purpose != PRUNED
    )
    if hold:
        query = query.with_for_update(read=True, key_share=True)
    row = conn.execute(query).one_or_none()
    return None if row is None else _record(row)


def list_files(
    conn: Connection,
    tenant: str,
    *,
    purpose: str | None = None,
    after: str | None = None,
    limit: int = 100,
    oldest_first: bool = False,
) -> list[FileRecord]:
    """The tenant's files, newest first unless told otherwise, those behind the file ``after``."""
    beyond = operator.gt if oldest_first else operator.lt
    query = select(*_COLUMNS).where(StoredFile.tenant == tenant, StoredFile.purpose != PRUNED)
    if purpose is not None:
        query = query.where(StoredFile.purpose == purpose)
    if after is not None and (last := find_file(conn, after, tenant)) is not None:
        query = query.where(
            beyond(StoredFile.created_at, last.created_at)
            | ((StoredFile.created_at == last.created_at) & beyond(StoredFile.id, last.id))
        )
    by = (StoredFile.created_at, StoredFile.id)
    query = query.order_by(*(by if oldest_first else (column.desc() for column in by))).limit(limit)
    return [_record(row) for row in conn.execute(query)]


def read_chunk(conn: Connection, file_id: str, number: int) -> bytes | None:
    """One piece of the file, counted from 0; ``None`` behind its end."""
    query = select(FileChunk.data).where(FileChunk.file_id == file_id, FileChunk.number == number)
    data = conn.scalar(query)
    return None if data is None else bytes(data)


def read_file(conn: Connection, file_id: str) -> Iterator[bytes]:
    """The file's bytes, piece by piece."""
    number = 0
    while (data := read_chunk(conn, file_id, number)) is not None:
        yield data
        number += 1


def copy_to(pieces: Iterable[bytes], target: IO[bytes]) -> None:
    """Write the pieces and go back to the beginning."""
    for piece in pieces:
        target.write(piece)
    target.seek(0)


def delete_file(conn: Connection, file_id: str, tenant: str) -> bool:
    """Remove the tenant's file; ``False`` when there is none such."""
    if find_file(conn, file_id, tenant) is None:
        return False
    conn.execute(delete(FileChunk).where(FileChunk.file_id == file_id))
    conn.execute(delete(StoredFile).where(StoredFile.id == file_id))
    return True


def _record(row: Row[str, str, str, str, int, datetime]) -> FileRecord:
    return FileRecord(*row)
