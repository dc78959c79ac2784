"""Signatures after the scheme of Standard Webhooks (standardwebhooks.com), made by senders and checked by receivers.

Signed is ``id.timestamp.body`` with HMAC-SHA256, so that neither the body nor the time can be changed, and an old
message that somebody recorded is refused once its time is past.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import json
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from backend.api import TokenmillError

ID_HEADER = "webhook-id"
TIMESTAMP_HEADER = "webhook-timestamp"
SIGNATURE_HEADER = "webhook-signature"
SECRET_PREFIX = "whsec_"
TOLERANCE_S = 300.0

_VERSION = "v1"
_SHORTEST_KEY = 24  # bytes
_LONGEST_KEY = 64


class CallbackSignatureError(TokenmillError, ValueError):
    """The message does not come from a sender that has the secret, is old, or is no event. Answer it with 401."""

    code = "callback_signature"


def new_secret() -> str:
    """A fresh random secret."""
    return SECRET_PREFIX + base64.b64encode(secrets.token_bytes(32)).decode("ascii")


def key_of(secret: str) -> bytes:
    """The key in a secret.

    Raises:
        ValueError: it is no secret; the message does not contain it.
    """
    try:
        key = base64.b64decode(secret.removeprefix(SECRET_PREFIX), validate=True)
    except (binascii.Error, ValueError):
        key = b""
    if not secret.startswith(SECRET_PREFIX) or not _SHORTEST_KEY <= len(key) <= _LONGEST_KEY:
        raise ValueError(
            f"must be {SECRET_PREFIX} and {_SHORTEST_KEY} to {_LONGEST_KEY} random bytes in base64. "
            "Make one: tokenmill callbacks secret"
        )
    return key


def sign(secret: str, message_id: str, timestamp: int, body: bytes) -> str:
    """One signature, ``v1,`` and the digest in base64. Times are in seconds since 1970.

    Raises:
        ValueError: it is no secret.
    """
    signed = b"%b.%d.%b" % (message_id.encode(), timestamp, body)
    digest = hmac.new(key_of(secret), signed, hashlib.sha256).digest()
    return f"{_VERSION},{base64.b64encode(digest).decode('ascii')}"


def signed_headers(keys: Sequence[str], message_id: str, timestamp: int, body: bytes) -> dict[str, str]:
    """The three headers, signed with every secret, so that receivers may change to a new one in their own time."""
    return {
        ID_HEADER: message_id,
        TIMESTAMP_HEADER: str(timestamp),
        SIGNATURE_HEADER: " ".join(sign(secret, message_id, timestamp, body) for secret in keys),
    }


def verify_callback(
    secret: str | Sequence[str],
    headers: Mapping[str, str],
    body: bytes | str,
    *,
    tolerance_s: float = TOLERANCE_S,
    clock: Callable[[], float] = time.time,
) -> dict[str, Any]:
    """What a callback says, once it is certain who sent it. For receivers.

    Args:
        secret: as the sender has it; several while it is being changed.
        headers: of the request, in any case.
        body: the request's body as it came, before anything has parsed it.
        tolerance_s: how far the sender's clock and the message's age may be off.
        clock: seconds since 1970.

    Raises:
        CallbackSignatureError: a header is missing, no signature fits, the time is too far off, or the body is no JSON
            object in UTF-8. Whatever a request brings, no other error comes of it.
        ValueError: the secret is none.
    """
    try:
        raw = body.encode() if isinstance(body, str) else bytes(body)
    except UnicodeEncodeError:
        raise CallbackSignatureError("the body is no text in UTF-8") from None
    found = {name.lower(): value for name, value in headers.items()}
    try:
        message_id, stamp, given = (found[name] for name in (ID_HEADER, TIMESTAMP_HEADER, SIGNATURE_HEADER))
    except KeyError as error:
        raise CallbackSignatureError(f"the header {error.args[0]} is missing") from None
    if not (stamp.isascii() and stamp.isdigit() and len(stamp) <= 15):
        raise CallbackSignatureError(f"{TIMESTAMP_HEADER} is no time")
    if not (message_id.isascii() and given.isascii()):  # as ours are, and a lone surrogate is not
        raise CallbackSignatureError(f"{ID_HEADER} or {SIGNATURE_HEADER} is not what a sender writes")
    timestamp = int(stamp)
    known = [secret] if isinstance(secret, str) else list(secret)
    expected = [sign(each, message_id, timestamp, raw) for each in known]
    # Every pair is compared, in constant time each, so that the time taken tells nothing about a near miss.
    matches = [
        hmac.compare_digest(mine.encode(), theirs.encode()) for theirs in given.split() for mine in expected
    ]
    if not any(matches):
        raise CallbackSignatureError("no signature fits the message and the secret")
    if abs(clock() - timestamp) > tolerance_s:
        raise CallbackSignatureError(f"the message is more than {tolerance_s:g} s old, or from the future")
    return _event_in(raw)


def _event_in(raw: bytes) -> dict[str, Any]:
    """The body as JSON; from one who has the secret, and still not trusted to be what a sender writes."""
    try:
        event = json.loads(raw.decode())
        if b"\\u" in raw:  # a lone surrogate may hide there: no text that could be stored or printed
            json.dumps(event, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        event = None
    if not isinstance(event, dict):
        raise CallbackSignatureError("the body is no JSON object in UTF-8")
    return event
