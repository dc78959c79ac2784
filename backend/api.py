"""What every backend offers and every caller needs: requests, results, handles, statistics and errors.

Nothing in here imports torch, Celery or SQL, so that a web application can build and validate a request with
the light base package alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Annotated, Any, Protocol, Self, runtime_checkable

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from backend.complaints import refuse_truth
from backend.errors import (
    ConfigurationError,
    EngineDeadError,
    KVCapacityError,
    PromptTooLongError,
    QueueFullError,
    RequestError,
    TokenmillError,
    UnknownModelError,
    UnsupportedModelError,
    request_error_from,
)
from backend.handle import GenerationHandle

__all__ = [
    "MAX_DEADLINE_S",
    "MAX_LOGIT_BIAS",
    "MAX_LOGPROBS",
    "MAX_SEED",
    "MAX_STOP_STRINGS",
    "MAX_STOP_TOKEN_IDS",
    "MAX_TOKEN_ID",
    "Backend",
    "BackendInfo",
    "BackendStats",
    "ChatMessage",
    "ConfigurationError",
    "EngineDeadError",
    "FinishReason",
    "GenerationHandle",
    "GenerationRequest",
    "GenerationResult",
    "KVCapacityError",
    "Prompt",
    "PromptTooLongError",
    "QueueFullError",
    "RequestError",
    "SamplingParams",
    "TokenChunk",
    "TokenLogprob",
    "TokenmillError",
    "UnknownModelError",
    "UnsupportedModelError",
    "check_text",
    "request_error_from",
]

MAX_STOP_STRINGS = 16
MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 1024
MAX_STOP_TOKEN_IDS = 64
MAX_SEED = 2**63 - 1
MAX_TOKEN_ID = 999_999_999  # no vocabulary has more; a number without bound may be more than can be written
MAX_DEADLINE_S = 3650 * 86_400  # ten years: a moment so far away can still be written as a date


# ------------------------------------------------------------------------------------------------------- requests


class FinishReason(StrEnum):
    """Why generation ended."""

    STOP = "stop"  # end-of-sequence token, stop token id or stop string
    LENGTH = "length"  # max_tokens or the context limit
    CANCELLED = "cancelled"
    DEADLINE = "deadline"


_SURROGATE = re.compile("[\ud800-\udfff]")


def check_text(text: str, field_name: str) -> str:
    """Refuse text that cannot be stored as UTF-8 in every supported database.

    Raises:
        RequestError: the text holds a NUL character or a lone surrogate; the message says where.
    """
    position = text.find("\x00")
    if position >= 0:
        raise RequestError(
            f"contains a NUL character at position {position}",
            field=field_name,
            fix="Remove it: databases cannot store NUL in text",
        )
    if match := _SURROGATE.search(text):
        raise RequestError(
            f"contains a lone surrogate (U+{ord(match.group()):04X}) at position {match.start()}",
            field=field_name,
            fix="Decode the text as UTF-8 before submitting it",
        )
    return text


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class ChatMessage(_Frozen):
    """One chat turn, rendered by the model's own chat template."""

    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: str

    @field_validator("role", "content")
    @classmethod
    def _text(cls, value: str, info: Any) -> str:
        return check_text(value, f"messages.{info.field_name}")


TokenId = Annotated[int, Field(ge=0, le=MAX_TOKEN_ID, strict=True)]


class SamplingParams(_Frozen):
    """How the next token is chosen and when generation ends. Greedy by default, so that runs repeat."""

    temperature: float = Field(0.0, ge=0.0, le=100.0, description="0 is greedy; higher is more random")
    top_k: int = Field(0, ge=0, le=MAX_TOKEN_ID, description="keep the k most likely tokens; 0 keeps all")
    top_p: float = Field(1.0, gt=0.0, le=1.0, description="keep the smallest set with this total probability")
    min_p: float = Field(0.0, ge=0.0, le=1.0, description="drop tokens below this share of the likeliest one")
    seed: int | None = Field(None, ge=0, le=MAX_SEED, description="drawn at submission when unset")
    repetition_penalty: float = Field(1.0, gt=0.0, le=100.0, description="above 1 discourages seen tokens")
    presence_penalty: float = Field(0.0, ge=-2.0, le=2.0)
    frequency_penalty: float = Field(0.0, ge=-2.0, le=2.0)
    logit_bias: dict[int, float] = Field(default_factory=dict, max_length=MAX_LOGIT_BIAS)
    max_tokens: int = Field(256, ge=1, le=10_000_000, description="most new tokens")
    min_tokens: int = Field(0, ge=0, description="no end-of-sequence or stop token id before this many")
    stop: tuple[str, ...] = Field((), max_length=MAX_STOP_STRINGS, description="strings that end generation")
    stop_token_ids: tuple[TokenId, ...] = Field((), max_length=MAX_STOP_TOKEN_IDS)
    ignore_eos: bool = Field(False, description="go on past the model's end-of-sequence token")
    logprobs: int | None = Field(
        None, ge=0, le=MAX_LOGPROBS, description="report log-probabilities with this many alternatives"
    )

    @field_validator(
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "seed",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "logit_bias",
        "max_tokens",
        "min_tokens",
        "logprobs",
        mode="before",
    )
    @classmethod
    def _numbers(cls, value: Any) -> Any:
        return refuse_truth(value)

    @field_validator("stop", mode="before")
    @classmethod
    def _one_or_many(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @field_validator("stop")
    @classmethod
    def _stops(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for text in value:
            if not text:
                raise ValueError("a stop string must not be empty")
            check_text(text, "stop")
        return value

    @field_validator("logit_bias")
    @classmethod
    def _bias(cls, value: dict[int, float]) -> dict[int, float]:
        for token, bias in value.items():
            if token < 0:
                raise ValueError("token ids must not be negative")
            if token > MAX_TOKEN_ID:
                raise ValueError(f"token ids must be at most {MAX_TOKEN_ID}")
            if not -100.0 <= bias <= 100.0:
                raise ValueError("each bias must lie between -100 and 100")
        return value

    @model_validator(mode="after")
    def _min_within_max(self) -> Self:
        if self.min_tokens > self.max_tokens:
            raise RequestError(
                f"must not exceed max_tokens ({self.max_tokens})",
                field="min_tokens",
                value=self.min_tokens,
                fix="Lower min_tokens or raise max_tokens",
            )
        return self

    @property
    def uses_penalties(self) -> bool:
        """Whether the sampler must count this sequence's tokens."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


class Prompt(_Frozen):
    """What to continue: exactly one of raw text, chat messages or token ids."""

    prompt: str | None = None
    messages: tuple[ChatMessage, ...] | None = None
    token_ids: tuple[TokenId, ...] | None = None

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        given = [name for name in ("prompt", "messages", "token_ids") if getattr(self, name) is not None]
        if len(given) != 1:
            raise RequestError(
                f"give exactly one of prompt, messages and token_ids, not {' and '.join(given) or 'none'}",
                field="prompt",
                fix="Keep one of the three",
            )
        if not getattr(self, given[0]):
            raise RequestError("must not be empty", field=given[0], fix="Give at least one token of input")
        if self.prompt is not None:
            check_text(self.prompt, "prompt")
        return self


class GenerationRequest(_Frozen):
    """One generation job as a backend takes it.

    ``request_id`` is for people and logs only: backends key their state by object, so a reused id is harmless.
    ``priority`` runs from 0 (most urgent) to 9. ``deadline_s`` counts from submission; when it passes, what has
    been generated is returned with ``FinishReason.DEADLINE``.
    """

    request_id: str
    prompt: Prompt
    sampling: SamplingParams = SamplingParams()
    priority: int = Field(3, ge=0, le=9)
    deadline_s: float | None = Field(None, gt=0, le=MAX_DEADLINE_S)
    stream: bool = False


# -------------------------------------------------------------------------------------------------------- results


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability (float32 log-softmax of the raw logits, natural logarithm) of one generated token."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # the most likely alternatives, best first
    # Of the token by itself; of a part of a character it is U+FFFD. None without a tokenizer.
    text: str | None = None
    top_texts: tuple[str, ...] | None = None  # of the alternatives


@dataclass(frozen=True, slots=True)
class TokenChunk:
    """A piece of a stream: text that will not change any more, with the tokens that completed it."""

    text: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class GenerationResult:
    """What came of a request. Text, tokens, log-probabilities and counts always agree about where it ended.

    A stop string is cut from ``text``; the tokens up to and including the one that completed it are kept and
    counted. An end-of-sequence token is kept in ``token_ids`` and counted, but not in ``text``.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    stop_reason: str | int | None = None  # the stop string or token id that ended it
    cached_tokens: int = 0  # prompt tokens served from the prefix cache
    seed: int | None = None  # as given, or as drawn where tokens are drawn at random
    queue_time_s: float = 0.0  # submission → first scheduled
    time_to_first_token_s: float | None = None  # submission → first token on the host
    latency_s: float = 0.0  # submission → finished
    preemptions: int = 0
    logprobs: tuple[TokenLogprob, ...] | None = None

    def to_dict(self) -> dict[str, Any]:
        """The result as JSON-safe values."""
        return asdict(self) | {"finish_reason": str(self.finish_reason)}


# ------------------------------------------------------------------------------------------------- backend, stats


@dataclass(frozen=True, slots=True)
class BackendInfo:
    """What a started backend runs, for the ``worker`` table, ``inspect stats`` and ``doctor``."""

    backend: str
    model: str
    device: str
    dtype: str
    slots: int  # requests that can run at once
    max_model_len: int  # tokens, prompt and new ones together
    vocab_size: int
    details: Mapping[str, Any] = field(default_factory=dict)  # JSON-safe configuration as it took effect


@dataclass(frozen=True, slots=True)
class BackendStats:
    """Counters since start, and gauges at this moment. Counters only grow, so that samples can be subtracted."""

    running: int = 0
    waiting: int = 0
    steps: int = 0
    prompt_tokens: int = 0  # prompt tokens of admitted requests, cache hits included
    cached_tokens: int = 0  # of these, served from the prefix cache
    generated_tokens: int = 0
    requests_finished: int = 0
    requests_failed: int = 0
    preemptions: int = 0
    busy_s: float = 0.0  # device computing
    prepare_s: float = 0.0  # CPU preparing batches
    wall_s: float = 0.0  # since start
    kv_blocks_total: int = 0
    kv_blocks_free: int = 0  # reusable prefix-cache blocks count as free


@runtime_checkable
class Backend(Protocol):
    """A persistent way to generate. One instance lives as long as its worker process.

    Every method is safe to call from any thread after ``start``. ``tests/engine/test_conformance.py`` and the files
    named after it state in code what an implementation must hold.
    """

    @property
    def name(self) -> str:
        """The registry name."""

    def start(self) -> None:
        """Load and make ready; returns when the first request could run.

        Raises:
            ConfigurationError: the configuration cannot work here.
        """

    def info(self) -> BackendInfo:
        """What is running; valid after ``start``."""

    def submit(self, request: GenerationRequest) -> GenerationHandle:
        """Queue a request. Validation that needs the model or its tokenizer happens here.

        Raises:
            RequestError: the request is bad or can never run here.
            EngineDeadError: the backend has stopped.
        """

    def stats(self) -> BackendStats:
        """Counters and gauges, without blocking."""

    def add_death_callback(self, callback: Callable[[EngineDeadError], None]) -> None:
        """Call ``callback`` once if the backend dies of a fault (at once when it already has)."""

    def shutdown(self, *, drain: bool, timeout_s: float | None = None) -> None:
        """Stop. With ``drain`` accepted requests may finish within ``timeout_s``; the rest end as cancelled."""
