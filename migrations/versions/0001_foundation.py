"""The first tables: batches, workers, jobs, attempts, results, samples.

Revision: 0001
Follows: nothing

Types are spelled out here rather than taken from ``models_db``: a revision must keep meaning what it meant.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import mysql

revision: str = "0001"
down_revision: str | None = None
branch_labels: str | None = None
depends_on: str | None = None

MARIADB: dict[str, Any] = {
    "mysql_engine": "InnoDB",
    "mysql_default_charset": "utf8mb4",
    "mysql_collate": "utf8mb4_nopad_bin",
}

TIME = sa.DateTime(timezone=True).with_variant(mysql.DATETIME(fsp=6), "mysql", "mariadb")
JSON = sa.JSON().with_variant(mysql.LONGTEXT(), "mysql", "mariadb")
TEXT = sa.Text().with_variant(mysql.LONGTEXT(), "mysql", "mariadb")
STATE = sa.String(16)
UUID = sa.String(36)
JOB_ID = sa.String(155)
SECONDS: sa.Double[float] = sa.Double()


def upgrade() -> None:
    op.create_table(
        "batch",
        sa.Column("id", UUID, nullable=False),
        sa.Column("name", sa.String(255), nullable=False),
        sa.Column("state", STATE, nullable=False),
        sa.Column("total", sa.Integer(), nullable=True),
        sa.Column("succeeded", sa.Integer(), nullable=False),
        sa.Column("failed", sa.Integer(), nullable=False),
        sa.Column("cancelled", sa.Integer(), nullable=False),
        sa.Column("expired", sa.Integer(), nullable=False),
        sa.Column("created_at", TIME, nullable=False),
        sa.Column("finished_at", TIME, nullable=True),
        sa.Column("deadline_at", TIME, nullable=True),
        sa.Column("source", TEXT, nullable=True),
        sa.Column("error", TEXT, nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_batch"),
        sa.CheckConstraint(
            "state IN ('validating', 'in_progress', 'finalizing', 'cancelling', 'completed', 'failed', 'expired', "
            "'cancelled')",
            name=op.f("ck_batch_state"),
        ),
        sa.CheckConstraint(
            "(state IN ('completed', 'failed', 'expired', 'cancelled')) = (finished_at IS NOT NULL)",
            name=op.f("ck_batch_finished"),
        ),
        **MARIADB,
    )
    op.create_index("ix_batch_created_at", "batch", ["created_at"])

    op.create_table(
        "worker",
        sa.Column("id", UUID, nullable=False),
        sa.Column("name", sa.String(255), nullable=False),
        sa.Column("host", sa.String(255), nullable=False),
        sa.Column("pid", sa.Integer(), nullable=False),
        sa.Column("version", sa.String(64), nullable=False),
        sa.Column("backend", sa.String(64), nullable=False),
        sa.Column("device", sa.String(255), nullable=False),
        sa.Column("model", sa.String(255), nullable=False),
        sa.Column("dtype", sa.String(32), nullable=False),
        sa.Column("slots", sa.Integer(), nullable=False),
        sa.Column("state", STATE, nullable=False),
        sa.Column("heartbeat", sa.BigInteger(), nullable=False),
        sa.Column("started_at", TIME, nullable=False),
        sa.Column("heartbeat_at", TIME, nullable=False),
        sa.Column("stopped_at", TIME, nullable=True),
        sa.Column("config", JSON, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_worker"),
        sa.CheckConstraint(
            "state IN ('starting', 'online', 'draining', 'stopped', 'dead')", name=op.f("ck_worker_state")
        ),
        sa.CheckConstraint(
            "(state IN ('stopped', 'dead')) = (stopped_at IS NOT NULL)", name=op.f("ck_worker_stopped")
        ),
        sa.CheckConstraint("slots >= 0", name=op.f("ck_worker_slots")),
        **MARIADB,
    )
    op.create_index("ix_worker_state", "worker", ["state"])

    op.create_table(
        "job",
        sa.Column("id", JOB_ID, nullable=False),
        sa.Column("batch_id", UUID, nullable=True),
        sa.Column("position", sa.Integer(), nullable=True),
        sa.Column("custom_id", sa.String(255), nullable=True),
        sa.Column("idempotency_key", sa.String(255), nullable=True),
        sa.Column("payload_hash", sa.String(64), nullable=True),
        sa.Column("tenant", sa.String(255), nullable=True),
        sa.Column("model", sa.String(255), nullable=False),
        sa.Column("queue", sa.String(255), nullable=False),
        sa.Column("priority", sa.SmallInteger(), nullable=False),
        sa.Column("state", STATE, nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("owner", UUID, nullable=True),
        sa.Column("cancel_requested", sa.Boolean(), nullable=False),
        sa.Column("created_at", TIME, nullable=False),
        sa.Column("published_at", TIME, nullable=True),
        sa.Column("started_at", TIME, nullable=True),
        sa.Column("finished_at", TIME, nullable=True),
        sa.Column("deadline_at", TIME, nullable=True),
        sa.Column("callbacks_sent_at", TIME, nullable=True),
        sa.Column("error_type", sa.String(128), nullable=True),
        sa.Column("error_message", TEXT, nullable=True),
        sa.Column("params", JSON, nullable=False),
        sa.Column("prompt", JSON, nullable=False),
        sa.Column("message", JSON, nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_job"),
        sa.ForeignKeyConstraint(["batch_id"], ["batch.id"], name="fk_job_batch_id_batch"),
        sa.ForeignKeyConstraint(["owner"], ["worker.id"], name="fk_job_owner_worker"),
        sa.UniqueConstraint("batch_id", "custom_id", name="uq_job_batch_id_custom_id"),
        sa.UniqueConstraint("idempotency_key", name="uq_job_idempotency_key"),
        sa.CheckConstraint(
            "state IN ('queued', 'running', 'succeeded', 'failed', 'cancelled', 'expired')",
            name=op.f("ck_job_state"),
        ),
        sa.CheckConstraint(
            "(state IN ('succeeded', 'failed', 'cancelled', 'expired')) = (finished_at IS NOT NULL)",
            name=op.f("ck_job_finished"),
        ),
        sa.CheckConstraint("(state = 'running') = (owner IS NOT NULL)", name=op.f("ck_job_owner")),
        sa.CheckConstraint(
            "state <> 'running' OR (attempt >= 1 AND started_at IS NOT NULL)", name=op.f("ck_job_started")
        ),
        sa.CheckConstraint("state <> 'succeeded' OR error_type IS NULL", name=op.f("ck_job_error")),
        sa.CheckConstraint("attempt >= 0", name=op.f("ck_job_attempt")),
        sa.CheckConstraint("priority BETWEEN 0 AND 9", name=op.f("ck_job_priority")),
        **MARIADB,
    )
    op.create_index("ix_job_batch_id_position", "job", ["batch_id", "position"])
    op.create_index("ix_job_batch_id_state", "job", ["batch_id", "state"])
    op.create_index("ix_job_state_published_at", "job", ["state", "published_at"])
    op.create_index("ix_job_owner", "job", ["owner"])
    op.create_index("ix_job_finished_at", "job", ["finished_at"])

    op.create_table(
        "attempt",
        sa.Column("job_id", JOB_ID, nullable=False),
        sa.Column("number", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("worker_id", UUID, nullable=False),
        sa.Column("started_at", TIME, nullable=False),
        sa.Column("ended_at", TIME, nullable=True),
        sa.Column("outcome", STATE, nullable=True),
        sa.Column("error", TEXT, nullable=True),
        sa.PrimaryKeyConstraint("job_id", "number", name="pk_attempt"),
        sa.ForeignKeyConstraint(["job_id"], ["job.id"], name="fk_attempt_job_id_job", ondelete="CASCADE"),
        sa.ForeignKeyConstraint(["worker_id"], ["worker.id"], name="fk_attempt_worker_id_worker"),
        sa.CheckConstraint(
            "outcome IS NULL OR outcome IN ('succeeded', 'failed', 'cancelled', 'expired', 'released', 'lost')",
            name=op.f("ck_attempt_outcome"),
        ),
        sa.CheckConstraint("(outcome IS NULL) = (ended_at IS NULL)", name=op.f("ck_attempt_ended")),
        sa.CheckConstraint("number >= 1", name=op.f("ck_attempt_number")),
        **MARIADB,
    )
    op.create_index("ix_attempt_worker_id_outcome", "attempt", ["worker_id", "outcome"])

    op.create_table(
        "result",
        sa.Column("job_id", JOB_ID, nullable=False),
        sa.Column("choice", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("finish_reason", sa.String(32), nullable=False),
        sa.Column("prompt_tokens", sa.Integer(), nullable=False),
        sa.Column("completion_tokens", sa.Integer(), nullable=False),
        sa.Column("cached_tokens", sa.Integer(), nullable=False),
        sa.Column("seed", sa.BigInteger(), nullable=True),
        sa.Column("queue_time_s", SECONDS, nullable=False),
        sa.Column("time_to_first_token_s", SECONDS, nullable=True),
        sa.Column("latency_s", SECONDS, nullable=False),
        sa.Column("created_at", TIME, nullable=False),
        sa.Column("stop_reason", JSON, nullable=True),
        sa.Column("text", TEXT, nullable=False),
        sa.Column("token_ids", JSON, nullable=True),
        sa.Column("logprobs", JSON, nullable=True),
        sa.PrimaryKeyConstraint("job_id", "choice", name="pk_result"),
        sa.ForeignKeyConstraint(["job_id"], ["job.id"], name="fk_result_job_id_job", ondelete="CASCADE"),
        sa.CheckConstraint(
            "choice >= 0 AND prompt_tokens >= 0 AND completion_tokens >= 0 AND cached_tokens >= 0",
            name=op.f("ck_result_counts"),
        ),
        **MARIADB,
    )

    op.create_table(
        "engine_sample",
        sa.Column("worker_id", UUID, nullable=False),
        sa.Column("sampled_at", TIME, nullable=False),
        sa.Column("interval_s", SECONDS, nullable=False),
        sa.Column("running", sa.Integer(), nullable=False),
        sa.Column("waiting", sa.Integer(), nullable=False),
        sa.Column("prompt_tokens", sa.BigInteger(), nullable=False),
        sa.Column("cached_tokens", sa.BigInteger(), nullable=False),
        sa.Column("generated_tokens", sa.BigInteger(), nullable=False),
        sa.Column("steps", sa.BigInteger(), nullable=False),
        sa.Column("requests_finished", sa.Integer(), nullable=False),
        sa.Column("requests_failed", sa.Integer(), nullable=False),
        sa.Column("preemptions", sa.Integer(), nullable=False),
        sa.Column("busy_s", SECONDS, nullable=False),
        sa.Column("prepare_s", SECONDS, nullable=False),
        sa.Column("active_fraction", SECONDS, nullable=False),
        sa.Column("kv_used_fraction", SECONDS, nullable=False),
        sa.PrimaryKeyConstraint("worker_id", "sampled_at", name="pk_engine_sample"),
        sa.ForeignKeyConstraint(
            ["worker_id"], ["worker.id"], name="fk_engine_sample_worker_id_worker", ondelete="CASCADE"
        ),
        sa.CheckConstraint("interval_s > 0", name=op.f("ck_engine_sample_interval")),
        **MARIADB,
    )
    op.create_index("ix_engine_sample_sampled_at", "engine_sample", ["sampled_at"])


def downgrade() -> None:
    for table in ("engine_sample", "result", "attempt", "job", "worker", "batch"):
        op.drop_table(table)
