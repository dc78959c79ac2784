"""The throughput history out of the roll-ups: quick over years, and there after its jobs were pruned."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any, Literal, get_args

from sqlalchemy import ColumnElement, Connection, String, cast, func, select

from models_db.dialects import hour_of
from models_db.errors import InvalidValueError
from models_db.histogram import Metric
from models_db.queries import ThroughputRow, period_s, within
from models_db.rollup_tables import JobClass, JobHour, LatencyHour, ThroughputHour
from models_db.rollups import floor_hour
from models_db.tables import Job, Worker
from models_db.timesql import database_now, day_of, night_of

HistoryBy = Literal["hour", "day", "night", "model", "tenant", "queue"]


def history(
    conn: Connection,
    by: HistoryBy = "hour",
    *,
    since: datetime | None = None,
    until: datetime | None = None,
    model: str | None = None,
) -> list[ThroughputRow]:
    """Like ``queries.throughput``, from whole hours: those that began in [the hour of ``since``, ``until``).

    Percentiles are upper ends of intervals (``models_db.histogram``). There is no span of work.

    Raises:
        InvalidValueError: ``by`` is none of the six.
    """
    if by not in get_args(HistoryBy):
        raise InvalidValueError("by", f"must be one of {', '.join(get_args(HistoryBy))}", value=repr(by))
    limits = (since, until, model)
    percentiles = _percentiles(conn, by, *limits)
    active = _active(conn, by, *limits)
    key = _key(by, JobHour.started_at)
    sums = [
        func.sum(getattr(JobHour, name)).label(name)
        for name in ("succeeded", "failed", "cancelled", "expired", "prompt_tokens", "cached_tokens")
    ]
    query = (
        select(
            key.label("key"),
            *sums,
            func.sum(JobHour.completion_tokens).label("completion_tokens"),
            func.min(JobHour.started_at).label("first"),
            func.max(JobHour.started_at).label("last"),
        )
        .join(JobClass, JobClass.id == JobHour.class_id)
        .where(
            JobHour.succeeded + JobHour.failed + JobHour.cancelled + JobHour.expired > 0,
            *_within(JobHour.started_at, JobClass.model, *limits),
        )
        .group_by(key)
    )
    present = conn.scalars(select(database_now())).one()
    rows = []
    for row in conn.execute(query):
        ends = {name: int(getattr(row, name)) for name in ("succeeded", "failed", "cancelled", "expired")}
        tokens, period = int(row.completion_tokens), period_s(row.first, row.last, present)
        found = percentiles.get(row.key, {})
        rows.append(
            ThroughputRow(
                key=row.key,
                jobs=sum(ends.values()),
                **ends,
                prompt_tokens=int(row.prompt_tokens),
                cached_tokens=int(row.cached_tokens),
                completion_tokens=tokens,
                period_s=period,
                tokens_per_s=tokens / period,
                span_s=None,
                span_tokens_per_s=None,
                latency_p50_s=percentile(found.get(Metric.LATENCY, ()), 50),
                latency_p95_s=percentile(found.get(Metric.LATENCY, ()), 95),
                ttft_p50_s=percentile(found.get(Metric.FIRST_TOKEN, ()), 50),
                ttft_p95_s=percentile(found.get(Metric.FIRST_TOKEN, ()), 95),
                active_fraction=active.get(row.key),
            )
        )
    if by in ("hour", "day", "night"):
        return sorted(rows, key=lambda row: row.key)
    return sorted(rows, key=lambda row: (-row.completion_tokens, row.key))


def percentile(counts: Sequence[tuple[int, int]], percent: int) -> float | None:
    """By nearest rank, in seconds, from (upper end in ms, count) in ascending order; ``None`` without counts."""
    total, seen = sum(count for _, count in counts), 0
    for upper, count in counts:
        seen += count
        if seen * 100 >= total * percent:
            return upper / 1000
    return None


def more_than(conn: Connection, jobs: int, since: datetime | None, until: datetime | None) -> bool:
    """Whether more than so many jobs ended in [since, until): a count that stops there."""
    query = select(Job.id).where(Job.finished_at.is_not(None), *within(Job.finished_at, since, until))
    return (conn.scalar(select(func.count()).select_from(query.limit(jobs + 1).subquery())) or 0) > jobs


def _key(by: HistoryBy, time: Any) -> ColumnElement[str]:
    match by:
        case "hour":
            return hour_of(time)
        case "day":
            return cast(day_of(time), String(10))
        case "night":
            return cast(night_of(time), String(10))
        case "model":
            return JobClass.model.expression
        case "tenant":
            return JobClass.tenant.expression
        case "queue":
            return JobClass.queue.expression


def _within(
    time: Any, model_column: Any, since: datetime | None, until: datetime | None, model: str | None
) -> list[ColumnElement[bool]]:
    filters = within(time, None if since is None else floor_hour(since), until)
    if model is not None:
        filters.append(model_column == model)
    return filters


def _percentiles(
    conn: Connection, by: HistoryBy, *limits: Any
) -> dict[str, dict[str, list[tuple[int, int]]]]:
    """Counts by key and metric, each as (upper end, jobs) in ascending order."""
    key = _key(by, LatencyHour.started_at)
    query = (
        select(key, LatencyHour.metric, LatencyHour.upper_ms, func.sum(LatencyHour.jobs))
        .join(JobClass, JobClass.id == LatencyHour.class_id)
        .where(
            LatencyHour.metric != Metric.QUEUE.value,
            *_within(LatencyHour.started_at, JobClass.model, *limits),
        )
        .group_by(key, LatencyHour.metric, LatencyHour.upper_ms)
        .order_by(LatencyHour.upper_ms)
    )
    found: dict[str, dict[str, list[tuple[int, int]]]] = {}
    for name, metric, upper, jobs in conn.execute(query):
        found.setdefault(name, {}).setdefault(metric, []).append((upper, int(jobs)))
    return found


def _active(conn: Connection, by: HistoryBy, *limits: Any) -> dict[str, float]:
    """The share of the workers' time that their devices computed; a tenant or a queue has no worker of its own."""
    if by in ("tenant", "queue"):
        return {}
    key = Worker.model.expression if by == "model" else _key(by, ThroughputHour.started_at)
    share = func.sum(ThroughputHour.active_s) / func.nullif(func.sum(ThroughputHour.sampled_s), 0)
    query = (
        select(key, share)
        .join(Worker, Worker.id == ThroughputHour.worker_id)
        .where(*_within(ThroughputHour.started_at, Worker.model, *limits))
        .group_by(key)
    )
    return {name: float(active) for name, active in conn.execute(query) if active is not None}
