"""Jobs as a client stores them, and rows that the database refuses to change."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import Engine, text

from models_db.jobs import insert_jobs
from models_db.records import NewJob
from models_db.tables import Job
from tests.messages import build_message
from workers.payload import GeneratePayload, queue_for


def accept(engine: Engine, ids: list[str], **columns: Any) -> None:
    """Jobs as a client stores them."""
    payload = GeneratePayload.parse({"model": "echo", "prompt": "some words"})
    jobs = [
        NewJob(
            id=job_id,
            model="echo",
            queue=queue_for("echo"),
            params={},
            prompt={},
            message=build_message(job_id, payload),
        )
        for job_id in ids
    ]
    with engine.begin() as conn:
        insert_jobs(conn, jobs)
        if columns:
            conn.execute(Job.__table__.update().where(Job.id.in_(ids)).values(**columns))  # type: ignore[attr-defined]


@contextmanager
def refusing(engine: Engine, condition: str, table: str = "job", when: str = "UPDATE") -> Iterator[None]:
    """A trigger that raises where this is so of the new row."""
    match engine.dialect.name:
        case "sqlite":
            make = [
                f"CREATE TRIGGER no_end BEFORE {when} ON {table} WHEN {condition} "
                "BEGIN SELECT RAISE(ABORT, 'not this one'); END"
            ]
            drop = ["DROP TRIGGER no_end"]
        case "postgresql":
            make = [
                "CREATE FUNCTION no_end() RETURNS trigger LANGUAGE plpgsql AS "
                f"$$ BEGIN IF {condition} THEN RAISE EXCEPTION 'not this one'; END IF; RETURN NEW; END $$",
                f"CREATE TRIGGER no_end BEFORE {when} ON {table} FOR EACH ROW EXECUTE FUNCTION no_end()",
            ]
            drop = [f"DROP TRIGGER no_end ON {table}", "DROP FUNCTION no_end()"]
        case _:
            make = [
                f"CREATE TRIGGER no_end BEFORE {when} ON {table} FOR EACH ROW IF {condition} THEN "
                "SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'not this one'; END IF"
            ]
            drop = ["DROP TRIGGER no_end"]

    def run(statements: list[str]) -> None:
        for statement in statements:
            with engine.begin() as conn:
                conn.execute(text(statement))

    run(make)
    try:
        yield
    finally:
        run(drop)
