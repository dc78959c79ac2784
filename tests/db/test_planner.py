"""PostgreSQL's statistics, brought up to date by whoever works; its own autovacuum is off for these tables."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, event, text

from models_db import planner
from models_db.base import Base
from models_db.callbacks import announce_jobs
from models_db.claims import ClaimItem, FinishItem, claim, finish
from models_db.jobs import lock_jobs
from models_db.migrate import upgrade
from models_db.planner import LEAST_CHANGES, LOCK_KEY, Planner, analyse_changed
from models_db.session import make_engine
from models_db.tables import AttemptOutcome, JobState
from models_db.transitions import close_attempts
from tests.db.helpers import T0, add_jobs, add_workers, new_job, new_result

MANY = 20_000


@pytest.fixture
def fresh(empty_url: str, kind: str) -> Iterator[Engine]:
    """Tables that have never held a row, of which PostgreSQL itself never makes statistics."""
    upgrade(empty_url)
    engine = make_engine(empty_url, lock_wait_s=0.2)
    if kind == "postgresql":
        with engine.begin() as conn:
            for name in Base.metadata.tables:
                conn.execute(text(f"ALTER TABLE {name} SET (autovacuum_enabled = false)"))
    add_workers(engine, "w")
    yield engine
    engine.dispose()


def fill(engine: Engine, count: int = MANY) -> None:
    """Jobs, each with an attempt that has ended and a callback, stored by somebody else in one go."""
    add_jobs(engine, "seed")
    copied = ", ".join(column.name for column in Base.metadata.tables["job"].columns if column.name != "id")
    store(
        engine,
        f"INSERT INTO job (id, {copied}) SELECT 'y' || n, {copied} FROM job, generate_series(1, {count}) AS n "
        "WHERE id = 'seed'",
        "INSERT INTO attempt (job_id, number, worker_id, started_at, ended_at, outcome) "
        "SELECT id, 1, 'w', created_at, created_at, 'lost' FROM job WHERE id LIKE 'y%'",
        "INSERT INTO callback (id, job_id, host, state, events, tries, unwanted, include_output, created_at, url) "
        "SELECT md5(id), id, 'h', 'waiting', 0, 0, 0, false, created_at, 'https://h/' FROM job WHERE id LIKE 'y%'",
    )
    await_changes(engine, {"job": count, "attempt": count, "callback": count})


def store(engine: Engine, *statements: str) -> None:
    """In a connection of its own: the server counts what one has changed at its end, and else some seconds later."""
    other = make_engine(engine.url.render_as_string(hide_password=False))
    with other.begin() as conn:
        for statement in statements:
            conn.execute(text(statement))
    other.dispose()


def await_changes(engine: Engine, least: dict[str, int]) -> None:
    """Wait until the server has counted so many changes of each table since it was analysed."""
    query = text("SELECT relname, n_mod_since_analyze FROM pg_stat_user_tables")
    deadline = time.monotonic() + 30
    while True:
        with engine.connect() as conn:
            counted = {name: changes for name, changes in conn.execute(query)}  # noqa: C416 - mypy
        if all(counted[name] >= count for name, count in least.items()):
            return
        assert time.monotonic() < deadline, counted
        time.sleep(0.02)


def analysed(engine: Engine) -> set[str]:
    """Tables that have been analysed by a command."""
    with engine.connect() as conn:
        return set(
            conn.scalars(text("SELECT relname FROM pg_stat_user_tables WHERE last_analyze IS NOT NULL"))
        )


def work(conn: Connection, number: int) -> None:
    """What a worker does all day."""
    jobs = [new_job(f"{number}-{n}") for n in range(10)]
    won = claim(conn, [ClaimItem(job) for job in jobs], "w")
    ended = [FinishItem(each.job_id, each.attempt, JobState.SUCCEEDED, new_result()) for each in won]
    assert all(finish(conn, ended, "w"))


def scanned(conn: Connection) -> dict[str, int]:
    """Rows that this session has read by going through whole tables, since it last told the server of them."""
    query = text("SELECT relname, seq_tup_read FROM pg_stat_xact_user_tables")
    return {name: rows for name, rows in conn.execute(query)}  # noqa: C416 - mypy knows no dict(rows)


def read_in_full(conn: Connection, do: Callable[[], object]) -> set[str]:
    """The tables that are gone through for this; of the transaction before, something may not be told yet."""
    before = scanned(conn)
    do()
    return {name for name, rows in scanned(conn).items() if rows - before.get(name, 0) > 500}


def test_statements_prepared_on_empty_tables_are_planned_anew(fresh: Engine, kind: str) -> None:
    if kind != "postgresql":
        assert analyse_changed(fresh) == planner.Analysed()
        return
    with fresh.connect() as worker:
        for number in range(12):  # the driver prepares after five, the server keeps a plan after five more
            with worker.begin():
                work(worker, number)
        fill(fresh)
        with worker.begin():
            read = read_in_full(worker, lambda: work(worker, 100))
            assert read == {"job", "attempt", "callback"}, "what this is about"
        found = analyse_changed(fresh)
        assert {"job", "attempt", "callback"} <= set(found.done)
        assert not found.refused
        with worker.begin():
            assert read_in_full(worker, lambda: work(worker, 101)) == set()
        with worker.begin():
            closed = partial(close_attempts, worker, ["y7"], AttemptOutcome.LOST, T0, None)
            assert read_in_full(worker, closed) == set()
            assert read_in_full(worker, lambda: announce_jobs(worker, ["y7"])) == set()
            assert read_in_full(worker, lambda: lock_jobs(worker, ["y7"])) == set()
    assert analyse_changed(fresh).done == [], "once is enough"


def touch(engine: Engine, count: int, changes: int) -> None:
    """Change so many rows, which makes it so many changes since the last ``ANALYZE``."""
    store(engine, f"UPDATE job SET priority = 1 WHERE id IN (SELECT id FROM job ORDER BY id LIMIT {count})")
    await_changes(engine, {"job": changes})


def test_what_has_changed_little_is_left_alone(fresh: Engine, kind: str) -> None:
    if kind != "postgresql":
        return
    fill(fresh, LEAST_CHANGES - 100)
    assert analyse_changed(fresh).done == []
    touch(fresh, 900, 2 * (LEAST_CHANGES - 100))
    assert analyse_changed(fresh).done == ["job"]


def test_a_large_table_is_analysed_once_a_minute_unless_it_doubles(fresh: Engine, kind: str) -> None:
    if kind != "postgresql":
        return
    fill(fresh, 4000)
    assert "job" in analyse_changed(fresh).done
    touch(fresh, 3000, 3000)
    assert analyse_changed(fresh).done == []
    touch(fresh, 3000, 6000)
    assert analyse_changed(fresh).done == ["job"]


def test_only_one_at_a_time_and_nobody_waits_for_it(fresh: Engine, kind: str) -> None:
    if kind != "postgresql":
        return
    fill(fresh)
    with fresh.begin() as other:
        other.execute(text(f"SELECT pg_advisory_xact_lock({LOCK_KEY})"))
        assert analyse_changed(fresh).done == []
    with fresh.begin() as other:  # as a migration or a VACUUM has it
        other.execute(text("LOCK TABLE attempt IN SHARE UPDATE EXCLUSIVE MODE"))
        assert set(analyse_changed(fresh).done) == {"job", "callback"}
    assert analyse_changed(fresh).done == ["attempt"]
    with fresh.begin() as free:
        assert free.scalar(text(f"SELECT pg_try_advisory_xact_lock({LOCK_KEY})"))


def test_a_role_that_owns_no_table_says_once_what_to_do(
    fresh: Engine, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    if kind != "postgresql":
        return
    fill(fresh)
    role = f"tokenmill_test_{secrets.token_hex(6)}"
    with fresh.begin() as conn:
        conn.execute(text(f"CREATE ROLE {role}"))
        conn.execute(text(f"GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA public TO {role}"))
    theirs = make_engine(fresh.url.render_as_string(hide_password=False))

    def become(connection: Any, _record: Any) -> None:
        connection.execute(f"SET ROLE {role}")
        connection.commit()

    event.listen(theirs, "connect", become)
    try:
        looking = Planner(theirs)
        with caplog.at_level(logging.WARNING):
            looking.look()
            looking.look()
        (said,) = [record.getMessage() for record in caplog.records if record.name == planner.__name__]
        assert "attempt, callback, job" in said
        assert "autovacuum" in said
        assert "GRANT" in said
        assert not analysed(fresh)
    finally:
        theirs.dispose()
        with fresh.begin() as conn:
            conn.execute(text(f"DROP OWNED BY {role}"))
            conn.execute(text(f"DROP ROLE {role}"))


def test_a_worker_looks_again_and_again_and_ends_at_once(fresh: Engine, kind: str) -> None:
    looking = Planner(fresh, period_s=0.02)
    looking.start()
    try:
        if kind == "postgresql":
            fill(fresh)
            deadline = time.monotonic() + 30
            while "attempt" not in analysed(fresh):
                assert time.monotonic() < deadline
                time.sleep(0.02)
    finally:
        looking.stop(timeout_s=30)
    assert "planner" not in {thread.name for thread in threading.enumerate()}


def test_a_database_that_is_away_costs_nothing(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    if kind != "postgresql":
        return
    away = make_engine("postgresql://nobody@127.0.0.1:1/none")
    with caplog.at_level(logging.WARNING):
        Planner(away).look()
    assert not caplog.records
