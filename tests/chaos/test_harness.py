"""The harness itself: it must see what is wrong before its silence means anything."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import insert, text, update

from models_db.base import utcnow
from models_db.claims import ClaimItem, claim
from models_db.deaths import KILLED_ITS_WORKER, bury
from models_db.migrate import upgrade
from models_db.session import make_engine
from models_db.tables import Job, JobState
from tests.chaos import witness
from tests.chaos import world as world_module
from tests.chaos.backends import POISON
from tests.chaos.clocks import NoClockShiftError, shifted
from tests.chaos.jobs import CANCELLABLE, FAILS, Expected, echo
from tests.chaos.judge import Harm, victims
from tests.chaos.plan import FAULTS, make_plan
from tests.chaos.proxy import Proxy
from tests.chaos.recovery import Fault, Kill, Timeline
from tests.chaos.verdict import Verdict, add_figures, killed_alone, line
from tests.chaos.witness import Change
from tests.chaos.world import FIGURES_VARIABLE, world
from tests.db.helpers import add_workers
from tests.fleet.conftest import KINDS
from tests.servers import Kind, ServerUnavailableError, fresh_database_url, skip_or_fail
from workers.client import Submission
from workers.payload import GeneratePayload

pytestmark = pytest.mark.chaos


@pytest.mark.parametrize("kind", KINDS)
def test_the_witness_sees_a_second_end_on_each_database(kind: Kind, tmp_path: Path) -> None:
    try:
        with fresh_database_url(kind, tmp_path) as url:
            _second_end(url)
    except ServerUnavailableError as exc:
        skip_or_fail(exc)


def _second_end(url: str) -> None:
    upgrade(url)
    engine = make_engine(url)
    witness.install(engine)
    row = {
        "model": "echo",
        "queue": "q",
        "priority": 3,
        "state": JobState.QUEUED,
        "attempt": 0,
        "cancel_requested": False,
        "created_at": utcnow(),
        "params": {},
        "prompt": {},
    }
    before = time.time()
    with engine.begin() as conn:
        conn.execute(insert(Job), [row | {"id": "good"}, row | {"id": "bad"}])
    for job_id in ("good", "bad"):
        with engine.begin() as conn:
            conn.execute(update(Job).where(Job.id == job_id).values(priority=6))  # of no interest
            conn.execute(
                update(Job).where(Job.id == job_id).values(state=JobState.CANCELLED, finished_at=utcnow())
            )
    with engine.begin() as conn:
        conn.execute(update(Job).where(Job.id == "bad").values(state=JobState.FAILED))
    with engine.connect() as conn:
        seen = witness.changes(conn, "job")
        assert conn.scalar(text("SELECT count(*) FROM chaos_change")) == 5
    engine.dispose()
    assert [(change.id, change.before, change.after) for change in seen if change.id == "bad"] == [
        ("bad", None, "queued"),
        ("bad", "queued", "cancelled"),
        ("bad", "cancelled", "failed"),
    ]
    assert witness.twice_ended(seen, []) == {"bad": ["cancelled to failed"]}
    assert before - 5 < seen[0].at < time.time() + 5


def test_a_result_that_is_written_twice_is_found() -> None:
    written = Change(1, 0.0, "result", "a", None, "written", None)
    assert witness.twice_ended([], [written]) == {}
    assert witness.twice_ended([], [written, Change(2, 0.0, "result", "a", "written", "written", None)]) == {
        "a": ["result written again"]
    }


def test_a_plan_is_a_function_of_its_seed() -> None:
    plan = make_plan(7, 600, 4000)
    assert plan == make_plan(7, 600, 4000)
    assert plan.steps != make_plan(8, 600, 4000).steps
    assert {step.kind for step in plan.steps} == set(FAULTS), "a long run does everything"
    assert sum(len(arrival.requests) for arrival in plan.arrivals) == 4000
    assert all(step.at + step.lasts < 600 for step in plan.steps)
    short = make_plan(1, 30, 200)
    assert short.steps[0].kind == "kill_one"
    assert {step.kind for step in make_plan(3, 60, 1, ["garbage", "revokes"]).steps} == {"garbage", "revokes"}


@pytest.mark.parametrize("seed", range(40))
def test_a_short_plan_holds_many_faults_as_well(seed: int) -> None:
    plan = make_plan(seed, 15, 160)
    kinds = [step.kind for step in plan.steps]
    assert plan == make_plan(seed, 15, 160)
    assert kinds[0] == "kill_one"
    assert len(set(kinds)) >= 4
    assert all(step.at + step.lasts < 15 for step in plan.steps)


def test_recovery_is_measured_and_disturbances_are_told() -> None:
    def job(at: float, after: str, owner: str) -> Change:
        return Change(0, at, "job", "j", "queued", after, owner)

    workers = [Change(0, 1.0, "worker", "victim", "starting", "online", "victim")]
    other = [*workers, Change(0, 2.0, "worker", "other", "starting", "online", "other")]
    late = [*workers, Change(0, 14.0, "worker", "other", "starting", "online", "other")]
    jobs = [job(5, "running", "victim"), job(18, "running", "other"), job(19, "running", "other")]
    timeline = Timeline(kills=[Kill(10.0, frozenset({"victim"}), frozenset({"j"}))])
    assert [(one.seconds, one.disturbed) for one in timeline.recoveries(jobs, other)] == [(8.0, False)]
    assert timeline.recoveries(jobs, late)[0].seconds == 4.0, "not before there was anybody to recover"
    assert timeline.recoveries(jobs[:1], other) == []
    timeline.faults.append(Fault("freeze", 12.0, 13.0))
    assert timeline.recoveries(jobs, other)[0].disturbed
    timeline.faults[:] = [Fault("freeze", 1.0, 2.0), Fault("freeze", 20.0, 30.0)]
    assert not timeline.recoveries(jobs, other)[0].disturbed


def test_the_line_adds_runs_up_and_a_wrong_answer_fails() -> None:
    good, bad = Verdict(jobs=3, duplicates=2), Verdict(jobs=1, lost={"x": "is queued"}, unacked=1)
    assert good.ok
    total = add_figures([good.figures() | {"recovery_max_s": 7.26}, bad.figures(), good.figures()])
    assert line(total) == "chaos: jobs=7 lost=1 double=0 duplicates=4 unacked=1 recovery_max_s=7.3 blamed=0"
    assert line(good.figures()).endswith("recovery_max_s=none blamed=0")
    assert line(Verdict(blamed={"x": "alone"}).figures()).endswith("blamed=1")
    for wrong in (
        bad,
        Verdict(double={"x": []}),
        Verdict(wrong={"x": ""}),
        Verdict(busy=["w"]),
        Verdict(unacked=1),
    ):
        with pytest.raises(AssertionError):
            wrong.assert_ok()
    assert echo("a b", 3) == "a b a"
    assert Expected("a b a").complaint("succeeded", "a b a") is None
    assert Expected("a b a").complaint("succeeded", "a b") is not None
    assert Expected("a b a").complaint("cancelled", "a b") is not None
    assert Expected("a b a", CANCELLABLE).complaint("cancelled", "a b") is None
    assert Expected("a b a", CANCELLABLE).complaint("cancelled", "b") is not None


def test_the_proxy_forwards_holds_freezes_cuts_and_refuses() -> None:
    with socket.create_server(("127.0.0.1", 0)) as upper:

        def shout() -> None:
            while True:
                try:
                    end, _ = upper.accept()
                except OSError:
                    return
                threading.Thread(target=answer, args=(end,), daemon=True).start()

        def answer(end: socket.socket) -> None:
            with end:
                try:
                    while data := end.recv(1000):
                        end.sendall(data.upper())
                except OSError:
                    return

        threading.Thread(target=shout, daemon=True).start()
        proxy = Proxy(upper.getsockname()[1])

        def connect() -> socket.socket:
            return socket.create_connection(("127.0.0.1", proxy.port), 20)

        with connect() as one, connect() as two:
            one.settimeout(20)
            one.sendall(b"hello" * 20_000)
            got = b""
            while len(got) < 100_000:
                got += one.recv(1 << 16)
            assert got == b"HELLO" * 20_000
            held = proxy.hold(b"secret")
            one.sendall(b"a secret")
            assert held.wait(20)
            two.sendall(b"open")
            assert two.recv(100) == b"OPEN"
            assert not _says_something(one)
            proxy.release()
            assert one.recv(100) == b"A SECRET"
            proxy.freeze()
            one.sendall(b"later")
            assert not _says_something(one)
            proxy.forward()
            assert one.recv(100) == b"LATER"
            assert proxy.cut() == 2
            with pytest.raises(ConnectionResetError):
                one.recv(100)
        proxy.refuse()
        assert _hears_nothing(connect)
        proxy.forward()
        with connect() as again:
            again.sendall(b"back")
            assert again.recv(100) == b"BACK"
        proxy.close()


def _says_something(end: socket.socket) -> bool:
    """Whether something comes within a little while."""
    return bool(select.select([end], [], [], 0.2)[0])


def _hears_nothing(connect: Callable[[], socket.socket]) -> bool:
    """Whether the other side closes a new connection without a word; it may do so while that is being made."""
    try:
        with connect() as end:
            end.sendall(b"x")
            return end.recv(100) == b""
    except ConnectionError:
        return True


def test_a_shifted_wall_clock_leaves_the_monotonic_one(tmp_path: Path) -> None:
    try:
        variables = shifted(-3600, tmp_path)
    except NoClockShiftError as exc:
        pytest.skip(f"NOT TESTED: WRONG WALL CLOCKS: {exc}")
    code = (
        "import time, datetime as d; time.sleep(0.1); "
        "print(time.time(), time.monotonic(), d.datetime.now().timestamp())"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, env={**os.environ, **variables}, capture_output=True, text=True, check=True
    )
    wall, monotonic, dated = map(float, done.stdout.split())
    assert abs(wall - (time.time() - 3600)) < 60
    assert abs(dated - wall) < 60
    assert abs(monotonic - time.monotonic()) < 60


def test_only_being_all_that_a_killed_worker_ran_explains_the_blame() -> None:
    attempts = [
        ("alone", "killed-1", "lost"),
        ("alone", "killed-2", "open"),
        ("alone", "killed-3", "lost"),
        ("beside", "killed-3", "lost"),
        ("alone", "died-by-itself", "lost"),
        ("ended", "killed-2", "succeeded"),  # before the kill
        ("alone", "killed-4", "released"),
    ]
    harmed = {"killed-1", "killed-2", "killed-3", "killed-4"}
    assert killed_alone(attempts, harmed) == {"alone": 2}


def test_a_death_is_our_doing_only_while_what_we_did_lasts() -> None:
    changes = [
        Change(0, 10.0, "worker", "victim", None, "starting", "victim"),
        Change(0, 20.0, "worker", "victim", "online", "dead", "victim"),
        Change(0, 30.0, "worker", "heir", None, "starting", "heir"),  # of the number of the victim's process
        Change(0, 40.0, "worker", "heir", "online", "dead", "heir"),
        Change(0, 10.0, "worker", "unburied", None, "starting", "unburied"),
    ]
    pids = {"victim": 7, "heir": 7, "unburied": 8}
    assert victims(pids, changes, []) == set()
    assert victims(pids, changes, [Harm(7, 15.0)]) == {"victim"}
    assert victims(pids, changes, [Harm(7, 25.0)]) == set(), "one was dead before, the other came later"
    assert victims(pids, changes, [Harm(7, 12.0, 19.0)]) == {"victim"}, "frozen, and missed"
    assert victims(pids, changes, [Harm(7, 31.0, 32.0), Harm(7, 33.0, 39.0)]) == {"heir"}
    assert victims(pids, changes, [Harm(7, 1.0, 4.0), Harm(7, 31.0, 32.0 - 5.0)]) == set(), "it got over that"
    assert victims(pids, changes, [Harm(8, 11.0)]) == {"unburied"}
    assert victims(pids, changes, [Harm(8, 11.0, 12.0)]) == set()


@pytest.mark.parametrize(
    ("prompt", "kills", "company", "verdict"),
    [
        ("fine words", 2, False, "blamed"),
        ("fine words", 1, False, "wrong"),
        ("fine words", 0, False, "wrong"),
        (POISON, 0, False, "fine"),
        ("unexpected", 2, False, "wrong"),
        ("fine words", 2, True, "wrong"),
    ],
)
def test_an_innocent_that_is_blamed_fails_the_run_unless_we_made_it_look_guilty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prompt: str, kills: int, company: bool, verdict: str
) -> None:
    """With ``company`` the database has blamed a job that was not alone: no such thing may pass as our doing."""
    monkeypatch.delenv(FIGURES_VARIABLE, raising=False)  # what is wrong here is no finding
    with world(tmp_path, "sqlite") as made:
        states = FAILS if prompt == POISON else None
        job_id, other = made.submit([{"prompt": prompt, "max_tokens": 3}] * 2, states=states)
        made.redis.client.flushdb()
        for number in range(2):
            add_workers(made.engine, f"w{number}", pid=number, model="echo")
            if number < kills:
                made.harms.append(
                    Harm(number, made.read(lambda conn: witness.changes(conn, "worker")[-1].at))
                )
            with made.engine.begin() as conn:
                (job,) = made.client.new_jobs([Submission(GeneratePayload(model="echo", prompt="x"))])
                claim(conn, [ClaimItem(replace(job, id=job_id))], f"w{number}")
                if company:
                    claim(conn, [ClaimItem(replace(job, id=other))], f"w{number}")
                    conn.execute(update(Job).where(Job.id == job_id).values(solo_deaths=number))
                bury(conn, f"w{number}")
        with made.engine.begin() as conn:
            if company:
                conn.execute(
                    update(Job)
                    .where(Job.id == job_id)
                    .values(state=JobState.FAILED, error_type=KILLED_ITS_WORKER, finished_at=utcnow())
                )
            done = {"state": JobState.CANCELLED, "finished_at": utcnow()}
            conn.execute(update(Job).where(Job.id == other).values(done))
        made.expected[other].states = CANCELLABLE
        if prompt == "unexpected":
            del made.expected[job_id]
        found = made.finish(stop=False)
    assert found.ok is (verdict != "wrong"), found.complaints()
    assert set(found.blamed) == ({job_id} if verdict == "blamed" else set())
    assert set(found.wrong) == ({job_id} if verdict == "wrong" else set())
    if verdict != "fine":
        with pytest.raises(AssertionError, match="blamed"):
            found.assert_ok()
    assert found.assert_ok(may_blame=True) if verdict == "blamed" else True


@pytest.mark.parametrize(("for_later", "lost"), [(True, False), (False, True)])
def test_a_job_that_stays_queued_is_lost_unless_only_a_newer_version_can_run_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, for_later: bool, lost: bool
) -> None:
    monkeypatch.delenv(FIGURES_VARIABLE, raising=False)
    with world(tmp_path, "sqlite") as made:
        (job_id,) = made.submit([{"prompt": "fine words", "max_tokens": 3}])
        made.redis.client.flushdb()
        found = made.finish(0.1, for_later=[job_id] if for_later else [], stop=False)
    assert set(found.lost) == ({job_id} if lost else set())
    assert found.ok is not lost


@pytest.mark.parametrize(
    ("backend", "complaint"),
    [
        pytest.param("leaky_engine", "blocks used", id="a block is leaked"),
        pytest.param("lying_engine", "said", id="an answer is wrong"),
    ],
)
@pytest.mark.chaos_long
def test_what_a_real_engine_does_wrong_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str, complaint: str
) -> None:
    monkeypatch.delenv(FIGURES_VARIABLE, raising=False)
    monkeypatch.setattr(world_module, "IDLE_S", 5.0)
    with world(tmp_path, "sqlite", real=True, backend=f"tests.chaos.backends:{backend}") as made:
        made.workers(1)
        made.submit_words(2, 20)
        found = made.finish()
    assert not found.ok
    assert complaint in "\n".join(found.complaints())
