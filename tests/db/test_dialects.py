"""The statements that are written differently for each database mean the same on all of them."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

import pytest
from sqlalchemy import Dialect, Engine, event, select, text, update
from sqlalchemy.dialects import mysql, postgresql, sqlite
from sqlalchemy.exc import IntegrityError, StatementError

from models_db import transitions
from models_db.base import JsonText
from models_db.dialects import among, insert_rows
from models_db.errors import DatabaseUnavailableError
from models_db.jobs import job_result
from models_db.session import transaction
from models_db.tables import Job, Result
from tests.db.helpers import T0, add_jobs, new_job, new_result

ODD = {
    "surrogate": "a\ud800b",
    "nul": "a\x00b",
    "quotes": "\"'\\ %s :rows {}",
    "emoji": "🌍",
    "none": None,
    "nested": [1, 2.5, True, {}],
}


def test_rows_come_back_as_they_were(db: Engine) -> None:
    rows = [
        new_job("a", params=ODD, prompt={}, message=None, deadline_at=None, priority=9).row(),
        new_job("b", message=ODD, deadline_at=T0, tenant="100%\t:rows\n'x'").row(),
    ]
    with db.begin() as conn:
        insert_rows(conn, Job, rows)
        found = conn.execute(select(Job.__table__).order_by(Job.id)).mappings().all()
    for row, stored in zip(rows, found, strict=True):
        assert row.items() <= dict(stored).items()


def test_many_rows_come_back_as_they_were_too(db: Engine) -> None:
    raw = '{"body":"100%\\\\t \\\\\\\\ \\"x\\"","n":[1,null]}'
    rows = [
        new_job(f"{n:03}", params=ODD, message=JsonText(raw), tenant="a\tb\n\\N", published_at=T0).row()
        for n in range(100)
    ]
    with db.begin() as conn:
        insert_rows(conn, Job, rows)
        found = conn.execute(select(Job.__table__).order_by(Job.id)).mappings().all()
    assert len(found) == 100
    for row, stored in zip(rows, found, strict=True):
        assert row | {"message": json.loads(raw)} == {name: stored[name] for name in row}


def test_what_a_database_refuses_is_named_the_same_among_many_rows(db: Engine) -> None:
    rows = [new_job(f"{n:03}").row() for n in range(50)]
    with pytest.raises(IntegrityError), db.begin() as conn:
        insert_rows(conn, Job, [*rows, rows[7]])
    with pytest.raises((ValueError, StatementError), match="aware"), db.begin() as conn:
        insert_rows(conn, Job, [row | {"created_at": datetime(2026, 3, 1)} for row in rows])
    with db.begin() as conn:
        assert conn.scalars(select(Job.id)).all() == []
        with pytest.raises(IntegrityError), conn.begin_nested():
            insert_rows(conn, Job, [*rows, rows[7]])
        insert_rows(conn, Job, rows)  # the transaction goes on
    with db.begin() as conn:
        assert len(conn.scalars(select(Job.id)).all()) == 50


def test_a_connection_lost_under_many_rows_is_the_database_away(db: Engine) -> None:
    ends = {
        "postgresql": "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid = ",
        "mysql": "KILL ",
    }
    own = {"postgresql": "SELECT pg_backend_pid()", "mysql": "SELECT connection_id()"}
    rows = [new_job(f"{n:03}").row() for n in range(50)]
    if db.dialect.name in ends:
        with db.connect() as conn:
            number = conn.scalar(text(own[db.dialect.name]))
            with db.connect() as other:
                other.execute(text(f"{ends[db.dialect.name]}{number}"))
            with pytest.raises(DatabaseUnavailableError):
                insert_rows(conn, Job, rows)
    transaction(db, lambda conn: insert_rows(conn, Job, rows))
    with db.begin() as conn:
        assert len(conn.scalars(select(Job.id)).all()) == 50


@pytest.mark.parametrize("stop_reason", ["5", 5, "", None])
def test_json_columns_tell_text_from_numbers_and_from_nothing(
    db: Engine, stop_reason: str | int | None
) -> None:
    add_jobs(db, "a")
    result = new_result(
        "ü 🌍 \n\t\"'\\",
        stop_reason=stop_reason,
        token_ids=[1, 2],
        logprobs=[{"top": [[1, -0.5]]}],
        seed=2**63 - 1,
    )
    with db.begin() as conn:
        insert_rows(conn, Result, [result.row("a", T0)])
        assert job_result(conn, "a") == result


def test_a_time_without_a_zone_is_refused(db: Engine) -> None:
    with pytest.raises((ValueError, StatementError), match="aware"), db.begin() as conn:
        insert_rows(conn, Job, [new_job("a").row() | {"created_at": datetime(2026, 3, 1)}])
    with db.begin() as conn:
        insert_rows(conn, Job, [])
        assert conn.scalars(select(Job.id)).all() == []


def test_among_finds_exactly_what_is_named(db: Engine) -> None:
    odd = ['"', "'", "a,b", "{a}", "a\\", "ü", "A", "a ", "NULL", "%"]
    add_jobs(db, "a", *odd)
    query = select(Job.id).where(among(Job.id))
    with db.begin() as conn:
        assert set(conn.scalars(query, {"ids": [*odd, "missing"]})) == set(odd)
        assert conn.scalars(query, {"ids": ["a"]}).all() == ["a"]
        assert conn.scalars(query, {"ids": []}).all() == []
        change = update(Job).where(among(Job.id)).values(tenant="t")
        assert conn.execute(change, {"ids": ["a", "A", "b"]}).rowcount == 2


@pytest.mark.parametrize(
    "dialect", [sqlite.dialect(), mysql.dialect(), postgresql.dialect()], ids=lambda it: it.name
)
def test_among_is_a_condition_that_an_index_answers(dialect: Dialect) -> None:
    """Compared with 1, as SQLAlchemy likes it, every row would be looked at, and locked."""
    for statement in (
        select(Job.id).where(among(Job.id)),
        select(Job.id).where(among(Job.id), Job.tenant.is_(None)).with_for_update(),
        update(Job).where(among(Job.id), Job.tenant.is_(None)).values(priority=1),
    ):
        assert "= 1" not in str(statement.compile(dialect=dialect)).split("WHERE")[1]


def test_naming_few_rows_of_many_looks_at_few(db: Engine, kind: str) -> None:
    add_jobs(db, *(f"{n:04}" for n in range(2000)))
    explain = "EXPLAIN QUERY PLAN " if kind == "sqlite" else "EXPLAIN "

    def ask(*args: Any) -> tuple[str, Any]:
        return explain + args[2], args[3]

    with db.connect() as conn:
        conn.exec_driver_sql("ANALYZE TABLE job" if kind == "mariadb" else "ANALYZE").close()
        event.listen(conn, "before_cursor_execute", ask, retval=True)
        plan = str(
            conn.execute(select(Job.id).where(among(Job.id)), {"ids": ["0007", "0008"]}).cursor.fetchall()
        )
    assert {"sqlite": "SEARCH job", "postgresql": "Index", "mariadb": "'range'"}[kind] in plan


def test_a_claim_looks_at_its_own_rows_before_the_database_knows_the_table(db: Engine, kind: str) -> None:
    """A bulk run has filled the table a moment ago, and nobody has counted what is in it."""
    add_jobs(db, *(f"{n:05}" for n in range(5000)))
    explain = "EXPLAIN QUERY PLAN " if kind == "sqlite" else "EXPLAIN "

    def ask(*args: Any) -> tuple[str, Any]:
        return explain + args[2], args[3]

    with db.connect() as conn:
        if kind == "postgresql":
            conn.exec_driver_sql("SET plan_cache_mode = force_generic_plan")
        event.listen(conn, "before_cursor_execute", ask, retval=True)
        statement = update(Job).where(*transitions._ARE_OPEN).values(owner="w")
        plan = str(conn.execute(statement, {"ids": ["00007", "00008"]}).cursor.fetchall())
    assert "state" not in plan.partition("Filter")[0]
    assert {"sqlite": "SEARCH job", "postgresql": "pk_job", "mariadb": "PRIMARY"}[kind] in plan
