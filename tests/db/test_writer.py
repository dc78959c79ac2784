"""The database thread: batching, one bad operation among good ones, outages, stopping."""

from __future__ import annotations

import threading
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager, suppress
from itertools import islice

import pytest
from sqlalchemy import event, func, select, text
from sqlalchemy.exc import IntegrityError, OperationalError

from models_db import claims, writer
from models_db.claims import ClaimItem, ClaimKind, FinishItem, ReleaseItem
from models_db.errors import DatabaseUnavailableError, InvalidValueError, WriterStoppedError
from models_db.jobs import job_result, job_states, job_status
from models_db.migrate import upgrade
from models_db.session import make_engine
from models_db.tables import EngineSample, Job, JobState, Worker, WorkerState
from models_db.writer import DatabaseThread
from tests.db.helpers import add_jobs, add_workers, attempts, claim_one, new_job, new_result, new_sample
from tests.db.outage import Outage
from tests.servers import ServerUnavailableError, fresh_database, private_server, skip_or_fail

LIMIT_S = 20


@pytest.fixture
def fleet(db):
    add_workers(db, "w", "other")
    return db


@contextmanager
def running(engine, **kw):
    thread = DatabaseThread(engine, "w", **kw)
    thread.start()
    try:
        yield thread
    finally:
        thread.stop(drain=False, timeout_s=LIMIT_S)


def success(job_id, attempt=1, text="text"):
    return FinishItem(job_id, attempt, JobState.SUCCEEDED, new_result(text))


def get(future: Future):
    return future.result(LIMIT_S)


@contextmanager
def commits(engine):
    """Count the commits of an engine."""
    count = []

    def note(_conn):
        count.append(1)

    event.listen(engine, "commit", note)
    try:
        yield count
    finally:
        event.remove(engine, "commit", note)


@contextmanager
def held_up(thread):
    """Keep the thread busy inside a transaction of its own, so that what is submitted now waits together."""
    entered, let_go = threading.Event(), threading.Event()

    def work(_conn):
        entered.set()
        assert let_go.wait(LIMIT_S)

    blocker = thread.call(work)
    assert entered.wait(LIMIT_S)
    try:
        yield
    finally:
        let_go.set()
        get(blocker)


def test_the_life_of_a_job_through_the_thread(fleet):
    with running(fleet) as thread:
        outcome = get(thread.claim(ClaimItem(new_job("j"))))
        assert (outcome.kind, outcome.attempt) == (ClaimKind.CLAIMED, 1)
        assert get(thread.release(ReleaseItem("j", 1))) is True
        assert get(thread.claim(ClaimItem(new_job("j")))).attempt == 2
        assert get(thread.finish(success("j", 2))) is True
        assert get(thread.finish(success("j", 2))) is False
        assert get(thread.claim(ClaimItem(new_job("j")))).outcome.result == new_result("text")
        assert get(thread.heartbeat(3)) is WorkerState.STARTING
        assert get(thread.sample(new_sample("w"))) is None
        assert get(thread.call(lambda conn: job_status(conn, "j").state)) is JobState.SUCCEEDED
        assert thread.stop()
        assert thread.pending == 0
    with fleet.connect() as conn:
        assert conn.scalar(select(func.count()).select_from(EngineSample)) == 1
        assert conn.scalar(select(Worker.heartbeat).where(Worker.id == "w")) == 3


def test_one_operation_alone_never_waits_for_others(fleet):
    pauses = []
    with running(fleet, pause=pauses.append) as thread, commits(fleet) as count:
        for number in range(3):
            get(thread.claim(ClaimItem(new_job(f"j{number}"))))
    assert (pauses, len(count)) == ([], 3)


def test_a_busy_batch_waits_while_more_arrives_and_answers_in_order(fleet):
    ids = [f"j{number:02}" for number in range(60)]
    late = iter(ids[10:])
    answers = []

    def claim(job_id):
        thread.claim(ClaimItem(new_job(job_id))).add_done_callback(
            lambda future: answers.append(future.result().job_id)
        )

    def pause(_seconds):
        for job_id in islice(late, 4):
            claim(job_id)

    with running(fleet, pause=pause, clock=lambda: 0.0) as thread, commits(fleet) as count:
        with held_up(thread):
            for job_id in ids[:10]:
                claim(job_id)
        while len(answers) < len(ids):
            get(thread.call(lambda conn: None))
        assert thread.stop()
    assert answers == ids
    assert len(count) < 12  # alone they are 60; the longest wait lets about forty gather


def test_dead_incarnations_are_asked_for_at_each_claim(fleet):
    add_jobs(fleet, "j")
    claim_one(fleet, "j", "other")
    dead = set()
    with running(fleet, dead_ids=lambda: dead) as thread:
        assert get(thread.claim(ClaimItem(new_job("j")))).kind is ClaimKind.ELSEWHERE
        dead.add("other")
        assert get(thread.claim(ClaimItem(new_job("j")))).kind is ClaimKind.CLAIMED


def test_everything_that_waits_goes_into_one_transaction_up_to_the_limit(fleet):
    with running(fleet, max_batch=100) as thread, commits(fleet) as count:
        with held_up(thread):
            futures = [thread.claim(ClaimItem(new_job(f"j{n:03}"))) for n in range(250)]
            assert thread.pending == 251
        assert {get(future).kind for future in futures} == {ClaimKind.CLAIMED}
    assert len(count) == 1 + 3, "the blocker, then 100, 100 and 50"


def test_an_idle_thread_commits_at_once_and_one_by_one(fleet):
    with running(fleet) as thread, commits(fleet) as count:
        for number in range(5):
            get(thread.claim(ClaimItem(new_job(f"j{number}"))))
    assert len(count) == 5


def test_a_heartbeat_goes_before_everything_that_waits(fleet):
    order = []
    with running(fleet, max_batch=10) as thread:
        with held_up(thread):
            for number in range(50):
                future = thread.claim(ClaimItem(new_job(f"j{number}")))
                future.add_done_callback(lambda _future: order.append("claim"))
            beats = [thread.heartbeat(number) for number in (1, 2, 3)]
            beats[-1].add_done_callback(lambda _future: order.append("beat"))
        assert {get(beat) for beat in beats} == {WorkerState.STARTING}
        assert thread.stop()
    assert order.index("beat") == 0
    with fleet.connect() as conn:
        assert conn.scalar(select(Worker.heartbeat).where(Worker.id == "w")) == 3


def test_results_too_large_for_one_transaction_are_spread(fleet, monkeypatch):
    monkeypatch.setattr(writer, "MAX_BATCH_BYTES", 10_000)
    add_jobs(fleet, *(f"j{n}" for n in range(6)))
    for number in range(6):
        claim_one(fleet, f"j{number}", "w")
    with running(fleet) as thread, commits(fleet) as count:
        with held_up(thread):
            futures = [thread.finish(success(f"j{n}", text="x" * 6000)) for n in range(6)]
        assert all(map(get, futures))
    assert len(count) == 1 + 3


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
        assert isinstance(
            bad.exception(LIMIT_S), (IntegrityError, OperationalError)
        )  # MariaDB calls it the latter
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


def test_what_was_cancelled_before_its_turn_is_not_done(fleet):
    with running(fleet) as thread:
        with held_up(thread):
            future = thread.claim(ClaimItem(new_job("j")))
            assert future.cancel()
        assert thread.stop()
    with pytest.raises(CancelledError):
        future.result(0)
    with fleet.connect() as conn:
        assert job_states(conn, ["j"]) == {}


def test_threads_may_submit_together_and_each_gets_its_own_answer(fleet):
    answers = {}

    def submit(worker):
        futures = {f"{worker}-{n}": thread.claim(ClaimItem(new_job(f"{worker}-{n}"))) for n in range(40)}
        answers.update({name: get(future).job_id for name, future in futures.items()})

    with running(fleet) as thread, commits(fleet) as count:
        threads = [threading.Thread(target=submit, args=(number,)) for number in range(4)]
        for one in threads:
            one.start()
        for one in threads:
            one.join(LIMIT_S)
    assert answers == {f"{worker}-{n}": f"{worker}-{n}" for worker in range(4) for n in range(40)}
    assert len(count) < 160, "what waits meanwhile shares a transaction"


# ----------------------------------------------------------------------------------------------------- stopping


def test_stop_drains_and_then_takes_nothing_more(fleet):
    with running(fleet) as thread:
        with held_up(thread):
            futures = [thread.claim(ClaimItem(new_job(f"j{n}"))) for n in range(20)]
            stopper = threading.Thread(target=thread.stop)
            stopper.start()
        stopper.join(LIMIT_S)
        assert all(future.done() and get(future).kind is ClaimKind.CLAIMED for future in futures)
        with pytest.raises(WriterStoppedError):
            thread.heartbeat(1)


def test_stop_without_drain_fails_what_waits(fleet):
    with running(fleet) as thread:
        with held_up(thread):
            future = thread.claim(ClaimItem(new_job("j")))
            left = []
            stopper = threading.Thread(target=lambda: left.append(thread.stop(drain=False)))
            stopper.start()
            assert thread._given_up.wait(LIMIT_S)
        stopper.join(LIMIT_S)
        assert left == [False]
        assert isinstance(future.exception(LIMIT_S), WriterStoppedError)


def test_a_thread_that_never_started_fails_what_it_was_given(fleet):
    thread = DatabaseThread(fleet, "w")
    future = thread.claim(ClaimItem(new_job("j")))
    assert thread.stop() is False
    assert isinstance(future.exception(LIMIT_S), WriterStoppedError)


# ------------------------------------------------------------------------------------------------------ outages


def test_an_outage_is_waited_out_with_nothing_lost(fleet):
    outage = Outage(fleet, connects=6)
    with outage, running(fleet, sleep=outage.delays.append, on_health=outage.on_health) as thread:
        futures = [thread.claim(ClaimItem(new_job(f"j{n}"))) for n in range(30)]
        assert {get(future).kind for future in futures} == {ClaimKind.CLAIMED}
        assert thread.healthy
    assert outage.delays == [0.05, 0.1, 0.2, 0.4, 0.8, 1.6]
    assert outage.health == [(False, "DatabaseUnavailableError"), (True, None)]


def test_a_long_outage_never_waits_longer_than_the_limit(fleet):
    with Outage(fleet, connects=40) as outage, running(fleet, sleep=outage.delays.append) as thread:
        get(thread.heartbeat(1))
    assert max(outage.delays) == writer.LONGEST_DELAY_S
    assert len(outage.delays) == 40


@pytest.mark.parametrize("goes_through", [False, True], ids=["not committed", "committed, answer lost"])
def test_a_connection_lost_at_commit_makes_nothing_happen_twice_or_never(fleet, goes_through):
    add_jobs(fleet, "end", "back", "start")
    for name in ("end", "back"):
        claim_one(fleet, name, "w")
    with Outage(fleet) as outage, running(fleet, sleep=outage.delays.append) as thread:
        outage.commit_goes_through = goes_through
        armed = []

        def arm(
            _conn,
        ):  # runs inside the batch, just before its commit; once only, although the batch is replayed
            if not armed:
                armed.append(True)
                outage.commits = 2

        with held_up(thread):
            started = thread.claim(ClaimItem(new_job("start")))
            bare = thread.claim(ClaimItem(new_job("bare")))
            twin = thread.claim(ClaimItem(new_job("bare")))
            ended = thread.finish(success("end"))
            again = thread.finish(success("end"))
            released = thread.release(ReleaseItem("back", 1))
            sample = thread.sample(new_sample("w"))
            thread.call(arm)
        assert [get(started).kind, get(bare).kind, get(twin).kind] == ["claimed", "claimed", "joined"]
        assert (get(ended), get(again), get(released), get(sample)) == (True, False, True, None)
        assert len(outage.delays) == 2
    with fleet.connect() as conn:
        assert [one[2] for one in attempts(conn, "end")] == ["succeeded"]
        assert [one[2] for one in attempts(conn, "back")] == ["released"]
        assert [one[:2] for one in attempts(conn, "start")] == [(1, "w")]
        assert job_result(conn, "end") is not None
        assert conn.scalar(select(func.count()).select_from(EngineSample)) == 1


def test_a_lost_race_for_locks_is_run_again_without_alarm(fleet, monkeypatch):
    from tests.db.test_session import _PostgresError

    calls = []
    real = claims.claim

    def deadlocks_twice(*args, **kw):
        calls.append(1)
        if len(calls) <= 2:
            raise OperationalError("UPDATE job", {}, _PostgresError("40P01"))
        return real(*args, **kw)

    monkeypatch.setattr(claims, "claim", deadlocks_twice)
    health = []
    with running(fleet, sleep=lambda _s: None, on_health=lambda *state: health.append(state)) as thread:
        assert get(thread.claim(ClaimItem(new_job("j")))).kind is ClaimKind.CLAIMED
    assert (len(calls), health) == (3, [])


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


def test_connections_that_are_cut_again_and_again_are_nobodys_fault(fleet, monkeypatch):
    real, cuts = claims.claim, iter(range(40))

    def cut(*args, **kw):
        if next(cuts, None) is not None:
            raise DatabaseUnavailableError("server closed the connection unexpectedly")
        return real(*args, **kw)

    monkeypatch.setattr(claims, "claim", cut)
    with running(fleet, sleep=lambda _s: None) as thread:
        with held_up(thread):
            futures = [thread.claim(ClaimItem(new_job(f"j{n}"))) for n in range(3)]
        assert {get(future).kind for future in futures} == {ClaimKind.CLAIMED}
        assert get(thread.claim(ClaimItem(new_job("alone")))).kind is ClaimKind.CLAIMED


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


def test_stop_gives_up_on_a_database_that_stays_away(fleet):
    with Outage(fleet, connects=10**9) as outage:
        away = threading.Event()
        thread = DatabaseThread(fleet, "w", on_health=lambda *_state: away.set())
        thread.start()
        futures = [thread.heartbeat(1), thread.claim(ClaimItem(new_job("j")))]
        assert away.wait(LIMIT_S)
        assert not thread.healthy
        assert thread.stop(timeout_s=0.2) is False
        for future in futures:
            assert isinstance(future.exception(0), WriterStoppedError)
    assert outage.delays == []


def test_a_health_callback_that_fails_stops_nothing(fleet):
    def fails(*_state):
        raise RuntimeError("not our problem")

    with Outage(fleet, connects=1), running(fleet, on_health=fails, sleep=lambda _s: None) as thread:
        assert get(thread.heartbeat(1)) is WorkerState.STARTING


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("postgresql", marks=pytest.mark.postgres),
        pytest.param("mariadb", marks=pytest.mark.mysql),
    ],
)
def test_a_server_that_restarts_is_found_again(kind):
    try:
        with private_server(kind) as server, fresh_database(server) as url:
            upgrade(url)
            engine = make_engine(url)
            add_workers(engine, "w")
            away, back = threading.Event(), threading.Event()

            def on_health(healthy, _error):
                (back if healthy else away).set()

            with running(engine, on_health=on_health) as thread:
                assert get(thread.claim(ClaimItem(new_job("j")))).kind is ClaimKind.CLAIMED
                server.stop()
                ended, beat = thread.finish(success("j")), thread.heartbeat(5)
                assert away.wait(LIMIT_S)
                waiting = thread.claim(ClaimItem(new_job("k")))
                assert not thread.healthy
                server.start()
                assert back.wait(LIMIT_S)
                assert get(ended) is True
                assert get(beat) is WorkerState.STARTING
                assert get(waiting).kind is ClaimKind.CLAIMED
                assert thread.stop()
            with engine.connect() as conn:
                assert conn.scalar(select(Job.state).where(Job.id == "j")) is JobState.SUCCEEDED
            engine.dispose()
    except ServerUnavailableError as exc:
        skip_or_fail(exc)
