"""Roll-ups per minute and hour, and the views that people ask.

Revision: 0003
Follows: 0002

A later revision that changes a table in batch mode must drop the views that read it first, and make them anew:
SQLite refuses to rename a table under a view.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import mysql

revision: str = "0003"
down_revision: str | None = "0002"
branch_labels: str | None = None
depends_on: str | None = None

MARIADB: dict[str, Any] = {
    "mysql_engine": "InnoDB",
    "mysql_default_charset": "utf8mb4",
    "mysql_collate": "utf8mb4_nopad_bin",
}

TIME = sa.DateTime(timezone=True).with_variant(mysql.DATETIME(fsp=6), "mysql", "mariadb")
SECONDS: sa.Double[float] = sa.Double()

THROUGHPUT = {
    sa.Integer: ("samples", "max_running", "max_waiting"),
    sa.Double: ("sampled_s", "active_s", "working_s", "prepare_s", "running_s", "waiting_s", "kv_used_s"),
    sa.BigInteger: (
        "prompt_tokens",
        "cached_tokens",
        "generated_tokens",
        "steps",
        "requests_finished",
        "requests_failed",
        "preemptions",
    ),
}
JOBS = {
    sa.Integer: (
        "succeeded",
        "failed",
        "cancelled",
        "expired",
        "released",
        "lost",
        "without_attempt",
        "retried",
        "timed",
        "first_tokens",
    ),
    sa.BigInteger: ("prompt_tokens", "cached_tokens", "completion_tokens"),
    sa.Double: ("latency_s", "queue_s", "first_token_s"),
}


def upgrade() -> None:
    op.create_index("ix_attempt_ended_at", "attempt", ["ended_at"])
    op.create_table(
        "job_class",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("model", sa.String(255), nullable=False),
        sa.Column("queue", sa.String(255), nullable=False),
        sa.Column("tenant", sa.String(255), nullable=False),
        sa.Column("priority", sa.SmallInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_job_class"),
        sa.UniqueConstraint(
            "model", "queue", "tenant", "priority", name="uq_job_class_model_queue_tenant_priority"
        ),
        **MARIADB,
    )
    op.create_table(
        "rollup_mark",
        sa.Column("name", sa.String(16), nullable=False),
        sa.Column("rolled_until", TIME, nullable=True),
        sa.Column("complete_from", TIME, nullable=True),
        sa.PrimaryKeyConstraint("name", name="pk_rollup_mark"),
        **MARIADB,
    )
    for span in ("minute", "hour"):
        _create("throughput", span, ("worker_id", sa.String(36), "worker"), THROUGHPUT)
        _create("job", span, ("class_id", sa.Integer(), "job_class"), JOBS)
        op.create_table(
            f"latency_{span}",
            sa.Column("started_at", TIME, nullable=False),
            sa.Column("class_id", sa.Integer(), nullable=False),
            sa.Column("metric", sa.String(16), nullable=False),
            sa.Column("upper_ms", sa.Integer(), nullable=False),
            sa.Column("jobs", sa.Integer(), nullable=False),
            sa.PrimaryKeyConstraint(
                "started_at", "class_id", "metric", "upper_ms", name=f"pk_latency_{span}"
            ),
            sa.ForeignKeyConstraint(
                ["class_id"], ["job_class.id"], name=f"fk_latency_{span}_class_id_job_class"
            ),
            sa.CheckConstraint(
                "metric IN ('latency', 'first_token', 'queue')", name=op.f(f"ck_latency_{span}_metric")
            ),
            **MARIADB,
        )
        op.create_index(f"ix_latency_{span}_class_id", f"latency_{span}", ["class_id"])
    dialect = op.get_bind().dialect.name
    for name, query in VIEWS.items():
        op.execute(sa.text(f"CREATE VIEW {name} AS {_filled(query, dialect)}".replace(":", "\\:")))


def downgrade() -> None:
    for name in reversed(VIEWS):
        op.execute(sa.text(f"DROP VIEW {name}"))
    for table in ("latency", "job", "throughput"):
        for span in ("hour", "minute"):
            op.drop_table(f"{table}_{span}")
    op.drop_table("rollup_mark")
    op.drop_table("job_class")
    op.drop_index("ix_attempt_ended_at", "attempt")


def _create(name: str, span: str, key: tuple[str, Any, str], columns: dict[Any, tuple[str, ...]]) -> None:
    table = f"{name}_{span}"
    column, kind, target = key
    dates = ("day", "night") if span == "hour" else ()
    op.create_table(
        table,
        sa.Column("started_at", TIME, nullable=False),
        sa.Column(column, kind, nullable=False),
        *(sa.Column(date, sa.Date(), nullable=False) for date in dates),
        *(sa.Column(value, type_(), nullable=False) for type_, values in columns.items() for value in values),
        sa.PrimaryKeyConstraint("started_at", column, name=f"pk_{table}"),
        sa.ForeignKeyConstraint([column], [f"{target}.id"], name=f"fk_{table}_{column}_{target}"),
        **MARIADB,
    )
    for indexed in (column, *dates):
        op.create_index(f"ix_{table}_{indexed}", table, [indexed])


# ---------------------------------------------------------------------------------------------------------- views

HOUR_OF_DAY = {
    "sqlite": "CAST(strftime('%H', started_at) AS INTEGER)",
    "postgresql": "CAST(EXTRACT(HOUR FROM started_at AT TIME ZONE 'UTC') AS INTEGER)",
    "mysql": "HOUR(started_at)",
}
DAY = {
    "sqlite": "date(started_at)",
    "postgresql": "CAST(started_at AT TIME ZONE 'UTC' AS DATE)",
    "mysql": "DATE(started_at)",
}
NIGHT = {  # from noon to noon, by the day on which it begins
    "sqlite": "date(started_at, '-12 hours')",
    "postgresql": "CAST(started_at AT TIME ZONE 'UTC' - INTERVAL '12 hours' AS DATE)",
    "mysql": "DATE(started_at - INTERVAL 12 HOUR)",
}
DURATION_S = {
    "sqlite": "ROUND((julianday(finished_at) - julianday(created_at)) * 86400.0, 3)",
    "postgresql": "CAST(EXTRACT(EPOCH FROM finished_at - created_at) AS DOUBLE PRECISION)",
    "mysql": "TIMESTAMPDIFF(MICROSECOND, created_at, finished_at) / 1000000e0",
}


def _filled(query: str, dialect: str) -> str:
    kind = "mysql" if dialect == "mariadb" else dialect
    for name, texts in (
        ("{hour}", HOUR_OF_DAY),
        ("{day}", DAY),
        ("{night}", NIGHT),
        ("{duration_s}", DURATION_S),
    ):
        query = query.replace(name, texts[kind])
    return query


_ENGINE_SUMS = ("sampled_s", "active_s", "running_s", "waiting_s", "generated_tokens", "preemptions")
_JOB_SUMS = ("succeeded", "failed", "cancelled", "expired", "released", "lost", "retried")


def _throughput(keys: str) -> str:
    """What engines did and what became of jobs, side by side, for each model and the keys."""
    columns = ", ".join(keys.split())
    engines = ", ".join(f"t.{name}" for name in _ENGINE_SUMS)
    jobs = ", ".join(f"j.{name}" for name in _JOB_SUMS)
    no_jobs = ", ".join(f"0 AS {name}" for name in _JOB_SUMS)
    no_engines = ", ".join(f"0 AS {name}" for name in _ENGINE_SUMS)
    of = {table: ", ".join(f"{table}.{key}" for key in keys.split()) for table in ("t", "j")}
    job_totals = ",\n       ".join(f"SUM({name}) AS {name}" for name in _JOB_SUMS)
    return f"""
SELECT {columns}, model,
       SUM(sampled_s) / 3600.0 AS gpu_hours,
       SUM(active_s) / 3600.0 AS active_hours,
       SUM(active_s) / NULLIF(SUM(sampled_s), 0) AS active_share,
       SUM(generated_tokens) AS generated_tokens,
       SUM(generated_tokens) / NULLIF(SUM(sampled_s) / 3600.0, 0) AS tokens_per_gpu_hour,
       SUM(running_s) / NULLIF(SUM(sampled_s), 0) AS running_per_worker,
       SUM(waiting_s) / NULLIF(SUM(sampled_s), 0) AS waiting_per_worker,
       SUM(preemptions) AS preemptions,
       {job_totals}
FROM (
    SELECT {of["t"]}, w.model, {engines}, {no_jobs}
    FROM throughput_hour t JOIN worker w ON w.id = t.worker_id
    UNION ALL
    SELECT {of["j"]}, c.model, {no_engines}, {jobs}
    FROM job_hour j JOIN job_class c ON c.id = j.class_id
) AS parts
GROUP BY {columns}, model
"""


def _percentiles() -> str:
    parts = []
    for metric, percents in (("latency", (50, 95, 99)), ("first_token", (50, 95)), ("queue", (50, 95))):
        parts += [
            f"MIN(CASE WHEN metric = '{metric}' AND seen * 100 >= total * {percent} THEN upper_ms END) / 1000.0 "
            f"AS {metric}_p{percent}_s"
            for percent in percents
        ]
    return ",\n       ".join(parts)


VIEWS = {
    "throughput_hourly": _throughput("started_at day night").replace(
        "SELECT started_at, day, night, model,", "SELECT started_at, day, night, {hour} AS hour, model,", 1
    ),
    "throughput_daily": _throughput("day"),
    "worker_utilisation": """
SELECT t.started_at, t.day, t.night, t.worker_id, w.name AS worker, w.host, w.device, w.model, w.slots, w.version,
       t.sampled_s, t.active_s, t.working_s,
       t.active_s / NULLIF(t.sampled_s, 0) AS active_share,
       t.running_s / NULLIF(t.sampled_s * w.slots, 0) AS slot_share,
       t.kv_used_s / NULLIF(t.sampled_s, 0) AS kv_share,
       t.generated_tokens,
       t.generated_tokens / NULLIF(t.working_s, 0) AS tokens_per_working_s,
       t.waiting_s / NULLIF(t.sampled_s, 0) AS mean_waiting,
       t.max_waiting, t.preemptions
FROM throughput_hour t JOIN worker w ON w.id = t.worker_id
""",
    "model_usage": """
SELECT j.day, j.night, c.model, c.tenant,
       SUM(j.succeeded) AS succeeded, SUM(j.failed) AS failed, SUM(j.cancelled) AS cancelled,
       SUM(j.expired) AS expired,
       SUM(j.prompt_tokens) AS prompt_tokens, SUM(j.cached_tokens) AS cached_tokens,
       SUM(j.completion_tokens) AS completion_tokens,
       SUM(j.latency_s) / NULLIF(SUM(j.timed), 0) AS mean_latency_s,
       SUM(j.queue_s) / NULLIF(SUM(j.timed), 0) AS mean_queue_s
FROM job_hour j JOIN job_class c ON c.id = j.class_id
GROUP BY j.day, j.night, c.model, c.tenant
""",
    "job_latency": f"""
SELECT started_at, {{day}} AS day, {{night}} AS night, {{hour}} AS hour, model, queue,
       MAX(CASE WHEN metric = 'latency' THEN total END) AS jobs,
       {_percentiles()}
FROM (
    SELECT started_at, model, queue, metric, upper_ms,
           SUM(jobs) OVER (PARTITION BY started_at, model, queue, metric ORDER BY upper_ms) AS seen,
           SUM(jobs) OVER (PARTITION BY started_at, model, queue, metric) AS total
    FROM (
        SELECT h.started_at, c.model, c.queue, h.metric, h.upper_ms, SUM(h.jobs) AS jobs
        FROM latency_hour h JOIN job_class c ON c.id = h.class_id
        GROUP BY h.started_at, c.model, c.queue, h.metric, h.upper_ms
    ) AS sums
) AS ranked
GROUP BY started_at, model, queue
""",
    # Ended batches hold their counts; only what is open is counted.
    "batch_progress": """
SELECT id, name, state, total, succeeded, failed, cancelled, expired, 0 AS running, 0 AS queued,
       created_at, finished_at, deadline_at, {duration_s} AS duration_s
FROM batch
WHERE finished_at IS NOT NULL
UNION ALL
SELECT b.id, b.name, b.state, b.total,
       COALESCE(SUM(CASE WHEN j.state = 'succeeded' THEN 1 ELSE 0 END), 0),
       COALESCE(SUM(CASE WHEN j.state = 'failed' THEN 1 ELSE 0 END), 0),
       COALESCE(SUM(CASE WHEN j.state = 'cancelled' THEN 1 ELSE 0 END), 0),
       COALESCE(SUM(CASE WHEN j.state = 'expired' THEN 1 ELSE 0 END), 0),
       COALESCE(SUM(CASE WHEN j.state = 'running' THEN 1 ELSE 0 END), 0),
       COALESCE(SUM(CASE WHEN j.state = 'queued' THEN 1 ELSE 0 END), 0),
       b.created_at, b.finished_at, b.deadline_at, NULL
FROM batch b LEFT JOIN job j ON j.batch_id = b.id
WHERE b.finished_at IS NULL
GROUP BY b.id, b.name, b.state, b.total, b.created_at, b.finished_at, b.deadline_at
""",
}
