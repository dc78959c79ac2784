"""Deaths of workers counted per job, locks of the fleet, messages that nobody can read.

Revision: 0002
Follows: 0001
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import mysql

revision: str = "0002"
down_revision: str | None = "0001"
branch_labels: str | None = None
depends_on: str | None = None

MARIADB: dict[str, Any] = {
    "mysql_engine": "InnoDB",
    "mysql_default_charset": "utf8mb4",
    "mysql_collate": "utf8mb4_nopad_bin",
}

TIME = sa.DateTime(timezone=True).with_variant(mysql.DATETIME(fsp=6), "mysql", "mariadb")
TEXT = sa.Text().with_variant(mysql.LONGTEXT(), "mysql", "mariadb")


def upgrade() -> None:
    # Not in batch mode: SQLite would copy the whole table.
    for name in ("deaths", "solo_deaths"):
        op.add_column("job", sa.Column(name, sa.SmallInteger(), nullable=False, server_default="0"))
    op.drop_index("ix_job_state_published_at", "job")
    op.create_index("ix_job_state_queue_deaths", "job", ["state", "queue", "deaths"])
    op.create_table(
        "fleet_lock",
        sa.Column("name", sa.String(255), nullable=False),
        sa.Column("owner", sa.String(36), nullable=True),
        sa.Column("taken_at", TIME, nullable=True),
        sa.PrimaryKeyConstraint("name", name="pk_fleet_lock"),
        **MARIADB,
    )
    op.create_table(
        "dead_letter",
        sa.Column("id", sa.String(36), nullable=False),
        sa.Column("queue", sa.String(255), nullable=False),
        sa.Column("received_at", TIME, nullable=False),
        sa.Column("worker_id", sa.String(36), nullable=False),
        sa.Column("reason", TEXT, nullable=False),
        sa.Column("message", TEXT, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_dead_letter"),
        **MARIADB,
    )
    op.create_index("ix_dead_letter_received_at", "dead_letter", ["received_at"])


def downgrade() -> None:
    op.drop_table("dead_letter")
    op.drop_table("fleet_lock")
    op.drop_index("ix_job_state_queue_deaths", "job")
    op.create_index("ix_job_state_published_at", "job", ["state", "published_at"])
    for name in ("solo_deaths", "deaths"):
        op.drop_column("job", name)
