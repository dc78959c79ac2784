"""How often the receiver of a callback said no, beside how often it was tried.

Revision: 0009
Follows: 0008
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision: str = "0009"
down_revision: str | None = "0008"
branch_labels: str | None = None
depends_on: str | None = None


def upgrade() -> None:
    # Not in batch mode: SQLite would copy the whole table.
    op.add_column("callback", sa.Column("unwanted", sa.Integer(), nullable=False, server_default="0"))


def downgrade() -> None:
    op.drop_column("callback", "unwanted")
