"""One deadly job among many: how many workers it costs, and that nobody else pays."""

from __future__ import annotations

import random
import signal
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from celery.exceptions import TaskRevokedError
from celery.worker import control as celery_control
from celery.worker import state as worker_state
from celery.worker.control import Panel
from sqlalchemy import Engine, select, update

from backend.api import EngineDeadError
from models_db.base import utcnow
from models_db.claims import WAITED_TOO_LONG
from models_db.deaths import ALONE_DEATHS, KILLED_ITS_WORKER, SOLO_LIMIT, SUSPECT_DEATHS
from models_db.jobs import request_cancel
from models_db.suspects import untold_ends
from models_db.tables import AttemptOutcome, FleetLock, Job, JobState, WorkerState
from models_db.workers import set_worker_state
from tests.fleet.conftest import MakeFleet
from tests.fleet.rows import accept
from tests.fleet.table_world import TestWorker, World
from tests.messages import build_message
from workers import control
from workers.exits import EXIT_TRY_AGAIN
from workers.payload import GeneratePayload, queue_for
from workers.revokes import Revokes

MOST_DEATHS = ALONE_DEATHS + SOLO_LIMIT


class Ward(World):
    """A fleet in which workers die of poison as soon as they run it."""

    def __init__(self, engine: Engine, slots: int, poison: set[str], workers: int, engine_dies: bool) -> None:
        super().__init__(engine, slots=slots)
        self.poison = poison
        self.engine_dies = engine_dies
        self.deaths = 0
        self.live = [self.worker(f"w{n}") for n in range(workers)]

    def go_on(self) -> None:
        """A second passes: deliveries arrive, poison kills, and otherwise all that runs ends."""
        self.clock.seconds += 1
        for number, job_id in enumerate(self.take_published()):
            self.live[number % len(self.live)].deliver(job_id)
        self.run()
        for worker in list(self.live):
            running = [job_id for job_id, handle in worker.backend.handles.items() if not handle.done()]
            if self.poison & set(running):
                self.kill(worker)
            else:
                for job_id in running:
                    worker.backend.finish(job_id)
        self.run()
        self.collect()

    def collect(self) -> None:
        """What was handed back is delivered again."""
        for worker in self.live:
            for request in list(worker.requests):
                if request.log[-1:] == ["front"]:
                    worker.requests.remove(request)
                    self.published.append(request.id)

    def kill(self, worker: TestWorker) -> None:
        self.deaths += 1
        if self.engine_dies:
            for handle in worker.backend.handles.values():
                handle.fail(EngineDeadError("a sticky device error"))
            self.run()
        self.collect()
        worker.kill()
        self.bury(worker.name)
        self.live.remove(worker)
        self.live.append(self.worker(f"w{len(self.workers)}"))

    def take_published(self) -> list[str]:
        published, self.published[:] = list(self.published), []
        return published


@pytest.mark.parametrize("deaths", [SUSPECT_DEATHS, ALONE_DEATHS], ids=["in a group", "alone"])
def test_a_suspect_that_never_ran_and_waited_too_long_expires_like_any_job(
    engine: Engine, deaths: int
) -> None:
    world = World(engine)
    worker = world.worker(max_queue_age_s=60)
    now = world.clock.now()
    accept(engine, ["old"], deaths=deaths, created_at=now - timedelta(seconds=61))
    accept(engine, ["young"], deaths=deaths, created_at=now - timedelta(seconds=50))
    accept(engine, ["ran"], deaths=deaths, created_at=now - timedelta(seconds=61), attempt=2)
    for _ in range(5):
        world.clock.seconds += 1
        for job_id in set(worker.backend.submitted) & worker.table._runs.ids():
            worker.backend.finish(job_id)
        world.run()
    assert sorted(worker.backend.submitted) == ["ran", "young"]
    assert world.state("old") is JobState.EXPIRED
    assert world.status("old").error_message == WAITED_TOO_LONG
    assert sorted(world.published) == ["old", "ran", "young"], "a delivery tells Celery"


@pytest.mark.parametrize("engine_dies", [False, True], ids=["process dies", "engine dies"])
@pytest.mark.parametrize(("innocents", "slots", "workers"), [(80, 100, 1), (30, 16, 3), (3, 1, 2), (0, 8, 1)])
def test_a_poison_among_innocents(
    engine: Engine, innocents: int, slots: int, workers: int, engine_dies: bool
) -> None:
    others = [f"job-{n:03}" for n in range(innocents)]
    jobs = [*others, "poison"]
    random.Random(1).shuffle(jobs)
    accept(engine, jobs)
    ward = Ward(engine, slots, {"poison"}, workers, engine_dies)
    ward.published += jobs
    for _ in range(400):
        ward.go_on()
        if all(state.terminal for state in ward.states().values()):
            break
    states = ward.states()
    assert {states[job_id] for job_id in others} <= {JobState.SUCCEEDED}
    assert states["poison"] is JobState.FAILED
    assert SOLO_LIMIT <= ward.deaths <= MOST_DEATHS
    status = ward.status("poison")
    assert status.error_type == KILLED_ITS_WORKER
    assert "nothing else" in status.error_message
    assert ward.attempts("poison") == [AttemptOutcome.LOST] * ward.deaths
    for job_id in others:
        outcomes = ward.attempts(job_id)
        assert outcomes.count(AttemptOutcome.SUCCEEDED) == 1
        assert set(outcomes) <= {AttemptOutcome.SUCCEEDED, AttemptOutcome.LOST}
    for _ in range(5):  # Celery hears of what ran without a delivery
        ward.go_on()
    traced = [job_id for worker in ward.workers.values() for job_id in worker.tracer.traced]
    assert sorted(set(traced)) == sorted(jobs)
    for worker in ward.live:
        assert (worker.table.pending, worker.table.running, worker.paused) == (0, 0, False)
    with engine.connect() as conn:
        assert not {worker.name for worker in ward.live} & set(conn.scalars(select(FleetLock.owner)))


def test_two_poisons_at_once(engine: Engine) -> None:
    jobs = [f"job-{n:02}" for n in range(40)]
    accept(engine, [*jobs, "p1", "p2"])
    ward = Ward(engine, 16, {"p1", "p2"}, 2, engine_dies=False)
    ward.published += [*jobs, "p1", "p2"]
    for _ in range(400):
        ward.go_on()
        if all(state.terminal for state in ward.states().values()):
            break
    states = ward.states()
    assert {states[job_id] for job_id in jobs} == {JobState.SUCCEEDED}
    assert states["p1"] is states["p2"] is JobState.FAILED
    assert ward.deaths <= 2 * MOST_DEATHS


def test_a_plain_death_makes_nobody_a_suspect(engine: Engine) -> None:
    jobs = [f"job-{n}" for n in range(8)]
    accept(engine, jobs)
    world = World(engine, slots=8)
    a, b = world.worker("a"), world.worker("b")
    for job_id in jobs:
        a.deliver(job_id)
    world.run()
    a.kill()
    world.bury("a")
    assert sorted(world.published) == jobs, "all come back at once, together"
    for job_id in world.published:
        b.deliver(job_id)
    world.run()
    assert sorted(b.backend.submitted) == jobs


def test_a_worker_that_stopped_by_itself_raises_no_suspicion(engine: Engine) -> None:

    accept(engine, ["j"])
    world = World(engine)
    a = world.worker("a")
    a.deliver("j")
    world.run()
    a.kill()
    with engine.begin() as conn:
        set_worker_state(conn, "a", WorkerState.STOPPED)
    world.bury("a")
    assert world.published == ["j"]
    with engine.connect() as conn:
        assert conn.scalar(select(Job.deaths)) == 0


def test_suspects_wait_for_the_lock_and_a_delivery_of_theirs_is_acknowledged(engine: Engine) -> None:
    accept(engine, ["j"], deaths=SUSPECT_DEATHS)
    world = World(engine)
    a, b = world.worker("a"), world.worker("b")
    world.run()
    assert (a.backend.submitted, b.backend.submitted) == (["j"], [])
    request = b.deliver("j")
    world.run()
    assert request.log == ["acknowledged"]
    accept(engine, ["k"], deaths=SUSPECT_DEATHS)
    again = b.deliver("k")
    for _ in range(5):
        world.clock.seconds += 1
        world.run()
    assert b.backend.submitted == [], "one worker at a time"
    assert again.log == ["acknowledged"]
    a.backend.finish("j")
    world.run()
    assert a.backend.submitted == ["j", "k"]
    a.backend.finish("k")
    world.run()
    assert world.published == ["j", "k"], "a delivery will tell Celery"


def test_a_job_that_runs_alone_waits_for_the_others_and_keeps_deliveries_out(engine: Engine) -> None:
    accept(engine, ["alone"], deaths=ALONE_DEATHS)
    accept(engine, ["other"])
    world = World(engine)
    worker = world.worker("a")
    worker.deliver("other")
    for _ in range(6):
        world.clock.seconds += 1
        world.run()
    assert worker.paused
    assert worker.backend.submitted == ["other"]
    refused = worker.deliver("late")
    world.run()
    assert refused.log == ["front"]
    worker.backend.finish("other")
    world.run()
    world.clock.seconds += 1
    world.run()
    assert worker.backend.submitted == ["other", "alone"]
    worker.backend.finish("alone")
    world.run()
    assert not worker.paused
    worker.deliver("late")
    world.run()
    assert worker.backend.submitted[-1] == "late"


def test_a_suspect_can_be_cancelled_and_its_lock_outlives_no_worker(engine: Engine) -> None:
    accept(engine, ["j", "k"], deaths=ALONE_DEATHS)
    world = World(engine)
    a = world.worker("a")
    world.run()
    assert a.backend.submitted == ["j"]
    with engine.begin() as conn:
        request_cancel(conn, ["k"])
    a.kill()
    world.bury("a")
    b = world.worker("b")
    world.run()
    assert b.backend.submitted == ["j"], "the lock of a dead worker is free"
    assert world.state("k") is JobState.CANCELLED


@pytest.mark.parametrize("deaths", [SUSPECT_DEATHS, ALONE_DEATHS], ids=["in a group", "alone"])
def test_a_delivery_tells_celery_of_a_suspect_that_was_cancelled_while_it_waited(
    engine: Engine, deaths: int
) -> None:
    accept(engine, ["j"], deaths=deaths, published_at=utcnow())
    with engine.begin() as conn:
        assert request_cancel(conn, ["j"]) == {"j": JobState.CANCELLED}
        (message,) = untold_ends(conn, queue_for("echo"), 10)
    assert message.id == "j"
    world = World(engine)
    worker = world.worker()
    worker.deliver("j")  # as the sweeper publishes it
    world.run()
    assert (worker.backend.submitted, worker.tracer.traced) == ([], ["j"])


def test_celery_hears_of_the_cancel_of_a_waiting_suspect(make_fleet: MakeFleet) -> None:
    """With a worker, and Celery's own result: whoever waits for it would wait for ever."""
    fleet = make_fleet()
    job_id = fleet.submit("told", prompt="some words", max_tokens=2)
    with fleet.engine.begin() as conn:
        conn.execute(update(Job).where(Job.id == job_id).values(deaths=SUSPECT_DEATHS))
        request_cancel(conn, [job_id])
    fleet.redis.client.flushall()
    fleet.worker()
    result = fleet.app.AsyncResult(job_id)
    with pytest.raises(TaskRevokedError):
        result.get(timeout=30)


def stored_message(**headers: Any) -> dict[str, Any]:
    payload = GeneratePayload.parse({"model": "echo", "prompt": "some words"})
    message = build_message("j", payload)
    return message | {"headers": message["headers"] | headers}


STAMPED = {"stamped_headers": ["batch"], "stamps": {"batch": ["spring", "autumn"]}}


@pytest.mark.parametrize(
    ("revokes", "hit"),
    [
        (Revokes(ids=frozenset({"j"})), True),
        (Revokes(stamps={"batch": "autumn"}), True),
        (Revokes(stamps={"batch": ["winter", "spring"]}), True),
        (Revokes(ids=frozenset({"other"}), stamps={"batch": ["winter"], "other": "spring"}), False),
    ],
    ids=["by id", "by a stamp", "by stamps", "another"],
)
@pytest.mark.parametrize("deaths", [SUSPECT_DEATHS, ALONE_DEATHS], ids=["in a group", "alone"])
def test_terminating_reaches_a_suspect_that_runs(
    engine: Engine, revokes: Revokes, hit: bool, deaths: int
) -> None:
    accept(engine, ["j"], deaths=deaths, message=stored_message(**STAMPED))
    world = World(engine)
    worker = world.worker("a")
    world.run()
    worker.backend.handles["j"].started = True
    worker.table.terminate(revokes)
    world.run()
    if hit:
        assert worker.backend.cancelled == ["j"]
        assert world.state("j") is JobState.CANCELLED
        assert world.published == ["j"], "a delivery will tell Celery"
    else:
        assert worker.backend.cancelled == []
        worker.backend.finish("j")
        world.run()
        assert world.state("j") is JobState.SUCCEEDED


@pytest.mark.parametrize("when", ["before it is claimed", "while it waits in the backend"])
def test_what_celery_has_revoked_does_not_start_as_a_suspect(
    engine: Engine, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    accept(engine, ["j"], deaths=SUSPECT_DEATHS, message=stored_message(**STAMPED))
    world = World(engine)
    worker = world.worker("a")
    worker.table.watch_revokes()
    if when == "before it is claimed":
        monkeypatch.setitem(worker_state.revoked_stamps, "batch", ["spring"])
        world.run()
        assert worker.backend.submitted == []
    else:
        worker.backend.starts = False
        world.run()
        assert worker.backend.submitted == ["j"]
        monkeypatch.setitem(worker_state.revoked_stamps, "batch", ["spring"])
        world.clock.seconds += 1
        world.run()
    assert world.state("j") is JobState.CANCELLED


def test_a_suspect_whose_message_has_expired_does_not_start(engine: Engine) -> None:
    past = "2026-01-01T00:00:00"  # without a zone it is UTC
    accept(engine, ["j"], deaths=SUSPECT_DEATHS, message=stored_message(expires=past))
    world = World(engine)
    worker = world.worker("a")
    world.run()
    assert worker.backend.submitted == []
    assert world.state("j") is JobState.EXPIRED


def test_celerys_commands_say_what_is_to_be_stored_and_terminated(monkeypatch: pytest.MonkeyPatch) -> None:
    control.register_commands()
    asked: list[Revokes] = []
    monkeypatch.setattr(celery_control, "revoke", lambda *args, **options: "theirs")
    monkeypatch.setattr(celery_control, "revoke_by_stamped_headers", lambda *args, **options: "theirs")
    stored: list[tuple[Any, bool]] = []
    pool = SimpleNamespace(
        terminate_revoked=asked.append, store_revokes=lambda *revoke: stored.append(revoke)
    )
    state = SimpleNamespace(consumer=SimpleNamespace(pool=pool))
    assert control.revoke(state, task_id="j") == "theirs"
    assert control.revoke_by_stamped_headers(state, headers={"batch": "spring"}) == "theirs"
    assert (asked, stored) == ([], [(frozenset({"j"}), False)])
    control.revoke(state, task_id=["j", "k"], terminate=True, signal="SIGTERM")
    control.revoke_by_stamped_headers(state, headers=["batch=spring"], terminate=True)
    assert asked == [Revokes(ids=frozenset({"j", "k"})), Revokes(stamps={"batch": "spring"})]
    assert Panel.data["terminate"](state, signal="KILL", task_id="j") == "theirs"
    assert asked[2:] == [Revokes(ids=frozenset({"j"}))]
    assert stored[1:] == [(frozenset({"j", "k"}), True), (frozenset({"j"}), True)]
    other = SimpleNamespace(consumer=SimpleNamespace(pool=object()))
    assert control.revoke(other, task_id="j", terminate=True) == "theirs"


def test_a_suspect_whose_message_cannot_be_read_fails_with_the_reason(engine: Engine) -> None:
    accept(engine, ["j"], deaths=SUSPECT_DEATHS, message={"body": "?"})
    world = World(engine)
    world.worker()
    world.run()
    assert world.state("j") is JobState.FAILED
    assert world.status("j").error_message == "message: cannot be read"


def test_a_prompt_that_aborts_the_process(make_fleet: MakeFleet) -> None:
    """With real processes: the innocents succeed, the poison fails, the workers' supervisor starts them again."""
    fleet = make_fleet(
        backend="tests.fleet.backends:aborts_of_poison",
        engine={"echo_tokens_per_s": 100, "max_num_seqs": 8},
        restart_backoff_s=0.1,
        restart_backoff_max_s=0.5,
    )
    supervisor = fleet.supervisor()
    innocents = [fleet.submit(f"innocent-{n}", max_tokens=10) for n in range(10)]
    poison = fleet.submit("poison", prompt="poison", max_tokens=10)
    states = fleet.wait_all([*innocents, poison], timeout_s=90)
    assert states.pop(poison) is JobState.FAILED
    assert set(states.values()) == {JobState.SUCCEEDED}
    status = fleet.status(poison)
    assert status is not None
    assert status.error_type == KILLED_ITS_WORKER
    assert 2 <= len(fleet.attempts(poison)) <= MOST_DEATHS
    assert "was killed by SIGABRT; starting again" in supervisor.log
    fleet.wait_drained()
    assert supervisor.stop() == 0


def test_a_worker_that_stood_still_takes_its_death_back(make_fleet: MakeFleet) -> None:
    """With real processes: its only job is not a bit suspicious afterwards, while another worker runs it."""
    fleet = make_fleet(engine={"echo_tokens_per_s": 20, "max_num_seqs": 2})
    fleet.start_workers(2)
    job_id = fleet.submit("j", max_tokens=100_000)
    fleet.wait_state(job_id, JobState.RUNNING)

    def counts() -> Any:
        with fleet.engine.connect() as conn:
            return tuple(conn.execute(select(Job.deaths, Job.solo_deaths).where(Job.id == job_id)).one())

    frozen = fleet.owner(job_id)
    frozen.signal(signal.SIGSTOP)
    fleet.wait_attempt(job_id, 2)
    assert counts() == (1, 1)
    frozen.signal(signal.SIGCONT)
    assert frozen.wait() == EXIT_TRY_AGAIN
    assert "its death no longer counts against 1 jobs" in frozen.log
    assert (counts(), fleet.state(job_id)) == ((0, 0), JobState.RUNNING)
