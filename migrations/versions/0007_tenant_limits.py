"""What tenants with a limit have open.

Revision: 0007
Follows: 0006
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

revision: str = "0007"
down_revision: str | None = "0006"
branch_labels: str | None = None
depends_on: str | None = None

MARIADB: dict[str, Any] = {
    "mysql_engine": "InnoDB",
    "mysql_default_charset": "utf8mb4",
    "mysql_collate": "utf8mb4_nopad_bin",
}


def upgrade() -> None:
    op.create_table(
        "tenant_usage",
        sa.Column("tenant", sa.String(255), nullable=False),
        sa.Column("jobs", sa.Integer(), nullable=False),
        sa.Column("tokens", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("tenant", name="pk_tenant_usage"),
        **MARIADB,
    )
    op.create_table(
        "tenant_job",
        sa.Column("job_id", sa.String(155), nullable=False),
        sa.Column("tenant", sa.String(255), nullable=False),
        sa.Column("tokens", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("job_id", name="pk_tenant_job"),
        **MARIADB,
    )
    op.create_index("ix_tenant_job_tenant", "tenant_job", ["tenant"])


def downgrade() -> None:
    op.drop_table("tenant_job")
    op.drop_table("tenant_usage")
