"""What a stored message asks for, read without a delivery."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from backend.api import MAX_DEADLINE_S, RequestError, TokenmillError
from workers.payload import GeneratePayload


@dataclass(frozen=True, slots=True)
class StoredRequest:
    """What a stored message asks for."""

    payload: GeneratePayload | None
    error: TokenmillError | None
    soft_s: float | None
    hard_s: float | None
    expires: datetime | None = None
    stamps: Mapping[str, Any] = field(default_factory=dict)


def read_stored(message: Mapping[str, Any] | None) -> StoredRequest:
    """The request in a stored message, to run a job that has no delivery."""
    try:
        if message is None:
            raise RequestError("is not stored", field="message")
        (data, *_), *_ = _body(message)
        headers = message["headers"]
        hard_s, soft_s = time_limits(headers)
        expires = headers.get("expires")
        return StoredRequest(
            GeneratePayload.parse(data),
            None,
            soft_s,
            hard_s,
            None if expires is None else _in_utc(datetime.fromisoformat(expires)),
            stamps_of(headers),
        )
    except TokenmillError as exc:
        return StoredRequest(None, exc, None, None)
    except Exception:  # whatever it holds, the worker that reads it goes on
        return StoredRequest(None, RequestError("cannot be read", field="message"), None, None)


def time_limits(headers: Mapping[str, Any]) -> tuple[float | None, float | None]:
    """A message's own hard and soft limit in seconds, no longer than a deadline may be.

    Raises:
        ValueError: they are no numbers.
    """
    limits = headers.get("timelimit") or (None, None)
    if not isinstance(limits, list | tuple) or len(limits) != 2:
        raise ValueError("timelimit must be a pair of numbers")
    for limit in limits:
        if limit is not None and (not isinstance(limit, int | float) or math.isnan(limit)):
            raise ValueError("timelimit must be a pair of numbers")
    hard_s, soft_s = (None if limit is None else min(limit, MAX_DEADLINE_S) for limit in limits)
    return hard_s, soft_s


def stamps_of(headers: Mapping[str, Any]) -> dict[str, Any]:
    """The values that a message was stamped with, by name.

    Raises:
        ValueError: they are not written as Celery writes them.
    """
    stamps, names = headers.get("stamps") or {}, headers.get("stamped_headers") or []
    if not isinstance(stamps, Mapping) or not isinstance(names, list | tuple):
        raise ValueError("stamps must be an object, and stamped_headers a list")
    if not all(isinstance(name, str) for name in (*stamps, *names)):
        raise ValueError("stamps must have names")
    return dict(stamps)


def has_links(message: Mapping[str, Any] | None) -> bool:
    """Whether links, chains or chords follow the job of a stored message."""
    try:
        return message is not None and names_links(_body(message)[2])
    except Exception:
        return False


def names_links(embed: object) -> bool:
    """The same, of the third part of a message's body."""
    parts = ("callbacks", "errbacks", "chain", "chord")
    return isinstance(embed, Mapping) and any(embed.get(name) for name in parts)


def _in_utc(at: datetime) -> datetime:
    return at if at.tzinfo is not None else at.replace(tzinfo=UTC)


def _body(message: Mapping[str, Any]) -> Any:
    body = message["body"]
    if message["properties"].get("body_encoding") == "base64":
        body = base64.b64decode(body).decode()
    return json.loads(body)
