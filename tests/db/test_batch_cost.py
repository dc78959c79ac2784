"""What is asked of a batch every few seconds costs a small fixed amount, however many lines the batch has."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, event, insert, join, literal, select, text, true, update
from sqlalchemy.orm import aliased

from models_db.api_batches import add_api_batch, find_api_batch
from models_db.batches import (
    create_batch,
    finish_batch_if_done,
    open_jobs,
    set_batch_state,
    unpublished,
)
from models_db.jobs import insert_jobs
from models_db.session import reading
from models_db.tables import BatchState, Job, Result
from tests.db.helpers import T0, add_workers, at, claim_one, finish_one, new_job

SIDE = 150  # its square is the number of lines


@pytest.fixture
def large(db: Engine) -> Engine:
    """A batch ``b`` whose 22,500 lines are all queued and published, but for ``3`` and ``4``."""
    with db.begin() as conn:
        create_batch(conn, name="nightly", batch_id="b")
        lines = [new_job(f"{n}", batch_id="b", position=n, published_at=at(1)) for n in range(SIDE)]
        insert_jobs(conn, lines)
        set_batch_state(conn, "b", BatchState.IN_PROGRESS)
        row, column = aliased(Job.__table__), aliased(Job.__table__)
        copied = [each for each in row.columns if each.name != "id"]
        copies = (
            select((row.c.id + literal("-") + column.c.id).label("id"), *copied)
            .select_from(join(row, column, true()))
            .where(column.c.id != "0")
        )
        conn.execute(insert(Job).from_select(["id", *(each.name for each in copied)], copies))
        conn.execute(update(Job).where(Job.id.in_(["3", "4"])).values(published_at=None))
    analyse(db)
    return db


def analyse(engine: Engine) -> None:
    """Have the database look at its tables, as it does by itself before long."""
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as conn:
        conn.execute(text("ANALYZE TABLE job" if conn.dialect.name in ("mysql", "mariadb") else "ANALYZE"))


def rows_read(engine: Engine, ask: Callable[[Connection], object]) -> int:
    """How many rows, or entries of an index, the database goes through for all statements of ``ask``."""
    name = engine.dialect.name
    if name in ("mysql", "mariadb"):
        counters = text("SHOW SESSION STATUS LIKE 'Handler_read%'")
        with reading(engine) as conn:
            before = sum(int(row[1]) for row in conn.execute(counters))
            ask(conn)
            return sum(int(row[1]) for row in conn.execute(counters)) - before
    if name == "sqlite":
        steps = [0]

        def step() -> int:
            steps[0] += 1
            return 0

        with reading(engine) as conn:
            # A connection that knows the tables as they were before another changed something about them, as ANALYZE
            # does, reads the schema again at its next statement. That is no cost of what is asked.
            conn.execute(select(Job.id).limit(1)).all()
            raw: Any = conn.connection.driver_connection
            raw.set_progress_handler(step, 3)  # instructions: the least that a row takes
            try:
                ask(conn)
            finally:
                raw.set_progress_handler(None, 0)
        return steps[0]
    asked: list[tuple[str, Any]] = []

    def keep(_conn: Any, _cursor: Any, statement: str, parameters: Any, *_: Any) -> None:
        asked.append((statement, parameters))

    with reading(engine) as conn:
        event.listen(conn, "before_cursor_execute", keep)
        ask(conn)
        event.remove(conn, "before_cursor_execute", keep)
        total = 0
        for statement, parameters in asked:
            explained = conn.exec_driver_sql(
                f"EXPLAIN (ANALYZE, FORMAT JSON) {statement}", parameters
            ).scalar()
            plan = json.loads(explained) if isinstance(explained, str) else explained
            total += _touched(plan[0]["Plan"])
    return total


def _touched(node: dict[str, Any]) -> int:
    inner = node.get("Plans", [])
    own = 0
    if not inner:
        own = (node["Actual Rows"] + node.get("Rows Removed by Filter", 0)) * node["Actual Loops"]
    return int(own) + sum(map(_touched, inner))


def test_the_measure_is_the_same_on_a_connection_that_knew_other_statistics(large: Engine) -> None:
    def ask(conn: Connection) -> object:
        return finish_batch_if_done(conn, "b")

    with large.connect() as one, large.connect() as other:  # so that the pool has several
        assert one.connection.driver_connection is not other.connection.driver_connection
    for _ in range(4):
        with reading(large) as conn:
            ask(conn)
    analyse(large)
    counts = [rows_read(large, ask) for _ in range(4)]
    assert max(counts) < 100, counts


def test_looking_at_a_large_batch_costs_next_to_nothing(large: Engine) -> None:
    with reading(large) as conn:
        assert open_jobs(conn, "b", 1) == (BatchState.IN_PROGRESS, 1)
        assert open_jobs(conn, "b", 1000) == (BatchState.IN_PROGRESS, 1000)
        assert sorted(unpublished(conn, "b", 500)) == ["3", "4"]
    # The measure sees what it is to rule out.
    assert rows_read(large, lambda conn: len(conn.scalars(select(Job.position)).all())) > 20_000
    assert rows_read(large, lambda conn: open_jobs(conn, "b", 1)) < 100
    assert rows_read(large, lambda conn: open_jobs(conn, "b", 1000)) < 10_000
    assert rows_read(large, lambda conn: unpublished(conn, "b", 500)) < 500
    assert rows_read(large, lambda conn: finish_batch_if_done(conn, "b")) < 100


def test_what_the_api_shows_of_a_batch_reads_no_results_and_an_ended_one_no_jobs(db: Engine) -> None:
    add_workers(db, "w")
    with db.begin() as conn:
        create_batch(conn, name="nightly", batch_id="b")
        insert_jobs(conn, [new_job(f"{n}", batch_id="b", position=n) for n in range(3)])
        set_batch_state(conn, "b", BatchState.IN_PROGRESS)
        add_api_batch(
            conn,
            "b",
            tenant="",
            endpoint="/v1/completions",
            completion_window="24h",
            input_file_id="f",
            labels=None,
        )
    for number in range(3):
        claim_one(db, f"{number}", "w")
        finish_one(db, f"{number}", 1, "w")
    asked: list[str] = []

    def keep(_conn: Any, _cursor: Any, statement: str, *_: Any) -> None:
        asked.append(statement)

    def shown() -> int:
        with reading(db) as conn:
            event.listen(conn, "before_cursor_execute", keep)
            found = find_api_batch(conn, "b", "")
        assert found is not None
        return found[1].done

    assert shown() == 3
    with db.begin() as conn:
        assert finish_batch_if_done(conn, "b", at=T0) is BatchState.COMPLETED
    assert any("job.state" in statement for statement in asked)
    assert not any(Result.__tablename__ in statement for statement in asked)
    asked.clear()
    assert shown() == 3
    assert not any("job.state" in statement for statement in asked)
