"""The questions people ask of the history, as SQL in one place, portable over the three databases."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Literal, get_args

from sqlalchemy import ColumnElement, Connection, Select, and_, case, func, null, or_, select, union_all

from models_db.dialects import hour_of
from models_db.errors import InvalidValueError
from models_db.rollups import floor_hour
from models_db.tables import (
    TERMINAL_JOB_STATES,
    Attempt,
    AttemptOutcome,
    EngineSample,
    Job,
    JobState,
    Result,
    Worker,
)
from models_db.timesql import database_now

GroupBy = Literal["hour", "model", "worker", "batch"]


@dataclass(frozen=True, slots=True)
class ThroughputRow:
    """One group of finished jobs. Times are in seconds; percentiles are by nearest rank.

    The counts are of ends: a job that failed, was tried again and succeeded counts once as failed, once as succeeded.
    (One that was cancelled before its first start, and then tried again, has left no trace of that but in roll-ups.)
    """

    key: str  # "2026-11-29 21:00" (UTC), a model, a worker's name or a batch id ("" without one)
    jobs: int  # ends, well or not
    succeeded: int
    failed: int
    cancelled: int
    expired: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    period_s: float  # whole hours: from the first with an end to the end of the last, as far as they are over
    tokens_per_s: float  # completion tokens over the period
    span_s: float | None  # first start to last end, within the hour when grouped by hour; None from roll-ups
    span_tokens_per_s: float | None  # completion tokens over the span
    latency_p50_s: float | None
    latency_p95_s: float | None
    ttft_p50_s: float | None
    ttft_p95_s: float | None
    active_fraction: float | None  # of the workers' sampled time, how much the device computed; None by batch

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe values."""
        return asdict(self)


# A sample belongs to a worker, not to a job, so there is no share of it for a batch.
_SAMPLE_KEYS: dict[GroupBy, ColumnElement[str]] = {
    "hour": hour_of(EngineSample.sampled_at),
    "model": Worker.model.expression,
    "worker": Worker.name.expression,
}


def throughput(
    conn: Connection,
    by: GroupBy = "hour",
    *,
    since: datetime | None = None,
    until: datetime | None = None,
    model: str | None = None,
    batch_id: str | None = None,
) -> list[ThroughputRow]:
    """Jobs that ended in [since, until), grouped; hours in order, the rest by new tokens, most first.

    Latency and time to first token are those of jobs that succeeded. An end counts for the worker of its attempt.

    Raises:
        InvalidValueError: ``by`` is not one of the four.
    """
    if by not in get_args(GroupBy):
        raise InvalidValueError("by", "must be hour, model, worker or batch", value=repr(by))
    filters: list[ColumnElement[bool]] = []
    if model is not None:
        filters.append(Job.model == model)
    if batch_id is not None:
        filters.append(Job.batch_id == batch_id)
    active = {} if batch_id is not None else _active_fractions(conn, by, since, until, model)
    present = conn.scalars(select(database_now())).one()
    rows = []
    for row in conn.execute(_grouped(by, since, until, filters)):
        period = period_s(row.first_end, row.last_end, present, since, until)
        start = row.first_start
        if by == "hour" and start is not None:
            start = max(start, datetime.strptime(row.key, "%Y-%m-%d %H:%M").replace(tzinfo=UTC))
        span = 0.0 if start is None else max(0.0, (row.last_end - start).total_seconds())
        tokens = int(row.completion_tokens)
        rows.append(
            ThroughputRow(
                key=row.key,
                jobs=row.jobs,
                succeeded=int(row.succeeded),
                failed=int(row.failed),
                cancelled=int(row.cancelled),
                expired=int(row.expired),
                prompt_tokens=int(row.prompt_tokens),
                cached_tokens=int(row.cached_tokens),
                completion_tokens=tokens,
                period_s=period,
                tokens_per_s=tokens / period,
                span_s=span,
                span_tokens_per_s=tokens / span if span > 0 else None,
                latency_p50_s=row.latency_p50,
                latency_p95_s=row.latency_p95,
                ttft_p50_s=row.ttft_p50,
                ttft_p95_s=row.ttft_p95,
                active_fraction=active.get(row.key),
            )
        )
    if by == "hour":
        return sorted(rows, key=lambda row: row.key)
    return sorted(rows, key=lambda row: (-row.completion_tokens, row.key))


def period_s(
    first: datetime,
    last: datetime,
    present: datetime,
    since: datetime | None = None,
    until: datetime | None = None,
) -> float:
    """Seconds of the whole hours from that of ``first`` to that of ``last``, within the limits and the past.

    The one divisor of tokens a second, from jobs as from roll-ups: a span of work as short as a single job would make
    an idle hour look like the busiest.
    """
    start, end = floor_hour(first), floor_hour(last) + timedelta(hours=1)
    if since is not None:
        start = max(start, since)
    if until is not None:
        end = min(end, until)
    if last < present < end:
        end = present
    return max(1.0, (end - start).total_seconds())


def _grouped(
    by: GroupBy, since: datetime | None, until: datetime | None, filters: list[ColumnElement[bool]]
) -> Select[*tuple[Any, ...]]:
    succeeded = Job.state == JobState.SUCCEEDED
    last_ends = (
        select(
            _key(by, Job.finished_at).label("key"),
            Job.state,
            Job.started_at,
            Job.finished_at,
            Result.prompt_tokens,
            Result.cached_tokens,
            Result.completion_tokens,
            case((succeeded, Result.latency_s)).label("latency"),
            case((succeeded, Result.time_to_first_token_s)).label("ttft"),
        )
        .select_from(Job)
        .outerjoin(Result, and_(Result.job_id == Job.id, Result.choice == 0))
        .outerjoin(Attempt, and_(Attempt.job_id == Job.id, Attempt.number == Job.attempt))
        .outerjoin(Worker, Worker.id == Attempt.worker_id)
        .where(Job.finished_at.is_not(None), *within(Job.finished_at, since, until), *filters)
    )
    # Jobs that ended, and were tried again. What they had was given back then.
    earlier_ends = (
        select(
            _key(by, Attempt.ended_at).label("key"),
            Attempt.outcome,
            Attempt.started_at,
            Attempt.ended_at,
            *(null() for _ in range(5)),
        )
        .select_from(Attempt)
        .join(Job, Job.id == Attempt.job_id)
        .join(Worker, Worker.id == Attempt.worker_id)
        .where(
            Attempt.outcome.in_([AttemptOutcome(state.value) for state in TERMINAL_JOB_STATES]),
            or_(
                Attempt.number != Job.attempt,
                Job.finished_at.is_(None),
                Attempt.ended_at != Job.finished_at,
            ),
            *within(Attempt.ended_at, since, until),
            *filters,
        )
    )
    ended = union_all(last_ends, earlier_ends).cte("ended")
    # The rank of each time within its group, missing ones last, and how many there are.
    ranked = select(
        ended,
        *(
            column
            for value in (ended.c.latency, ended.c.ttft)
            for column in (
                func.row_number()
                .over(partition_by=ended.c.key, order_by=(case((value.is_(None), 1), else_=0), value))
                .label(f"{value.name}_rank"),
                func.count(value).over(partition_by=ended.c.key).label(f"{value.name}_count"),
            )
        ),
    ).cte("ranked")

    def percentile(name: str, percent: int) -> ColumnElement[float | None]:
        # Nearest rank: the smallest time whose rank is at least this share of the count.
        rank, count = ranked.c[f"{name}_rank"], ranked.c[f"{name}_count"]
        return func.min(case((rank * 100 >= count * percent, ranked.c[name]))).label(f"{name}_p{percent}")

    def in_state(state: JobState) -> ColumnElement[int]:
        return func.sum(case((ranked.c.state == state, 1), else_=0)).label(str(state))

    return select(
        ranked.c.key,
        func.count().label("jobs"),
        *(in_state(state) for state in JobState if state.terminal),
        func.coalesce(func.sum(ranked.c.prompt_tokens), 0).label("prompt_tokens"),
        func.coalesce(func.sum(ranked.c.cached_tokens), 0).label("cached_tokens"),
        func.coalesce(func.sum(ranked.c.completion_tokens), 0).label("completion_tokens"),
        func.min(ranked.c.started_at).label("first_start"),
        func.min(ranked.c.finished_at).label("first_end"),
        func.max(ranked.c.finished_at).label("last_end"),
        *(percentile(name, percent) for name in ("latency", "ttft") for percent in (50, 95)),
    ).group_by(ranked.c.key)


def _key(by: GroupBy, time: Any) -> ColumnElement[str]:
    match by:
        case "hour":
            return hour_of(time)
        case "model":
            return Job.model.expression
        case "worker":
            return func.coalesce(Worker.name, "")
        case "batch":
            return func.coalesce(Job.batch_id, "")


def within(time: Any, since: datetime | None, until: datetime | None) -> list[ColumnElement[bool]]:
    """The conditions of a time in [since, until)."""
    conditions = [] if since is None else [time >= since]
    return conditions if until is None else [*conditions, time < until]


def _active_fractions(
    conn: Connection, by: GroupBy, since: datetime | None, until: datetime | None, model: str | None
) -> dict[str, float]:
    key = _SAMPLE_KEYS.get(by)
    if key is None:
        return {}
    active = func.sum(EngineSample.active_fraction * EngineSample.interval_s)
    query = (
        select(key.label("key"), (active / func.sum(EngineSample.interval_s)).label("active"))
        .select_from(EngineSample)
        .join(Worker, Worker.id == EngineSample.worker_id)
        .group_by(key)
    )
    query = query.where(*within(EngineSample.sampled_at, since, until))
    if model is not None:
        query = query.where(Worker.model == model)
    return {row.key: float(row.active) for row in conn.execute(query)}


def job_counts(conn: Connection, *, model: str | None = None) -> Mapping[JobState, int]:
    """How many jobs are in which state; every state is present."""
    query = select(Job.state, func.count()).group_by(Job.state)
    if model is not None:
        query = query.where(Job.model == model)
    counts = dict.fromkeys(JobState, 0)
    for state, count in conn.execute(query):
        counts[state] = count
    return counts
