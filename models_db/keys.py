"""API keys of ``tokenmill serve``: made, looked up by their digest, revoked.

A key is ``tm_<id>_<secret>`` with 256 random bits in its secret. A fast hash is right for such keys: there is no
dictionary to try. Every function works inside the caller's transaction and never commits.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import Connection, insert, select, update

from models_db.base import utcnow
from models_db.door_tables import ApiKey
from models_db.text import check_name

KEY_PREFIX = "tm_"


@dataclass(frozen=True, slots=True)
class KeyRecord:
    """A key as people may see it."""

    id: str
    tenant: str
    name: str
    created_at: datetime
    revoked_at: datetime | None


def digest_of(key: str) -> str:
    """What is stored of a key: SHA-256, in hexadecimal."""
    return hashlib.sha256(key.encode()).hexdigest()


def create_key(
    conn: Connection,
    *,
    tenant: str,
    name: str,
    at: datetime | None = None,
    token: Callable[[int], str] = secrets.token_hex,
) -> tuple[KeyRecord, str]:
    """Make a key; it is returned here and can never be read again.

    Raises:
        InvalidValueError: tenant or name are empty, too long, or hold text that a database refuses.
    """
    check_name("tenant", tenant, 255)
    check_name("name", name, 255)
    record = KeyRecord(token(4), tenant, name, at or utcnow(), None)
    key = f"{KEY_PREFIX}{record.id}_{token(32)}"
    conn.execute(
        insert(ApiKey).values(
            id=record.id, tenant=tenant, name=name, digest=digest_of(key), created_at=record.created_at
        )
    )
    return record, key


def find_key(conn: Connection, key: str) -> KeyRecord | None:
    """The key, unless there is none such or it has been revoked."""
    row = conn.execute(
        select(ApiKey.id, ApiKey.tenant, ApiKey.name, ApiKey.created_at, ApiKey.revoked_at).where(
            ApiKey.digest == digest_of(key), ApiKey.revoked_at.is_(None)
        )
    ).one_or_none()
    return None if row is None else KeyRecord(*row)


def list_keys(conn: Connection) -> list[KeyRecord]:
    """All keys, the oldest first."""
    rows = conn.execute(
        select(ApiKey.id, ApiKey.tenant, ApiKey.name, ApiKey.created_at, ApiKey.revoked_at).order_by(
            ApiKey.created_at, ApiKey.id
        )
    )
    return [KeyRecord(*row) for row in rows]


def revoke_key(conn: Connection, key_id: str, at: datetime | None = None) -> bool:
    """Let nobody in with this key any more; ``False`` when there is none such, or it was revoked before."""
    changed = conn.execute(
        update(ApiKey)
        .where(ApiKey.id == key_id, ApiKey.revoked_at.is_(None))
        .values(revoked_at=at or utcnow())
    )
    return changed.rowcount == 1


def any_active(conn: Connection) -> bool:
    """Whether somebody could be let in."""
    return conn.scalar(select(ApiKey.id).where(ApiKey.revoked_at.is_(None)).limit(1)) is not None
