"""The tables of the roll-ups: what the fleet did in each minute and hour, as sums and counts that can be added up.

``throughput_…`` says what the engines did, one row a worker; ``job_…`` what became of the jobs, one row a class of
jobs; ``latency_…`` how long they took, as counts in the intervals of ``models_db.histogram``. All of it can be
computed again from the samples, attempts and results while those are there, and outlives them.
"""

from __future__ import annotations

from datetime import date, datetime

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    Date,
    Double,
    ForeignKey,
    Index,
    Integer,
    SmallInteger,
    String,
    UniqueConstraint,
)
from sqlalchemy.orm import Mapped, mapped_column

from models_db.base import MARIADB_TABLE, Base, UTCDateTime
from models_db.histogram import Metric


class JobClass(Base):
    """A class of jobs that the roll-ups count together."""

    __tablename__ = "job_class"

    id: Mapped[int] = mapped_column(Integer, primary_key=True)
    model: Mapped[str] = mapped_column(String(255))
    queue: Mapped[str] = mapped_column(String(255))
    tenant: Mapped[str] = mapped_column(String(255))  # empty for jobs without one
    priority: Mapped[int] = mapped_column(SmallInteger)

    __table_args__ = (UniqueConstraint("model", "queue", "tenant", "priority"), MARIADB_TABLE)


class RollupMark(Base):
    """How far the roll-ups are: the row ``rollups``. Each other one is a note of samples that the next one looks at."""

    __tablename__ = "rollup_mark"

    name: Mapped[str] = mapped_column(String(16), primary_key=True)
    # Every minute before it is there; of a note: since when there are samples that may not be.
    rolled_until: Mapped[datetime | None] = mapped_column(UTCDateTime)
    complete_from: Mapped[datetime | None] = mapped_column(UTCDateTime)  # what lies before it may be pruned

    __table_args__ = (MARIADB_TABLE,)


class _Throughput:
    """Sums of ``engine_sample`` over a worker's samples. Gauges are weighted with the seconds they stood for."""

    samples: Mapped[int] = mapped_column(Integer)
    sampled_s: Mapped[float] = mapped_column(Double)  # the worker was there, and sampled
    active_s: Mapped[float] = mapped_column(Double)  # its device computed
    working_s: Mapped[float] = mapped_column(Double)  # it had something to do
    prepare_s: Mapped[float] = mapped_column(Double)
    running_s: Mapped[float] = mapped_column(Double)  # running requests times seconds
    waiting_s: Mapped[float] = mapped_column(Double)
    kv_used_s: Mapped[float] = mapped_column(Double)  # used share of the cache times seconds
    prompt_tokens: Mapped[int] = mapped_column(BigInteger)
    cached_tokens: Mapped[int] = mapped_column(BigInteger)
    generated_tokens: Mapped[int] = mapped_column(BigInteger)
    steps: Mapped[int] = mapped_column(BigInteger)
    requests_finished: Mapped[int] = mapped_column(BigInteger)
    requests_failed: Mapped[int] = mapped_column(BigInteger)
    preemptions: Mapped[int] = mapped_column(BigInteger)
    max_running: Mapped[int] = mapped_column(Integer)
    max_waiting: Mapped[int] = mapped_column(Integer)


class _Jobs:
    """How attempts of a class of jobs ended, and jobs without one. Times are those of attempts that succeeded."""

    succeeded: Mapped[int] = mapped_column(Integer)
    failed: Mapped[int] = mapped_column(Integer)
    cancelled: Mapped[int] = mapped_column(Integer)
    expired: Mapped[int] = mapped_column(Integer)
    released: Mapped[int] = mapped_column(Integer)
    lost: Mapped[int] = mapped_column(Integer)
    without_attempt: Mapped[int] = mapped_column(Integer)  # of these, ended while they waited
    retried: Mapped[int] = mapped_column(Integer)  # attempts that were not the first
    prompt_tokens: Mapped[int] = mapped_column(BigInteger)
    cached_tokens: Mapped[int] = mapped_column(BigInteger)
    completion_tokens: Mapped[int] = mapped_column(BigInteger)
    latency_s: Mapped[float] = mapped_column(Double)
    queue_s: Mapped[float] = mapped_column(Double)
    first_token_s: Mapped[float] = mapped_column(Double)
    timed: Mapped[int] = mapped_column(Integer)  # jobs whose ``latency_s`` and ``queue_s`` are added up
    first_tokens: Mapped[int] = mapped_column(Integer)  # jobs whose ``first_token_s`` is


class ThroughputMinute(_Throughput, Base):
    """What one worker did in one minute."""

    __tablename__ = "throughput_minute"

    started_at: Mapped[datetime] = mapped_column(UTCDateTime, primary_key=True)
    worker_id: Mapped[str] = mapped_column(ForeignKey("worker.id"), primary_key=True)

    __table_args__ = (Index(None, "worker_id"), MARIADB_TABLE)


class ThroughputHour(_Throughput, Base):
    """What one worker did in one hour."""

    __tablename__ = "throughput_hour"

    started_at: Mapped[datetime] = mapped_column(UTCDateTime, primary_key=True)
    worker_id: Mapped[str] = mapped_column(ForeignKey("worker.id"), primary_key=True)
    day: Mapped[date] = mapped_column(Date)
    night: Mapped[date] = mapped_column(Date)  # noon to noon, by the day on which it begins

    __table_args__ = (Index(None, "worker_id"), Index(None, "day"), Index(None, "night"), MARIADB_TABLE)


class JobMinute(_Jobs, Base):
    """What became of one class of jobs in one minute."""

    __tablename__ = "job_minute"

    started_at: Mapped[datetime] = mapped_column(UTCDateTime, primary_key=True)
    class_id: Mapped[int] = mapped_column(ForeignKey("job_class.id"), primary_key=True)

    __table_args__ = (Index(None, "class_id"), MARIADB_TABLE)


class JobHour(_Jobs, Base):
    """What became of one class of jobs in one hour."""

    __tablename__ = "job_hour"

    started_at: Mapped[datetime] = mapped_column(UTCDateTime, primary_key=True)
    class_id: Mapped[int] = mapped_column(ForeignKey("job_class.id"), primary_key=True)
    day: Mapped[date] = mapped_column(Date)
    night: Mapped[date] = mapped_column(Date)

    __table_args__ = (Index(None, "class_id"), Index(None, "day"), Index(None, "night"), MARIADB_TABLE)


_METRICS = ", ".join(f"'{metric}'" for metric in Metric)


class LatencyMinute(Base):
    """How many jobs of a class took about so long, in one minute."""

    __tablename__ = "latency_minute"

    started_at: Mapped[datetime] = mapped_column(UTCDateTime, primary_key=True)
    class_id: Mapped[int] = mapped_column(ForeignKey("job_class.id"), primary_key=True)
    metric: Mapped[str] = mapped_column(String(16), primary_key=True)
    # At most so long, above the next lower one.
    upper_ms: Mapped[int] = mapped_column(Integer, primary_key=True)
    jobs: Mapped[int] = mapped_column(Integer)

    __table_args__ = (
        CheckConstraint(f"metric IN ({_METRICS})", name="metric"),
        Index(None, "class_id"),
        MARIADB_TABLE,
    )


class LatencyHour(Base):
    """How many jobs of a class took about so long, in one hour."""

    __tablename__ = "latency_hour"

    started_at: Mapped[datetime] = mapped_column(UTCDateTime, primary_key=True)
    class_id: Mapped[int] = mapped_column(ForeignKey("job_class.id"), primary_key=True)
    metric: Mapped[str] = mapped_column(String(16), primary_key=True)
    upper_ms: Mapped[int] = mapped_column(Integer, primary_key=True)
    jobs: Mapped[int] = mapped_column(Integer)

    __table_args__ = (
        CheckConstraint(f"metric IN ({_METRICS})", name="metric"),
        Index(None, "class_id"),
        MARIADB_TABLE,
    )
