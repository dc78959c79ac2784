"""API keys, uploaded files, and batches that come through the OpenAI-compatible doorway.

Revision: 0004
Follows: 0003
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import mysql

revision: str = "0004"
down_revision: str | None = "0003"
branch_labels: str | None = None
depends_on: str | None = None

MARIADB: dict[str, Any] = {
    "mysql_engine": "InnoDB",
    "mysql_default_charset": "utf8mb4",
    "mysql_collate": "utf8mb4_nopad_bin",
}

TIME = sa.DateTime(timezone=True).with_variant(mysql.DATETIME(fsp=6), "mysql", "mariadb")
JSON = sa.JSON().with_variant(mysql.LONGTEXT(), "mysql", "mariadb")
BYTES = sa.LargeBinary().with_variant(mysql.LONGBLOB(), "mysql", "mariadb")


def upgrade() -> None:
    op.create_table(
        "api_key",
        sa.Column("id", sa.String(16), nullable=False),
        sa.Column("tenant", sa.String(255), nullable=False),
        sa.Column("name", sa.String(255), nullable=False),
        sa.Column("digest", sa.String(64), nullable=False),
        sa.Column("created_at", TIME, nullable=False),
        sa.Column("revoked_at", TIME, nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_api_key"),
        sa.UniqueConstraint("digest", name="uq_api_key_digest"),
        **MARIADB,
    )
    op.create_table(
        "stored_file",
        sa.Column("id", sa.String(40), nullable=False),
        sa.Column("tenant", sa.String(255), nullable=False),
        sa.Column("filename", sa.String(255), nullable=False),
        sa.Column("purpose", sa.String(64), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.Column("created_at", TIME, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_stored_file"),
        **MARIADB,
    )
    op.create_index("ix_stored_file_tenant_created_at", "stored_file", ["tenant", "created_at"])
    op.create_table(
        "file_chunk",
        sa.Column("file_id", sa.String(40), nullable=False),
        sa.Column("number", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("data", BYTES, nullable=False),
        sa.ForeignKeyConstraint(
            ["file_id"], ["stored_file.id"], name="fk_file_chunk_file_id_stored_file", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("file_id", "number", name="pk_file_chunk"),
        **MARIADB,
    )
    op.create_table(
        "api_batch",
        sa.Column("batch_id", sa.String(36), nullable=False),
        sa.Column("tenant", sa.String(255), nullable=False),
        sa.Column("endpoint", sa.String(64), nullable=False),
        sa.Column("completion_window", sa.String(16), nullable=False),
        sa.Column("input_file_id", sa.String(40), nullable=False),
        sa.Column("output_file_id", sa.String(40), nullable=True),
        sa.Column("error_file_id", sa.String(40), nullable=True),
        sa.Column("labels", JSON, nullable=True),
        sa.Column("feeder", sa.String(36), nullable=True),
        sa.Column("feeder_beat", sa.BigInteger(), nullable=False),
        sa.Column("created_at", TIME, nullable=False),
        sa.ForeignKeyConstraint(
            ["batch_id"], ["batch.id"], name="fk_api_batch_batch_id_batch", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("batch_id", name="pk_api_batch"),
        **MARIADB,
    )
    op.create_index("ix_api_batch_tenant_created_at", "api_batch", ["tenant", "created_at"])


def downgrade() -> None:
    op.drop_table("api_batch")
    op.drop_table("file_chunk")
    op.drop_table("stored_file")
    op.drop_table("api_key")
