"""Throughput and counts against answers worked out by hand, on every database."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from models_db.batches import create_batch
from models_db.claims import ClaimItem, FinishItem, claim, finish
from models_db.errors import InvalidValueError
from models_db.jobs import insert_jobs, request_cancel
from models_db.queries import job_counts, period_s, throughput
from models_db.session import reading
from models_db.tables import JobState
from models_db.workers import NewWorker, add_samples, register_worker
from tests.db.helpers import new_job, new_result, new_sample

NINE = datetime(2026, 3, 1, 9, tzinfo=UTC)


def minute(minutes):
    return NINE + timedelta(minutes=minutes)


def run(conn, job_id, worker, start, end, state, result):
    claim(conn, [ClaimItem(new_job(job_id))], worker, now=start)
    error = "boom" if state is JobState.FAILED else None
    assert finish(conn, [FinishItem(job_id, 1, state, result, error)], worker, now=end) == [True]


@pytest.fixture
def history(db):
    """Two models on two machines, one of which was restarted; jobs end between 9:10 and 10:10."""
    with db.begin() as conn:
        for worker_id, name, model in (
            ("1", "gpu-a", "small"),
            ("2", "gpu-a", "small"),
            ("3", "gpu-b", "large"),
        ):
            fields = {"host": "h", "pid": 1, "version": "0", "backend": "echo", "started_at": NINE}
            register_worker(conn, NewWorker(id=worker_id, name=name, model=model, **fields))
        create_batch(conn, name="night", batch_id="b")
        jobs = [new_job(f"s{n}", model="small", batch_id="b", position=n, created_at=NINE) for n in range(20)]
        jobs += [new_job(name, model="large", created_at=NINE) for name in ("l0", "l1", "l2", "open", "gone")]
        insert_jobs(conn, jobs)
        for n in range(20):  # latencies 1..20 s, first tokens for the even ones only
            worker = "1" if n < 10 else "2"
            result = new_result(
                prompt_tokens=10,
                completion_tokens=30,
                cached_tokens=4,
                latency_s=float(20 - n),
                time_to_first_token_s=n / 10 if n % 2 == 0 else None,
            )
            run(conn, f"s{n}", worker, minute(10), minute(20), JobState.SUCCEEDED, result)
        slow = new_result(
            prompt_tokens=100, completion_tokens=600, latency_s=900.0, time_to_first_token_s=2.0
        )
        # Begun before ten, ended after.
        run(conn, "l0", "3", minute(55), minute(70), JobState.SUCCEEDED, slow)
        run(conn, "l1", "3", minute(62), minute(63), JobState.FAILED, None)
        partial = new_result(prompt_tokens=1, completion_tokens=50, latency_s=1e6)
        run(conn, "l2", "3", minute(62), minute(64), JobState.CANCELLED, partial)
        claim(conn, [ClaimItem(new_job("open"))], "3", now=minute(62))
        request_cancel(conn, ["gone"], at=minute(65))
        add_samples(
            conn,
            [
                new_sample("1", sampled_at=minute(15), interval_s=5.0, active_fraction=1.0),
                new_sample("2", sampled_at=minute(15), interval_s=15.0, active_fraction=0.6),
                new_sample("3", sampled_at=minute(61), interval_s=5.0, active_fraction=0.5),
            ],
        )
    return db


def rows_by_key(db, by, **kw):
    with reading(db) as conn:
        return {row.key: row for row in throughput(conn, by, **kw)}


def test_by_hour(history):
    with reading(history) as conn:
        rows = throughput(conn)
    assert [row.key for row in rows] == ["2026-03-01 09:00", "2026-03-01 10:00"]
    nine, ten = rows
    assert (nine.jobs, nine.succeeded, nine.failed, nine.cancelled, nine.expired) == (20, 20, 0, 0, 0)
    assert (nine.prompt_tokens, nine.cached_tokens, nine.completion_tokens) == (200, 80, 600)
    assert (nine.span_s, nine.span_tokens_per_s) == (600.0, 1.0)
    assert (nine.period_s, nine.tokens_per_s) == (3600.0, 600 / 3600)
    assert (nine.latency_p50_s, nine.latency_p95_s) == (10.0, 19.0)  # nearest rank of 1..20
    assert (nine.ttft_p50_s, nine.ttft_p95_s) == (0.8, 1.8)  # of 0.0, 0.2 … 1.8
    assert nine.active_fraction == pytest.approx((5 * 1.0 + 15 * 0.6) / 20)
    assert (ten.jobs, ten.succeeded, ten.failed, ten.cancelled) == (4, 1, 1, 2)
    assert ten.completion_tokens == 650
    assert ten.span_s == 600.0, "from ten, not from before the hour, to ten past"
    assert (ten.latency_p50_s, ten.latency_p95_s, ten.ttft_p95_s) == (900.0, 900.0, 2.0)
    assert ten.active_fraction == pytest.approx(0.5)


def test_by_model(history):
    with reading(history) as conn:
        rows = throughput(conn, "model")
    assert [(row.key, row.jobs, row.completion_tokens) for row in rows] == [
        ("large", 4, 650),
        ("small", 20, 600),
    ]
    assert rows[0].span_s == 900.0
    assert rows[0].span_tokens_per_s == pytest.approx(650 / 900)
    assert (rows[0].period_s, rows[0].tokens_per_s) == (3600.0, pytest.approx(650 / 3600))
    assert [row.active_fraction for row in rows] == [pytest.approx(0.5), pytest.approx(0.7)]


def test_by_worker_joins_its_incarnations_and_keeps_jobs_that_nobody_ran(history):
    rows = rows_by_key(history, "worker")
    assert {key: (row.jobs, row.completion_tokens) for key, row in rows.items()} == {
        "gpu-a": (20, 600),
        "gpu-b": (3, 650),
        "": (1, 0),
    }
    assert rows["gpu-a"].active_fraction == pytest.approx(0.7)
    assert (rows[""].span_tokens_per_s, rows[""].latency_p50_s, rows[""].active_fraction) == (
        None,
        None,
        None,
    )
    assert rows[""].tokens_per_s == 0


def test_by_batch(history):
    rows = rows_by_key(history, "batch")
    assert {key: row.jobs for key, row in rows.items()} == {"b": 20, "": 4}
    assert rows["b"].active_fraction is None
    assert rows["b"].to_dict()["latency_p95_s"] == 19.0


def test_limits_of_time_model_and_batch(history):
    assert list(rows_by_key(history, "hour", since=minute(60))) == ["2026-03-01 10:00"]
    assert list(rows_by_key(history, "hour", until=minute(60))) == ["2026-03-01 09:00"]
    assert rows_by_key(history, "hour", since=minute(20), until=minute(20)) == {}
    assert rows_by_key(history, "model", since=minute(20), until=minute(21))["small"].jobs == 20
    assert list(rows_by_key(history, "worker", model="large")) == ["gpu-b", ""]
    assert rows_by_key(history, "hour", model="large")["2026-03-01 10:00"].active_fraction == 0.5
    assert list(rows_by_key(history, "model", batch_id="b")) == ["small"]


@pytest.mark.parametrize(
    ("first", "last", "present", "since", "until", "seconds"),
    [
        (20, 30, 500, None, None, 3600),
        (20, 130, 500, None, None, 3 * 3600),
        (20, 30, 40, None, None, 40 * 60),  # the hour goes on
        (20, 30, 500, 10, 50, 40 * 60),  # no more of the hour was asked for
        (20, 30, 25, None, None, 3600),  # whose clock is this?
        (0, 0, 500, 0, 0, 1),
    ],
)
def test_the_period_of_tokens_a_second(first, last, present, since, until, seconds):
    limits = (None if since is None else minute(since), None if until is None else minute(until))
    assert period_s(minute(first), minute(last), minute(present), *limits) == seconds


def test_no_history_gives_no_rows(db):
    for by in ("hour", "model", "worker", "batch"):
        assert rows_by_key(db, by) == {}


def test_an_unknown_grouping_is_refused(db):
    with (
        reading(db) as conn,
        pytest.raises(InvalidValueError, match="by: must be hour, model, worker or batch"),
    ):
        throughput(conn, "week")


def test_counts_name_every_state(history):
    with reading(history) as conn:
        counts = job_counts(conn)
        large = job_counts(conn, model="large")
    assert list(counts) == list(JobState)
    assert (counts[JobState.SUCCEEDED], counts[JobState.RUNNING], counts[JobState.EXPIRED]) == (21, 1, 0)
    assert large[JobState.SUCCEEDED] == 1
