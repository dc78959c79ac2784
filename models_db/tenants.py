"""Limits on what a tenant may have open: queued or running jobs, and the tokens they may come to.

A tenant without a limit has no row here. A limited one has a row that counts at least what is open, and one for each
job counted. The row is locked until the submission commits, so that a limit holds exactly, however many submit at
once. Nobody counts down when a job ends: what has ended is taken off when the count reaches a limit.

Every function works inside the caller's transaction and never commits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Connection,
    Index,
    Integer,
    String,
    delete,
    exists,
    func,
    insert,
    select,
    update,
)
from sqlalchemy.orm import Mapped, mapped_column

from models_db.base import MARIADB_TABLE, Base, Id
from models_db.dialects import insert_or_ignore
from models_db.errors import TenantLimitError
from models_db.tables import Job, JobState


class TenantUsage(Base):
    """A limited tenant: its row is the lock, its counts are those at the last look and all that came since."""

    __tablename__ = "tenant_usage"

    tenant: Mapped[str] = mapped_column(String(255), primary_key=True)
    jobs: Mapped[int] = mapped_column(Integer)
    tokens: Mapped[int] = mapped_column(BigInteger)

    __table_args__ = (MARIADB_TABLE,)


class TenantJob(Base):
    """A job that was counted. It refers to ``job`` by name alone: deleting jobs costs nothing for this."""

    __tablename__ = "tenant_job"

    job_id: Mapped[str] = mapped_column(Id, primary_key=True)
    tenant: Mapped[str] = mapped_column(String(255))
    tokens: Mapped[int] = mapped_column(BigInteger)

    __table_args__ = (Index(None, "tenant"), MARIADB_TABLE)


@dataclass(frozen=True, slots=True)
class TenantLimit:
    """The most a tenant may have open; 0 is no limit."""

    jobs: int = 0
    tokens: int = 0


def admit(
    conn: Connection, wanted: Mapping[str, Mapping[str, int]], limits: Mapping[str, TenantLimit]
) -> None:
    """Count new jobs against their tenants' limits, in the transaction that inserts them.

    Args:
        wanted: for each tenant, the ids of its new jobs with the tokens each may come to.
        limits: of each tenant that has one.

    Raises:
        TenantLimitError: not all of a tenant's jobs fit; the caller must roll back.
    """
    # In one order, so that two submissions for several tenants cannot wait for each other.
    for tenant in sorted(wanted.keys() & limits.keys()):
        if wanted[tenant]:
            _admit(conn, tenant, wanted[tenant], limits[tenant])


def _admit(conn: Connection, tenant: str, wanted: Mapping[str, int], limit: TenantLimit) -> None:
    none = {"tenant": tenant, "jobs": 0, "tokens": 0}
    insert_or_ignore(conn, TenantUsage, [none], [TenantUsage.tenant])
    lock = select(TenantUsage.jobs, TenantUsage.tokens).where(TenantUsage.tenant == tenant).with_for_update()
    jobs, tokens = conn.execute(lock).one()
    asked = len(wanted), sum(wanted.values())
    if not _fits(limit, jobs + asked[0], tokens + asked[1]):
        jobs, tokens = _count_open(conn, tenant)
        if not _fits(limit, jobs + asked[0], tokens + asked[1]):
            _refuse(tenant, limit, (jobs, tokens), asked)
        conn.execute(delete(TenantJob).where(TenantJob.tenant == tenant, ~_is_open()))
    conn.execute(
        update(TenantUsage)
        .where(TenantUsage.tenant == tenant)
        .values(jobs=jobs + asked[0], tokens=tokens + asked[1])
    )
    rows = [{"job_id": job_id, "tenant": tenant, "tokens": cost} for job_id, cost in wanted.items()]
    conn.execute(insert(TenantJob), rows)


def _fits(limit: TenantLimit, jobs: int, tokens: int) -> bool:
    return (not limit.jobs or jobs <= limit.jobs) and (not limit.tokens or tokens <= limit.tokens)


def _refuse(tenant: str, limit: TenantLimit, present: tuple[int, int], asked: tuple[int, int]) -> None:
    if limit.jobs and present[0] + asked[0] > limit.jobs:
        raise TenantLimitError(tenant, "jobs", limit.jobs, present[0], asked[0])
    raise TenantLimitError(tenant, "tokens", limit.tokens, present[1], asked[1])


def _is_open() -> ColumnElement[bool]:
    open_states = (JobState.QUEUED, JobState.RUNNING)
    return exists().where(Job.id == TenantJob.job_id, Job.state.in_(open_states))


def _count_open(conn: Connection, tenant: str) -> tuple[int, int]:
    query = select(func.count(), func.coalesce(func.sum(TenantJob.tokens), 0)).where(
        TenantJob.tenant == tenant, _is_open()
    )
    jobs, tokens = conn.execute(query).one()
    return int(jobs), int(tokens)
