"""A database that stops, hangs and drops connections; a disk that is full when results must wait."""

from __future__ import annotations

import contextlib
import random
import time

import pytest
from sqlalchemy import make_url

from models_db.tables import JobState
from tests.chaos.conftest import MakeWorld
from tests.chaos.disks import NoFullDiskError, small_disk
from tests.chaos.proxy import Proxy
from tests.chaos.services import drop_clients
from tests.chaos.test_kills import SERVERS
from tests.fleet.fleet import wait_until
from tests.servers import Kind

pytestmark = [pytest.mark.chaos, pytest.mark.postgres, pytest.mark.timeout(240)]

SILENT = "is dead: its heartbeat stands still"
CUT_OFF = "it takes no messages"
CONSUMES = "messages are taken from the queues again"
PACED = {"echo_tokens_per_s": 20, "max_num_seqs": 8}


@pytest.mark.chaos_long
@pytest.mark.parametrize(
    ("kind", "seconds"),
    [
        pytest.param("postgresql", 4, marks=pytest.mark.postgres),
        pytest.param("postgresql", 60, marks=pytest.mark.postgres),
        pytest.param("mariadb", 12, marks=pytest.mark.mysql),
    ],
)
def test_the_database_is_stopped(make_world: MakeWorld, kind: Kind, seconds: int) -> None:
    world = make_world(kind, engine=PACED)
    world.workers(2)
    jobs = world.submit_words(24, 40)
    world.wait_some(JobState.RUNNING, 16)
    assert world.server is not None
    world.server.stop()
    time.sleep(seconds)  # the length of the outage
    assert world.redis.unacked() > 0, "what could not be committed is not acknowledged"
    world.server.start()
    verdict = world.finish().assert_ok()
    assert verdict.exit_codes == [0, 0]
    # A claim that was on its way when the worker gave its messages back, and is committed once the database is back,
    # is released: nothing of it ran.
    ran = {outcome: count for outcome, count in verdict.attempts.items() if outcome != "released"}
    assert ran == {"succeeded": len(jobs)}, "the results waited and nothing was run again"


@pytest.mark.chaos_long
@pytest.mark.parametrize("kind", SERVERS)
def test_connections_to_the_database_are_dropped_again_and_again(make_world: MakeWorld, kind: Kind) -> None:
    """By the network and by the server, in between and in the middle of transactions."""
    world = make_world(kind, engine=PACED)
    world.workers(2)
    jobs = world.submit_words(150, 10)
    assert world.database_proxy is not None
    cuts = 0
    for number in range(40):
        cuts += drop_clients(world.engine) if number % 2 else world.database_proxy.cut()
        # Some transactions get through, some are cut after their commit.
        time.sleep(random.uniform(0.05, 0.6))
    assert cuts > 10
    verdict = world.finish().assert_ok()
    assert verdict.attempts == {"succeeded": len(jobs)}


@pytest.mark.chaos_long
def test_the_database_hangs_without_a_word(make_world: MakeWorld) -> None:
    world = make_world(engine=PACED)
    world.workers(2)
    world.submit_words(60, 20)
    world.wait_some(JobState.RUNNING, 16)
    assert world.database_proxy is not None
    world.database_proxy.freeze()
    time.sleep(10)  # longer than a death sentence
    world.database_proxy.forward()
    world.finish().assert_ok()


@pytest.mark.chaos_long
@pytest.mark.parametrize("how", ["refused", "silent"])
def test_one_worker_is_cut_off_from_the_database_while_the_others_live(
    make_world: MakeWorld, how: str
) -> None:
    """It can neither beat nor store: the others take over what it ran, and get what it has taken and cannot claim."""
    world = make_world(engine=PACED)
    assert world.database_proxy is not None
    own = Proxy(world.database_proxy.target)
    try:
        url = (
            make_url(str(world.settings["database_url"]))
            .set(port=own.port)
            .render_as_string(hide_password=False)
        )
        lonely = world.seat(supervised=True, database_url=url)
        (other,) = world.workers(1, supervised=True)
        lonely.ready()
        jobs = world.submit_words(16, 20 * 6)
        world.wait_running(jobs)
        pid = lonely.pid()
        assert pid is not None
        world.harm(pid)
        with world.fault("one worker without a database"):
            own.refuse() if how == "refused" else own.freeze()
            more = world.submit_words(24, 20)
            wait_until(lambda: SILENT in other.log, 60, "the other worker to find it dead")
            wait_until(lambda: CUT_OFF in lonely.log, 10, "the lonely worker to notice")
            # For the other one what is left is a dozen seconds of work.
            world.wait_some(JobState.SUCCEEDED, len(jobs) + len(more), 30)
            assert lonely.pid() == pid, "it is still there, and still cut off"
            assert CONSUMES not in lonely.log
            own.forward()
        verdict = world.finish().assert_ok()
    finally:
        own.close()
    assert verdict.attempts["lost"] > 0
    assert verdict.attempts["succeeded"] == len(jobs) + len(more)
    assert set(verdict.attempts) <= {"lost", "released", "succeeded"}, "nothing counts as failed"


@pytest.mark.chaos_long
@pytest.mark.parametrize("kind", SERVERS)
def test_results_wait_in_memory_when_the_disk_of_the_spool_is_full(make_world: MakeWorld, kind: Kind) -> None:
    world = make_world(kind, engine=PACED)
    with contextlib.ExitStack() as stack:
        try:
            disk = stack.enter_context(small_disk(world.folder / "full"))
        except NoFullDiskError as exc:
            pytest.skip(f"NOT TESTED: A FULL DISK: {exc}")
        disk.fill()
        (seat,) = world.workers(1, spool_dir=str(disk.folder))
        jobs = world.submit_words(16, 30)
        world.wait_some(JobState.RUNNING, 8)
        assert world.server is not None
        world.server.stop()
        time.sleep(4)
        world.server.start()
        verdict = world.finish().assert_ok()
        assert verdict.attempts == {"succeeded": len(jobs)}
        assert "spool" in seat.log.lower(), "the operator is told"


@pytest.mark.chaos_long
def test_a_spooled_result_outlives_its_worker(make_world: MakeWorld) -> None:
    world = make_world(engine=PACED)
    spool = world.folder / "spool"
    (seat,) = world.workers(1, spool_dir=str(spool))
    jobs = world.submit_words(8, 80)
    world.wait_running(jobs)
    assert world.server is not None
    world.server.stop()

    def spooled() -> bool:
        return sum(path.read_bytes().count(b"\n") for path in spool.rglob("*.spool")) == len(jobs)

    wait_until(spooled, 30, "all results to be in the spool")
    seat.kill()
    world.server.start()
    seat.start()
    seat.ready()
    verdict = world.finish().assert_ok()
    assert verdict.attempts == {"succeeded": len(jobs)}, "nothing was run again"
