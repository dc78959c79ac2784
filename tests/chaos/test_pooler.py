"""Workers whose way to PostgreSQL is a PgBouncer that pools by transaction, and that dies."""

from __future__ import annotations

import signal

import pytest

from models_db.tables import JobState
from tests.chaos.conftest import MakeWorld
from tests.fleet.fleet import wait_until
from tests.pooler import pgbouncer

pytestmark = [pytest.mark.chaos, pytest.mark.postgres, pytest.mark.timeout(180)]

AWAY, BACK = "The database is away", "The database answers again"


def test_jobs_go_on_through_a_pooler_that_is_killed_and_comes_back(make_world: MakeWorld) -> None:
    world = make_world(engine={"echo_tokens_per_s": 20, "max_num_seqs": 8})
    with pgbouncer(world.database_url) as pooler:
        seats = world.workers(2, database_url=pooler.url(world.database_url))
        jobs = world.submit_words(120, 20)
        for outage, done in enumerate((20, 60), start=1):
            world.wait_some(JobState.SUCCEEDED, done)
            pooler.stop()
            wait_until(
                lambda n=outage: all(seat.log.count(AWAY) >= n for seat in seats), 30, "both to miss it"
            )
            pooler.start(world.database_url)
            wait_until(
                lambda n=outage: all(seat.log.count(BACK) >= n for seat in seats), 30, "both to have it again"
            )
        verdict = world.finish().assert_ok()
    assert verdict.attempts == {"succeeded": len(jobs)}, "nothing was run twice"
    assert verdict.exit_codes == [0, 0]
    for seat in seats:
        assert "prepared statement" not in seat.log


def test_a_worker_that_freezes_behind_a_pooler_holds_nobody_up(make_world: MakeWorld) -> None:
    """Whatever transaction it was in, the server ends it; the pooler would leave it open."""
    world = make_world(engine={"echo_tokens_per_s": 20, "max_num_seqs": 8})
    with pgbouncer(world.database_url) as pooler:
        world.workers(2, database_url=pooler.url(world.database_url))
        jobs = world.submit_words(60, 20)
        frozen = world.busy_seat()
        pid = frozen.signal(signal.SIGSTOP)
        assert pid is not None
        world.harm(pid)
        world.wait_some(JobState.SUCCEEDED, len(jobs), 60)
        frozen.kill()
        world.finish().assert_ok()
