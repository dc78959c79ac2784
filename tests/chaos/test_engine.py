"""The asynchronous engine under each fault: the same texts as without it, and every block free afterwards."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from sqlalchemy import func, select

from models_db.tables import EngineSample, JobState
from tests.chaos.conftest import MakeWorld
from tests.chaos.faults import Faults
from tests.chaos.plan import Step
from tests.chaos.world import World
from tests.servers import Kind

pytestmark = [pytest.mark.chaos, pytest.mark.chaos_long, pytest.mark.timeout(290)]

ENGINE = {"echo_tokens_per_s": 20, "max_num_seqs": 8}
# How long each lasts, and what it must have done to some job, else it came too early or too late.
FAULTS: dict[str, tuple[float, str | None]] = {
    "kill_one": (0.0, "lost"),
    "kill_all": (0.0, "lost"),
    "freeze_past_death": (10.0, "lost"),
    "poison": (0.0, "lost"),
    "warm_restart": (0.0, None),
    "redis_kill": (1.0, None),
    "redis_cuts": (2.0, None),
    "database_stop": (4.0, None),
    "database_cuts": (2.0, None),
    "cancels": (0.0, "cancelled"),
    "revokes": (0.0, "cancelled"),
}


def assert_blocks_were_used(world: World) -> None:
    """Else that all are free afterwards, which ``finish`` looks at, says nothing."""
    assert world.read(lambda conn: conn.scalar(select(func.max(EngineSample.kv_used_fraction)))) > 0


def outcomes(world: World, outcome: str) -> int:
    """How many jobs and attempts have come to this."""
    states = list(world.states().values()).count(JobState.CANCELLED)
    return (
        states
        if outcome == "cancelled"
        else sum(world.attempts(job).count(outcome) for job in world.states())
    )


@pytest.mark.parametrize(
    ("kind", "faults"),
    [
        pytest.param(
            "postgresql", ("cancels", "revokes", "redis_cuts", "database_cuts"), id="cuts and cancels"
        ),
        pytest.param("postgresql", ("kill_one", "kill_all", "warm_restart"), id="ends of workers"),
        pytest.param("mariadb", ("freeze_past_death", "redis_kill", "database_stop"), id="servers"),
        pytest.param("sqlite", ("poison",), id="a prompt that kills"),
    ],
)
def test_no_fault_changes_a_text_or_leaks_a_block(
    make_world: MakeWorld, kind: Kind, faults: Sequence[str]
) -> None:
    """On the same two workers one after the other, each judged before the next comes."""
    world = make_world(
        kind, real=True, persistent=True, engine=ENGINE, shutdown_grace_s=3, restart_backoff_max_s=1.0
    )
    world.workers(2, supervised=True)
    does = Faults(world)
    for number, fault in enumerate(faults):
        lasts, outcome = FAULTS[fault]
        before = outcomes(world, outcome) if outcome else 0
        world.submit_words(20, 20)
        world.submit_words(4, 120)
        world.wait_some(JobState.RUNNING, 8)
        world.wait_samples(1)
        with world.fault(fault):
            does.do(Step(0.0, fault, lasts, number))
        world.finish(100, stop=False).assert_ok()
        assert outcome is None or outcomes(world, outcome) > before, f"{fault} did not meet any job"
    verdict = world.finish().assert_ok()
    assert not any(verdict.exit_codes)
    assert_blocks_were_used(world)
