"""Who is held for dead, and what becomes of counters."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import Connection, event

from backend.api import BackendStats
from models_db.base import utcnow
from models_db.claims import ClaimItem, claim
from models_db.errors import WriterStoppedError
from models_db.migrate import upgrade
from models_db.records import NewJob
from models_db.session import make_engine
from models_db.tables import WorkerState
from models_db.workers import register_worker
from workers.incarnation import DeathWatch, Incarnation, Sampler, _Sight, new_worker
from workers.settings import load_settings


def test_dead_is_whose_counter_stands_still_for_long_enough() -> None:
    watch = DeathWatch(dead_after_s=6, longest_gap_s=3)
    for second in range(20):
        dead = watch.look({"moving": second, "still": min(second, 5)}, float(second))
        # It moved last at 5; after more than 6 s without a move it is dead.
        assert dead == (frozenset({"still"}) if second > 11 else frozenset())


def test_a_counter_that_moves_again_is_alive_again() -> None:
    watch = DeathWatch(6, 3)
    for second in range(10):
        dead = watch.look({"w": 1}, float(second))
    assert dead == {"w"}
    assert watch.look({"w": 2}, 10.0) == frozenset()


def test_after_a_gap_in_our_own_sight_everyone_gets_the_full_time_again() -> None:
    watch = DeathWatch(6, 3)
    for second in range(6):
        watch.look({"w": 1}, float(second))
    assert watch.look({"w": 1}, 100.0) == frozenset(), "we were away, it may have been, too"
    for second in range(101, 107):
        assert watch.look({"w": 1}, float(second)) == frozenset()
    assert watch.look({"w": 1}, 107.0) == {"w"}


def test_a_worker_that_is_new_to_us_gets_the_full_time() -> None:
    watch = DeathWatch(6, 3)
    for second in range(20):
        watch.look({}, float(second))
    assert watch.look({"old": 1}, 20.0) == frozenset()


@given(st.lists(st.tuples(st.floats(0.1, 2.9), st.booleans()), min_size=1, max_size=60))
def test_nobody_is_dead_who_moved_within_the_time(steps: list[tuple[float, bool]]) -> None:
    watch, now, counter, moved_at = DeathWatch(6, 3), 0.0, 0, 0.0
    watch.look({"w": 0}, now)
    for pause, moves in steps:
        now += pause
        if moves:
            counter, moved_at = counter + 1, now
        assert ("w" in watch.look({"w": counter}, now)) == (now - moved_at > 6)


def test_looks_that_are_always_late_find_the_dead_all_the_same() -> None:
    for pauses in ([4.0] * 20, [7.0, 1.0] * 20, [3.5, 2.0, 30.0] * 20):
        watch, now = DeathWatch(6, 3), 0.0
        found: float | None = None
        for number, pause in enumerate(pauses):
            now += pause
            dead = watch.look({"still": 1, "moving": number}, now)
            assert "moving" not in dead
            if dead and found is None:
                found = now
        assert found is not None, f"looks {pauses[:3]} s apart"
        assert found > 6


def test_a_gap_excuses_anew_who_has_moved_since_the_last() -> None:
    watch = DeathWatch(6, 3)
    for second in range(6):
        watch.look({"w": 1}, float(second))
    watch.look({"w": 1}, 100.0)
    watch.look({"w": 2}, 101.0)
    for second in range(102, 106):
        watch.look({"w": 2}, float(second))
    for second in range(200, 207):
        assert watch.look({"w": 2}, float(second)) == frozenset()
    assert watch.look({"w": 2}, 207.0) == {"w"}


class Beats:
    """The part of the database thread that beats and looks, answering when told to."""

    def __init__(self) -> None:
        self.beats: list[Future[WorkerState | None]] = []
        self.looks: list[Future[_Sight]] = []

    def heartbeat(self, counter: int) -> Future[WorkerState | None]:
        self.beats.append(Future())
        return self.beats[-1]

    def call(self, work: object) -> Future[_Sight]:
        self.looks.append(Future())
        return self.looks[-1]


def test_a_heartbeat_waits_for_no_look() -> None:
    settings = load_settings(database_url="sqlite:///unused.db")
    row = new_worker(settings)
    incarnation = Incarnation(settings, row, on_cancel=lambda ids: None, on_dead=lambda error: None)
    incarnation._db = db = Beats()  # type: ignore[assignment]
    for expected in (1, 2, 3):
        incarnation.beat()
        assert (len(db.beats), len(db.looks)) == (expected, 1), "the look waits behind other work"
        db.beats[-1].set_result(WorkerState.ONLINE)
    db.looks[0].set_result(_Sight({}, set(), set(), []))
    incarnation.beat()
    incarnation.beat()
    assert (len(db.beats), len(db.looks)) == (4, 2)


def test_silence_ends_with_a_heartbeat_that_the_database_took() -> None:
    settings = load_settings(database_url="sqlite:///unused.db")
    now, told = [100.0], list[str]()
    incarnation = Incarnation(
        settings,
        new_worker(settings),
        on_cancel=lambda ids: None,
        on_dead=lambda error: told.append(error.code),
        clock=lambda: now[0],
    )
    incarnation._db = db = Beats()  # type: ignore[assignment]
    incarnation.beat()
    now[0] += 7
    assert incarnation.silence_s() == 7
    db.beats[-1].set_exception(RuntimeError("refused"))
    assert incarnation.silence_s() == 7
    incarnation.beat()
    db.beats[-1].set_result(WorkerState.ONLINE)
    assert incarnation.silence_s() == 0
    incarnation.beat()
    now[0] += 7
    db.beats[-1].set_result(WorkerState.DEAD)
    assert (incarnation.silence_s(), told) == (7, ["declared_dead"]), (
        "who is held for dead takes nothing more"
    )


def test_a_worker_that_cannot_beat_any_more_says_so() -> None:
    settings = load_settings(database_url="sqlite:///unused.db")
    row, told = new_worker(settings), list[str]()
    incarnation = Incarnation(
        settings, row, on_cancel=lambda ids: None, on_dead=lambda error: told.append(error.code)
    )

    class Broken(Beats):
        def heartbeat(self, counter: int) -> Future[WorkerState | None]:
            if self.beats:
                raise WriterStoppedError("the database thread died")
            future = super().heartbeat(counter)
            future.set_result(WorkerState.ONLINE)
            incarnation._stop.set()  # so that this returns in any case
            incarnation._stop.wait = lambda timeout=None: False  # type: ignore[method-assign]
            return future

    incarnation._db = Broken()  # type: ignore[assignment]
    incarnation._loop()
    assert told == ["heartbeat"]


def test_what_we_own_is_told_after_each_look(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'owned.db'}"
    upgrade(url)
    engine = make_engine(url)
    settings, owned = load_settings(database_url=url), list[object]()
    me, other = new_worker(settings), replace(new_worker(settings), id="other")
    incarnation = Incarnation(
        settings, me, on_cancel=lambda ids: None, on_dead=lambda error: None, on_owned=owned.append
    )
    with engine.begin() as conn:
        register_worker(conn, me)
        register_worker(conn, other)
        for job_id, owner in (("mine", me.id), ("theirs", other.id)):
            job = NewJob(id=job_id, model="m", queue="q", params={}, prompt={}, created_at=utcnow())
            claim(conn, [ClaimItem(job)], owner, frozenset())
        sight: Future[_Sight] = Future()
        sight.set_result(incarnation._look(conn))
    engine.dispose()
    incarnation._on_look(sight)
    assert owned == [{"mine": 1}]


def test_samples_are_differences_and_gauges() -> None:
    sampler = Sampler("w", 10.0, BackendStats(steps=5, generated_tokens=100, busy_s=1.0, wall_s=2.0))
    sample = sampler.sample(
        15.0,
        BackendStats(
            steps=15,
            generated_tokens=400,
            requests_finished=3,
            busy_s=5.0,
            running=2,
            waiting=1,
            kv_blocks_total=10,
            kv_blocks_free=4,
        ),
    )
    assert sample is not None
    assert (sample.interval_s, sample.steps, sample.generated_tokens, sample.requests_finished) == (
        5.0,
        10,
        300,
        3,
    )
    assert (sample.running, sample.waiting) == (2, 1)
    assert (sample.busy_s, sample.active_fraction) == (4.0, 0.8)
    assert abs(sample.kv_used_fraction - 0.6) < 1e-9
    assert sampler.sample(15.0, BackendStats()) is None, "no time has passed"


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=20))
def test_the_samples_of_a_life_add_up_to_its_counters(growth: list[int]) -> None:
    sampler, total, now, seen = Sampler("w", 0.0, BackendStats()), 0, 0.0, 0
    for more in growth:
        total, now = total + more, now + 1
        sample = sampler.sample(now, BackendStats(generated_tokens=total, busy_s=now * 3))
        assert sample is not None
        assert sample.active_fraction == 1.0, "never above one, whatever a backend says"
        seen += sample.generated_tokens
    assert seen == total


def test_a_worker_that_starts_during_the_look_is_not_gone(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'looked.db'}"
    upgrade(url)
    engine = make_engine(url)
    settings = load_settings(database_url=url)
    me = new_worker(settings)
    incarnation = Incarnation(settings, me, on_cancel=lambda ids: None, on_dead=lambda error: None)
    other = replace(new_worker(settings), id="other")
    looks: list[str] = []

    def after_the_first_look(conn: Connection, *_: object) -> None:
        if not looks:
            looks.append("first")
            register_worker(conn, other)
            item = ClaimItem(
                NewJob(id="job", model="m", queue="q", params={}, prompt={}, created_at=utcnow())
            )
            claim(conn, [item], other.id, frozenset())

    with engine.begin() as conn:
        register_worker(conn, me)
        event.listen(engine, "after_cursor_execute", after_the_first_look)
        sight = incarnation._look(conn)
    engine.dispose()
    assert looks
    assert sight.owners <= sight.counters.keys()


def test_the_dead_and_what_the_stopped_left_are_reported_until_they_are_buried() -> None:
    settings = load_settings(database_url="sqlite:///unused.db")
    now, gone = [100.0], list[set[str]]()
    incarnation = Incarnation(
        settings,
        new_worker(settings),
        on_cancel=lambda ids: None,
        on_dead=lambda error: None,
        on_gone=lambda ids: gone.append(set(ids)),
        clock=lambda: now[0],
    )

    def look(still: int, owners: set[str]) -> None:
        future: Future[_Sight] = Future()
        future.set_result(_Sight({"still": still, "moving": int(now[0])}, set(), owners, []))
        incarnation._on_look(future)
        now[0] += 1

    look(1, {"still", "moving"})
    assert gone == []
    for _ in range(5):
        look(1, {"still", "moving", "stopped"})
    assert gone == [{"stopped"}] * 5
    assert incarnation.dead_ids() == frozenset(), "a worker that stopped raises no suspicion"
    look(1, {"still"})
    look(1, {"still"})
    assert gone[5:] == [{"still"}]
    assert incarnation.dead_ids() == {"still"}
