"""Workers that are killed, frozen and thought dead."""

from __future__ import annotations

import random
import signal
import time

import pytest

from models_db.tables import JobState
from tests.chaos.conftest import MakeWorld
from tests.chaos.world import World
from tests.fleet.fleet import wait_until
from tests.servers import Kind

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(240)]

PACED = {"echo_tokens_per_s": 20, "max_num_seqs": 8}
RECOVERY_TARGET_S = 10.0
SERVERS = [
    pytest.param("postgresql", marks=pytest.mark.postgres),
    pytest.param("mariadb", marks=pytest.mark.mysql),
]


def kill_one(world: World) -> None:
    """Two workers under load, of which one is killed at a moment that depends on nothing."""
    seats = world.workers(2)
    world.submit_words(60, 20)
    world.submit_words(4, 200)
    world.wait_some(JobState.SUCCEEDED)
    time.sleep(random.uniform(0, 0.5))  # the moment is to be any
    world.kill(world.busy_seat())
    assert (
        len([seat for seat in seats if seat.pid() is not None and seat.current.process.poll() is None]) == 1
    )
    verdict = world.finish().assert_ok()
    assert verdict.attempts["lost"] >= 1
    assert verdict.recovery_max_s is not None, "the victim held jobs, so somebody claimed them again"
    assert verdict.recovery_max_s < RECOVERY_TARGET_S


@pytest.mark.postgres
def test_a_killed_worker_costs_nothing_but_time(make_world: MakeWorld) -> None:
    kill_one(make_world("postgresql", engine=PACED))


@pytest.mark.chaos_long
@pytest.mark.parametrize(
    "kind", ["sqlite", pytest.param("mariadb", marks=pytest.mark.mysql)], ids=["sqlite", "mariadb"]
)
def test_a_killed_worker_costs_nothing_on_other_databases(make_world: MakeWorld, kind: Kind) -> None:
    kill_one(make_world(kind, engine=PACED))


@pytest.mark.postgres
@pytest.mark.chaos_long
def test_all_workers_killed_at_once_and_started_again_by_their_supervisors(make_world: MakeWorld) -> None:
    world = make_world("postgresql", engine=PACED)
    seats = world.workers(2, supervised=True)
    world.submit_words(80, 20)
    world.submit_words(4, 300)
    for _ in range(3):
        world.wait_some(JobState.RUNNING, 4)
        pids = {seat.pid() for seat in seats}
        world.kill(*seats)
        wait_until(
            lambda pids=pids: pids.isdisjoint({seat.pid() for seat in seats}), 10, "the dead to be gone"
        )
        wait_until(lambda: None not in {seat.pid() for seat in seats}, 20, "the supervisors to start others")
    world.finish().assert_ok()
    assert "was killed by SIGKILL; starting again" in seats[0].log


@pytest.mark.chaos_long
@pytest.mark.parametrize("kind", [*SERVERS, "sqlite"])
def test_a_worker_frozen_past_its_death_sentence_loses_its_late_commits(
    make_world: MakeWorld, kind: Kind
) -> None:
    world = make_world(kind, engine=PACED)
    seats = world.workers(2)
    jobs = world.submit_words(12, 60)
    world.wait_running(jobs)
    frozen = world.seat_of(jobs[0])
    theirs = [job_id for job_id in jobs if world.seat_of(job_id) is frozen]
    with world.fault("freeze"):
        frozen.signal(signal.SIGSTOP)
        wait_until(
            lambda: all(len(world.attempts(job_id)) > 1 for job_id in theirs), 40, "others to take over"
        )
        # Its own clock has gone on: when it wakes, all its jobs are complete and it commits them, too late.
        frozen.signal(signal.SIGCONT)
    assert frozen.current.wait(30) == 75
    frozen.start()
    frozen.ready()
    verdict = world.finish().assert_ok()
    assert verdict.attempts["lost"] >= len(theirs)
    assert [code for code in verdict.exit_codes if code] == [75]
    assert len(seats) == 2


@pytest.mark.chaos_long
@pytest.mark.parametrize("kind", SERVERS)
def test_a_worker_frozen_within_a_commit_holds_nobody_up(make_world: MakeWorld, kind: Kind) -> None:
    """It has locked the rows of its jobs and sends no more: the others must not wait for those locks for ever."""
    world = make_world(kind, engine=PACED)
    frozen, other = world.seat(), world.seat(start=False)
    frozen.ready()
    jobs = world.submit_words(4, 40)
    world.wait_running(jobs)
    assert world.database_proxy is not None
    held = world.database_proxy.hold(b"INTO result")
    assert held.wait(30), "a result is about to be written"
    with world.fault("freeze"):
        frozen.signal(signal.SIGSTOP)
        other.start()
        other.ready()
        more = world.submit_words(8, 20)
        wait_until(
            lambda: all(world.states()[job_id].terminal for job_id in [*jobs, *more]), 60, "others to go on"
        )
        world.database_proxy.release()
        frozen.signal(signal.SIGCONT)
    assert frozen.current.wait(30) == 75
    verdict = world.finish().assert_ok()
    assert verdict.duplicates >= 1, "what it was about to commit came too late"
    assert verdict.exit_codes == [75, 0]


@pytest.mark.postgres
@pytest.mark.chaos_long
def test_a_job_may_outlast_many_visibility_timeouts(make_world: MakeWorld) -> None:
    world = make_world("postgresql", engine=PACED)
    world.workers(2)
    jobs = world.submit_words(4, 20 * 45)
    verdict = world.finish().assert_ok()
    assert verdict.attempts == {"succeeded": len(jobs)}
    assert verdict.duplicates == 0
