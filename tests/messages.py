"""Messages of jobs, made and published by hand."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from workers.payload import GeneratePayload, RedisPipeline, encode_message, push, wire


def build_message(job_id: str, payload: GeneratePayload) -> dict[str, Any]:
    """The message of a job, as the Redis transport stores it: headers, properties and body."""
    made: dict[str, Any] = json.loads(encode_message(job_id, payload, payload.to_dict()))
    return made


def publish(pipeline: RedisPipeline, messages: Iterable[Mapping[str, Any]]) -> None:
    """Publish messages in order, in one round trip."""
    push(pipeline, map(wire, messages))
