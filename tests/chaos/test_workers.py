"""Prompts that kill, clocks that are wrong, and shutdowns under load."""

from __future__ import annotations

import time

import pytest
from sqlalchemy import Connection, select

from models_db.deaths import ALONE_DEATHS, SOLO_LIMIT
from models_db.tables import Attempt, AttemptOutcome, Job, JobState
from tests.chaos.backends import POISON
from tests.chaos.clocks import NoClockShiftError, shifted
from tests.chaos.conftest import MakeWorld
from tests.chaos.jobs import ENDED_WELL, FAILS, Expected
from tests.fleet.fleet import wait_until
from tests.servers import Kind

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(600)]


def died_with(conn: Connection, job_id: str) -> list[set[str]]:
    """The jobs that were in flight on each worker that died with this one, itself included, in order."""
    lost = select(Attempt.worker_id, Attempt.job_id).where(Attempt.outcome == AttemptOutcome.LOST)
    workers = [
        row.worker_id for row in conn.execute(lost.where(Attempt.job_id == job_id).order_by(Attempt.number))
    ]
    return [
        {row.job_id for row in conn.execute(lost.where(Attempt.worker_id == worker))} for worker in workers
    ]


@pytest.mark.chaos_long
@pytest.mark.parametrize(
    ("kind", "slots"),
    [
        pytest.param("postgresql", 256, marks=pytest.mark.postgres),
        pytest.param("mariadb", 64, marks=pytest.mark.mysql),
        ("sqlite", 64),
    ],
)
def test_a_prompt_that_aborts_the_process_costs_255_innocents_nothing(
    make_world: MakeWorld, kind: Kind, slots: int
) -> None:
    engine = {"echo_tokens_per_s": 100, "max_num_seqs": slots, "max_num_batched_tokens": 512}
    world = make_world(
        kind, engine=engine, backend="tests.chaos.backends:aborts_in_company", restart_backoff_max_s=1.0
    )
    seat = world.seat(supervised=True, start=False)  # one, so that it takes them all
    (poison,) = world.submit([{"prompt": POISON, "max_tokens": 10}], states=FAILS)
    innocents = world.submit_words(slots - 1, 100)
    seat.start()
    verdict = world.finish(120).assert_ok()
    states = world.states()
    assert [job_id for job_id, state in states.items() if state is not JobState.SUCCEEDED] == [poison]
    assert states[poison] is JobState.FAILED
    companies = world.read(lambda conn: died_with(conn, poison))
    assert companies[0] == {*innocents, poison}, "all of them were in flight when it struck first"
    assert [len(company) for company in companies].count(1) == SOLO_LIMIT, "it was blamed only for that"
    assert len(companies[-1]) == 1
    assert len(world.attempts(poison)) <= ALONE_DEATHS + SOLO_LIMIT, "it was soon found out"
    assert all(world.attempts(job_id)[-1] == "succeeded" for job_id in innocents[:3])
    assert verdict.attempts["succeeded"] == len(innocents)


@pytest.mark.chaos_long
@pytest.mark.postgres
def test_wall_clocks_an_hour_ahead_and_behind(make_world: MakeWorld) -> None:
    # Times that are fair on a right clock, and up at once (or an hour too late) on a wrong one.
    world = make_world(engine={"echo_tokens_per_s": 20, "max_num_seqs": 8}, max_queue_age_s=1800)
    try:
        seats = [world.seat(variables=shifted(by, world.folder)) for by in (3600, -3600)] + [world.seat()]
    except NoClockShiftError as exc:
        pytest.skip(f"NOT TESTED: WRONG WALL CLOCKS: {exc}")
    for seat in seats:
        seat.ready()
    jobs = world.submit_words(12, 20 * 15)  # longer than the visibility timeout
    jobs += world.submit_words(60, 10, deadline_s=600)
    verdict = world.finish(stop=False).assert_ok()
    assert verdict.attempts == {"succeeded": len(jobs)}, "nobody took anything from anybody"
    assert verdict.duplicates == 0
    # Whoever takes them, they are late after two seconds and not before.
    late = world.submit_words(12, 20 * 60, deadline_s=2)
    world.expected |= {job_id: Expected(None, ENDED_WELL | {"expired"}) for job_id in late}
    world.finish(stop=False).assert_ok()
    with world.engine.connect() as conn:
        took = [
            (row.finished_at - row.created_at).total_seconds()
            for row in conn.execute(select(Job.created_at, Job.finished_at).where(Job.id.in_(late)))
        ]
    assert all(1.5 < seconds < 15 for seconds in took), took
    ahead = seats[0]
    more = world.submit_words(24, 20 * 5)
    world.wait_running(more)
    held = world.kill(ahead).held  # the two that are left bury it, and neither believes any wall clock
    verdict = world.finish().assert_ok()
    assert verdict.attempts["lost"] == len(held) > 0
    assert verdict.recovery_max_s is not None
    assert verdict.recovery_max_s < 10


@pytest.mark.chaos_long
@pytest.mark.parametrize(
    ("kind", "times"),
    [
        pytest.param("postgresql", 6, marks=pytest.mark.postgres),
        pytest.param("mariadb", 3, marks=pytest.mark.mysql),
        ("sqlite", 3),
    ],
)
def test_warm_shutdowns_under_load_one_after_the_other(make_world: MakeWorld, kind: Kind, times: int) -> None:
    world = make_world(kind, engine={"echo_tokens_per_s": 20, "max_num_seqs": 8}, shutdown_grace_s=5)
    seats = world.workers(2, supervised=True)
    world.submit_words(25 * times, 20)
    world.submit_words(times, 20 * 20)  # longer than the grace: they are handed back
    for number in range(times):
        seat = seats[number % 2]
        seat.replace()
        seat.ready()
        time.sleep(1)  # the successor works for a while
    verdict = world.finish().assert_ok()
    assert set(verdict.exit_codes) == {0}
    assert "lost" not in verdict.attempts, "a warm shutdown loses no run"
    assert verdict.duplicates == 0
    wait_until(lambda: world.redis.unacked() == 0, 5, "nothing unacknowledged")
