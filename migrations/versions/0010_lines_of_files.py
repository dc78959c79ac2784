"""How many lines the files of a batch over HTTP have: those with a whole answer, and the others.

Revision: 0010
Follows: 0009
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision: str = "0010"
down_revision: str | None = "0009"
branch_labels: str | None = None
depends_on: str | None = None


def upgrade() -> None:
    for name in ("answered", "unanswered"):  # not in batch mode: SQLite would copy the whole table
        op.add_column("api_batch", sa.Column(name, sa.Integer(), nullable=True))


def downgrade() -> None:
    for name in ("unanswered", "answered"):
        op.drop_column("api_batch", name)
