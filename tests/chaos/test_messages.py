"""Messages that come twice, are revoked, cannot be read, or are for a later version."""

from __future__ import annotations

import base64
import json
import signal
import uuid
from typing import Any

import pytest
from sqlalchemy import update

from models_db.deaths import ALONE_DEATHS, SUSPECT_DEATHS
from models_db.tables import Job, JobState
from tests.chaos.conftest import MakeWorld
from tests.chaos.jobs import CANCELLABLE, FAILS, Expected
from tests.chaos.world import MODEL, World
from tests.fleet.conftest import KINDS
from tests.fleet.fleet import wait_until
from tests.messages import build_message
from tests.servers import Kind
from workers.payload import GeneratePayload

pytestmark = [pytest.mark.chaos, pytest.mark.postgres, pytest.mark.timeout(180)]

PACED = {"echo_tokens_per_s": 20, "max_num_seqs": 4}


@pytest.mark.chaos_long
@pytest.mark.parametrize("kind", KINDS)
def test_one_job_delivered_many_times_runs_once(make_world: MakeWorld, kind: Kind) -> None:
    world = make_world(kind, engine=PACED)
    jobs = world.submit_words(6, 40)
    for _ in range(5):
        world.publish_again(jobs)
    world.workers(2)
    world.wait_some(JobState.RUNNING, len(jobs))
    for _ in range(5):
        world.publish_again(jobs)
    world.wait_some(JobState.SUCCEEDED, len(jobs))
    world.publish_again(jobs)
    verdict = world.finish().assert_ok()
    assert verdict.attempts == {"succeeded": len(jobs)}
    assert verdict.duplicates == 0


@pytest.mark.chaos_long
@pytest.mark.parametrize(
    ("kind", "terminate"),
    [
        pytest.param("postgresql", False, id="revoke", marks=pytest.mark.postgres),
        pytest.param("postgresql", True, id="revoke and terminate, postgresql", marks=pytest.mark.postgres),
        pytest.param("mariadb", True, id="revoke and terminate, mariadb", marks=pytest.mark.mysql),
        pytest.param("sqlite", True, id="revoke and terminate, sqlite"),
    ],
)
def test_revoked_in_each_state(make_world: MakeWorld, kind: Kind, terminate: bool) -> None:
    world = make_world(kind, engine={"echo_tokens_per_s": 20, "max_num_seqs": 2}, prefetch_headroom=2)
    (seat,) = world.workers(1)

    def revoke(*ids: str) -> None:
        for job_id in ids:
            world.expected[job_id].states = CANCELLABLE

        def heard() -> object:  # not yet by a worker that has just started
            return world.app.control.revoke(list(ids), terminate=terminate, reply=True, timeout=5, limit=1)

        wait_until(heard, 30, "the worker to hear of it")

    fields = [{"prompt": f"job {n}", "max_tokens": 60, "priority": 3} for n in range(9)]
    fields[6] |= {"max_tokens": 200}  # outlasts the beginning of the drain
    running, kept, *prefetched, queued, late, last, more, beyond = jobs = world.submit(fields)
    world.wait_running([running, kept])
    wait_until(lambda: world.redis.unacked() >= 4, 10, "the headroom to be filled")
    revoke(running, prefetched[0], queued)
    done = world.submit_words(1, 1)  # a revoke of what has ended does nothing
    if terminate:
        world.wait_state(running, JobState.CANCELLED)
    earlier = [running, kept, *prefetched, queued, late]
    wait_until(
        lambda: all(world.states()[job_id].terminal for job_id in earlier), 60, "the earlier ones to end"
    )
    world.wait_state(last, JobState.RUNNING)  # and with a slot of its own: nobody else wants one
    seat.signal(signal.SIGTERM)  # draining
    seat.current.wait_for("Draining")
    revoke(last, beyond)  # what runs, and what will be handed back
    seat.current.wait(60)
    assert world.state(last) is (JobState.CANCELLED if terminate else JobState.SUCCEEDED)
    seat.start()
    seat.ready()
    world.wait_state(done[0], JobState.SUCCEEDED)
    revoke(*done)
    verdict = world.finish().assert_ok()
    assert verdict.jobs == len(jobs) + 1
    states = world.states()
    assert states[queued] is states[prefetched[0]] is states[beyond] is JobState.CANCELLED
    assert states[running] is (JobState.CANCELLED if terminate else JobState.SUCCEEDED)
    assert states[kept] is states[late] is states[more] is states[done[0]] is JobState.SUCCEEDED


@pytest.mark.chaos_long
@pytest.mark.parametrize("deaths", [SUSPECT_DEATHS, ALONE_DEATHS], ids=["in a group", "alone"])
def test_a_suspect_can_be_revoked_before_and_while_it_runs(make_world: MakeWorld, deaths: int) -> None:
    """Suspects have no delivery, and so no request in which Celery could find them."""
    world = make_world(engine={"echo_tokens_per_s": 20, "max_num_seqs": 1})  # a group is one then
    running, waiting, kept = jobs = [  # one by one, because the oldest runs first
        *world.insert_only([{"prompt": "suspect one", "max_tokens": 20 * 60}]),
        *world.insert_only([{"prompt": "suspect two", "max_tokens": 20}]),
        *world.insert_only([{"prompt": "suspect three", "max_tokens": 20}]),
    ]
    with world.engine.begin() as conn:
        conn.execute(update(Job).where(Job.id.in_(jobs)).values(deaths=deaths))
    world.workers(1)
    world.wait_state(running, JobState.RUNNING)
    for job_id in (running, waiting):
        world.expected[job_id].states = frozenset({"cancelled"})

    def heard() -> bool:  # not yet by a worker that has just started
        return "ok" in str(world.app.control.revoke([waiting, running], reply=True, timeout=5, limit=1))

    wait_until(heard, 30, "the worker to know of it")
    world.wait_samples(2)  # each a second apart: it has looked twice at what is revoked
    assert world.state(running) is JobState.RUNNING, "it has begun, and was not to be terminated"
    world.app.control.revoke(running, terminate=True, reply=True, timeout=5, limit=1)
    world.wait_state(running, JobState.CANCELLED, 10)
    world.finish().assert_ok()
    assert world.state(kept) is JobState.SUCCEEDED
    assert world.attempts(waiting) == [], "cancelled in SQL before its turn came"


def message_for(world: World, **payload: Any) -> dict[str, Any]:
    parsed = GeneratePayload.parse({"model": MODEL, "prompt": "unread words", "max_tokens": 2} | payload)
    return build_message(str(uuid.uuid4()), parsed)


@pytest.mark.chaos_long
def test_bodies_that_cannot_be_read_disturb_nobody(make_world: MakeWorld) -> None:
    world = make_world(engine=PACED)
    world.workers(2)
    jobs = world.submit_words(20, 30)
    message = message_for(world)
    for body in ("%%%", "bm8ganNvbg==", "gAJ9cQAu", ""):  # no base64, no JSON, a pickle, nothing
        world.push_message(
            message | {"body": body, "headers": message["headers"] | {"id": str(uuid.uuid4())}}
        )
    world.push_message(message | {"content-type": "application/x-python-serialize"})
    jobs += world.submit_words(20, 10)
    wait_until(lambda: all(world.states()[job_id].terminal for job_id in jobs), 60, "the others to end")
    for job_id in world.states().keys() - world.expected.keys():
        world.expected[job_id] = Expected(None, FAILS)  # a worker may store what it could not read, as failed
    verdict = world.finish().assert_ok()
    assert verdict.exit_codes == [0, 0]


@pytest.mark.chaos_long
def test_entries_that_are_no_messages_disturb_nobody(make_world: MakeWorld) -> None:
    world = make_world(engine=PACED)
    world.workers(2)
    jobs = world.submit_words(20, 30)
    message = message_for(world)
    for data in (b"not json", b"[]", b"{}", b"\xff\xfe", json.dumps({"body": "e30="}).encode()):
        world.push(data)
    world.push(json.dumps({name: value for name, value in message.items() if name != "headers"}).encode())
    jobs += world.submit_words(20, 10)
    verdict = world.finish().assert_ok()
    assert verdict.exit_codes == [0, 0]
    assert {world.states()[job_id] for job_id in jobs} == {JobState.SUCCEEDED}


@pytest.mark.chaos_long
def test_a_newer_payload_waits_for_a_newer_worker(make_world: MakeWorld) -> None:
    world = make_world(engine=PACED, newer_payload_delay_s=1.0)
    (seat,) = world.workers(1)
    body = json.dumps([[{"version": 2, "model": MODEL, "novelty": True}], {}, {}])
    newer = message_for(world) | {"body": base64.b64encode(body.encode()).decode()}
    world.push_message(newer)
    seat.current.wait_for("goes back to its queue")
    world.submit_words(20, 5)
    world.wait_some(JobState.SUCCEEDED, 20)
    world.finish(for_later=[newer["headers"]["id"]]).assert_ok()
    assert world.redis.queued(world.queue) == 1
