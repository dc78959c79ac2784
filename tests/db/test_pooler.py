"""PostgreSQL behind a pooler that gives each transaction another connection of the server."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from sqlalchemy import Engine, text

from models_db.errors import DatabaseUnavailableError
from models_db.schema import check_schema
from models_db.session import make_engine, transaction
from tests.pooler import SERVER_CONNECTIONS, PgBouncer, pgbouncer
from tests.servers import ServerUnavailableError, fresh_database_url, skip_or_fail

pytestmark = [pytest.mark.postgres, pytest.mark.timeout(120)]

_LIMIT = text("SELECT current_setting('idle_in_transaction_session_timeout')")
_BACKEND = text("SELECT pg_backend_pid()")


@pytest.fixture(scope="module")
def direct(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with ExitStack() as stack:
        try:
            yield stack.enter_context(fresh_database_url("postgresql", tmp_path_factory.mktemp("pooler")))
        except ServerUnavailableError as exc:
            skip_or_fail(exc)


@pytest.fixture(scope="module")
def pooler(direct: str) -> Iterator[PgBouncer]:
    with pgbouncer(direct) as pooler:
        yield pooler


def limits(engine: Engine, count: int = 4 * SERVER_CONNECTIONS) -> dict[str, set[int]]:
    """The idle limits that transactions of this engine have, with the connections of the server that had them."""
    found: dict[str, set[int]] = {}
    for _ in range(count):
        limit, backend = transaction(
            engine, lambda conn: (str(conn.scalar(_LIMIT)), int(conn.scalar(_BACKEND) or 0))
        )
        found.setdefault(limit, set()).add(backend)
    return found


def test_statements_that_are_often_used_are_not_prepared_on_somebody_elses_connection(
    pooler: PgBouncer, direct: str
) -> None:
    """The driver prepares what it has run five times, on a connection that is another one by then."""
    failures: list[BaseException] = []

    def work() -> None:
        engine = make_engine(pooler.url(direct))
        try:
            for number in range(40):
                assert (
                    transaction(engine, lambda conn, n=number: conn.scalar(text("SELECT :n + 1"), {"n": n}))
                    == number + 1
                )  # type: ignore[misc]
        except BaseException as exc:
            failures.append(exc)
        finally:
            engine.dispose()

    threads = [threading.Thread(target=work) for _ in range(2 * SERVER_CONNECTIONS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_the_idle_limit_is_that_of_each_transaction_and_of_nobody_else(
    pooler: PgBouncer, direct: str
) -> None:
    limited = make_engine(pooler.url(direct), idle_in_transaction_s=0.5)
    others = make_engine(pooler.url(direct))
    try:
        with ExitStack() as stack:  # so that the server's connections are all there
            for _ in range(SERVER_CONNECTIONS):
                stack.enter_context(others.begin()).execute(_BACKEND)
        found = limits(limited)
        assert found.keys() == {"500ms"}
        assert len(found["500ms"]) > 1, "its transactions had several connections of the server"
        assert limits(others).keys() == {"0"}
        with limited.connect() as conn:
            backend = conn.scalar(_BACKEND)
            there = text("SELECT count(*) FROM pg_stat_activity WHERE pid = :pid")
            server = make_engine(direct)
            while transaction(server, lambda other: other.scalar(there, {"pid": backend})):
                time.sleep(0.05)  # the server's own time, which nothing tells of
            server.dispose()
            with pytest.raises(DatabaseUnavailableError, match="idle-in-transaction"):
                conn.execute(_BACKEND)
    finally:
        limited.dispose()
        others.dispose()


def test_the_limit_of_a_wait_for_locks_is_that_of_each_transaction(pooler: PgBouncer, direct: str) -> None:
    limited = make_engine(pooler.url(direct), idle_in_transaction_s=5, lock_wait_s=0.25)
    others = make_engine(pooler.url(direct))
    setting = text("SELECT current_setting('lock_timeout')")
    try:
        for _ in range(2 * SERVER_CONNECTIONS):
            assert transaction(limited, lambda conn: conn.scalar(setting)) == "250ms"
            assert transaction(others, lambda conn: conn.scalar(setting)) == "0"
    finally:
        limited.dispose()
        others.dispose()


def test_without_a_pooler_a_session_keeps_its_statements_and_its_limit(direct: str) -> None:
    engine = make_engine(direct, idle_in_transaction_s=0.5)
    try:
        for _ in range(10):
            transaction(engine, lambda conn: conn.execute(_BACKEND))
        prepared = text("SELECT count(*) FROM pg_prepared_statements")
        assert transaction(engine, lambda conn: conn.scalar(prepared))
        assert limits(engine).keys() == {"500ms"}
    finally:
        engine.dispose()


def test_migrations_run_one_at_a_time_through_it(pooler: PgBouncer, direct: str) -> None:
    url = pooler.url(direct)
    command = [sys.executable, "-m", "workers.cli", "db", "upgrade"]
    environment = os.environ | {"TOKENMILL_DATABASE_URL": url}
    processes = [
        subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for _ in range(2)
    ]
    said = [process.communicate(timeout=60)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], said
    engine = make_engine(url)
    check_schema(engine)
    engine.dispose()


def test_a_restart_of_the_pooler_is_an_outage_that_passes(pooler: PgBouncer, direct: str) -> None:
    engine = make_engine(pooler.url(direct), idle_in_transaction_s=5)
    try:
        transaction(engine, lambda conn: conn.execute(_BACKEND))
        pooler.stop()
        pooler.start(direct)
        assert transaction(engine, lambda conn: conn.scalar(text("SELECT 1"))) == 1
    finally:
        engine.dispose()
