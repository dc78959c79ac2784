"""Callbacks: who wants to be told when a job or a batch has ended, and how far the telling is.

A row is written in the transaction that accepts the job or makes the batch. The transaction that ends it makes the
row due, so that neither a client nor a worker has to live for it. Senders take due rows host by host: each look goes
through an index on state, host and time, whatever number of callbacks waits for jobs that still run.

Every function works inside the caller's transaction and never commits.

Locks are taken in this order: jobs or a batch, then callbacks. Senders lock callbacks alone, for the length of a claim
or of a note, and a batch that they end only where nobody else has it (``lock_free_batch``). So whoever ends a job waits
for no sender: what waits for its end is locked by none. Who ends a batch or opens it again may meet a sender that has
just counted its jobs, or has just taken its callback, and waits for that short transaction.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any

from sqlalchemy import (
    Boolean,
    CheckConstraint,
    Connection,
    ForeignKey,
    Index,
    Integer,
    String,
    UniqueConstraint,
    exists,
    func,
    literal_column,
    select,
    update,
)
from sqlalchemy.orm import Mapped, mapped_column

from models_db.base import MARIADB_TABLE, Base, LongText, UTCDateTime, Uuid, enum_column, utcnow
from models_db.dialects import among, chunked, insert_or_ignore
from models_db.errors import InvalidValueError
from models_db.ids import uuid7
from models_db.tables import Batch, BatchState, Job, JobState
from models_db.text import clean_text

MAX_URL = 2048
MAX_HOST = 300  # a name of 253 characters and a port
_LONGEST_ERROR = 1000

DATABASE_NOW = literal_column("CURRENT_TIMESTAMP", UTCDateTime())
"""The database's own clock: several senders agree on it, whatever their hosts' clocks say."""


class CallbackState(StrEnum):
    """Where a callback is."""

    WAITING = "waiting"  # what it is about has not ended
    DUE = "due"  # to be sent at ``due_at``, or being sent until then
    DELIVERED = "delivered"
    FAILED = "failed"  # given up


class Callback(Base):
    """The wish to be told of one job's or one batch's end. Goes when that goes."""

    __tablename__ = "callback"

    id: Mapped[str] = mapped_column(Uuid, primary_key=True)
    job_id: Mapped[str | None] = mapped_column(ForeignKey("job.id", ondelete="CASCADE"))
    batch_id: Mapped[str | None] = mapped_column(ForeignKey("batch.id", ondelete="CASCADE"))
    host: Mapped[str] = mapped_column(String(MAX_HOST))  # with the port, where the URL has one
    state: Mapped[CallbackState] = mapped_column(enum_column(CallbackState))
    events: Mapped[int] = mapped_column(Integer)  # ends so far: a job that is retried ends again
    tries: Mapped[int] = mapped_column(Integer)  # at telling the latest end; the fence of a sender
    # Those of them that were answered with a no.
    unwanted: Mapped[int] = mapped_column(Integer, server_default="0")
    include_output: Mapped[bool] = mapped_column(Boolean)
    created_at: Mapped[datetime] = mapped_column(UTCDateTime)
    ended_at: Mapped[datetime | None] = mapped_column(UTCDateTime)  # since when the latest end is to be told
    due_at: Mapped[datetime | None] = mapped_column(UTCDateTime)
    settled_at: Mapped[datetime | None] = mapped_column(UTCDateTime)
    url: Mapped[str] = mapped_column(String(MAX_URL))
    error: Mapped[str | None] = mapped_column(LongText)  # of the last try

    __table_args__ = (
        UniqueConstraint("job_id"),
        UniqueConstraint("batch_id"),
        CheckConstraint("state IN ('waiting', 'due', 'delivered', 'failed')", name="state"),
        CheckConstraint("(job_id IS NULL) <> (batch_id IS NULL)", name="subject"),
        CheckConstraint("(state = 'due') = (due_at IS NOT NULL)", name="due"),
        CheckConstraint("(state IN ('delivered', 'failed')) = (settled_at IS NOT NULL)", name="settled"),
        CheckConstraint("events >= 0 AND tries >= 0", name="counts"),
        Index(None, "state", "host", "due_at"),  # what to send next, host by host
        MARIADB_TABLE,
    )


@dataclass(frozen=True, slots=True)
class NewCallback:
    """Where to tell of an end.

    Raises:
        InvalidValueError: the URL or its host is longer than the table holds.
    """

    url: str
    host: str
    include_output: bool = False

    def __post_init__(self) -> None:
        if len(self.url) > MAX_URL or len(self.host) > MAX_HOST:
            raise InvalidValueError("callback_url", "is too long", fix=f"Use at most {MAX_URL} characters")

    def row(
        self, created_at: datetime, *, job_id: str | None = None, batch_id: str | None = None
    ) -> dict[str, Any]:
        """The row of the table; it waits."""
        return {
            "id": uuid7(),
            "job_id": job_id,
            "batch_id": batch_id,
            "host": self.host,
            "state": CallbackState.WAITING,
            "events": 0,
            "tries": 0,
            "unwanted": 0,
            "include_output": self.include_output,
            "created_at": created_at,
            "url": self.url,
        }


# ------------------------------------------------------------------------------------------- from jobs and batches


def insert_job_callbacks(
    conn: Connection, wanted: Iterable[tuple[str, NewCallback | None]], at: datetime | None = None
) -> list[str]:
    """The callbacks of jobs that have just been inserted, where they have one; one that is there already stays.

    Returns:
        The jobs that have one.
    """
    now = at or utcnow()
    rows = [callback.row(now, job_id=job_id) for job_id, callback in wanted if callback is not None]
    insert_or_ignore(conn, Callback, rows, [Callback.job_id])
    return [row["job_id"] for row in rows]


def insert_batch_callback(
    conn: Connection, batch_id: str, callback: NewCallback, at: datetime | None = None
) -> None:
    """The callback of this batch."""
    row = callback.row(at or utcnow(), batch_id=batch_id)
    insert_or_ignore(conn, Callback, [row], [Callback.batch_id])


_DUE = {
    "state": CallbackState.DUE,
    "events": Callback.events + 1,
    "tries": 0,
    "unwanted": 0,
    "ended_at": DATABASE_NOW,
    "due_at": DATABASE_NOW,
    "settled_at": None,
    "error": None,
}
_JOBS_ENDED = update(Callback).where(among(Callback.job_id)).values(_DUE)
_JOBS_REOPENED = (
    update(Callback)
    .where(among(Callback.job_id))
    .values(state=CallbackState.WAITING, due_at=None, settled_at=None, ended_at=None)
)


def announce_jobs(conn: Connection, job_ids: Sequence[str]) -> None:
    """These jobs have ended in this transaction: their callbacks, where they have one, are due at once."""
    for some in chunked(job_ids):
        conn.execute(_JOBS_ENDED, {"ids": list(some)})


def recall_jobs(conn: Connection, job_ids: Sequence[str]) -> None:
    """These jobs run again: an end that has not been told yet is not told any more, the next one is."""
    for some in chunked(job_ids):
        conn.execute(_JOBS_REOPENED, {"ids": list(some)})


def announce_batch(conn: Connection, batch_id: str) -> None:
    """This batch has ended in this transaction."""
    conn.execute(update(Callback).where(Callback.batch_id == batch_id).values(_DUE))


def recall_batches(conn: Connection, batch_ids: Sequence[str]) -> None:
    """These batches are in progress again."""
    conn.execute(
        update(Callback)
        .where(Callback.batch_id.in_(batch_ids))
        .values(state=CallbackState.WAITING, due_at=None, settled_at=None, ended_at=None)
    )


def batches_to_end(conn: Connection, limit: int = 100) -> list[str]:
    """Batches with a callback all of whose jobs have ended, but which nobody watches: they have to be ended.

    A batch that is still being fed, or whose files are being written, is left to who does that.
    """
    open_job = exists().where(Job.batch_id == Batch.id, Job.state.in_((JobState.QUEUED, JobState.RUNNING)))
    query = (
        select(Batch.id)
        .join(Callback, Callback.batch_id == Batch.id)
        .where(
            Callback.batch_id.is_not(None),
            Callback.state == CallbackState.WAITING,
            Batch.state.in_((BatchState.IN_PROGRESS, BatchState.CANCELLING)),
            ~open_job,
        )
        .limit(limit)
    )
    return list(conn.scalars(query))


# ------------------------------------------------------------------------------------------------- from senders


@dataclass(frozen=True, slots=True)
class DueCallback:
    """A callback that a sender has taken: until its lease ends no other one sends it."""

    id: str
    job_id: str | None
    batch_id: str | None
    events: int
    tries: int  # this one included
    unwanted: int  # of those before, see ``Callback``
    ended_at: datetime
    host: str
    url: str
    include_output: bool

    @property
    def message_id(self) -> str:
        """The same for every try at telling this end."""
        return f"msg_{self.id.replace('-', '')}_{self.events}"


def database_now(conn: Connection) -> datetime:
    """What the database's clock says; on SQLite and MariaDB in whole seconds, rounded down."""
    now = conn.scalar(select(DATABASE_NOW))
    assert isinstance(now, datetime)
    return now


def due_hosts(conn: Connection, now: datetime, *, after: str = "", limit: int = 50) -> tuple[list[str], str]:
    """Hosts that something is to be told now, in their order beyond ``after``; looks at so many hosts at most.

    Two look-ups in the index a host, however many callbacks are due there.

    Returns:
        The hosts, and where to go on: the last one that was looked at, or ``""`` at the end.
    """
    found: list[str] = []
    for _ in range(limit):
        following = select(func.min(Callback.host)).where(
            Callback.state == CallbackState.DUE, Callback.host > after
        )
        host = conn.scalar(following)
        if host is None:
            return found, ""
        first = select(func.min(Callback.due_at)).where(
            Callback.state == CallbackState.DUE, Callback.host == host
        )
        due_at = conn.scalar(first)
        if due_at is not None and due_at <= now:
            found.append(host)
        after = host
    return found, after


_CLAIM = [getattr(Callback, name) for name in DueCallback.__dataclass_fields__]
SCHEMES = ("https", "http")


def claim_due(
    conn: Connection,
    host: str,
    limit: int,
    now: datetime,
    lease: timedelta,
    schemes: Collection[str] = SCHEMES,
) -> list[DueCallback]:
    """Take up to ``limit`` callbacks of a host, the oldest first; no other sender gets them before the lease ends.

    Nobody is waited for: what another sender is just taking is left to it, so that one that froze while it did holds
    up none but those. SQLite has no locks of rows, and lets one sender in after the other.

    Args:
        schemes: those of the URLs to take.
    """
    query = select(*_CLAIM).where(
        Callback.state == CallbackState.DUE, Callback.host == host, Callback.due_at <= now
    )
    if set(schemes) != set(SCHEMES):
        beginning = func.lower(func.substr(Callback.url, 1, 5))
        query = query.where(beginning.in_([f"{scheme}:"[:5] for scheme in schemes]))
    query = query.order_by(Callback.due_at).limit(limit).with_for_update(skip_locked=True)
    rows = conn.execute(query).all()
    if rows:
        taken = update(Callback).where(Callback.id.in_([row.id for row in rows]))
        conn.execute(taken.values(tries=Callback.tries + 1, due_at=now + lease))
    return [DueCallback(**(row._asdict() | {"tries": row.tries + 1})) for row in rows]


def overdue(
    conn: Connection, host: str, now: datetime, ended_before: datetime, limit: int = 50
) -> list[DueCallback]:
    """Callbacks of a host that nobody has, of ends before that time, among so many that have been due for longest."""
    query = (
        select(*_CLAIM)
        .where(Callback.state == CallbackState.DUE, Callback.host == host, Callback.due_at <= now)
        .order_by(Callback.due_at)
        .limit(limit)
    )
    return [DueCallback(*row) for row in conn.execute(query) if row.ended_at < ended_before]


def lock_free_batch(conn: Connection, batch_id: str) -> bool:
    """Lock this batch until the transaction ends; ``False`` where somebody else has it, who is not waited for."""
    query = select(Batch.id).where(Batch.id == batch_id).with_for_update(skip_locked=True)
    return conn.scalar(query) is not None


def _of(claim: DueCallback, tries: int) -> Any:
    """The row, where it still is as this sender knows it."""
    return update(Callback).where(
        Callback.id == claim.id,
        Callback.state == CallbackState.DUE,
        Callback.events == claim.events,
        Callback.tries == tries,
    )


def record_delivered(conn: Connection, claim: DueCallback) -> bool:
    """It was told; ``False`` when another sender has taken it meanwhile, or its job runs again."""
    values = {"state": CallbackState.DELIVERED, "due_at": None, "settled_at": DATABASE_NOW, "error": None}
    return conn.execute(_of(claim, claim.tries).values(values)).rowcount == 1


def record_retry(
    conn: Connection, claim: DueCallback, error: str, due_at: datetime, *, unwanted: bool = False
) -> bool:
    """It could not be told and is due again then; as ``record_delivered``.

    Args:
        unwanted: the receiver said no, so that it is asked a few times only.
    """
    values = {"due_at": due_at, "error": _short(error), "unwanted": claim.unwanted + unwanted}
    return conn.execute(_of(claim, claim.tries).values(values)).rowcount == 1


def record_failed(conn: Connection, claim: DueCallback, error: str) -> bool:
    """It is given up; as ``record_delivered``."""
    values = {
        "state": CallbackState.FAILED,
        "due_at": None,
        "settled_at": DATABASE_NOW,
        "error": _short(error),
    }
    return conn.execute(_of(claim, claim.tries).values(values)).rowcount == 1


def _short(error: str) -> str:
    return clean_text(error)[:_LONGEST_ERROR]


# --------------------------------------------------------------------------------------------------- for people


@dataclass(frozen=True, slots=True)
class CallbackRecord:
    """A callback and how far it is."""

    id: str
    job_id: str | None
    batch_id: str | None
    host: str
    state: CallbackState
    events: int
    tries: int
    unwanted: int
    created_at: datetime
    ended_at: datetime | None
    due_at: datetime | None
    settled_at: datetime | None
    url: str
    error: str | None


_RECORD = [getattr(Callback, name) for name in CallbackRecord.__dataclass_fields__]


def list_callbacks(
    conn: Connection,
    *,
    state: CallbackState | None = None,
    ids: Sequence[str] | None = None,
    limit: int = 20,
) -> list[CallbackRecord]:
    """The latest callbacks, newest first; of one state, or those with these ids, of callback, job or batch."""
    query = select(*_RECORD).order_by(Callback.id.desc()).limit(limit)
    if state is not None:
        query = query.where(Callback.state == state)
    if ids is not None:
        query = query.where(Callback.id.in_(ids) | Callback.job_id.in_(ids) | Callback.batch_id.in_(ids))
    return [CallbackRecord(*row) for row in conn.execute(query)]


def retry_callbacks(conn: Connection, ids: Sequence[str] | None = None, *, host: str | None = None) -> int:
    """Send callbacks that were given up again, under their old message id; how many.

    Args:
        ids: of the callbacks, their jobs or batches; all that failed when ``None``.
        host: only those to this host.
    """
    values = {
        "state": CallbackState.DUE,
        "tries": 0,
        "unwanted": 0,
        "ended_at": DATABASE_NOW,
        "due_at": DATABASE_NOW,
        "settled_at": None,
    }
    statement = update(Callback).where(Callback.state == CallbackState.FAILED).values(values)
    if ids is not None:
        statement = statement.where(
            Callback.id.in_(ids) | Callback.job_id.in_(ids) | Callback.batch_id.in_(ids)
        )
    if host is not None:
        statement = statement.where(Callback.host == host)
    return conn.execute(statement).rowcount


def callback_counts(conn: Connection, most: int = 100_000) -> dict[str, int]:
    """How many are due and how many have failed, counted up to ``most``; for metrics."""
    counts = {}
    for state in (CallbackState.DUE, CallbackState.FAILED):
        some = select(Callback.id).where(Callback.state == state).limit(most).subquery()
        counts[str(state)] = conn.scalar(select(func.count()).select_from(some)) or 0
    return counts
