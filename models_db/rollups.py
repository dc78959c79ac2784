"""Computes the roll-ups from samples, attempts and results: per minute, and per hour from the minutes.

A stretch of time is computed by deleting its rows and inserting them anew in one transaction, so doing it again, or
twice at once, changes nothing. ``advance`` goes on from where the last one stopped; any worker may call it. Whoever
writes samples into a time that is done sets the mark back (``note_samples``).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

from sqlalchemy import (
    CTE,
    ColumnElement,
    Connection,
    Engine,
    FromClause,
    and_,
    case,
    delete,
    exists,
    func,
    insert,
    literal,
    null,
    or_,
    select,
    union_all,
    update,
)

from models_db.base import Base
from models_db.dialects import insert_or_ignore, insert_rows
from models_db.histogram import Metric, upper_ms
from models_db.rollup_tables import (
    JobClass,
    JobHour,
    JobMinute,
    LatencyHour,
    LatencyMinute,
    RollupMark,
    ThroughputHour,
    ThroughputMinute,
)
from models_db.session import reading, transaction
from models_db.tables import TERMINAL_JOB_STATES, Attempt, AttemptOutcome, EngineSample, Job, JobState, Result
from models_db.timesql import day_of, hour_start_of, minute_of, night_of, seconds_between

MARK = "rollups"
MINUTE = timedelta(minutes=1)
HOUR = timedelta(hours=1)
SETTLE = timedelta(seconds=10)
"""A minute is computed so long after its end, when what belongs to it has normally been committed."""
LOOK_BACK = MINUTE
"""What lies so far before the mark is computed once more: a commit may have been on its way."""

_MARK_ROW = select(RollupMark.rolled_until, RollupMark.complete_from).where(RollupMark.name == MARK)

ROLLUPS: tuple[type[Base], ...] = (
    ThroughputMinute,
    ThroughputHour,
    JobMinute,
    JobHour,
    LatencyMinute,
    LatencyHour,
)


def floor_minute(moment: datetime) -> datetime:
    """The beginning of its minute, in UTC."""
    return moment.astimezone(UTC).replace(second=0, microsecond=0)


def floor_hour(moment: datetime) -> datetime:
    """The beginning of its hour, in UTC."""
    return floor_minute(moment).replace(minute=0)


def rolled_until(conn: Connection) -> datetime | None:
    """Up to when every minute has been computed; ``None`` before the first."""
    return conn.scalar(select(RollupMark.rolled_until).where(RollupMark.name == MARK))


def advance(
    conn: Connection,
    now: datetime,
    *,
    longest: timedelta = timedelta(days=1),
    with_present: bool = False,
) -> bool:
    """Compute the next stretch of at most ``longest``; whether there may be more to do.

    Leaves it to someone else who is at it. ``with_present`` also computes the part of the present minute that is
    there, which is then computed again.
    """
    if not with_present and not _due(rolled_until(conn), now):
        return False
    _ensure_mark(conn)
    locked = conn.execute(_MARK_ROW.with_for_update(skip_locked=True)).one_or_none()
    if locked is None:
        return False
    stretch = _next_stretch(conn, locked.rolled_until, locked.complete_from, now, longest, with_present)
    if stretch.since is not None:
        roll_up(conn, stretch.since, stretch.until)
    return _set_mark(conn, stretch)


def advance_aside(engine: Engine, now: datetime, *, longest: timedelta = timedelta(days=1)) -> bool:
    """``advance`` in transactions of its own, in which nobody who writes waits for it.

    SQLite lets one transaction write at a time. So the rows are read first, and replace those of the stretch of time
    only where nobody has moved the mark meanwhile.
    """
    if engine.dialect.name != "sqlite":
        return transaction(engine, partial(advance, now=now, longest=longest))
    with reading(engine) as conn:
        row = conn.execute(_MARK_ROW).one_or_none()
    if row is None:
        transaction(engine, _ensure_mark)
    mark, complete = (None, None) if row is None else (row.rolled_until, row.complete_from)
    if not _due(mark, now):
        return False
    with reading(engine) as conn:
        stretch = _next_stretch(conn, mark, complete, now, longest)
        classes = [] if stretch.since is None else _new_classes(conn, stretch.since, stretch.until)
    if classes:
        transaction(engine, partial(_insert_classes, classes=classes))
    found: list[tuple[type[Base], list[dict[str, Any]]]] = []
    if stretch.since is not None:
        with reading(engine) as conn:
            found = [
                (table, [dict(row) for row in conn.execute(query).mappings()])
                for table, query in _minutes(stretch.since, stretch.until)
            ]
    return transaction(engine, partial(_store, stretch=stretch, found=found))


def catch_up(
    engine: Engine,
    now: datetime,
    *,
    with_present: bool = False,
    longest: timedelta = timedelta(days=1),
    sleep: Callable[[float], object] = time.sleep,
) -> None:
    """Advance to ``now`` in as many transactions as it takes, waiting for others who are at it."""
    step = partial(advance, now=now, longest=longest, with_present=with_present)
    while True:
        while transaction(engine, step):
            pass
        with reading(engine) as conn:
            mark = rolled_until(conn)
        if mark is not None and mark >= floor_minute(now - SETTLE):
            return
        sleep(0.2)


def reopen(conn: Connection, since: datetime) -> None:
    """Have everything from ``since`` on computed again, by whoever advances next."""
    conn.execute(
        update(RollupMark)
        .where(RollupMark.name == MARK, RollupMark.rolled_until > since)
        .values(rolled_until=floor_hour(since))
    )


def note_samples(conn: Connection, oldest: datetime) -> None:
    """Samples from ``oldest`` on have been inserted: set the mark back if their time was done already.

    Late samples come from a worker that was cut off from the database; what it finished meanwhile is as late.
    """
    mark = rolled_until(conn)
    if mark is not None and oldest < mark - LOOK_BACK:
        reopen(conn, oldest)


def close_before(conn: Connection, moment: datetime) -> None:
    """Never compute again what lies before ``moment``, because its rows are about to be deleted.

    Raises:
        ValueError: ``moment`` is not the beginning of an hour.
    """
    if moment != floor_hour(moment):
        raise ValueError(f"moment: must be the beginning of an hour (got {moment.isoformat()})")
    _ensure_mark(conn)
    earlier = or_(RollupMark.complete_from.is_(None), RollupMark.complete_from < moment)
    conn.execute(update(RollupMark).where(RollupMark.name == MARK, earlier).values(complete_from=moment))


def complete_from(conn: Connection) -> datetime | None:
    """Before when rows may have been pruned; ``None`` while none were."""
    return conn.scalar(select(RollupMark.complete_from).where(RollupMark.name == MARK))


def roll_up(conn: Connection, since: datetime, until: datetime) -> None:
    """Compute every minute that begins in [since, until) and every hour that has a part in it.

    Raises:
        ValueError: a limit is not the beginning of a minute.
    """
    for moment in (since, until):
        if moment != floor_minute(moment):
            raise ValueError(f"since, until: must be beginnings of minutes (got {moment.isoformat()})")
    _insert_classes(conn, _new_classes(conn, since, until))
    for table, query in _minutes(since, until):
        _replace(conn, table, query, since, until)
    _replace_hours(conn, since, until)


# ----------------------------------------------------------------------------------------------------- the pieces


def _ensure_mark(conn: Connection) -> None:
    if conn.scalar(select(RollupMark.name).where(RollupMark.name == MARK)) is None:
        insert_or_ignore(conn, RollupMark, [{"name": MARK}], [RollupMark.name])


@dataclass(frozen=True, slots=True)
class _Stretch:
    """What is to be computed next, with the mark's row as it was when that was judged."""

    mark: datetime | None
    complete_from: datetime | None
    since: datetime | None  # none where there is nothing to compute
    until: datetime
    done: datetime  # what the mark says afterwards
    more: bool


def _due(mark: datetime | None, now: datetime) -> bool:
    return mark is None or mark < floor_minute(now - SETTLE)


def _next_stretch(
    conn: Connection,
    mark: datetime | None,
    complete: datetime | None,
    now: datetime,
    longest: timedelta,
    with_present: bool = False,
) -> _Stretch:
    target = floor_minute(now - SETTLE)
    end = floor_minute(now) + MINUTE if with_present else target
    since = _next_source(conn, None if mark is None else mark - LOOK_BACK)
    if since is None or since >= end:
        since, until = None, end
    else:
        since = floor_minute(since)
        if complete is not None:
            since = max(since, complete)
        until = min(end, floor_hour(since + longest) if longest >= HOUR else since + longest)
    return _Stretch(mark, complete, since, until, min(until, target), until < end)


def _set_mark(conn: Connection, stretch: _Stretch) -> bool:
    """Note what has been computed; whether there may be more to do."""
    if stretch.mark is None or stretch.done > stretch.mark:
        conn.execute(update(RollupMark).where(RollupMark.name == MARK).values(rolled_until=stretch.done))
    return stretch.more


def _store(
    conn: Connection, stretch: _Stretch, found: Sequence[tuple[type[Base], Sequence[dict[str, Any]]]]
) -> bool:
    """Put in what was read before; whether there may be more to do, such as all of it again."""
    row = conn.execute(_MARK_ROW).one()
    if (row.rolled_until, row.complete_from) != (stretch.mark, stretch.complete_from):
        return True
    if stretch.since is not None:
        for table, rows in found:
            _clear(conn, table, stretch.since, stretch.until)
            insert_rows(conn, table, rows)
        _replace_hours(conn, stretch.since, stretch.until)
    return _set_mark(conn, stretch)


def _next_source(conn: Connection, since: datetime | None) -> datetime | None:
    """When the first row from ``since`` on lies that a roll-up is made of."""
    found = []
    for column in (EngineSample.sampled_at, Attempt.ended_at, Job.finished_at):
        query = select(func.min(column))
        if since is not None:
            query = query.where(column >= since)
        if (first := conn.scalar(query)) is not None:
            found.append(first)
    return min(found, default=None)


def _replace(conn: Connection, table: Any, query: Any, since: datetime, until: datetime) -> None:
    """Put the rows of the query in place of those of the stretch of time."""
    _clear(conn, table, since, until)
    conn.execute(insert(table).from_select([column.name for column in query.selected_columns], query))


def _clear(conn: Connection, table: Any, since: datetime, until: datetime) -> None:
    conn.execute(delete(table).where(table.started_at >= since, table.started_at < until))


def _minutes(since: datetime, until: datetime) -> list[tuple[type[Base], Any]]:
    """The rows of a stretch of time in each table of minutes; the classes of its jobs must be known."""
    ended = _ended(since, until)
    return [
        (ThroughputMinute, _samples(since, until)),
        (JobMinute, _outcomes(ended)),
        (LatencyMinute, _times(ended)),
    ]


def _replace_hours(conn: Connection, since: datetime, until: datetime) -> None:
    """Compute every hour anew that has a part in the stretch of time."""
    first, end = floor_hour(since), floor_hour(until - timedelta(microseconds=1)) + HOUR
    for minute, hour in (
        (ThroughputMinute, ThroughputHour),
        (JobMinute, JobHour),
        (LatencyMinute, LatencyHour),
    ):
        _replace(conn, hour, _hours(minute, hour, first, end), first, end)


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


def _new_classes(conn: Connection, since: datetime, until: datetime) -> list[dict[str, Any]]:
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


def _insert_classes(conn: Connection, classes: Sequence[dict[str, Any]]) -> None:
    # Several workers on SQLite may find the same ones.
    if classes:
        key = [JobClass.model, JobClass.queue, JobClass.tenant, JobClass.priority]
        insert_or_ignore(conn, JobClass, classes, key)


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


def _hours(minute: Any, hour: Any, since: datetime, until: datetime) -> Any:
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
