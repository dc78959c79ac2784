"""The questions people ask of the history, as SQL in one place, portable over the three databases."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from sqlalchemy import Connection

from models_db.tables import JobState

GroupBy = Literal["hour", "model", "worker", "batch"]


@dataclass(frozen=True, slots=True)
class ThroughputRow:
    """One group of finished jobs. Times are in seconds; percentiles are by nearest rank."""

    key: str  # "2026-11-29 21:00" (UTC), a model, a worker's name or a batch id ("" without one)
    jobs: int  # that ended, well or not
    succeeded: int
    failed: int
    cancelled: int
    expired: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    span_s: float  # first start to last end, within the hour when grouped by hour
    tokens_per_s: float | None  # completion tokens over the span
    latency_p50_s: float | None
    latency_p95_s: float | None
    ttft_p50_s: float | None
    ttft_p95_s: float | None
    active_fraction: float | None  # of the workers' sampled time, how much the device computed; None by batch

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe values."""
        raise NotImplementedError


def throughput(
    conn: Connection,
    by: GroupBy = "hour",
    *,
    since: datetime | None = None,
    until: datetime | None = None,
    model: str | None = None,
    batch_id: str | None = None,
) -> list[ThroughputRow]:
    """Jobs that ended in [since, until), grouped; hours in order, the rest by tokens, most first."""
    raise NotImplementedError


def job_counts(conn: Connection, *, model: str | None = None) -> Mapping[JobState, int]:
    """How many jobs are in which state; every state is present."""
    raise NotImplementedError
