"""Links, chains, groups, chords and the options of ``apply_async``, against a real worker and the Redis backend."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from celery import chain, chord, group
from celery.exceptions import TaskRevokedError
from celery.exceptions import TimeoutError as CeleryTimeoutError

from backend.api import UnknownModelError
from models_db.tables import AttemptOutcome, JobState
from tests.fleet.celery_fleet import PROMPT, CeleryFleet, celery_fleet
from tests.fleet.fleet import PATIENCE_S, wait_until

TASK = "tokenmill.generate"
FOR_EVER = 100_000
GRAIN_S = 0.05  # of clocks


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CeleryFleet]:
    with celery_fleet(tmp_path_factory.mktemp("canvas")) as fleet:
        fleet.observed_worker()
        yield fleet


def collected(fleet: CeleryFleet, text: str) -> int:
    """How often the link began that was given this answer."""
    begun = [
        note for note in fleet.seen() if (note["what"], note["sender"]) == ("task_prerun", "tests.collect")
    ]
    return sum(isinstance(note["args"][0], dict) and note["args"][0]["text"] == text for note in begun)


def test_links_chains_groups_and_chords(fleet: CeleryFleet) -> None:
    linked = fleet.signature(1).apply_async(link=fleet.task("collect"))
    assert linked.get(timeout=20)["text"] == PROMPT
    (child,) = wait_until(lambda: linked.children, PATIENCE_S, "the link")
    assert child.get(timeout=20) == {"collected": [PROMPT]}
    two = chain(
        fleet.signature(1, "first"),
        fleet.task("prompt"),
        fleet.app.signature(TASK, queue=fleet.queue),
        fleet.task("collect"),
    )
    assert two().get(timeout=20) == {"collected": ["next first"]}, (
        "a second generation job, made of the first's answer"
    )
    many = group(fleet.signature(1, f"g{n}") for n in range(4)).apply_async()
    assert [value["text"] for value in many.get(timeout=20)] == ["g0", "g1", "g2", "g3"]
    header = [fleet.signature(1, f"c{n}") for n in range(4)]
    assert chord(header)(fleet.task("collect")).get(timeout=20) == {"collected": ["c0", "c1", "c2", "c3"]}


def test_a_failure_calls_link_error_and_no_link(fleet: CeleryFleet) -> None:
    wrong = fleet.app.signature(TASK, args=[{"model": "nobody", "prompt": "x"}], queue=fleet.queue)
    task = wrong.apply_async(link=fleet.task("collect"), link_error=fleet.task("console"))
    with pytest.raises(UnknownModelError):
        task.get(timeout=20)

    fleet.workers[0].wait_for(f"told of {task.id}: UnknownModelError")
    assert not task.children


def test_the_state_of_a_result_through_its_life(fleet: CeleryFleet) -> None:
    both = [fleet.signature(FOR_EVER).apply_async() for _ in range(2)]
    for task in both:
        wait_until(lambda task=task: task.state == "STARTED", PATIENCE_S, "STARTED")
    waiting = fleet.signature(1).apply_async()
    with pytest.raises(CeleryTimeoutError):
        waiting.get(timeout=0.3)
    assert waiting.state == "PENDING", "it waits for a slot"
    for task in both:
        task.revoke(terminate=True)
    assert waiting.get(timeout=20)["completion_tokens"] == 1
    assert (waiting.state, waiting.successful()) == ("SUCCESS", True)
    for task in both:
        with pytest.raises(TaskRevokedError):
            task.get(timeout=20)
        assert task.state == "REVOKED"
        fleet.wait_state(task.id, JobState.CANCELLED)


def test_options_of_apply_async(fleet: CeleryFleet) -> None:
    sent_at = time.monotonic()
    due = fleet.signature(1).apply_async(countdown=0.5, headers={"tenant": "t"}, priority=9, expires=60)
    assert due.get(timeout=20)["completion_tokens"] == 1
    received, prerun = fleet.wait_seen(due.id, "task_postrun")[:2]
    assert received["info"]["delivery_info"]["priority"] == 9
    assert prerun["at"] - sent_at > 0.5 - GRAIN_S, "it waits for its time"
    late = fleet.signature(1).apply_async(expires=-1)
    with pytest.raises(TaskRevokedError, match="expired"):
        late.get(timeout=20)
    fleet.wait_state(late.id, JobState.EXPIRED)
    sent = fleet.signature(1).apply_async(retry=True, retry_policy={"max_retries": 1, "interval_start": 0})
    assert sent.get(timeout=20)["completion_tokens"] == 1
    assert fleet.task("flaky", 2).apply_async(retry=False).get(timeout=20) == 2, (
        "a user's task may retry itself"
    )
    fleet.wait_drained()


def test_callbacks_follow_once_after_a_second_delivery_and_after_a_death(fleet: CeleryFleet) -> None:
    twice = fleet.signature(10, "twice", task_id="delivered-twice", link=fleet.task("collect"))
    for _ in range(2):
        twice.apply_async(task_id="delivered-twice", link=fleet.task("collect"))
    text = " ".join(["twice"] * 10)
    wait_until(lambda: collected(fleet, text), 20, "the link")
    fleet.wait_drained()
    twice.apply_async(task_id="delivered-twice", link=fleet.task("collect"))
    fleet.wait_drained()
    assert collected(fleet, text) == 1
    assert fleet.attempts("delivered-twice") == [AttemptOutcome.SUCCEEDED]

    wrong = fleet.app.signature(TASK, args=[{"model": "nobody", "prompt": "x"}], queue=fleet.queue)
    for _ in range(3):
        wrong.apply_async(task_id="fails-once", link_error=fleet.task("console"))
        fleet.workers[0].wait_for("told of fails-once: UnknownModelError")
        fleet.wait_drained()
    assert fleet.workers[0].log.count("told of fails-once: UnknownModelError") == 1

    (first,) = fleet.workers
    orphan = fleet.signature(60, "orphan").apply_async(link=fleet.task("collect"))
    fleet.wait_state(orphan.id, JobState.RUNNING)
    first.kill()
    fleet.observed_worker()
    assert orphan.get(timeout=30)["completion_tokens"] == 60
    text = " ".join(["orphan"] * 60)
    wait_until(lambda: collected(fleet, text), 20, "the link of the job that was taken over")
    fleet.wait_drained()
    assert collected(fleet, text) == 1
    assert fleet.attempts(orphan.id) == [AttemptOutcome.LOST, AttemptOutcome.SUCCEEDED]
