"""Limits of tenants on what they have open hold exactly, also when many submit at once, on each database."""

from __future__ import annotations

import threading

import pytest
from sqlalchemy import Engine, event, func, select

from models_db.errors import TenantLimitError
from models_db.jobs import insert_jobs, request_cancel
from models_db.session import reading, transaction
from models_db.tables import Job
from models_db.tenants import TenantJob, TenantLimit, TenantUsage
from tests.db.helpers import add_workers, claim_one, finish_one, new_job


def submit(
    db: Engine, names: list[str], limit: TenantLimit, *, tenant: str = "acme", tokens: int = 10
) -> None:
    made = [new_job(name, tenant=tenant, tokens=tokens) for name in names]
    transaction(db, lambda conn: insert_jobs(conn, made, {"acme": limit}))


def names(prefix: str, count: int) -> list[str]:
    return [f"{prefix}{n:03}" for n in range(count)]


def count(db: Engine, table: type) -> int:
    with reading(db) as conn:
        return conn.scalar(select(func.count()).select_from(table)) or 0


def test_what_does_not_fit_is_refused_whole_and_says_what_is_open(db: Engine) -> None:
    limit = TenantLimit(jobs=10)
    submit(db, names("a", 8), limit)
    with pytest.raises(
        TenantLimitError, match="'acme' has 8 jobs open and asks for 3 more, beyond its limit of 10"
    ) as caught:
        submit(db, names("b", 3), limit)
    error = caught.value
    assert (error.tenant, error.what, error.limit, error.present, error.wanted) == ("acme", "jobs", 10, 8, 3)
    assert error.waiting_helps
    assert count(db, Job) == 8
    submit(db, names("c", 2), limit)
    with pytest.raises(TenantLimitError) as caught:
        submit(db, names("d", 11), limit)
    assert not caught.value.waiting_helps


def test_tokens_are_counted_beside_jobs(db: Engine) -> None:
    limit = TenantLimit(jobs=100, tokens=55)
    submit(db, names("a", 5), limit)
    with pytest.raises(
        TenantLimitError, match=r"50 tokens open and asks for 10 more.*TOKENMILL_TENANT_MAX_OPEN_TOKENS"
    ):
        submit(db, ["b"], limit)
    submit(db, ["c"], limit, tokens=5)


def test_ended_jobs_make_room_whatever_their_end(db: Engine) -> None:
    add_workers(db, "w")
    limit = TenantLimit(jobs=4)
    submit(db, ["a", "b", "c", "d"], limit)
    claim_one(db, "a", "w")
    claim_one(db, "b", "w")
    with pytest.raises(TenantLimitError):
        submit(db, ["e"], limit)  # running jobs count
    finish_one(db, "a", 1, "w")
    transaction(db, lambda conn: request_cancel(conn, ["c"]))
    submit(db, ["e", "f"], limit)
    with pytest.raises(TenantLimitError) as caught:
        submit(db, ["g"], limit)
    assert caught.value.present == 4
    assert count(db, TenantJob) == 4  # what had ended is gone


def test_others_pay_nothing(db: Engine) -> None:
    submit(db, names("a", 50), TenantLimit(jobs=1), tenant="other")
    transaction(db, lambda conn: insert_jobs(conn, [new_job("none"), new_job("acme", tenant="acme")]))
    assert (count(db, TenantUsage), count(db, TenantJob)) == (0, 0)


def test_a_repeated_key_is_counted_once_and_never_refused(db: Engine) -> None:
    limit = {"acme": TenantLimit(jobs=1)}
    keyed = {"tenant": "acme", "tokens": 1, "idempotency_key": "k", "payload_hash": "h"}
    transaction(db, lambda conn: insert_jobs(conn, [new_job("first", **keyed)], limit))
    for name in ("second", "third"):
        job = new_job(name, **keyed)
        (outcome,) = transaction(db, lambda conn, job=job: insert_jobs(conn, [job], limit))
        assert (outcome.id, outcome.created) == ("first", False)


def test_many_at_once_stay_exactly_within_the_limit(db: Engine) -> None:
    limit = TenantLimit(jobs=25)
    refused: list[TenantLimitError] = []
    barrier = threading.Barrier(6)

    def work(number: int) -> None:
        barrier.wait()
        for n in range(4):
            try:
                submit(db, names(f"{number}-{n}-", 3), limit)
            except TenantLimitError as error:
                refused.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert count(db, Job) == 24  # eight threes; the ninth would be 27
    assert len(refused) == 24 - 8


def test_a_full_tenant_is_told_before_any_row_is_written(db: Engine) -> None:
    limit = TenantLimit(jobs=1)
    submit(db, ["a"], limit)
    written: list[str] = []

    def note(conn: object, cursor: object, statement: str, *rest: object) -> None:
        written.append(statement.lower())

    event.listen(db, "before_cursor_execute", note)
    try:
        with pytest.raises(TenantLimitError):
            submit(db, ["b"], limit)
    finally:
        event.remove(db, "before_cursor_execute", note)
    assert written
    assert not [statement for statement in written if statement.startswith("insert into job ")]
