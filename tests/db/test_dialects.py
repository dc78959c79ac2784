"""The statements that are written differently for each database mean the same on all of them."""

from __future__ import annotations

from datetime import datetime

import pytest
from sqlalchemy import Engine, select, update
from sqlalchemy.exc import StatementError

from models_db.dialects import among, insert_rows
from models_db.jobs import job_result
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
