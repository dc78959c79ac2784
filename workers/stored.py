"""What a stored message asks for, read without a delivery."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from backend.api import RequestError, TokenmillError
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
        hard_s, soft_s = headers.get("timelimit") or (None, None)
        expires = headers.get("expires")
        return StoredRequest(
            GeneratePayload.parse(data),
            None,
            soft_s,
            hard_s,
            None if expires is None else _in_utc(datetime.fromisoformat(expires)),
            dict(headers.get("stamps") or {}),
        )
    except TokenmillError as exc:
        return StoredRequest(None, exc, None, None)
    except (KeyError, ValueError, TypeError, AttributeError):
        return StoredRequest(None, RequestError("cannot be read", field="message"), None, None)


def has_links(message: Mapping[str, Any] | None) -> bool:
    """Whether links, chains or chords follow the job of a stored message."""
    try:
        return message is not None and names_links(_body(message)[2])
    except (LookupError, ValueError, TypeError, AttributeError):
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
