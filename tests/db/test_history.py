"""Roll-ups, views and the documented questions, on the sample history and on every database."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import datetime, timedelta
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, func, select, text, update

from models_db.errors import InvalidValueError
from models_db.fleet_now import look
from models_db.histogram import BEYOND_MS, BOUNDS_MS, upper_ms
from models_db.history import history
from models_db.jobs import request_cancel, retry_failed
from models_db.migrate import upgrade
from models_db.queries import throughput
from models_db.rollup_tables import JobHour, JobMinute, RollupMark, ThroughputHour
from models_db.rollups import ROLLUPS, advance, close_before, floor_hour, reopen, roll_up, rolled_until
from models_db.sample_history import END, START, load
from models_db.session import make_engine, transaction
from models_db.tables import EngineSample, JobState, Result
from models_db.workers import add_samples
from tests.answers import answer, questions
from tests.db.helpers import add_jobs, add_workers, at, claim_one, finish_one, new_sample
from tests.servers import Server, fresh_database

QUESTIONS = list(questions())
MINUTE = timedelta(minutes=1)


@pytest.fixture(scope="session")
def sample(running_server: Server | None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """A database with the sample history, for reading."""
    with ExitStack() as stack:
        if running_server is None:
            url = f"sqlite:///{tmp_path_factory.mktemp('sample') / 'sample.db'}"
        else:
            url = stack.enter_context(fresh_database(running_server))
        upgrade(url)
        engine = make_engine(url)
        stack.callback(engine.dispose)
        transaction(engine, load)
        yield engine


@pytest.mark.parametrize(
    ("sql", "table"), [entry[2:] for entry in QUESTIONS], ids=[str(entry[0]) for entry in QUESTIONS]
)
def test_every_documented_question_has_the_documented_answer(sql: str, table: str, sample: Engine) -> None:
    with sample.connect() as conn:
        assert answer(conn, sql) == table, "if this is right, run: python -m tests.answers"


def test_the_page_has_twenty_questions_none_of_which_is_answered_by_nothing() -> None:
    assert [entry[0] for entry in QUESTIONS] == list(range(1, 21))
    assert all(table.count("\n") > 2 for *_, table in QUESTIONS)


def test_the_sample_history_is_refused_where_there_is_one(sample: Engine) -> None:
    with sample.connect() as conn, pytest.raises(InvalidValueError, match="Name an empty database"):
        load(conn)


def contents(conn: Connection) -> dict[str, list[Any]]:
    """Every roll-up; the order in which a database adds does not count."""

    def plain(row: Any) -> tuple[Any, ...]:
        return tuple(round(value, 6) if isinstance(value, float) else value for value in row)

    return {
        table.__tablename__: sorted(map(plain, conn.execute(select(table.__table__)))) for table in ROLLUPS
    }


def test_sums_are_those_of_the_rows_and_computing_again_changes_nothing(sample: Engine) -> None:
    with sample.connect() as conn:  # rolled back at the end
        before = contents(conn)
        sums = [
            (ThroughputHour.generated_tokens, EngineSample.generated_tokens),
            (ThroughputHour.sampled_s, EngineSample.interval_s),
            (JobMinute.completion_tokens, Result.completion_tokens),
            (JobHour.completion_tokens, Result.completion_tokens),
            (JobHour.latency_s, Result.latency_s),
        ]
        for rolled, source in sums:
            assert conn.scalar(select(func.sum(rolled))) == pytest.approx(
                conn.scalar(select(func.sum(source)))
            )
        reopen(conn, START)
        assert rolled_until(conn) == START
        assert advance(conn, END + MINUTE, longest=timedelta(hours=36))
        while advance(conn, END + MINUTE, longest=timedelta(hours=36)):
            pass
        assert rolled_until(conn) == END
        assert contents(conn) == before
        conn.rollback()


def test_a_percentile_is_the_upper_end_of_its_interval(db: Engine) -> None:
    seconds = [0.0, 0.001, 0.0011, 0.33, 0.3301, 1.0, 999_999.0, 1e6, 1e9]
    expected = [1, 1, 2, 330, 390, 1000, 10**9, 10**9, BEYOND_MS]
    with db.connect() as conn:
        found = [conn.scalar(select(upper_ms(text(repr(value))))) for value in seconds]  # type: ignore[arg-type]
    assert found == expected
    assert all(b / a <= 1.25 for a, b in pairwise(BOUNDS_MS) if a >= 10)


@pytest.fixture
def fleet(db: Engine) -> Engine:
    """One job that succeeded at 12:31, one that was cancelled as it waited, samples, all of it rolled up."""
    add_workers(db, "w")
    add_jobs(db, "done", "gone", tenant="t")
    claim_one(db, "done", "w", now=at(10))
    finish_one(db, "done", 1, "w", now=at(40))
    with db.begin() as conn:
        request_cancel(conn, ["gone"], at=at(50))
        add_samples(conn, [new_sample("w", sampled_at=at(5 * n), generated_tokens=7) for n in range(12)])
    catch_up(db, at(300))
    return db


def catch_up(engine: Engine, now: datetime, **options: Any) -> None:
    while transaction(engine, partial(advance, now=now, **options)):
        pass


def total(engine: Engine, column: Any) -> Any:
    with engine.connect() as conn:
        return conn.scalar(select(func.sum(column)))


def test_late_samples_set_the_mark_back(fleet: Engine) -> None:
    assert total(fleet, ThroughputHour.generated_tokens) == 84
    late = new_sample("w", sampled_at=at(7), generated_tokens=100)
    transaction(fleet, partial(add_samples, samples=[late]))
    with fleet.connect() as conn:
        assert rolled_until(conn) == floor_hour(at(0))
        assert look(conn, 6.0, now=at(305)).rolled_until == floor_hour(at(0))
    catch_up(fleet, at(310))
    assert total(fleet, ThroughputHour.generated_tokens) == 184


def test_a_job_counts_where_its_attempt_ended_and_again_after_a_retry(fleet: Engine) -> None:
    counted = [total(fleet, getattr(JobHour, name)) for name in ("succeeded", "cancelled", "without_attempt")]
    assert counted == [1, 1, 1]
    with fleet.begin() as conn:
        retry_failed(conn, ids=["gone"], states=["cancelled"], at=at(320))
    claim_one(fleet, "gone", "w", now=at(330))
    finish_one(fleet, "gone", 1, "w", now=at(340))
    catch_up(fleet, at(600))
    assert total(fleet, JobHour.succeeded) == 2


@pytest.mark.parametrize("by", ["hour", "model"])
def test_a_failed_and_retried_job_counts_alike_in_rollups_and_from_jobs(by: Any, fleet: Engine) -> None:
    add_jobs(fleet, "twice")
    claim_one(fleet, "twice", "w", now=at(400))
    finish_one(fleet, "twice", 1, "w", JobState.FAILED, now=at(410))
    with fleet.begin() as conn:
        retry_failed(conn, ids=["twice"], at=at(420))
    claim_one(fleet, "twice", "w", now=at(4000))
    with fleet.connect() as conn:
        before = {row.key: (row.jobs, row.failed) for row in throughput(conn, by)}
    finish_one(fleet, "twice", 2, "w", now=at(4010))
    catch_up(fleet, at(9000))
    with fleet.connect() as conn:
        exact = throughput(conn, by)
        rolled = history(conn, by)
    names = (
        "key",
        "jobs",
        "succeeded",
        "failed",
        "cancelled",
        "completion_tokens",
        "period_s",
        "tokens_per_s",
    )
    assert [[getattr(row, name) for name in names] for row in rolled] == [
        [getattr(row, name) for name in names] for row in exact
    ]
    assert sum(row.failed for row in exact) == 1
    assert sum(failed for _, failed in before.values()) == 1, "while it runs again"
    assert sum(row.jobs for row in exact) == sum(jobs for jobs, _ in before.values()) + 1


def test_the_present_is_there_when_asked_for_and_complete_later(fleet: Engine) -> None:
    transaction(
        fleet, partial(add_samples, samples=[new_sample("w", sampled_at=at(400), generated_tokens=1)])
    )
    catch_up(fleet, at(401))
    assert total(fleet, ThroughputHour.generated_tokens) == 84
    catch_up(fleet, at(401), with_present=True)
    assert total(fleet, ThroughputHour.generated_tokens) == 85
    transaction(
        fleet, partial(add_samples, samples=[new_sample("w", sampled_at=at(402), generated_tokens=1)])
    )
    catch_up(fleet, at(600))
    assert total(fleet, ThroughputHour.generated_tokens) == 86


def test_what_was_closed_is_never_computed_again(fleet: Engine) -> None:
    hour = floor_hour(at(3600))
    with fleet.begin() as conn:
        close_before(conn, hour)
        close_before(conn, floor_hour(at(0)))  # it does not go back
        conn.execute(update(RollupMark).values(rolled_until=floor_hour(at(0))))
        conn.execute(EngineSample.__table__.delete())
    catch_up(fleet, at(7200))
    assert total(fleet, ThroughputHour.generated_tokens) == 84
    much_too_late = new_sample("w", sampled_at=at(7), generated_tokens=100)
    transaction(fleet, partial(add_samples, samples=[much_too_late]))
    catch_up(fleet, at(7300))
    assert total(fleet, ThroughputHour.generated_tokens) == 84
    with fleet.connect() as conn, pytest.raises(ValueError, match="beginning of an hour"):
        close_before(conn, at(1))


def test_several_at_once_count_everything_once(fleet: Engine) -> None:
    with fleet.begin() as conn:
        reopen(conn, at(0))
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: catch_up(fleet, at(300)), range(4)))
    catch_up(fleet, at(300))
    assert total(fleet, ThroughputHour.generated_tokens) == 84
    assert total(fleet, JobMinute.succeeded) == 1


def test_limits_that_are_no_minutes_are_refused(db: Engine) -> None:
    with db.connect() as conn, pytest.raises(ValueError, match="beginnings of minutes"):
        roll_up(conn, at(0), at(60))


@pytest.mark.parametrize("by", ["hour", "model"])
def test_the_history_from_rollups_agrees_with_that_from_jobs(by: Any, sample: Engine) -> None:
    with sample.connect() as conn:
        exact = {row.key: row for row in throughput(conn, by)}
        rolled = {row.key: row for row in history(conn, by)}
    assert rolled.keys() == exact.keys()
    for key, row in rolled.items():
        true = exact[key]
        for name in (
            "jobs",
            "succeeded",
            "failed",
            "cancelled",
            "expired",
            "prompt_tokens",
            "cached_tokens",
            "completion_tokens",
            "period_s",
            "tokens_per_s",
        ):
            assert getattr(row, name) == getattr(true, name), (key, name)
        assert (row.span_s, row.span_tokens_per_s) == (None, None)
        assert true.span_s is not None
        assert true.span_s <= true.period_s
        for name in ("latency_p50_s", "latency_p95_s", "ttft_p50_s", "ttft_p95_s"):
            value, limit = getattr(true, name), getattr(row, name)
            assert (value is None) == (limit is None)
            assert value is None or value <= limit <= 1.25 * value + 0.001, (key, name)
        assert row.active_fraction == pytest.approx(true.active_fraction)


def test_the_history_by_night_day_tenant_and_queue(sample: Engine) -> None:
    with sample.connect() as conn:
        nights = history(conn, "night", model="large")
        days = history(conn, "day", since=START + timedelta(hours=12), until=END - timedelta(hours=12))
        tenants = history(conn, "tenant")
        queues = history(conn, "queue", since=END - timedelta(hours=1))
        with pytest.raises(InvalidValueError, match="must be one of hour, day"):
            history(conn, "week")  # type: ignore[arg-type]
    assert [(row.key, row.completion_tokens) for row in nights] == [
        ("2026-03-02", 186919),
        ("2026-03-03", 186919),
        ("2026-03-04", 190619),
    ]
    assert [row.key for row in days] == ["2026-03-03", "2026-03-04"]
    assert [row.key for row in tenants] == ["reports", "search", "web"]
    assert [(row.key, row.jobs) for row in queues] == [("tokenmill.large", 5), ("tokenmill.small", 10)]


def test_top_sees_workers_queues_and_open_batches(sample: Engine) -> None:
    with sample.connect() as conn:
        now = look(conn, 6.0, now=END)
    assert [(each.worker.id, each.running) for each in now.workers] == [
        ("gpu-1-a", 0),
        ("gpu-3-b", 1),
        ("gpu-2-b", 1),
    ]
    assert now.silent == 3, "the sample history's workers beat long ago"
    assert now.running == 2
    assert [(queue, jobs) for queue, jobs, _ in now.queued] == [("tokenmill.large", 5)]
    assert [(batch.name, batch.succeeded, batch.total) for batch in now.batches] == [("reports-0305", 5, 12)]
    assert now.batches[0].created_at == END - timedelta(minutes=10)
    assert now.tokens_per_s == pytest.approx(sum(each.tokens_per_s or 0 for each in now.workers))
    assert now.rolled_until == END


def dashboard_queries() -> list[tuple[str, str]]:
    path = Path(__file__).parents[2] / "examples" / "grafana" / "tokenmill.json"
    panels = json.loads(path.read_text(encoding="utf-8"))["panels"]
    return [(panel["title"], target["rawSql"]) for panel in panels for target in panel["targets"]]


@pytest.mark.parametrize(("title", "sql"), dashboard_queries(), ids=lambda part: part[:20])
def test_every_panel_of_the_dashboard_has_something_to_show(title: str, sql: str, sample: Engine) -> None:
    within = r"\1 BETWEEN '2026-03-02 12:00:00' AND '2026-03-05 12:00:00'"
    if sample.dialect.name == "sqlite":  # the dashboard is for PostgreSQL
        sql = sql.replace("CURRENT_TIMESTAMP - INTERVAL '10' SECOND", "datetime('now', '-10 seconds')")
    with sample.connect() as conn:
        rows = conn.execute(text(re.sub(r"\$__timeFilter\(([\w.]+)\)", within, sql))).all()
    assert rows, title
    assert any(value is not None for value in rows[0])
