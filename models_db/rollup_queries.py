"""What a roll-up computes, as queries: the rows of a stretch of time for each of its tables."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import (
    CTE,
    ColumnElement,
    Connection,
    FromClause,
    and_,
    case,
    exists,
    func,
    literal,
    null,
    or_,
    select,
    union_all,
)

from models_db.base import Base
from models_db.histogram import Metric, upper_ms
from models_db.rollup_tables import JobClass, JobMinute, LatencyMinute, ThroughputMinute
from models_db.tables import TERMINAL_JOB_STATES, Attempt, AttemptOutcome, EngineSample, Job, JobState, Result
from models_db.timesql import day_of, hour_start_of, minute_of, night_of, seconds_between


def minutes(since: datetime, until: datetime) -> list[tuple[type[Base], Any]]:
    """The rows of a stretch of time in each table of minutes; the classes of its jobs must be known."""
    ended = _ended(since, until)
    return [
        (ThroughputMinute, _samples(since, until)),
        (JobMinute, _outcomes(ended)),
        (LatencyMinute, _times(ended)),
    ]


def hours(minute: Any, hour: Any, since: datetime, until: datetime) -> Any:
    """The minutes added up: keys grouped, maxima kept, all else summed."""
    table = minute.__table__
    started = hour_start_of(table.c.started_at)
    keys = [column for column in table.primary_key if column.name != "started_at"]
    values = [
        (func.max if column.name.startswith("max_") else func.sum)(column).label(column.name)
        for column in table.c
        if not column.primary_key
    ]
    dates = []
    if "day" in hour.__table__.c:
        dates = [day_of(started).label("day"), night_of(started).label("night")]
    return (
        select(started.label("started_at"), *keys, *dates, *values)
        .where(table.c.started_at >= since, table.c.started_at < until)
        .group_by(started, *keys)
    )


def new_classes(conn: Connection, since: datetime, until: datetime) -> list[dict[str, Any]]:
    """Classes of jobs that have ended in the stretch of time, as far as they have no number yet."""
    columns = (Job.model, Job.queue, _tenant(), Job.priority)
    by_attempt = (
        select(*columns)
        .join(Attempt, Attempt.job_id == Job.id)
        .where(Attempt.ended_at >= since, Attempt.ended_at < until)
    )
    by_job = select(*columns).where(Job.finished_at >= since, Job.finished_at < until, _without_attempt())
    seen = union_all(by_attempt, by_job).subquery().select().distinct().subquery()
    model, queue, tenant, priority = seen.c
    known = exists().where(
        JobClass.model == model,
        JobClass.queue == queue,
        JobClass.tenant == tenant,
        JobClass.priority == priority,
    )
    names = ("model", "queue", "tenant", "priority")
    found = conn.execute(select(model, queue, tenant, priority).where(~known))
    return [dict(zip(names, row, strict=True)) for row in found]


# ----------------------------------------------------------------------------------------------------- the pieces


def _samples(since: datetime, until: datetime) -> Any:
    sample, span = EngineSample, EngineSample.interval_s
    started = minute_of(sample.sampled_at)
    working = or_(sample.running > 0, sample.generated_tokens > 0)

    def total(value: Any, name: str) -> ColumnElement[Any]:
        return func.sum(value).label(name)

    counts = (
        "prompt_tokens",
        "cached_tokens",
        "generated_tokens",
        "steps",
        "requests_finished",
        "requests_failed",
        "preemptions",
        "prepare_s",
    )
    return (
        select(
            started.label("started_at"),
            sample.worker_id,
            func.count().label("samples"),
            total(span, "sampled_s"),
            total(sample.active_fraction * span, "active_s"),
            total(case((working, span), else_=literal(0.0)), "working_s"),
            total(sample.running * span, "running_s"),
            total(sample.waiting * span, "waiting_s"),
            total(sample.kv_used_fraction * span, "kv_used_s"),
            *(total(getattr(sample, name), name) for name in counts),
            func.max(sample.running).label("max_running"),
            func.max(sample.waiting).label("max_waiting"),
        )
        .where(sample.sampled_at >= since, sample.sampled_at < until)
        .group_by(started, sample.worker_id)
    )


def _tenant() -> ColumnElement[str]:
    return func.coalesce(Job.tenant, "")


def _without_attempt() -> ColumnElement[bool]:
    """Jobs whose end is not that of an attempt: cancelled, expired, given up or answered while they waited."""
    closed = exists().where(
        Attempt.job_id == Job.id,
        Attempt.number == Job.attempt,
        Attempt.ended_at == Job.finished_at,
        Attempt.outcome.in_([AttemptOutcome(state.value) for state in TERMINAL_JOB_STATES]),
    )
    return ~closed


def _ended(since: datetime, until: datetime) -> CTE:
    """One row for each attempt that ended in the stretch of time, and each job that ended without one."""
    same_class = and_(
        JobClass.model == Job.model,
        JobClass.queue == Job.queue,
        JobClass.tenant == _tenant(),
        JobClass.priority == Job.priority,
    )
    last = and_(Attempt.number == Job.attempt, Attempt.ended_at == Job.finished_at)
    succeeded = and_(Attempt.outcome == AttemptOutcome.SUCCEEDED, Job.state == JobState.SUCCEEDED)
    waited = seconds_between(Job.created_at, Attempt.started_at) + Result.queue_time_s
    attempts = (
        select(
            minute_of(Attempt.ended_at).label("started_at"),
            JobClass.id.label("class_id"),
            Attempt.outcome.label("outcome"),
            case((Attempt.number > 1, 1), else_=0).label("retried"),
            literal(0).label("without_attempt"),
            func.coalesce(Result.prompt_tokens, 0).label("prompt_tokens"),
            func.coalesce(Result.cached_tokens, 0).label("cached_tokens"),
            func.coalesce(Result.completion_tokens, 0).label("completion_tokens"),
            case((succeeded, Result.latency_s)).label("latency_s"),
            case((succeeded, Result.time_to_first_token_s)).label("first_token_s"),
            case((succeeded, case((waited > 0, waited), else_=literal(0.0)))).label("queue_s"),
        )
        .select_from(Attempt)
        .join(Job, Job.id == Attempt.job_id)
        .join(JobClass, same_class)
        .outerjoin(Result, and_(Result.job_id == Job.id, Result.choice == 0, last))
        .where(Attempt.ended_at >= since, Attempt.ended_at < until)
    )
    zero, nothing = literal(0), null()
    unstarted = (
        select(
            minute_of(Job.finished_at),
            JobClass.id,
            Job.state,
            zero,
            literal(1),
            zero,
            zero,
            zero,
            nothing,
            nothing,
            nothing,
        )
        .select_from(Job)
        .join(JobClass, same_class)
        .where(Job.finished_at >= since, Job.finished_at < until, _without_attempt())
    )
    # Several questions are asked of it, and PostgreSQL and SQLite look through what a CTE names once.
    return union_all(attempts, unstarted).cte("ended")


def _outcomes(ended: FromClause) -> Any:
    def total(name: str) -> ColumnElement[Any]:
        return func.sum(ended.c[name]).label(name)

    def time(name: str) -> ColumnElement[Any]:
        return func.coalesce(func.sum(ended.c[name]), literal(0.0)).label(name)

    return select(
        ended.c.started_at,
        ended.c.class_id,
        *(
            func.sum(case((ended.c.outcome == outcome, 1), else_=0)).label(outcome.value)
            for outcome in AttemptOutcome
        ),
        *map(total, ("without_attempt", "retried", "prompt_tokens", "cached_tokens", "completion_tokens")),
        *map(time, ("latency_s", "queue_s", "first_token_s")),
        func.count(ended.c.latency_s).label("timed"),
        func.count(ended.c.first_token_s).label("first_tokens"),
    ).group_by(ended.c.started_at, ended.c.class_id)


def _times(ended: FromClause) -> Any:
    columns = {
        Metric.LATENCY: ended.c.latency_s,
        Metric.FIRST_TOKEN: ended.c.first_token_s,
        Metric.QUEUE: ended.c.queue_s,
    }
    values = union_all(
        *(
            select(
                ended.c.started_at,
                ended.c.class_id,
                literal(metric.value).label("metric"),
                upper_ms(column).label("upper_ms"),
            ).where(column.is_not(None))
            for metric, column in columns.items()
        )
    ).subquery("times")
    keys = (values.c.started_at, values.c.class_id, values.c.metric, values.c.upper_ms)
    return select(*keys, func.count().label("jobs")).group_by(*keys)
