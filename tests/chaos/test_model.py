"""The engine with a real model under a kill: the same texts as without one, and every block free afterwards."""

from __future__ import annotations

import pytest

from models_db.tables import JobState
from tests.chaos.conftest import MakeWorld
from tests.fleet.fleet import wait_until

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.chaos_long,
    pytest.mark.postgres,
    pytest.mark.model,
    pytest.mark.timeout(600),
]

PROMPTS = [
    "Once upon a time",
    "The capital of France is",
    "def fibonacci(n):",
    "Water boils at",
    "My favourite",
]


def test_a_killed_engine_changes_no_text_and_leaks_no_block(make_world: MakeWorld) -> None:
    world = make_world(backend="async", model="smollm2", engine={"max_num_seqs": 8, "num_kv_blocks": 400})
    seats = [world.seat(), world.seat()]
    for seat in seats:
        seat.ready()
    requests = [
        {"prompt": f"{prompt} number {n}", "max_tokens": 24, "temperature": 0.0}
        for n in range(2)
        for prompt in PROMPTS
    ]
    calm = world.submit(requests)
    wait_until(lambda: all(world.states()[job_id].terminal for job_id in calm), 90, "the calm run")
    texts = world.texts(calm)
    stormy = world.submit(requests * 2)
    for job_id, text in zip(stormy, texts * 2, strict=True):
        world.expected[job_id].text = text
    world.wait_some(JobState.SUCCEEDED, len(calm) + 1, 60)
    world.kill(world.busy_seat())
    verdict = world.finish().assert_ok()
    assert verdict.attempts["lost"] >= 1
    assert verdict.attempts["succeeded"] == len(calm) + len(stormy)
