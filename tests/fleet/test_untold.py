"""Jobs that have ended while Redis took nothing, whose worker dies before Celery has heard of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from celery import chord
from sqlalchemy import update

from models_db.base import utcnow
from models_db.deaths import SUSPECT_DEATHS, bury
from models_db.jobs import mark_callbacks_sent
from models_db.suspects import untold_ends
from models_db.tables import AttemptOutcome, Job, JobState
from models_db.transitions import end_jobs
from tests.fleet.celery_fleet import CeleryFleet, celery_fleet
from tests.fleet.fleet import wait_until
from tests.fleet.test_celery_canvas import collected
from tests.fleet.test_sweeper import QUEUE, Place, place

__all__ = ["place"]  # the fixture

TOKENS = 30


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[CeleryFleet]:
    with celery_fleet(tmp_path, prefetch_headroom=3) as fleet:
        yield fleet


def test_results_links_and_chords_come_after_a_death_while_redis_is_read_only(fleet: CeleryFleet) -> None:
    worker = fleet.observed_worker()
    linked = fleet.signature(TOKENS, "linked").apply_async(link=fleet.task("collect"))
    body = chord([fleet.signature(TOKENS, "part")])(fleet.task("collect"))
    (part,) = body.parent.results
    for job_id in (linked.id, part.id):
        fleet.wait_state(job_id, JobState.RUNNING)
    fleet.redis.client.execute_command("REPLICAOF", "127.0.0.1", "1")
    try:
        for job_id in (linked.id, part.id):
            fleet.wait_state(job_id, JobState.SUCCEEDED)
        worker.wait_for("Connection to Redis lost")  # by who tells Celery
        worker.kill()
    finally:
        fleet.redis.client.execute_command("REPLICAOF", "NO", "ONE")
    fleet.observed_worker()
    assert linked.get(timeout=60)["completion_tokens"] == TOKENS
    assert body.get(timeout=60) == {"collected": [" ".join(["part"] * TOKENS)]}
    text = " ".join(["linked"] * TOKENS)
    wait_until(lambda: collected(fleet, text), 20, "the link")
    fleet.wait_drained(20)
    assert collected(fleet, text) == 1
    for job_id in (linked.id, part.id):
        assert fleet.attempts(job_id) == [AttemptOutcome.SUCCEEDED], "nothing ran twice"


def test_a_suspect_s_end_is_told_by_others_when_its_worker_could_not(place: Place) -> None:
    ended, linked, plain, queued = place.accept(4)
    place.redis.flushall()
    with place.engine.begin() as conn:
        conn.execute(update(Job).where(Job.id.in_([ended, linked, queued])).values(deaths=SUSPECT_DEATHS))
        for job_id in (ended, linked):
            end_jobs(conn, [job_id], JobState.FAILED, utcnow(), "Some", "error")
        end_jobs(conn, [plain], JobState.CANCELLED, utcnow())
    dies = place.sweeper("dies")

    def refuse(messages: Any) -> None:
        raise ConnectionError("Redis takes nothing")

    dies._view.publish = refuse  # type: ignore[method-assign]
    dies.announce([ended, linked, plain, queued])
    place.pass_time(2, dies)
    with place.engine.begin() as conn:
        assert {each.id for each in untold_ends(conn, QUEUE, 10)} == {ended, linked}
        assert bury(conn, "dies").untold == []
        mark_callbacks_sent(conn, [linked])
    place.redis.delete(f"tokenmill.sweeper.{QUEUE}")
    other = place.sweeper("other")
    place.pass_time(1, other)
    assert place.listed() == [ended]
    place.redis.flushall()  # a worker has taken it
    place.pass_time(10, other)
    assert place.listed() == [], "once"
