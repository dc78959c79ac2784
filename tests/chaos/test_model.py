"""The engine with a real model under faults: the same texts as without them, and every block free afterwards."""

from __future__ import annotations

import signal
import time

import pytest
from sqlalchemy import func, select

from models_db.tables import EngineSample, JobState
from tests.chaos.conftest import MakeWorld
from tests.chaos.jobs import CANCELLABLE
from tests.chaos.world import World
from tests.fleet.fleet import wait_until

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.chaos_long,
    pytest.mark.postgres,
    pytest.mark.model,
    pytest.mark.timeout(600),
]

ENGINE = {"max_num_seqs": 8, "num_kv_blocks": 400}
PROMPTS = [
    "Once upon a time",
    "The capital of France is",
    "def fibonacci(n):",
    "Water boils at",
    "My favourite",
]
REQUESTS = [
    {"prompt": f"{prompt} number {n}", "max_tokens": 24, "temperature": 0.0}
    for n in range(2)
    for prompt in PROMPTS
]


def calm_texts(world: World) -> list[str]:
    """What the model says while nothing goes wrong."""
    calm = world.submit(REQUESTS)
    wait_until(lambda: all(world.states()[job_id].terminal for job_id in calm), 90, "the calm run")
    return world.texts(calm)


def assert_blocks_were_used(world: World) -> None:
    """Else that all are free afterwards, which ``finish`` looks at, says nothing."""
    assert world.read(lambda conn: conn.scalar(select(func.max(EngineSample.kv_used_fraction)))) > 0


def test_a_killed_engine_changes_no_text_and_leaks_no_block(make_world: MakeWorld) -> None:
    world = make_world(backend="async", model="smollm2", engine=ENGINE)
    seats = [world.seat(), world.seat()]
    for seat in seats:
        seat.ready()
    texts = calm_texts(world)
    stormy = world.submit(REQUESTS * 2)
    for job_id, text in zip(stormy, texts * 2, strict=True):
        world.expected[job_id].text = text
    world.wait_some(JobState.SUCCEEDED, len(texts) + 1, 60)
    world.kill(world.busy_seat())
    verdict = world.finish().assert_ok()
    assert verdict.attempts["lost"] >= 1
    assert verdict.attempts["succeeded"] == len(texts) + len(stormy)
    assert_blocks_were_used(world)


def test_cancels_revokes_cuts_and_a_freeze_change_no_text_and_leak_no_block(make_world: MakeWorld) -> None:
    """On one engine, which lives through all of it: what is left half done must give its blocks back."""
    world = make_world(backend="async", model="smollm2", engine=ENGINE)
    (seat,) = world.workers(1)
    texts = calm_texts(world)
    for number in range(4):
        stormy = world.submit(REQUESTS)
        for job_id, text in zip(stormy, texts, strict=True):
            world.expected[job_id].text = text
        doomed = world.submit([{"prompt": f"On and on {n}", "max_tokens": 400} for n in range(6)])
        for job_id in doomed:
            world.expected[job_id].states = CANCELLABLE
        world.wait_some(JobState.RUNNING, 4, 60)
        match number:
            case 0:
                world.redis_proxy.cut()
            case 1:
                assert world.database_proxy is not None
                world.database_proxy.cut()
            case 2:
                seat.signal(signal.SIGSTOP)
                time.sleep(2)  # shorter than death
                seat.signal(signal.SIGCONT)
            case _:
                world.redis.cut()
        for job_id in doomed[:3]:
            world.client.cancel(job_id)
        world.app.control.revoke(doomed[3:], terminate=True)
        wait_until(
            lambda stormy=stormy: all(world.states()[job_id].terminal for job_id in stormy), 120, "texts"
        )
        for job_id in doomed:
            world.client.cancel(job_id)  # a revoke is lost while no connection listens
    verdict = world.finish().assert_ok()
    assert verdict.exit_codes == [0]
    assert verdict.attempts["cancelled"] >= 4, "some were under way"
    assert_blocks_were_used(world)
