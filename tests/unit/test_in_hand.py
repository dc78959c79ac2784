"""The row of a job whose message is only in a worker's hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from models_db.base import utcnow
from tests.messages import build_message
from workers.in_hand import job_in_hand
from workers.payload import STORED_HEADER, GeneratePayload
from workers.settings import load_settings

SETTINGS = load_settings(model="echo", backend="echo")
FIELDS = {"model": "echo", "prompt": "words", "tenant": "t", "priority": 7, "deadline_s": 5}


def message(**changed: Any) -> dict[str, Any]:
    return build_message("the-id", GeneratePayload.parse(FIELDS)) | changed


def raw(value: object) -> bytes:
    return json.dumps(value).encode()


def test_it_has_all_that_a_claim_would_have_stored() -> None:
    now = utcnow()
    job = job_in_hand(raw(message()), SETTINGS, now)
    assert job is not None
    assert (job.id, job.model, job.queue, job.tenant, job.priority) == (
        "the-id",
        "echo",
        "tokenmill.echo",
        "t",
        7,
    )
    assert job.prompt["prompt"] == "words"
    assert job.message == message() | {"properties": job.message["properties"]}  # type: ignore[index]
    assert job.published_at == job.created_at == now
    assert job.deadline_at is not None
    assert (job.deadline_at - now).total_seconds() == 5


@pytest.mark.parametrize("body", ["no base64", "", None])
def test_one_whose_payload_cannot_be_read_is_kept_for_whoever_claims_it(body: str | None) -> None:
    job = job_in_hand(raw(message(body=body)), SETTINGS, utcnow())
    assert job is not None
    assert (job.id, job.queue, dict(job.prompt)) == ("the-id", "tokenmill.echo", {})
    assert job.message is not None


def _other_task(value: dict[str, Any]) -> None:
    value["headers"]["task"] = "celery.chord_unlock"


def _stored(value: dict[str, Any]) -> None:
    value["headers"][STORED_HEADER] = True


def _no_id(value: dict[str, Any]) -> None:
    del value["headers"]["id"]


def _bad_id(value: dict[str, Any]) -> None:
    value["headers"]["id"] = "\x00"


def _odd_id(value: dict[str, Any]) -> None:
    value["headers"]["id"] = [1]


def _odd_info(value: dict[str, Any]) -> None:
    value["properties"]["delivery_info"] = "nowhere"


@pytest.mark.parametrize("change", [_other_task, _stored, _no_id, _bad_id, _odd_id, _odd_info])
def test_what_needs_no_row_or_can_have_none_gets_none(change: Callable[[dict[str, Any]], None]) -> None:
    value = message()
    change(value)
    assert job_in_hand(raw(value), SETTINGS, utcnow()) is None


@pytest.mark.parametrize("data", [b"", b"\xff", b"[1]", b"null", b"{}", b'{"headers": 1}'])
def test_what_is_no_message_gets_none(data: bytes) -> None:
    assert job_in_hand(data, SETTINGS, utcnow()) is None
