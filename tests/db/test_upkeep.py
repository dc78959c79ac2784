"""The upkeep thread: what takes long keeps no claim waiting, and a roll-up beside others counts what one alone does."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, event, func, select

from models_db.claims import ClaimItem, ClaimKind
from models_db.errors import WriterStoppedError
from models_db.jobs import request_cancel
from models_db.migrate import upgrade
from models_db.rollup_tables import JobMinute, RollupMark, ThroughputHour
from models_db.rollups import (
    MARK,
    ROLLUPS,
    advance,
    advance_aside,
    floor_hour,
    floor_minute,
    reopen,
    rolled_until,
)
from models_db.session import make_engine, transaction
from models_db.tables import Job
from models_db.upkeep import UpkeepThread
from models_db.workers import add_samples
from models_db.writer import DatabaseThread
from tests.db.helpers import add_jobs, add_workers, at, claim_one, finish_one, new_job, new_sample

LIMIT_S = 20.0
ENDED = "WITH ended AS"  # in the statements of a roll-up that look through what has ended


@pytest.fixture
def fleet(db: Engine) -> Engine:
    """Jobs of two classes that have ended in two minutes, and samples, of which nothing is rolled up."""
    add_workers(db, "w")
    add_jobs(db, "a", "b", "gone")
    add_jobs(db, "c", tenant="t")
    for job_id, end in (("a", 40), ("b", 100), ("c", 101)):
        claim_one(db, job_id, "w", now=at(10))
        finish_one(db, job_id, 1, "w", now=at(end))
    with db.begin() as conn:
        request_cancel(conn, ["gone"], at=at(50))
        add_samples(conn, [new_sample("w", sampled_at=at(5 * n), generated_tokens=7) for n in range(12)])
    return db


@pytest.fixture
def upkeep(db: Engine) -> Iterator[UpkeepThread]:
    thread = UpkeepThread(db)
    thread.start()
    yield thread
    assert thread.stop(LIMIT_S)


@contextmanager
def database_thread(engine: Engine) -> Iterator[DatabaseThread]:
    thread = DatabaseThread(engine, "w", now=lambda: at(500))
    thread.start()
    try:
        yield thread
    finally:
        thread.stop(drain=False, timeout_s=LIMIT_S)


@contextmanager
def held_at(engine: Engine, statement: str) -> Iterator[tuple[threading.Event, threading.Event]]:
    """Stop whoever comes to such a statement: an event that says that somebody has, and one that lets them go on."""
    reached, go_on = threading.Event(), threading.Event()

    def wait(_conn: Any, _cursor: Any, sql: str, *_: Any) -> None:
        if statement in sql:
            reached.set()
            assert go_on.wait(LIMIT_S)

    event.listen(engine, "before_cursor_execute", wait)
    try:
        yield reached, go_on
    finally:
        go_on.set()
        event.remove(engine, "before_cursor_execute", wait)


def contents(conn: Connection) -> dict[str, list[tuple[Any, ...]]]:
    return {
        table.__tablename__: sorted(map(tuple, conn.execute(select(table.__table__)))) for table in ROLLUPS
    }


def get(future: Future[Any]) -> Any:
    return future.result(LIMIT_S)


def test_a_job_is_claimed_and_ended_in_the_midst_of_a_roll_up(fleet: Engine, upkeep: UpkeepThread) -> None:
    with database_thread(fleet) as db, held_at(fleet, ENDED) as (reached, go_on):
        rolling = upkeep.submit(partial(advance_aside, now=at(300)))
        assert reached.wait(LIMIT_S)
        assert get(db.claim(ClaimItem(new_job("urgent")))).kind is ClaimKind.CLAIMED
        assert not rolling.done()
        go_on.set()
        assert get(rolling) is False
    with fleet.connect() as conn:
        assert conn.scalar(select(func.sum(JobMinute.succeeded))) == 3


def test_a_job_is_claimed_in_the_midst_of_a_long_question(fleet: Engine, upkeep: UpkeepThread) -> None:
    reached, go_on = threading.Event(), threading.Event()

    def ask(conn: Connection) -> int:
        before = conn.scalar(select(func.count()).select_from(Job)) or 0
        reached.set()
        assert go_on.wait(LIMIT_S)
        return before

    with database_thread(fleet) as db:
        counting = upkeep.call(ask)
        assert reached.wait(LIMIT_S)
        assert get(db.claim(ClaimItem(new_job("urgent")))).kind is ClaimKind.CLAIMED
        assert not counting.done()
        go_on.set()
        assert get(counting) == 4


def test_a_roll_up_aside_counts_what_one_in_a_transaction_does(fleet: Engine) -> None:
    while advance_aside(fleet, at(300)):
        pass
    with fleet.connect() as conn:
        aside, mark = contents(conn), rolled_until(conn)
    assert all(aside.values())
    transaction(fleet, partial(reopen, since=at(0)))
    while transaction(fleet, partial(advance, now=at(300))):
        pass
    with fleet.connect() as conn:
        assert (contents(conn), rolled_until(conn)) == (aside, mark)
    assert advance_aside(fleet, at(300)) is False
    # Later minutes, of known classes and a new one, and a stretch in which nothing has ended.
    add_jobs(fleet, "d", tenant="another")
    claim_one(fleet, "d", "w", now=at(400))
    finish_one(fleet, "d", 1, "w", now=at(410))
    for now in (at(600), at(6000)):
        while advance_aside(fleet, now):
            pass
    with fleet.connect() as conn:
        assert conn.scalar(select(func.sum(JobMinute.succeeded))) == 4
        found = contents(conn)
    transaction(fleet, partial(reopen, since=at(0)))
    while transaction(fleet, partial(advance, now=at(6000))):
        pass
    with fleet.connect() as conn:
        assert contents(conn) == found


def test_samples_that_are_committed_during_a_roll_up_or_after_it_count(
    db: Engine, upkeep: UpkeepThread
) -> None:
    """It has passed their time by and has not seen them: their writers, who wait for nothing, have left a note."""
    add_workers(db, "w")
    transaction(db, partial(add_samples, samples=[new_sample("w", sampled_at=at(n)) for n in (0, 400)]))
    while advance_aside(db, at(100)):
        pass
    with held_at(db, ENDED) as (reached, go_on):
        rolling = upkeep.submit(partial(advance_aside, now=at(600)))
        assert reached.wait(LIMIT_S)
        transaction(db, partial(add_samples, samples=[new_sample("w", sampled_at=at(200))]))
        with db.begin() as writing:
            add_samples(writing, [new_sample("w", sampled_at=at(201))])
            go_on.set()
            if db.dialect.name != "sqlite":  # whose roll-up waits with its rows for the one that writes
                assert get(rolling) is False
        assert get(rolling) is False
    with db.connect() as conn:
        assert conn.scalar(select(func.sum(ThroughputHour.samples))) == 2
        assert rolled_until(conn) == floor_hour(at(0)), "it says so"
    while advance_aside(db, at(600)):
        pass
    with db.connect() as conn:
        assert conn.scalar(select(func.sum(ThroughputHour.samples))) == 4
        assert rolled_until(conn) == floor_minute(at(590))
        assert conn.scalars(select(RollupMark.name)).all() == [MARK], "no note is left"


def test_a_mark_that_is_set_back_during_a_roll_up_stays_so(tmp_path: Path) -> None:
    """On SQLite; the other databases lock it meanwhile."""
    url = f"sqlite:///{tmp_path / 'mark.db'}"
    upgrade(url)
    engine = make_engine(url)
    add_workers(engine, "w")
    transaction(engine, partial(add_samples, samples=[new_sample("w", sampled_at=at(n)) for n in (7, 400)]))
    assert advance_aside(engine, at(300)) is False
    upkeep = UpkeepThread(engine)
    upkeep.start()
    with held_at(engine, ENDED) as (reached, go_on):
        rolling = upkeep.submit(partial(advance_aside, now=at(600)))
        assert reached.wait(LIMIT_S)
        transaction(engine, partial(reopen, since=at(0)))
        go_on.set()
        assert get(rolling) is True, "there is more to do"
    assert upkeep.stop(LIMIT_S)
    with engine.connect() as conn:
        assert rolled_until(conn) == floor_hour(at(0))
        assert conn.scalar(select(func.sum(ThroughputHour.samples))) == 1
    while advance_aside(engine, at(600)):
        pass
    with engine.connect() as conn:
        assert conn.scalar(select(func.sum(ThroughputHour.samples))) == 2
    engine.dispose()


def test_what_fails_fails_alone_with_its_own_error(db: Engine, upkeep: UpkeepThread) -> None:
    broken = upkeep.call(lambda conn: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        get(broken)
    assert get(upkeep.call(lambda conn: conn.scalar(select(1)))) == 1


def test_a_stopped_thread_ends_what_it_does_and_fails_what_waits(db: Engine) -> None:
    upkeep, entered, go_on = UpkeepThread(db), threading.Event(), threading.Event()

    def work(_engine: Engine) -> str:
        entered.set()
        assert go_on.wait(LIMIT_S)
        return "done"

    upkeep.start()
    going, waiting = upkeep.submit(work), upkeep.submit(work)
    assert entered.wait(LIMIT_S)
    assert upkeep.stop(timeout_s=0.0) is False
    with pytest.raises(WriterStoppedError):
        upkeep.submit(work)
    go_on.set()
    assert get(going) == "done"
    with pytest.raises(WriterStoppedError):
        get(waiting)


def test_a_thread_that_was_never_started_fails_what_it_was_given(db: Engine) -> None:
    upkeep = UpkeepThread(db)
    asked = upkeep.call(lambda conn: conn.scalar(select(1)))
    assert upkeep.stop(LIMIT_S)
    with pytest.raises(WriterStoppedError):
        get(asked)
