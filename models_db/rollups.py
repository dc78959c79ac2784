"""Computes the roll-ups from samples, attempts and results: per minute, and per hour from the minutes.

A stretch of time is computed by deleting its rows and inserting them anew in one transaction, so doing it again, or
twice at once, changes nothing. ``advance`` goes on from where the last one stopped; any worker may call it.

Whoever writes samples leaves a note of their time in the same transaction (``note_samples``). A roll-up reads the notes
before the samples, so that it has seen the samples of every note that it takes away; one that it has not seen stays for
the next, which goes back to a time that was done. So none is lost, whenever it is committed, and no writer waits for a
roll-up, which holds the mark for as long as it computes.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

from sqlalchemy import Connection, Engine, delete, func, insert, or_, select, update

from models_db.base import Base
from models_db.clock import database_time
from models_db.dialects import chunked, insert_or_ignore, insert_rows
from models_db.rollup_queries import hours, minutes, new_classes
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
from models_db.tables import Attempt, EngineSample, Job

MARK = "rollups"
MINUTE = timedelta(minutes=1)
HOUR = timedelta(hours=1)
SETTLE = timedelta(seconds=10)
"""A minute is computed so long after its end, when what belongs to it has normally been committed."""
LOOK_BACK = MINUTE
"""What lies so far before the mark is computed once more: a commit may have been on its way."""

_MARK_ROWS = select(RollupMark.name, RollupMark.rolled_until, RollupMark.complete_from)

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
    return _read_mark(conn).done


def advance(
    conn: Connection,
    now: datetime | None = None,
    *,
    longest: timedelta = timedelta(days=1),
    with_present: bool = False,
) -> bool:
    """Compute the next stretch of at most ``longest``; whether there may be more to do.

    Leaves it to someone else who is at it. ``with_present`` also computes the part of the present minute that is
    there, which is then computed again.

    Args:
        now: the present by the database's clock when unset. Ends of jobs have its time: by a host's clock that is
            ahead, minutes would be done for good before what belongs to them has happened.
    """
    now = now or database_time(conn)
    if not with_present and not _due(_read_mark(conn).done, now):
        return False
    _ensure_mark(conn)
    lock = select(RollupMark.name).where(RollupMark.name == MARK).with_for_update(skip_locked=True)
    if conn.scalar(lock) is None:
        return False
    stretch = _next_stretch(conn, _read_mark(conn), now, longest, with_present)
    if stretch.since is not None:
        roll_up(conn, stretch.since, stretch.until)
    return _set_mark(conn, stretch)


def advance_aside(
    engine: Engine,
    now: datetime | None = None,
    *,
    longest: timedelta = timedelta(days=1),
    with_present: bool = False,
) -> bool:
    """``advance`` in transactions of its own, in which nobody who writes waits for it.

    SQLite lets one transaction write at a time. So the rows are read first, and replace those of the stretch of time
    only where nobody has moved the mark meanwhile.
    """
    if engine.dialect.name != "sqlite":
        return transaction(engine, partial(advance, now=now, longest=longest, with_present=with_present))
    with reading(engine) as conn:
        now = now or database_time(conn)
        mark = _read_mark(conn)
    if not with_present and not _due(mark.done, now):
        return False
    if mark.rolled_until is None:
        transaction(engine, _ensure_mark)
    with reading(engine) as conn:
        stretch = _next_stretch(conn, mark, now, longest, with_present)
        classes = [] if stretch.since is None else new_classes(conn, stretch.since, stretch.until)
    if classes:
        transaction(engine, partial(_insert_classes, classes=classes))
    found: list[tuple[type[Base], list[dict[str, Any]]]] = []
    if stretch.since is not None:
        with reading(engine) as conn:
            found = [
                (table, [dict(row) for row in conn.execute(query).mappings()])
                for table, query in minutes(stretch.since, stretch.until)
            ]
    return transaction(engine, partial(_store, stretch=stretch, found=found))


def catch_up(
    engine: Engine,
    now: datetime | None = None,
    *,
    with_present: bool = False,
    longest: timedelta = timedelta(days=1),
    sleep: Callable[[float], object] = time.sleep,
) -> None:
    """Advance to ``now`` in as many transactions as it takes, waiting for others who are at it. See ``advance``."""
    if now is None:
        with reading(engine) as conn:
            now = database_time(conn)
    while True:
        while advance_aside(engine, now, longest=longest, with_present=with_present):
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
    """Samples from ``oldest`` on are inserted in this transaction: the next roll-up sees to it that they count.

    Late ones come from a worker that was cut off from the database, and what it finished meanwhile is as late; or their
    commit took long. Nobody can know the latter beforehand, so that every writer leaves its note: a row of its own,
    which meets no lock.
    """
    conn.execute(insert(RollupMark).values(name=secrets.token_hex(8), rolled_until=oldest))


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
    _insert_classes(conn, new_classes(conn, since, until))
    for table, query in minutes(since, until):
        _replace(conn, table, query, since, until)
    _replace_hours(conn, since, until)


# ----------------------------------------------------------------------------------------------------- the pieces


def _ensure_mark(conn: Connection) -> None:
    if conn.scalar(select(RollupMark.name).where(RollupMark.name == MARK)) is None:
        insert_or_ignore(conn, RollupMark, [{"name": MARK}], [RollupMark.name])


@dataclass(frozen=True, slots=True)
class _Mark:
    """The mark, and the notes of the samples that have come in since a roll-up last looked."""

    rolled_until: datetime | None = None
    complete_from: datetime | None = None
    notes: tuple[str, ...] = ()
    oldest: datetime | None = None  # of the samples that the notes tell of

    @property
    def done(self) -> datetime | None:
        """Up to when every minute is computed for good: what lies shortly before the mark is looked at again anyway."""
        if self.rolled_until is None or self.oldest is None or self.oldest >= self.rolled_until - LOOK_BACK:
            return self.rolled_until
        return floor_hour(self.oldest)


def _read_mark(conn: Connection) -> _Mark:
    rows = {name: (until, complete) for name, until, complete in conn.execute(_MARK_ROWS)}
    until, complete = rows.pop(MARK, (None, None))
    oldest = min((moment for moment, _ in rows.values() if moment is not None), default=None)
    return _Mark(until, complete, tuple(rows), oldest)


@dataclass(frozen=True, slots=True)
class _Stretch:
    """What is to be computed next, with the mark as it was when that was judged."""

    mark: _Mark
    since: datetime | None  # none where there is nothing to compute
    until: datetime
    done: datetime  # what the mark says afterwards
    more: bool


def _due(mark: datetime | None, now: datetime) -> bool:
    return mark is None or mark < floor_minute(now - SETTLE)


def _next_stretch(
    conn: Connection, mark: _Mark, now: datetime, longest: timedelta, with_present: bool
) -> _Stretch:
    target = floor_minute(now - SETTLE)
    end = floor_minute(now) + MINUTE if with_present else target
    since = _next_source(conn, None if mark.done is None else mark.done - LOOK_BACK)
    if since is None or since >= end:
        since, until = None, end
    else:
        since = floor_minute(since)
        if mark.complete_from is not None:
            since = max(since, mark.complete_from)
        until = min(end, floor_hour(since + longest) if longest >= HOUR else since + longest)
    return _Stretch(mark, since, until, min(until, target), until < end)


def _set_mark(conn: Connection, stretch: _Stretch) -> bool:
    """Note what has been computed; whether there may be more to do."""
    begun = stretch.mark.done
    reached = stretch.done if begun is None else max(begun, stretch.done)
    if reached != stretch.mark.rolled_until:
        conn.execute(update(RollupMark).where(RollupMark.name == MARK).values(rolled_until=reached))
    for names in chunked(stretch.mark.notes):
        conn.execute(delete(RollupMark).where(RollupMark.name.in_(names)))
    return stretch.more


def _store(
    conn: Connection, stretch: _Stretch, found: Sequence[tuple[type[Base], Sequence[dict[str, Any]]]]
) -> bool:
    """Put in what was read before; whether there may be more to do, such as all of it again."""
    now = _read_mark(conn)
    if (now.rolled_until, now.complete_from) != (stretch.mark.rolled_until, stretch.mark.complete_from):
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


def _replace_hours(conn: Connection, since: datetime, until: datetime) -> None:
    """Compute every hour anew that has a part in the stretch of time."""
    first, end = floor_hour(since), floor_hour(until - timedelta(microseconds=1)) + HOUR
    for minute, hour in (
        (ThroughputMinute, ThroughputHour),
        (JobMinute, JobHour),
        (LatencyMinute, LatencyHour),
    ):
        _replace(conn, hour, hours(minute, hour, first, end), first, end)


def _insert_classes(conn: Connection, classes: Sequence[dict[str, Any]]) -> None:
    # Several workers on SQLite may find the same ones.
    if classes:
        key = [JobClass.model, JobClass.queue, JobClass.tenant, JobClass.priority]
        insert_or_ignore(conn, JobClass, classes, key)
