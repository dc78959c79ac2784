"""Payloads that cannot run, and jobs that the database or the backend refuses: they fail alone, or wait and go back."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import Engine
from sqlalchemy.exc import IntegrityError

from backend.api import QueueFullError, RequestError
from models_db.errors import DatabaseError
from models_db.tables import JobState
from tests.fleet.rows import accept, refusing
from tests.fleet.table_world import World, failing


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([{"model": "echo", "prompt": ""}], "prompt: must not be empty"),
        ([{"model": "echo", "prompt": "x", "max_tokens": 0}], "max_tokens"),
        ([{"model": "echo", "prompt": "x", "colour": "red"}], "colour: unknown field"),
        ([{"model": "nobody", "prompt": "x"}], "model: is not served here"),
        ([{"model": "other", "prompt": "x"}], "Send it to the queue tokenmill.other"),
        (["text"], "must be a JSON object"),
        ([], "takes exactly one positional argument"),
        ([{}, {}], "takes exactly one positional argument"),
    ],
)
def test_a_bad_payload_fails_its_own_job_and_no_other(world: World, args: list[Any], message: str) -> None:
    worker = world.worker()
    good = worker.deliver("good")
    bad = worker.deliver("bad", args=args)
    world.run()
    worker.backend.finish("good")
    world.run()
    assert world.state("bad") is JobState.FAILED
    status = world.status("bad")
    assert message in status.error_message
    assert status.error_type in ("RequestError", "UnknownModelError")
    assert bad.outcome is not None
    assert bad.outcome.error_type == status.error_type
    assert bad.log[-1] == good.log[-1] == "acknowledged"
    assert world.state("good") is JobState.SUCCEEDED


def test_an_id_that_no_row_can_hold_still_fails_for_celery(world: World) -> None:
    worker = world.worker()
    request = worker.deliver("x" * 200)
    world.run()
    assert request.outcome is not None
    assert request.outcome.state is JobState.FAILED
    assert request.log[-1] == "acknowledged"
    assert world.states() == {}


def test_a_claim_that_the_database_refuses_tells_celery_nothing_and_goes_back_later(
    world: World, engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    worker = world.worker()
    accept(engine, ["bad"])
    delays = []
    with refusing(engine, "NEW.id = 'bad' AND NEW.state = 'running'"):
        for number in range(6):
            request = worker.deliver("bad", stored=True)
            other = worker.deliver(f"good {number}")
            began = world.clock()
            world.run()
            assert request.log == []
            worker.backend.finish(f"good {number}")
            world.run()
            assert other.log[-1] == "acknowledged"
            while not request.ended:
                world.clock.seconds += 0.5
                world.run()
            delays.append(world.clock() - began)
            assert request.log == ["back"], "to the end of the queue, and nobody is told of an end"
    assert delays == [1, 2, 4, 8, 15, 15]
    assert caplog.text.count("refuses the claim of job bad") == 3, "more and more rarely"
    assert world.state("bad") is JobState.QUEUED
    assert "bad" not in worker.tracer.traced
    worker.deliver("bad", stored=True)
    world.run()
    worker.backend.finish("bad")
    world.run()
    assert world.state("bad") is JobState.SUCCEEDED
    assert worker.table.pending == 0


def test_a_refused_claim_is_told_only_of_a_job_that_has_no_row(
    world: World, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = world.worker()
    accept(engine, ["stored"])
    monkeypatch.setattr(
        worker.store, "claim", lambda _: failing(DatabaseError("id: another job has its key"))
    )
    stored, bare = worker.deliver("stored"), worker.deliver("bare")
    world.run()
    assert stored.log == []
    assert bare.outcome is not None
    assert bare.outcome.error_message == "id: another job has its key"
    assert bare.log[-1] == "acknowledged"
    worker.table.close()
    world.run()
    assert stored.log == ["back"], "a shutdown does not wait for it"


def test_no_row_of_the_database_is_quoted(
    world: World, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = world.worker()
    error = IntegrityError("INSERT", {}, Exception("no null here\nDETAIL:  Failing row contains (secret)."))
    monkeypatch.setattr(worker.store, "claim", lambda _: failing(error))
    request = worker.deliver("j")
    world.run()
    assert request.log == []
    assert "no null here" in caplog.text
    assert request.delivery is not None
    worker.table._endings.begin()
    worker.table._endings.fail(request.delivery, error)
    world.run()
    assert request.outcome is not None
    assert request.outcome.error_message == "IntegrityError Exception"
    assert "secret" not in caplog.text


def test_a_newer_payload_is_held_and_handed_back_untouched(world: World) -> None:
    worker = world.worker(newer_payload_delay_s=5)
    request = worker.deliver("j", {"version": 2, "model": "echo", "prompt": "x", "novel": 1})
    world.run()
    assert request.log == []
    assert world.states() == {}
    world.clock.seconds += 6
    world.run()
    assert request.log == ["back"], "to the end of the queue, so that others get their turn"
    assert worker.table.pending == 0


def test_a_request_that_the_backend_refuses_fails(world: World) -> None:
    worker = world.worker()
    worker.backend.refuse = RequestError("is too much", field="max_tokens")
    request = worker.deliver("j")
    world.run()
    assert world.state("j") is JobState.FAILED
    assert request.outcome is not None
    assert request.outcome.error_message == "max_tokens: is too much"


def test_a_full_backend_is_asked_again(world: World) -> None:
    worker = world.worker()
    worker.backend.refuse = QueueFullError("full")
    request = worker.deliver("j")
    world.run()
    assert request.log == []
    worker.backend.refuse = None
    world.clock.seconds += 1
    world.run()
    assert worker.backend.submitted == ["j"]


def test_a_result_that_the_database_refuses_fails_the_job_with_the_reason(world: World) -> None:
    worker = world.worker()
    request = worker.deliver("j")
    world.run()
    worker.store.finish_error = ValueError("no such text")
    worker.backend.finish("j")
    world.run()
    assert world.state("j") is JobState.FAILED
    assert world.status("j").error_type == "ValueError"
    assert "no such text" not in world.status("j").error_message, "an error may quote what it is about"
    assert request.log[-1] == "acknowledged"
