"""The index of a batch's progress also finds what of the batch has not been published.

Revision: 0008
Follows: 0007
"""

from __future__ import annotations

from alembic import op

revision: str = "0008"
down_revision: str | None = "0007"
branch_labels: str | None = None
depends_on: str | None = None


def upgrade() -> None:
    # The new one first: MariaDB wants an index for the foreign key at any time.
    op.create_index("ix_job_batch_id_state_published_at", "job", ["batch_id", "state", "published_at"])
    op.drop_index("ix_job_batch_id_state", "job")


def downgrade() -> None:
    op.create_index("ix_job_batch_id_state", "job", ["batch_id", "state"])
    op.drop_index("ix_job_batch_id_state_published_at", "job")
