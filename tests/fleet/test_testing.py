"""The service in one process that web apps test against behaves like a fleet."""

from __future__ import annotations

import pytest

from backend.api import RequestError
from models_db.errors import IdempotencyConflictError
from models_db.tables import JobState
from workers.client import JobFailedError
from workers.testing import LocalFleet


def test_jobs_run_fail_wait_and_are_cancelled() -> None:
    with LocalFleet(max_prompt_chars=100) as fleet:
        client = fleet.client
        job = client.submit("say this back", max_tokens=3)
        assert job.wait(timeout_s=20).text == "say this back"
        assert client.submit("one", idempotency_key="k").id == client.submit("one", idempotency_key="k").id
        with pytest.raises(IdempotencyConflictError):
            client.submit("other", idempotency_key="k")
        with pytest.raises(RequestError, match="max_prompt_chars"):
            client.submit("x" * 101)

        fleet.fail_next("the sky fell")
        broken = client.submit("one")
        with pytest.raises(JobFailedError, match="the sky fell"):
            broken.wait(timeout_s=20)
        (event,) = broken.stream(timeout_s=20)
        assert event.end is not None
        assert event.end.error_message == "the sky fell"

        fleet.hold()
        waiting, unwanted = client.submit("later", max_tokens=1), client.submit("never")
        assert waiting.status().state is JobState.QUEUED
        assert unwanted.cancel() is JobState.CANCELLED
        fleet.release()
        assert waiting.wait(timeout_s=20).text == "later"
        assert unwanted.status().state is JobState.CANCELLED

        streamed = list(client.submit("a b c", max_tokens=3, stream=True).stream(timeout_s=20))
        assert "".join(event.text for event in streamed) == "a b c"
        assert streamed[-1].kind == "end"


def test_a_running_job_is_cancelled() -> None:
    with LocalFleet(tokens_per_s=20) as fleet:
        job = fleet.client.submit("words without end", max_tokens=10_000)
        job.cancel()
        with pytest.raises(JobFailedError, match="was cancelled"):
            job.wait(timeout_s=20)
