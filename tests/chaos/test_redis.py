"""Redis that is killed, emptied and cut off."""

from __future__ import annotations

import contextlib
import signal
import threading
import time

import pytest

from models_db.tables import JobState
from tests.chaos.conftest import MakeWorld
from tests.chaos.seats import Seat
from tests.chaos.sweepers import Elected, sweeping
from tests.chaos.world import World
from tests.fleet.conftest import KINDS
from tests.fleet.fleet import wait_until
from tests.servers import Kind

pytestmark = [pytest.mark.chaos, pytest.mark.postgres, pytest.mark.timeout(240)]

PACED = {"echo_tokens_per_s": 20, "max_num_seqs": 8}


@pytest.mark.chaos_long
@pytest.mark.parametrize(
    ("kind", "keep"),
    [
        pytest.param("postgresql", True, id="with its file", marks=pytest.mark.postgres),
        pytest.param("postgresql", False, id="without its file, postgresql", marks=pytest.mark.postgres),
        pytest.param("mariadb", False, id="without its file, mariadb", marks=pytest.mark.mysql),
        pytest.param("sqlite", False, id="without its file, sqlite"),
    ],
)
def test_redis_is_killed_and_comes_back(make_world: MakeWorld, kind: Kind, keep: bool) -> None:
    world = make_world(kind, engine=PACED, persistent=True)
    world.workers(2)
    world.submit_words(100, 20)
    world.wait_some(JobState.SUCCEEDED)
    for _ in range(2):
        world.redis.kill(keep=keep)
        away = world.submit_words(3, 5)  # accepted all the same
        time.sleep(1)  # an outage has a length
        world.redis.start()
        more = world.submit_words(10, 20)
    wait_until(
        lambda: all(world.states()[job_id].terminal for job_id in [*away, *more]), 60, "the later jobs"
    )
    world.finish().assert_ok()


@pytest.mark.chaos_long
@pytest.mark.parametrize("kind", [pytest.param("postgresql", marks=pytest.mark.postgres), "sqlite"])
def test_connections_are_cut_twenty_times_in_a_row(make_world: MakeWorld, kind: Kind) -> None:
    world = make_world(kind, engine=PACED)
    world.workers(2)
    world.submit_words(60, 40)
    world.wait_some(JobState.RUNNING, 8)
    for number in range(20):
        if number % 2:
            world.redis_proxy.cut()  # as a network does
        else:
            world.redis.cut()  # as the server does
        time.sleep(0.1)
    verdict = world.finish().assert_ok()
    assert verdict.exit_codes == [0, 0]
    assert verdict.attempts == {"succeeded": 60}, "nothing was run again"


def test_connections_that_die_without_a_word_are_missed_soon(make_world: MakeWorld) -> None:
    """New connections work; nobody says that the old ones lead nowhere."""
    world = make_world(engine=PACED)
    seat = world.seat()
    seat.ready()
    (running,) = world.submit_words(1, 40)
    world.wait_state(running, JobState.RUNNING)
    assert world.redis_proxy.strand() > 1
    (later,) = world.submit_words(1, 5)
    world.wait_state(later, JobState.SUCCEEDED, 40)
    verdict = world.finish().assert_ok()
    assert verdict.exit_codes == [0]
    assert verdict.attempts == {"succeeded": 2}, "what ran went on"


def lose_a_message(world: World, how: int) -> tuple[Seat, Seat, str]:
    """Stop a worker between the pop of a message and its note in ``unacked``; the message is nowhere then."""
    victim, other = world.seat(), world.seat(start=False)
    victim.ready()
    held = world.redis_proxy.hold(b"HSET")  # nothing else is kept in a hash
    (job_id,) = world.submit_words(1, 10)
    assert held.wait(30), "the worker has popped the message and is about to note it"
    victim.signal(how)
    assert world.redis.queued(world.queue) == world.redis.unacked() == 0
    assert world.state(job_id) is JobState.QUEUED
    return victim, other, job_id


def test_a_message_lost_before_it_was_noted_is_published_again(make_world: MakeWorld) -> None:
    world = make_world(engine=PACED)
    _, other, job_id = lose_a_message(world, signal.SIGKILL)
    world.redis_proxy.release()
    world.redis_proxy.cut()
    other.start()
    world.wait_state(job_id, JobState.SUCCEEDED, 40)
    assert world.finish().assert_ok().attempts == {"succeeded": 1}


@pytest.mark.chaos_long
def test_a_worker_frozen_before_it_noted_a_message_wakes_too_late(make_world: MakeWorld) -> None:
    world = make_world(engine=PACED)
    frozen, other, job_id = lose_a_message(world, signal.SIGSTOP)
    other.start()
    world.redis_proxy.release()
    world.wait_state(job_id, JobState.SUCCEEDED, 40)
    frozen.signal(signal.SIGCONT)
    verdict = world.finish().assert_ok()
    assert verdict.attempts == {"succeeded": 1}


def test_accepted_jobs_that_redis_never_saw_run(make_world: MakeWorld) -> None:
    """Two workers find the same rows, and each job runs once."""
    world = make_world(engine={"max_num_seqs": 8})
    seats = [world.seat(), world.seat()]
    world.insert_only([{"prompt": f"unseen {n} by redis", "max_tokens": 4} for n in range(200)])
    for seat in seats:
        seat.ready()
    verdict = world.finish().assert_ok()
    assert verdict.attempts == {"succeeded": 200}
    assert verdict.duplicates == 0


@pytest.mark.chaos_long
@pytest.mark.parametrize("kind", KINDS)
def test_two_sweepers_at_once_publish_a_job_once(make_world: MakeWorld, kind: Kind) -> None:
    """Both have seen, when either begins to publish, that every message is missing."""
    world = make_world(kind, engine={"max_num_seqs": 8})
    world.insert_only([{"prompt": f"unseen {n} by redis", "max_tokens": 4} for n in range(200)])
    both = threading.Barrier(2, timeout=60)

    def meet(scan: int) -> None:
        if scan == 2:
            both.wait()

    views = [Elected(world.app.connection_for_write, world.queue, meet) for _ in range(2)]
    with contextlib.ExitStack() as stack:
        for number, view in enumerate(views):
            stack.enter_context(sweeping(view, world.database_url, world.queue, f"sweeper{number}"))
        wait_until(lambda: world.redis.queued(world.queue) >= 200, 60, "the messages")
        counts = [view.counts for view in views]
        wait_until(
            lambda: all(view.counts > before + 2 for view, before in zip(views, counts, strict=True)),
            30,
            "both to look again",
        )
    assert min(view.scans for view in views) >= 2
    assert world.redis.queued(world.queue) == 200, "each message was published once"
    world.workers(1)
    assert world.finish().assert_ok().attempts == {"succeeded": 200}
