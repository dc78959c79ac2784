"""What is submitted: a checked request, and the row and the message that come of it."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta

from backend.api import MAX_SEED, RequestError, check_text
from backend.errors import short_repr
from models_db.base import JsonText
from models_db.ids import uuid7
from models_db.jobs import NewJob
from workers.callbacks.wanted import wanted_callback
from workers.payload import Forms, GeneratePayload, encode_message, queue_for, queue_key
from workers.settings import Settings

MAX_KEY = 255  # characters of an idempotency key, as the column has them


@dataclass(frozen=True, slots=True)
class Submission:
    """One checked request, with where it belongs.

    Raises:
        RequestError: the key is no text that a database can hold.
    """

    payload: GeneratePayload
    batch_id: str | None = None
    position: int | None = None
    idempotency_key: str | None = None

    def __post_init__(self) -> None:
        if self.idempotency_key is not None:
            check_key(self.idempotency_key)

    def new_job(self, now: datetime, settings: Settings, *, stored: bool) -> NewJob:
        """The row that this becomes, of a new id.

        Args:
            stored: the client stores it before it publishes it.
        """
        forms = Forms.of(self.payload)
        # The key must find the same job again, so what is compared is the request before a seed is drawn.
        asked_for = None if self.idempotency_key is None else forms.digest()
        payload = with_seed(self.payload)
        if payload is not self.payload:
            forms = Forms.of(payload)
        job_id = uuid7()
        deadline = None if payload.deadline_s is None else now + timedelta(seconds=payload.deadline_s)
        return NewJob(
            id=job_id,
            batch_id=self.batch_id,
            position=self.position,
            custom_id=payload.custom_id,
            idempotency_key=self.idempotency_key,
            payload_hash=asked_for,
            tenant=payload.tenant,
            model=payload.model,
            queue=queue_for(payload.model),
            priority=payload.priority,
            params=forms.params,
            prompt=forms.prompt,
            message=JsonText(encode_message(job_id, payload, forms.fields, stored=stored)),
            created_at=now,
            published_at=now if stored else None,
            tokens=payload.tokens_at_most if settings.limits_tenants else 0,
            deadline_at=deadline,
            callback=wanted_callback(payload, settings),
        )


def with_seed(payload: GeneratePayload, draw: Callable[[int], int] = secrets.randbelow) -> GeneratePayload:
    """The payload, with a seed drawn where sampling is random and none was given: every attempt repeats."""
    if payload.temperature == 0 or payload.seed is not None:
        return payload
    return payload.model_copy(update={"seed": draw(MAX_SEED + 1)})


def check_key(key: object) -> None:
    """Refuse what cannot be an idempotency key.

    Raises:
        RequestError: it is no text, empty, longer than 255 characters, or cannot be stored.
    """
    name = "idempotency_key"
    if not isinstance(key, str):
        fix = f"Write it as text: {short_repr(str(key))}" if _fits(key) else "Give text"
        raise RequestError("must be text", field=name, value=key, fix=fix)
    if not 0 < len(key) <= MAX_KEY:
        fix = f"Use 1 to {MAX_KEY} characters, or a digest of what it stands for"
        raise RequestError(f"has {len(key)} characters", field=name, fix=fix)
    check_text(key, name)


def _fits(key: object) -> bool:
    return isinstance(key, int) and abs(key) < 10**MAX_KEY


def delivery(job: NewJob) -> tuple[str, bytes]:
    """A new job's first delivery: its stored message as it is, whose tag nothing else has yet."""
    assert isinstance(job.message, JsonText)
    return queue_key(job.queue, job.priority), job.message.encode()
