"""Every query in the guides and in the demo runs on every database."""

from __future__ import annotations

import pytest
from sqlalchemy import Engine, text

from tests.guides import queries
from workers.demo_queries import QUESTIONS

DOCUMENTED = [*queries(), *(("demo", question.sql) for question in QUESTIONS)]


@pytest.mark.parametrize(
    ("page", "sql"), DOCUMENTED, ids=[f"{page}-{n}" for n, (page, _) in enumerate(DOCUMENTED)]
)
def test_every_documented_query_runs(page: str, sql: str, db: Engine) -> None:
    with db.connect() as connection:
        assert connection.execute(text(sql)).all() == []


def test_queries_were_found() -> None:
    assert {page for page, _ in DOCUMENTED} >= {"README.md", "sql.md", "operations.md", "demo"}
