"""Workers that are killed, frozen and thought dead."""

from __future__ import annotations

import random
import signal
import time

import pytest

from models_db.tables import JobState
from tests.chaos.backends import HOLD_VARIABLE
from tests.chaos.conftest import MakeWorld
from tests.chaos.test_engine import assert_blocks_were_used
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


def kill_one(world: World, *, short: bool = False) -> None:
    """Two workers under load, of which one is killed at a moment that depends on nothing."""
    seats = world.workers(2)
    world.submit_words(24 if short else 60, 20)
    world.submit_words(4, 80 if short else 200)
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
    """With a real engine: the texts are those of one to which nothing happens, and the survivor's blocks are free."""
    world = make_world("postgresql", real=True, engine=PACED)
    kill_one(world, short=True)
    assert_blocks_were_used(world)


@pytest.mark.chaos_long
@pytest.mark.parametrize("kind", [*SERVERS, "sqlite"])
def test_a_killed_worker_costs_nothing_on_any_database(make_world: MakeWorld, kind: Kind) -> None:
    kill_one(make_world(kind, engine=PACED))


@pytest.mark.chaos_long
@pytest.mark.parametrize("kind", [*SERVERS, "sqlite"])
def test_all_workers_killed_at_once_and_started_again_by_their_supervisors(
    make_world: MakeWorld, kind: Kind
) -> None:
    world = make_world(kind, engine=PACED)
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
    """It is frozen with the ends of jobs in its hands, and commits them once it wakes: too late."""
    world = make_world(kind, engine=PACED)
    file = world.folder / "hold"
    file.touch()
    frozen = world.seat(
        backend="tests.chaos.backends:waits_before_a_commit", variables={HOLD_VARIABLE: str(file)}
    )
    other = world.seat(start=False, engine=PACED | {"echo_tokens_per_s": 2})  # has not ended them by then
    frozen.ready()
    jobs = world.submit_words(8, 20)
    wait_until(file.read_text, 30, "a commit")
    # Within a transaction, so that no thread of it has locked an SQLite file: nobody could get past that.
    with world.engine.begin():
        pid = frozen.signal(signal.SIGSTOP)
        assert pid is not None
        wait_until(lambda: frozen.frozen, 30, "the worker to stand still")
    file.unlink()
    (harm,) = world.harm(pid)
    with world.fault("freeze"):
        assert {world.states()[job_id] for job_id in jobs} == {JobState.RUNNING}
        other.start()
        wait_until(
            lambda: all(len(world.attempts(job_id)) > 1 for job_id in jobs), 60, "the other one to take over"
        )
        assert {world.states()[job_id] for job_id in jobs} == {JobState.RUNNING}, (
            "nothing but the fence refuses"
        )
        frozen.signal(signal.SIGCONT)
        harm.ended = time.time()
    assert frozen.current.wait(30) == 75
    frozen.start()
    frozen.ready()
    verdict = world.finish().assert_ok()
    assert verdict.duplicates >= 1, "what it was about to commit came too late"
    assert verdict.attempts == {"lost": len(jobs), "succeeded": len(jobs)}
    assert verdict.exit_codes == [75, 0, 0]


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
