"""Engines: their settings, and errors that say what to do without giving passwords away."""

from __future__ import annotations

import sqlite3
import threading
import time
from contextlib import closing

import pytest
from sqlalchemy import insert, select, text
from sqlalchemy.exc import DBAPIError, OperationalError, TimeoutError

from models_db.base import dump_json
from models_db.errors import DatabaseUnavailableError, DatabaseUrlError
from models_db.faults import Fault, classify, summary
from models_db.session import make_engine, reading, redact, session_factory, transaction
from models_db.tables import Job
from tests.db.helpers import add_jobs, new_job
from tests.db.outage import PostgresError
from tests.servers import free_port


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("nonsense", "names no supported database"),
        ("oracle://u:s3cret@h/d", "names no supported database"),
        ("postgresql+psycopg2://u:s3cret@h/d", "driver 'psycopg2' is not supported"),
        ("postgresql://u:s3cret@h:port/d", "cannot be read"),
        ("sqlite://", "in memory cannot be shared"),
        ("sqlite:///:memory:", "in memory cannot be shared"),
        ("sqlite:///file:x?mode=memory&uri=true", "in memory cannot be shared"),
    ],
)
def test_a_bad_url_is_refused_with_an_example_and_no_password(url, message):
    with pytest.raises(DatabaseUrlError, match=message) as caught:
        make_engine(url)
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize("scheme", ["postgresql", "postgres", "mariadb", "mysql", "mysql+pymysql"])
def test_an_unreachable_server_is_named_without_its_password(scheme):
    port = free_port()
    engine = make_engine(f"{scheme}://user:s3cret@127.0.0.1:{port}/name")
    with pytest.raises(DatabaseUnavailableError, match=rf"127.0.0.1:{port}/name is not available") as caught:
        engine.connect()
    assert "TOKENMILL_DATABASE_URL" in str(caught.value)
    assert "s3cret" not in str(caught.value)
    assert classify(caught.value) is Fault.AWAY


def test_a_file_that_cannot_be_opened_is_named(tmp_path):
    engine = make_engine(f"sqlite:///{tmp_path}/missing/x.db")
    with pytest.raises(DatabaseUnavailableError, match=r"missing/x\.db is not available .*folder exists"):
        engine.connect()
    (tmp_path / "text.db").write_text("no database at all, but long enough to be read as a header" * 10)
    with pytest.raises(
        DatabaseUnavailableError, match=r"text\.db is not available \(file is not a database\)"
    ):
        make_engine(f"sqlite:///{tmp_path}/text.db").connect()


def test_urls_are_shown_without_secrets():
    assert redact("postgresql://u:s3cret@h:1/d?sslpassword=s3cret") == "postgresql://u:***@h:1/d"
    assert redact("sqlite:///x.db") == "sqlite:///x.db"
    assert redact("::s3cret::") == "(unreadable database URL)"


def test_sqlite_is_durable_enough_concurrent_and_strict_about_parents(tmp_path):
    with make_engine(f"sqlite:///{tmp_path}/x.db").connect() as conn:
        values = [
            conn.exec_driver_sql(f"PRAGMA {name}").scalar()
            for name in ("journal_mode", "synchronous", "foreign_keys", "busy_timeout")
        ]
    assert values == ["wal", 1, 1, 15000]


def test_isolation_is_what_claims_rely_on(db, kind):
    with db.connect() as conn:
        if kind != "sqlite":
            assert conn.get_isolation_level() == "READ COMMITTED"
        else:
            conn.begin()
            other = sqlite3.connect(db.url.database, timeout=0)
            with closing(other), pytest.raises(sqlite3.OperationalError, match="locked"):
                other.execute("BEGIN IMMEDIATE")


def test_a_reader_neither_waits_for_a_writer_nor_holds_one_up(db):
    add_jobs(db, "j")
    with db.begin() as writer:
        writer.execute(text("UPDATE job SET tenant = 'new'"))
        with reading(db) as reader:
            assert reader.scalar(select(Job.tenant)) is None
    with reading(db) as reader:
        reader.execute(select(Job.tenant)).all()
        with db.begin() as writer:
            writer.execute(text("UPDATE job SET tenant = 'newer'"))


def test_sessions_keep_their_objects_after_a_commit(db):
    with session_factory(db).begin() as session:
        job = Job(**new_job("j").row())
        session.add(job)
    assert job.prompt == {"prompt": "Grüße, 世界 🌍"}


def test_a_deadlock_is_resolved_by_doing_it_again(db, kind):
    add_jobs(db, "a", "b")
    barrier = threading.Barrier(2)
    tries = []

    def work(conn, first, second):
        tries.append(first)
        conn.execute(text(f"UPDATE job SET priority = priority + 1 WHERE id = '{first}'"))
        if kind != "sqlite" and len(tries) <= 2:
            barrier.wait(60)  # both hold one row and want the other
        conn.execute(text(f"UPDATE job SET priority = priority + 1 WHERE id = '{second}'"))

    threads = [
        threading.Thread(target=transaction, args=(db, lambda conn, pair=pair: work(conn, *pair)))
        for pair in (("a", "b"), ("b", "a"))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    with db.connect() as conn:
        assert conn.scalars(select(Job.priority)).all() == [5, 5]
    assert len(tries) == (2 if kind == "sqlite" else 3)


def test_a_transaction_that_falls_silent_loses_its_locks(db, kind):
    """As of a process that is frozen. SQLite has nobody who could end it."""
    if kind == "sqlite":
        make_engine(str(db.url), idle_in_transaction_s=1).connect().close()  # is harmless
        return
    add_jobs(db, "a")
    url = db.url.render_as_string(hide_password=False)
    silent = make_engine(url, idle_in_transaction_s=1.5)
    rename = text("UPDATE job SET tenant = :name WHERE id = 'a'")
    conn = silent.connect()
    for _ in range(2):  # the limit holds for every transaction of the connection
        conn.rollback()
        conn.execute(rename, {"name": "silent"})
    transaction(db, lambda other: other.execute(rename, {"name": "other"}))  # which the lock lets through
    with pytest.raises(DatabaseUnavailableError) as caught:
        conn.execute(rename, {"name": "late"})
    assert classify(caught.value) is Fault.AWAY
    conn.close()
    with silent.connect() as conn:
        assert conn.scalar(select(Job.tenant)) == "other"
    silent.dispose()


def test_a_wait_for_a_lock_has_an_end_and_is_tried_again(db, kind):
    if kind == "sqlite":
        make_engine(str(db.url), lock_wait_s=1).connect().close()  # is harmless: 15 s it is
        return
    add_jobs(db, "a")
    url = db.url.render_as_string(hide_password=False)
    engine = make_engine(url, lock_wait_s=0.3)
    rename = text("UPDATE job SET tenant = :name WHERE id = 'a'")
    with db.begin() as holder:
        holder.execute(rename, {"name": "holder"})
        for _ in range(2):
            began = time.monotonic()
            with pytest.raises(OperationalError) as caught, engine.begin() as conn:
                conn.execute(rename, {"name": "other"})
            assert classify(caught.value) is Fault.TRANSIENT
            assert time.monotonic() - began < 14, "not the 15 s (MariaDB) or the ever (PostgreSQL) of others"
        with pytest.raises(DatabaseUnavailableError, match="too busy: 2 tries"):
            transaction(engine, lambda conn: conn.execute(rename, {"name": "other"}), tries=2)
    transaction(engine, lambda conn: conn.execute(rename, {"name": "other"}))
    engine.dispose()


def test_a_lock_that_never_comes_free_is_reported_as_such(tmp_path):
    engine = make_engine(f"sqlite:///{tmp_path}/x.db")
    delays = []

    def locked(_conn):
        error = sqlite3.OperationalError("database is locked")
        error.sqlite_errorcode = sqlite3.SQLITE_BUSY
        raise OperationalError("UPDATE", {}, error)

    with pytest.raises(DatabaseUnavailableError, match="too busy: 4 tries"):
        transaction(engine, locked, tries=4, sleep=delays.append)
    assert delays == [0.02, 0.04, 0.08]


def test_other_errors_are_not_tried_again(db):
    tries = []

    def wrong(conn):
        tries.append(1)
        conn.execute(text("SELECT nonsense FROM nowhere"))

    with pytest.raises(DBAPIError) as caught:
        transaction(db, wrong)
    assert (tries, classify(caught.value)) == ([1], Fault.OTHER)


class _MariadbError(Exception):
    """Newer drivers give a state besides the number."""

    def __init__(self, number, sqlstate):
        super().__init__(number, "message")
        self.sqlstate = sqlstate


def _sqlite_error(code):
    error = sqlite3.OperationalError("x")
    error.sqlite_errorcode = code
    return error


_FAULTS = {
    Fault.AWAY: [
        *map(PostgresError, ("08000", "08006", "25006", "25P03", "25P04", "53000", "53100", "53300", None)),
        *map(PostgresError, ("57000", "57P01", "57P02", "57P03", "57P05", "58030")),
        *(Exception(number, "no space, connections or server") for number in (3, 20, 1021, 1026, 1114)),
        *(
            Exception(number, "no connection")
            for number in (0, 1040, 1047, 1053, 1203, 1226, 1927, 2006, 2013)
        ),
        *(Exception(number, "read-only") for number in (1290, 1792, 1836, 1874)),
        _MariadbError(1021, "HY000"),
        _MariadbError(1203, "42000"),
        *map(_sqlite_error, (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR | 3 << 8, sqlite3.SQLITE_READONLY)),
    ],
    Fault.TRANSIENT: [
        *map(PostgresError, ("40001", "40P01", "55P03", "55006", "72000")),
        *map(PostgresError, ("57014", "53200", "53400", "26000", "42P05")),
        *(Exception(number, "lock or race") for number in (1020, 1205, 1206, 1213, 1412, 1615, 3572)),
        *(Exception(number, "cancelled") for number in (1028, 1317, 1969, 3024)),
        *(Exception(number, "no memory, file or resource") for number in (5, 1030, 1037, 1038, 1041, 1878)),
        _MariadbError(1205, "HY000"),
        _MariadbError(1317, "70100"),
        *map(_sqlite_error, (sqlite3.SQLITE_BUSY | 2 << 8, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_INTERRUPT)),
        _sqlite_error(sqlite3.SQLITE_NOMEM),
    ],
    Fault.OTHER: [
        *map(PostgresError, ("22021", "23502", "23505", "42501", "42P01", "54000", "P0001")),
        *(Exception(number, "the row's own fault") for number in (1048, 1062, 1153, 1366, 1406, 1644)),
        _MariadbError(1406, "22001"),
        *map(_sqlite_error, (sqlite3.SQLITE_ERROR, sqlite3.SQLITE_CONSTRAINT, sqlite3.SQLITE_TOOBIG)),
    ],
}


@pytest.mark.parametrize("fault", Fault)
def test_errors_are_sorted_by_what_to_do(fault):
    for original in _FAULTS[fault]:
        error = OperationalError("SELECT 1", {}, original)
        assert classify(error) is fault, (vars(original), original)


def test_a_pool_without_a_free_connection_is_waited_for():
    assert classify(TimeoutError("QueuePool limit of size 5 overflow 10 reached")) is Fault.TRANSIENT


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        (
            'null value in column "state"\nDETAIL:  Failing row contains (secret).',
            'null value in column "state"',
        ),
        ('invalid input syntax for type integer: "secret"', "invalid input syntax for type integer: ..."),
        ('invalid input syntax for type json: "a\nsecret"', "invalid input syntax for type json: ..."),
        ("(1062, \"Duplicate entry 'a' for secret' for key 'uq_job'\")", "entry ... for key 'uq_job'"),
        (
            "(1366, \"Incorrect string value: 'secret' for column `db`.`text`\")",
            "value: ... for column `db`.`text`",
        ),
        ("(1292, \"Truncated incorrect DOUBLE value: 'secret", "DOUBLE value: ..."),
    ],
)
def test_a_summary_says_what_is_wrong_without_the_row(text, kept):
    said = summary(OperationalError("UPDATE", {}, Exception(text)))
    assert "secret" not in said
    assert kept in said


def test_errors_quote_no_prompts(db):
    secret = "the patient's name"
    with pytest.raises(DBAPIError) as caught, db.begin() as conn:
        conn.execute(insert(Job), [new_job("j", prompt={"prompt": secret}).row() | {"priority": 11}])
    assert secret not in summary(caught.value)
    assert secret not in summary(caught.value.orig)
    assert "hidden" in str(caught.value)


def test_json_holds_what_databases_refuse():
    assert dump_json({"ü": [1.5, float("nan"), ("x", float("-inf"))]}) == '{"ü":[1.5,null,["x",null]]}'
    assert dump_json("\ud800\x00") == '"\\ud800\\u0000"'
