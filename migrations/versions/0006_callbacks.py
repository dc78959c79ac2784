"""Who wants to be told when a job or a batch has ended, and how far the telling is.

Revision: 0006
Follows: 0005
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import mysql

revision: str = "0006"
down_revision: str | None = "0005"
branch_labels: str | None = None
depends_on: str | None = None

MARIADB: dict[str, Any] = {
    "mysql_engine": "InnoDB",
    "mysql_default_charset": "utf8mb4",
    "mysql_collate": "utf8mb4_nopad_bin",
}

TIME = sa.DateTime(timezone=True).with_variant(mysql.DATETIME(fsp=6), "mysql", "mariadb")
LONG_TEXT = sa.Text().with_variant(mysql.LONGTEXT(), "mysql", "mariadb")


def upgrade() -> None:
    op.create_table(
        "callback",
        sa.Column("id", sa.String(36), nullable=False),
        sa.Column("job_id", sa.String(155), nullable=True),
        sa.Column("batch_id", sa.String(36), nullable=True),
        sa.Column("host", sa.String(300), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("events", sa.Integer(), nullable=False),
        sa.Column("tries", sa.Integer(), nullable=False),
        sa.Column("include_output", sa.Boolean(), nullable=False),
        sa.Column("created_at", TIME, nullable=False),
        sa.Column("ended_at", TIME, nullable=True),
        sa.Column("due_at", TIME, nullable=True),
        sa.Column("settled_at", TIME, nullable=True),
        sa.Column("url", sa.String(2048), nullable=False),
        sa.Column("error", LONG_TEXT, nullable=True),
        sa.CheckConstraint(
            "state IN ('waiting', 'due', 'delivered', 'failed')", name=op.f("ck_callback_state")
        ),
        sa.CheckConstraint("(job_id IS NULL) <> (batch_id IS NULL)", name=op.f("ck_callback_subject")),
        sa.CheckConstraint("(state = 'due') = (due_at IS NOT NULL)", name=op.f("ck_callback_due")),
        sa.CheckConstraint(
            "(state IN ('delivered', 'failed')) = (settled_at IS NOT NULL)", name=op.f("ck_callback_settled")
        ),
        sa.CheckConstraint("events >= 0 AND tries >= 0", name=op.f("ck_callback_counts")),
        sa.ForeignKeyConstraint(["job_id"], ["job.id"], name="fk_callback_job_id_job", ondelete="CASCADE"),
        sa.ForeignKeyConstraint(
            ["batch_id"], ["batch.id"], name="fk_callback_batch_id_batch", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name="pk_callback"),
        sa.UniqueConstraint("job_id", name="uq_callback_job_id"),
        sa.UniqueConstraint("batch_id", name="uq_callback_batch_id"),
        **MARIADB,
    )
    op.create_index("ix_callback_state_host_due_at", "callback", ["state", "host", "due_at"])


def downgrade() -> None:
    op.drop_table("callback")
