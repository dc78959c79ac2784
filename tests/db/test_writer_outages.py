"""The database thread while its database is away: nothing is lost, and nothing happens twice."""

from __future__ import annotations

import threading

import pytest
from sqlalchemy import func, select

from models_db import claims, writer
from models_db.claims import ClaimItem, ClaimKind, ReleaseItem
from models_db.errors import DatabaseUnavailableError, WriterStoppedError
from models_db.jobs import job_result
from models_db.migrate import upgrade
from models_db.session import make_engine
from models_db.tables import EngineSample, Job, JobState, WorkerState
from models_db.writer import DatabaseThread
from tests.db.database_thread import LIMIT_S, get, held_up, running, success
from tests.db.helpers import add_jobs, add_workers, attempts, claim_one, new_job, new_sample
from tests.db.outage import Outage
from tests.servers import ServerUnavailableError, fresh_database, private_server, skip_or_fail


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

        # Runs inside the batch, just before its commit; once only, although the batch is replayed.
        def arm(_conn):
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
