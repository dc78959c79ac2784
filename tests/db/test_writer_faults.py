"""The database thread and operations that fail or wait for a lock: each fails alone and holds nobody else up."""

from __future__ import annotations

import threading
from contextlib import suppress

import pytest
from sqlalchemy import event, func, select, text
from sqlalchemy.exc import IntegrityError, OperationalError

from models_db import claims
from models_db.claims import ClaimItem, ClaimKind, FinishItem
from models_db.errors import DatabaseUnavailableError, InvalidValueError, WriterStoppedError
from models_db.jobs import job_states, job_status
from models_db.session import make_engine
from models_db.tables import Job, JobState, Worker, WorkerState
from tests.db.database_thread import LIMIT_S, commits, get, held_up, running, success
from tests.db.helpers import add_jobs, add_workers, claim_one, new_job, new_result, new_sample
from tests.db.outage import PostgresError


def test_a_poisoned_operation_fails_alone(fleet):
    add_jobs(fleet, *(f"j{n}" for n in range(5)))
    for number in range(5):
        claim_one(fleet, f"j{number}", "w")
    with running(fleet) as thread:
        with held_up(thread):
            futures = [thread.finish(success(f"j{n}")) for n in range(5) if n != 2]
            bad = thread.finish(FinishItem("j2", 1, JobState.SUCCEEDED, new_result(completion_tokens=-1)))
            beat = thread.heartbeat(9)
            orphan = thread.sample(new_sample("nobody"))
            claimed = thread.claim(ClaimItem(new_job("bare")))
            sample = thread.sample(new_sample("w"))
        assert all(map(get, futures))
        # MariaDB calls it the latter.
        assert isinstance(bad.exception(LIMIT_S), (IntegrityError, OperationalError))
        assert isinstance(orphan.exception(LIMIT_S), IntegrityError)
        assert get(beat) is WorkerState.STARTING
        assert get(claimed).kind is ClaimKind.CLAIMED
        assert get(sample) is None
        assert thread.healthy
        with fleet.connect() as conn:
            assert job_status(conn, "j2").state is JobState.RUNNING
        assert get(thread.finish(success("j2"))) is True


def test_a_heartbeat_goes_before_what_runs_alone_after_a_failure(fleet):
    entered, let_go, order = threading.Event(), threading.Event(), []

    def slow(_conn):  # comes last in a batch, so that the batch has failed before it first runs
        entered.set()
        assert let_go.wait(LIMIT_S)

    with running(fleet) as thread:
        with held_up(thread):
            orphan = thread.sample(new_sample("nobody"))
            slow_alone = thread.call(slow)
            claimed = [thread.claim(ClaimItem(new_job(f"j{n}"))) for n in range(5)]
            for future in claimed:
                future.add_done_callback(lambda _future: order.append("claim"))
        with pytest.raises(IntegrityError):
            get(orphan)
        assert entered.wait(LIMIT_S)
        beat = thread.heartbeat(1)
        beat.add_done_callback(lambda _future: order.append("beat"))
        let_go.set()
        get(slow_alone)
        assert {get(future).kind for future in claimed} == {ClaimKind.CLAIMED}
        get(beat)
        assert thread.stop()
    assert order == ["claim", "beat"] + ["claim"] * 4, "one was in the same part as what was slow"


def test_one_bad_operation_among_many_is_found_in_few_transactions(fleet):
    add_jobs(fleet, "holder", idempotency_key="key", payload_hash="hash")
    with running(fleet) as thread, commits(fleet) as count:
        with held_up(thread):
            claimed = [thread.claim(ClaimItem(new_job(f"j{n:03}"))) for n in range(256)]
            bad = thread.claim(ClaimItem(new_job("bad", idempotency_key="key", payload_hash="hash")))
            beat = thread.heartbeat(1)
            claimed += [thread.claim(ClaimItem(new_job(f"j{n:03}"))) for n in range(256, 500)]
            done = []
            for future in (beat, claimed[0]):
                future.add_done_callback(done.append)
        assert {get(future).kind for future in claimed} == {ClaimKind.CLAIMED}
        assert bad.exception(LIMIT_S) is not None
        assert get(beat) is WorkerState.STARTING
        assert done == [beat, claimed[0]], "nobody shall miss us meanwhile"
    assert len(count) < 16


def test_a_callers_own_error_costs_its_neighbours_nothing(fleet):
    def wrong(conn):
        conn.execute(text("UPDATE worker SET name = 'half done'"))
        raise InvalidValueError("field", "is wrong")

    with running(fleet) as thread, commits(fleet) as count:
        with held_up(thread):
            claimed = thread.claim(ClaimItem(new_job("j")))
            refused = thread.call(wrong)
            broken = thread.call(lambda conn: conn.execute(text("SELECT nonsense FROM nowhere")))
            fine = thread.call(lambda conn: conn.scalar(select(func.count()).select_from(Worker)))
        assert get(fine) == 2
        with pytest.raises(InvalidValueError, match="field: is wrong"):
            get(refused)
        assert broken.exception(LIMIT_S) is not None
        assert get(claimed).kind is ClaimKind.CLAIMED
    assert len(count) == 2, "one transaction for all four"
    with fleet.connect() as conn:
        assert set(conn.scalars(select(Worker.name))) == {"w", "other"}


def test_what_breaks_a_working_connection_each_time_is_the_culprit_and_fails_alone(fleet):
    """Such as a row that is larger than the server's largest packet."""

    def killer(conn):
        conn.invalidate()
        raise DatabaseUnavailableError("server closed the connection unexpectedly")

    with running(fleet, sleep=lambda _s: None) as thread:
        with held_up(thread):
            culprit = thread.call(killer)
            futures = [thread.claim(ClaimItem(new_job(f"j{n}"))) for n in range(3)]
        assert isinstance(culprit.exception(LIMIT_S), DatabaseUnavailableError)
        assert {get(future).kind for future in futures} == {ClaimKind.CLAIMED}
        assert thread.healthy


def test_a_result_larger_than_a_packet_is_stored_or_fails_alone(fleet, kind):
    add_jobs(fleet, "large", "small")
    for name in ("large", "small"):
        claim_one(fleet, name, "w")
    with fleet.connect() as conn:
        limit = conn.scalar(text("SELECT @@max_allowed_packet" if kind == "mariadb" else "SELECT 16777216"))
    with running(fleet, sleep=lambda _s: None) as thread:
        with held_up(thread):
            large = thread.finish(success("large", text="x" * (limit + 1)))
            small = thread.finish(success("small"))
        assert get(small) is True
        if kind == "mariadb":  # the only one with a limit that a test can reach
            assert isinstance(large.exception(LIMIT_S), (OperationalError, DatabaseUnavailableError))
            assert get(thread.finish(FinishItem("large", 1, JobState.FAILED, None, "too large"))) is True
        else:
            assert get(large) is True
        assert thread.healthy


def test_a_locked_row_holds_up_nothing_else(db, kind, caplog):
    """SQLite has one lock for all, which is nobody's row."""
    if kind == "sqlite":
        return
    add_workers(db, "w")
    add_jobs(db, "locked", *(f"j{n}" for n in range(5)))
    url = db.url.render_as_string(hide_password=False)
    engine = make_engine(url, lock_wait_s=0.2)
    with db.begin() as holder, running(engine) as thread:
        holder.execute(select(Job.id).where(Job.id == "locked").with_for_update())
        with held_up(thread):
            locked = thread.claim(ClaimItem(new_job("locked")))
            beat = thread.heartbeat(1)
            others = [thread.claim(ClaimItem(new_job(f"j{n}"))) for n in range(5)]
            call = thread.call(lambda conn: conn.scalar(select(func.count()).select_from(Worker)))
        assert get(beat) is WorkerState.STARTING
        for number in range(2, 6):
            assert get(thread.heartbeat(number)) is WorkerState.STARTING
        assert {get(future).kind for future in others} == {ClaimKind.CLAIMED}
        assert get(call) == 1
        late = thread.claim(ClaimItem(new_job("late")))
        assert get(late).kind is ClaimKind.CLAIMED
        assert not locked.done()
        assert thread.healthy
        assert thread.pending == 1
        holder.rollback()
        assert get(locked).kind is ClaimKind.CLAIMED
        assert thread.stop()
    engine.dispose()
    assert "cannot get through together" in caplog.text


def test_stopping_waits_for_a_lock_and_gives_up_in_time(db, kind):
    if kind == "sqlite":
        return
    add_workers(db, "w")
    add_jobs(db, "locked", "free")
    engine = make_engine(db.url.render_as_string(hide_password=False), lock_wait_s=0.2)
    with db.begin() as holder, running(engine) as thread:
        holder.execute(select(Job.id).where(Job.id == "locked").with_for_update())
        locked, free = (thread.claim(ClaimItem(new_job(job_id))) for job_id in ("locked", "free"))
        assert get(free).kind is ClaimKind.CLAIMED
        assert thread.stop(timeout_s=0.5) is False
        assert isinstance(locked.exception(0), WriterStoppedError)
    engine.dispose()


def test_a_lost_race_for_locks_is_run_again_without_alarm(fleet, monkeypatch):
    calls = []
    real = claims.claim

    def deadlocks_twice(*args, **kw):
        calls.append(1)
        if len(calls) <= 2:
            raise OperationalError("UPDATE job", {}, PostgresError("40P01"))
        return real(*args, **kw)

    monkeypatch.setattr(claims, "claim", deadlocks_twice)
    health = []
    with running(fleet, sleep=lambda _s: None, on_health=lambda *state: health.append(state)) as thread:
        assert get(thread.claim(ClaimItem(new_job("j")))).kind is ClaimKind.CLAIMED
    assert (len(calls), health) == (3, [])


def test_a_cancelled_statement_ends_no_job(db, kind):
    """By an operator, or by the server's limit for statements: the same statement goes through a little later."""
    if kind == "sqlite":
        return
    who, cancel = {
        "postgresql": ("SELECT pg_backend_pid()", "SELECT pg_cancel_backend({})"),
        "mariadb": ("SELECT CONNECTION_ID()", "KILL QUERY {}"),
    }[kind]
    add_workers(db, "w")
    add_jobs(db, "j")
    claim_one(db, "j", "w")
    cancelled = threading.Event()
    event.listen(db, "handle_error", lambda _context: cancelled.set())
    with db.begin() as holder, db.connect() as operator, running(db) as thread:
        number = get(thread.call(lambda conn: conn.scalar(text(who))))
        holder.execute(select(Job.id).where(Job.id == "j").with_for_update())
        finished = thread.finish(success("j"))
        for _ in range(100 * LIMIT_S):
            with suppress(OperationalError):  # MariaDB: nothing runs there yet
                operator.execute(text(cancel.format(number)))
            if cancelled.wait(0.01):
                break
        assert cancelled.is_set()
        holder.rollback()
        assert get(finished) is True
        assert thread.healthy
    with db.connect() as conn:
        assert job_states(conn, ["j"]) == {"j": JobState.SUCCEEDED}
