"""The tables behind ``tokenmill serve``: API keys, uploaded files, and what its batches add to ``batch``."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import BigInteger, ForeignKey, Index, Integer, LargeBinary, String, UniqueConstraint
from sqlalchemy.dialects import mysql
from sqlalchemy.orm import Mapped, mapped_column

from models_db.base import MARIADB_TABLE, Base, JSONType, UTCDateTime

Bytes = LargeBinary().with_variant(mysql.LONGBLOB(), "mysql", "mariadb")


class ApiKey(Base):
    """A key that lets a tenant in. The key itself is nowhere: only its SHA-256 is stored."""

    __tablename__ = "api_key"

    id: Mapped[str] = mapped_column(String(16), primary_key=True)  # the key's second part, for people
    tenant: Mapped[str] = mapped_column(String(255))
    name: Mapped[str] = mapped_column(String(255))
    digest: Mapped[str] = mapped_column(String(64))
    created_at: Mapped[datetime] = mapped_column(UTCDateTime)
    revoked_at: Mapped[datetime | None] = mapped_column(UTCDateTime)

    __table_args__ = (UniqueConstraint("digest"), MARIADB_TABLE)


class StoredFile(Base):
    """An uploaded or written file; its bytes are in ``file_chunk``."""

    __tablename__ = "stored_file"

    id: Mapped[str] = mapped_column(String(40), primary_key=True)
    tenant: Mapped[str] = mapped_column(String(255))  # empty where nobody has to show a key
    filename: Mapped[str] = mapped_column(String(255))
    purpose: Mapped[str] = mapped_column(String(64))
    bytes: Mapped[int] = mapped_column(BigInteger)
    created_at: Mapped[datetime] = mapped_column(UTCDateTime)

    __table_args__ = (Index(None, "tenant", "created_at"), MARIADB_TABLE)


class FileChunk(Base):
    """A piece of a file."""

    __tablename__ = "file_chunk"

    file_id: Mapped[str] = mapped_column(ForeignKey("stored_file.id", ondelete="CASCADE"), primary_key=True)
    number: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    data: Mapped[bytes] = mapped_column(Bytes)

    __table_args__ = (MARIADB_TABLE,)


class ApiBatch(Base):
    """What a batch that came through ``/v1/batches`` has beside its row in ``batch``."""

    __tablename__ = "api_batch"

    batch_id: Mapped[str] = mapped_column(ForeignKey("batch.id", ondelete="CASCADE"), primary_key=True)
    tenant: Mapped[str] = mapped_column(String(255))
    endpoint: Mapped[str] = mapped_column(String(64))
    completion_window: Mapped[str] = mapped_column(String(16))
    input_file_id: Mapped[str] = mapped_column(String(40))
    output_file_id: Mapped[str | None] = mapped_column(String(40))
    error_file_id: Mapped[str | None] = mapped_column(String(40))
    answered: Mapped[int | None] = mapped_column(Integer)  # lines of the output file, once it is written
    unanswered: Mapped[int | None] = mapped_column(Integer)  # lines of the error file
    labels: Mapped[dict[str, Any] | None] = mapped_column(JSONType)
    feeder: Mapped[str | None] = mapped_column(String(36))  # which server makes its jobs and its files
    feeder_beat: Mapped[int] = mapped_column(BigInteger)  # only its movement counts, never a clock
    created_at: Mapped[datetime] = mapped_column(UTCDateTime)

    __table_args__ = (Index(None, "tenant", "created_at"), MARIADB_TABLE)
