"""The one argument of the task ``tokenmill.generate``, and the Celery message that carries it.

The payload is flat, versioned JSON, so that any language can enqueue a job::

    {"version": 1, "model": "smollm2", "prompt": "Once upon a time", "max_tokens": 64}

sent as ``args=[payload], kwargs={}`` to the queue ``queue_for(model)``. Nothing in here imports torch or
Celery: a message is built, stored and published as plain data.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import socket
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from operator import itemgetter
from typing import Any, Literal, Protocol, Self

from pydantic import Field, ValidationError, field_validator, model_validator

from backend.api import (
    MAX_DEADLINE_S,
    MAX_SEED,
    ChatMessage,
    GenerationRequest,
    Prompt,
    RequestError,
    SamplingParams,
    TokenId,
    TokenmillError,
    UnknownModelError,
    check_text,
    request_error_from,
)
from backend.complaints import refuse_truth
from backend.config import BULK_PRIORITY as BULK_PRIORITY
from backend.errors import short_repr
from models_db.entropy import random_bytes
from workers.callbacks.urls import MAX_URL, CallbackRules, check_callback_url
from workers.settings import Settings

TASK_NAME = "tokenmill.generate"
PAYLOAD_VERSION = 1
QUEUE_PREFIX = "tokenmill."
DEFAULT_PRIORITY = 3
MAX_STOP_CHARS = 1000
_OTHER_BYTES = 20_000  # more than all other fields can come to
MAX_TASK_ID = 155  # the width of job.id

STORED_HEADER = "tokenmill_stored"
"""In a message's headers: true where the job's row was committed before the message was published.

Without a row such a message is stale, whereas any other message is accepted by the worker that takes it. Only who has
written the row may set it: a sender without a database never does.
"""

# Kombu's Redis transport keeps one list a priority step, named with this separator.
PRIORITY_STEPS = (0, 3, 6, 9)
PRIORITY_SEPARATOR = "\x06\x16"

# Made once: json.dumps with options makes an encoder a call.
_COMPACT = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False)
_CANONICAL = json.JSONEncoder(sort_keys=True, separators=(",", ":"))

_NOT_SLUG = re.compile(r"[^a-z0-9._-]+")
# Which job it is, for whom and when: nothing of the answer depends on them.
_ROUTING = frozenset(
    {
        "custom_id",
        "tenant",
        "priority",
        "deadline_s",
        "stream",
        "callback_url",
        "callback_include_output",
    }
)
_PROMPT_FIELDS = ("prompt", "messages", "token_ids")
# Of messages in one command. Redis ends a connection that has too much to say at once.
_PUSH_BYTES = 4 * 2**20


class NewerPayloadError(TokenmillError):
    """The payload was written for a newer version of this software; the worker hands the message back."""

    code = "newer_payload"

    def __init__(self, version: int) -> None:
        self.version = version
        super().__init__(
            f"version: payload version {short_repr(version)} is newer than {PAYLOAD_VERSION}, the newest known here. "
            "Upgrade this worker"
        )


class GeneratePayload(SamplingParams):
    """What a job asks for: the model, exactly one of three prompt forms, and how to sample."""

    version: Literal[1] = 1
    model: str = Field(min_length=1, max_length=255)
    prompt: str | None = None
    messages: tuple[ChatMessage, ...] | None = None
    token_ids: tuple[TokenId, ...] | None = None
    priority: int = Field(DEFAULT_PRIORITY, ge=0, le=9, description="0 is the most urgent")
    deadline_s: float | None = Field(
        None, gt=0, le=MAX_DEADLINE_S, description="counts from submission; ten years at most"
    )
    tenant: str | None = Field(None, min_length=1, max_length=255)
    custom_id: str | None = Field(None, min_length=1, max_length=255)
    return_token_ids: bool = Field(False, description="store the token ids beside the text")
    stream: bool = Field(
        False, description="write the text to a Redis Stream as it comes, see ``Client.stream``"
    )
    callback_url: str | None = Field(
        None, min_length=1, max_length=MAX_URL, description="told when the job has ended, see callbacks.md"
    )
    callback_include_output: bool = Field(False, description="the callback brings the text along")

    @field_validator("priority", "deadline_s", mode="before")
    @classmethod
    def _more_numbers(cls, value: Any) -> Any:
        return refuse_truth(value)

    @field_validator("model", "tenant", "custom_id")
    @classmethod
    def _storable(cls, value: str | None, info: Any) -> str | None:
        return value if value is None else check_text(value, info.field_name)

    @field_validator("stop")
    @classmethod
    def _short_stops(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        longest = max(map(len, value), default=0)
        if longest > MAX_STOP_CHARS:
            raise RequestError(
                f"is longer than {MAX_STOP_CHARS} characters", field="stop", value=longest, fix="Shorten it"
            )
        return value

    @model_validator(mode="after")
    def _one_prompt(self) -> Self:
        # Each of the three has been validated as a field of this. What is left is what holds for them together, for
        # which no prompt is made: it would cost a quarter of all that there is to check.
        Prompt._exactly_one(self)  # type: ignore[operator]
        return self

    @model_validator(mode="after")
    def _output_goes_somewhere(self) -> Self:
        if self.callback_include_output and self.callback_url is None:
            raise RequestError(
                "is set and there is no callback", field="callback_include_output", fix="Give a callback_url"
            )
        return self

    @classmethod
    def parse(cls, data: object) -> GeneratePayload:
        """Validate what came off the wire or from a caller.

        Raises:
            NewerPayloadError: a later version wrote it.
            RequestError: names the field, the value and the fix.
        """
        if not isinstance(data, Mapping):
            raise RequestError(
                "must be a JSON object", field="payload", value=type(data).__name__, fix="Send args=[payload]"
            )
        version = data.get("version", PAYLOAD_VERSION)
        if type(version) is int and version > PAYLOAD_VERSION:
            raise NewerPayloadError(version)
        if isinstance(version, bool):
            raise RequestError("must be 1", field="version", value=version, fix="Use 1")
        try:
            return cls.model_validate(data)
        except ValidationError as exc:
            raise request_error_from(exc) from None

    def check_limits(self, settings: Settings, *, at_submission: bool = True) -> None:
        """Refuse what the settings do not allow. What a tenant may have open is asked at submission alone.

        Raises:
            UnknownModelError: the model is not one that this fleet serves.
            RequestError: the prompt is longer than ``max_prompt_chars`` or the whole than ``max_payload_bytes``, the
                job alone is beyond its tenant's limit, or the callback goes where none may go.
        """
        accepted = settings.accepted_models
        if self.model not in accepted:
            raise UnknownModelError(
                "is not served here",
                field="model",
                value=self.model,
                fix=f"Use one of: {', '.join(accepted)}",
            )
        length = self.prompt_chars
        if length > settings.max_prompt_chars:
            raise RequestError(
                f"the prompt has {length:,} characters, more than max_prompt_chars ({settings.max_prompt_chars})",
                field="prompt" if self.prompt is not None else "messages",
                fix="Shorten it or raise TOKENMILL_MAX_PROMPT_CHARS",
            )
        size = self._size_beyond(settings.max_payload_bytes)
        if size is not None:
            raise RequestError(
                f"is larger than max_payload_bytes ({settings.max_payload_bytes}) as JSON",
                field="payload",
                value=size,
                fix="Shorten it or raise TOKENMILL_MAX_PAYLOAD_BYTES",
            )
        limit = settings.tenant_limit(self.tenant) if at_submission else None
        if limit is not None and 0 < limit.tokens < self.tokens_at_most:
            raise RequestError(
                f"with the prompt comes to more than the {limit.tokens} tokens that the tenant may have open",
                field="max_tokens",
                value=self.max_tokens,
                fix="Ask for less, or raise TOKENMILL_TENANT_MAX_OPEN_TOKENS",
            )
        if self.callback_url is not None:
            check_callback_url(self.callback_url, CallbackRules.of(settings))

    def _size_beyond(self, limit: int) -> int | None:
        """Bytes of the payload as JSON where they are more than ``limit``; counted only where that may be."""
        texts = self.prompt_chars + sum(map(len, self.stop))
        numbers = len(self.token_ids or ()) + len(self.stop_token_ids) + len(self.logit_bias)
        # A character is at most six bytes of JSON; 200 bytes are a turn's or a number's, however it is written.
        if 6 * texts + 200 * (numbers + len(self.messages or ())) + _OTHER_BYTES <= limit:
            return None
        size = len(_COMPACT.encode(self.to_dict()).encode())
        return size if size > limit else None

    @property
    def prompt_chars(self) -> int:
        """Characters of the prompt's text; none where it is given as token ids."""
        return len(self.prompt or "") + sum(len(message.content) for message in self.messages or ())

    @property
    def tokens_at_most(self) -> int:
        """About how many tokens the job may come to: a quarter of the prompt's characters, and ``max_tokens``."""
        prompt = len(self.token_ids) if self.token_ids is not None else -(-self.prompt_chars // 4)
        return prompt + self.max_tokens

    def sampling(self) -> SamplingParams:
        """The sampling part alone."""
        values = {name: getattr(self, name) for name in SamplingParams.model_fields}
        return SamplingParams.model_construct(**values)  # already validated as a part of this

    def to_request(self, job_id: str) -> GenerationRequest:
        """The request for a backend.

        An unset seed is derived from the job id, so that every attempt at a job draws the same tokens.
        """
        sampling = self.sampling()
        if sampling.seed is None and sampling.temperature > 0:
            sampling = sampling.model_copy(update={"seed": seed_of(job_id)})
        return GenerationRequest.model_construct(
            request_id=job_id,
            prompt=Prompt.model_construct(
                prompt=self.prompt, messages=self.messages, token_ids=self.token_ids
            ),
            sampling=sampling,
            priority=self.priority,
            deadline_s=self.deadline_s,
            stream=self.stream,
        )

    def params(self) -> dict[str, Any]:
        """Sampling parameters that differ from the defaults, as JSON-safe values; for the ``job`` row."""
        return _params(self.to_dict())

    def prompt_json(self) -> dict[str, Any]:
        """The prompt in the form it was given, as JSON-safe values; for the ``job`` row."""
        return _prompt(self.to_dict())

    def to_dict(self) -> dict[str, Any]:
        """The payload as it goes on the wire; fields at their defaults are left out, the version never."""
        return {"version": self.version} | self.model_dump(mode="json", exclude_defaults=True)

    def content_hash(self) -> str | None:
        """SHA-256 over all that decides the answer; ``None`` where another run would draw another one."""
        if self.temperature > 0 and self.seed is None:
            return None
        content = {name: value for name, value in self.to_dict().items() if name not in _ROUTING}
        canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()

    def digest(self) -> str:
        """SHA-256 over the whole payload, for comparing two submissions with one idempotency key."""
        return _digest(self.to_dict())


@dataclass(frozen=True, slots=True)
class Forms:
    """A payload in each form that a job's row and message need, made from one walk over its fields."""

    params: dict[str, Any]
    prompt: dict[str, Any]
    fields: dict[str, Any]  # as on the wire

    @classmethod
    def of(cls, payload: GeneratePayload) -> Self:
        """The forms of a payload."""
        fields = payload.to_dict()
        return cls(_params(fields), _prompt(fields), fields)

    def digest(self) -> str:
        """See ``GeneratePayload.digest``."""
        return _digest(self.fields)


_SAMPLING_FIELDS = frozenset(SamplingParams.model_fields)


def _params(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name in _SAMPLING_FIELDS}


def _prompt(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: fields[name] for name in _PROMPT_FIELDS if name in fields}


def _digest(fields: Mapping[str, Any]) -> str:
    return hashlib.sha256(_CANONICAL.encode(fields).encode()).hexdigest()


def seed_of(job_id: str) -> int:
    """A seed from 0 to 2**63 - 1 that depends on the job id alone."""
    return int.from_bytes(hashlib.blake2b(job_id.encode(), digest_size=8).digest(), "big") & MAX_SEED


# -------------------------------------------------------------------------------------------------- messages


@lru_cache(maxsize=64)
def queue_for(model: str) -> str:
    """The queue of a model: ``tokenmill.`` and its name.

    A name with other characters than ``a-z0-9._-``, or a long one, is simplified and gets a short digest, so
    that two models never share a queue.
    """
    slug = _NOT_SLUG.sub("-", model.lower()).strip("-")
    if slug != model or len(slug) > 80:
        slug = f"{slug[:80]}-{hashlib.sha256(model.encode()).hexdigest()[:6]}".lstrip("-")
    return QUEUE_PREFIX + slug


def queue_key(queue: str, priority: int) -> str:
    """The Redis list that holds a queue's messages of a priority (0 to 9, rounded down to its step)."""
    step = max(step for step in PRIORITY_STEPS if step <= priority)
    return f"{queue}{PRIORITY_SEPARATOR}{step}" if step else queue


def encode_message(
    job_id: str, payload: GeneratePayload, fields: Mapping[str, Any], *, stored: bool = False
) -> str:
    """The complete message of a job as JSON text (ASCII), as the Redis transport stores it: headers, properties, body.

    It holds all that is needed to publish the job again under the same id, and is stored in ``job.message``. The
    prompt is only in the (base64) body, never in ``argsrepr``. What is equal in all messages is made once.

    Args:
        fields: the payload's, as ``to_dict`` gives them.
        stored: the row is committed before the message is published; see ``STORED_HEADER``.
    """
    _check_id(job_id)
    frame = _frame(payload.model, payload.priority, _origin(os.getpid()), stored)
    filling = {"id": json.dumps(job_id)[1:-1], "body": _body(fields), "tag": random_bytes(16).hex()}
    return "".join([filling.get(part, part) for part in frame])


@lru_cache(maxsize=64)
def _frame(model: str, priority: int, origin: str, stored: bool) -> tuple[str, ...]:
    """A message's text in pieces; ``id``, ``body`` and ``tag`` stand alone where they belong."""
    mark = uuid.uuid4().hex  # in no name
    places = [f"{mark}{place}{mark}" for place in ("id", "body", "tag")]
    message = _message(places[0], places[1], model, priority, origin, places[2])
    if stored:
        message["headers"][STORED_HEADER] = True
    text = json.dumps(message, separators=(",", ":"))
    return tuple(text.split(mark))


@lru_cache(maxsize=4)  # by process, because a client may live through a fork
def _origin(pid: int) -> str:
    return f"{pid}@{socket.gethostname()}"


def _check_id(job_id: str) -> None:
    if not 0 < len(job_id) <= MAX_TASK_ID:
        raise RequestError(
            f"must have 1 to {MAX_TASK_ID} characters", field="job_id", value=job_id, fix="Use a UUID"
        )


def _body(fields: Mapping[str, Any]) -> str:
    embed = {"callbacks": None, "errbacks": None, "chain": None, "chord": None}
    return base64.b64encode(_COMPACT.encode([[fields], {}, embed]).encode()).decode("ascii")


def _message(job_id: str, body: str, model: str, priority: int, origin: str, tag: str) -> dict[str, Any]:
    return {
        "body": body,
        "content-encoding": "utf-8",
        "content-type": "application/json",
        "headers": {
            "lang": "py",
            "task": TASK_NAME,
            "id": job_id,
            "shadow": None,
            "eta": None,
            "expires": None,
            "group": None,
            "group_index": None,
            "retries": 0,
            "timelimit": [None, None],
            "root_id": job_id,
            "parent_id": None,
            "argsrepr": describe(model),
            "kwargsrepr": "{}",
            "origin": origin,
            "ignore_result": False,
            "replaced_task_nesting": 0,
            "stamped_headers": None,
            "stamps": {},
        },
        "properties": {
            "correlation_id": job_id,
            "reply_to": "",
            "delivery_mode": 2,
            "delivery_info": {"exchange": "", "routing_key": queue_for(model)},
            "priority": priority,
            "body_encoding": "base64",
            "delivery_tag": tag,
        },
    }


def describe(model: object) -> str:
    """What logs and events show in place of the arguments: never the prompt."""
    name = model if isinstance(model, str) else type(model).__name__
    return f"(<tokenmill payload for {name[:80]}>,)"


def wire(message: Mapping[str, Any], *, stored: bool = False) -> tuple[str, bytes]:
    """A message made ready to publish: the Redis list for ``LPUSH``, and the bytes, with a fresh tag.

    A delivery tag names one delivery, so that two publications of a job must not share it.

    Args:
        stored: it comes from a row, whoever published it first; see ``STORED_HEADER``.
    """
    if stored:
        message = dict(message) | {"headers": dict(message["headers"]) | {STORED_HEADER: True}}
    properties = dict(message["properties"]) | {"delivery_tag": str(uuid.uuid4())}
    key = queue_key(properties["delivery_info"]["routing_key"], properties.get("priority") or 0)
    return key, json.dumps(dict(message) | {"properties": properties}, separators=(",", ":")).encode()


class RedisPipeline(Protocol):
    """What ``push`` needs of a Redis client's pipeline."""

    def lpush(self, name: str, *values: bytes) -> Any: ...

    def execute(self) -> Any: ...


def push(pipeline: RedisPipeline, deliveries: Iterable[tuple[str, bytes]]) -> None:
    """Publish what ``wire`` makes, in order; neighbours of one list travel in one command."""
    for key, group in groupby(deliveries, itemgetter(0)):
        some: list[bytes] = []
        size = 0
        for _, data in group:
            if some and size + len(data) > _PUSH_BYTES:
                pipeline.lpush(key, *some)
                some, size = [], 0
            some.append(data)
            size += len(data)
        pipeline.lpush(key, *some)
    pipeline.execute()
