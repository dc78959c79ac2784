"""Which job answered what, so that unchanged prompts need not be run again.

Revision: 0005
Follows: 0004
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import mysql

revision: str = "0005"
down_revision: str | None = "0004"
branch_labels: str | None = None
depends_on: str | None = None

MARIADB: dict[str, Any] = {
    "mysql_engine": "InnoDB",
    "mysql_default_charset": "utf8mb4",
    "mysql_collate": "utf8mb4_nopad_bin",
}

TIME = sa.DateTime(timezone=True).with_variant(mysql.DATETIME(fsp=6), "mysql", "mariadb")


def upgrade() -> None:
    op.create_table(
        "known_answer",
        sa.Column("content_hash", sa.String(64), nullable=False),
        sa.Column("job_id", sa.String(155), nullable=False),
        sa.Column("created_at", TIME, nullable=False),
        sa.ForeignKeyConstraint(
            ["job_id"], ["job.id"], name="fk_known_answer_job_id_job", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("content_hash", name="pk_known_answer"),
        **MARIADB,
    )
    op.create_index("ix_known_answer_job_id", "known_answer", ["job_id"])


def downgrade() -> None:
    op.drop_table("known_answer")
