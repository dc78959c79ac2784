"""What every backend offers and every caller needs: requests, results, handles, statistics and errors.

Nothing in here imports torch, Celery or SQL, so that a web application can build and validate a request with
the light base package alone.
"""

from __future__ import annotations

import logging
import queue
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, InvalidStateError
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Annotated, Any, Protocol, Self, runtime_checkable

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from backend.complaints import complaint, refuse_truth

MAX_STOP_STRINGS = 16
MAX_LOGPROBS = 20
logger = logging.getLogger(__name__)

MAX_LOGIT_BIAS = 1024
MAX_STOP_TOKEN_IDS = 64
MAX_SEED = 2**63 - 1
MAX_DEADLINE_S = 3650 * 86_400  # ten years: a moment so far away can still be written as a date


# --------------------------------------------------------------------------------------------------------- errors


class TokenmillError(Exception):
    """Root of every error that Tokenmill raises on purpose. ``code`` is stable and machine-readable."""

    code = "error"


class RequestError(TokenmillError):
    """One bad request; it fails alone and nothing else in flight is disturbed.

    ``field`` names the offending part, ``value`` is a short rendering of what was given (never a whole prompt; empty
    where there is none to show) and ``fix`` says what to do about it.
    """

    code = "invalid_request"

    def __init__(self, message: str, *, field: str = "", value: object = None, fix: str = "") -> None:
        self.field = field
        self.value = "" if value is None else _short(value)
        self.fix = fix
        parts = [f"{field}: {message}" if field else message]
        if value is not None:
            parts.append(f"(got {self.value})")
        text = " ".join(parts)
        super().__init__(f"{text}. {fix}" if fix else text)

    def to_dict(self) -> dict[str, str]:
        """The error as JSON-safe fields: code, message, field, value, fix."""
        return {
            "code": self.code,
            "message": str(self),
            "field": self.field,
            "value": self.value,
            "fix": self.fix,
        }


class PromptTooLongError(RequestError):
    """The prompt leaves no room for a single new token within the model's context."""

    code = "prompt_too_long"


class KVCapacityError(RequestError):
    """The request could never fit the key/value cache, even alone."""

    code = "kv_capacity"


class UnknownModelError(RequestError):
    """The named model is not one that is configured here."""

    code = "unknown_model"


class QueueFullError(RequestError):
    """The backend's waiting queue is at its configured limit."""

    code = "queue_full"


class ConfigurationError(TokenmillError):
    """A setting is wrong or something the configuration asks for is missing."""

    code = "configuration"


class UnsupportedModelError(ConfigurationError):
    """The model's architecture, weights or attention layout cannot be run correctly by this engine."""

    code = "unsupported_model"


class EngineDeadError(TokenmillError):
    """The engine met a fault that it cannot continue from; every request in flight is told so."""

    code = "engine_dead"


def _short(value: object, limit: int = 80) -> str:
    try:
        text = repr(value)
    except Exception:  # nested too deeply, or a number with more digits than Python writes
        text = f"<{type(value).__name__}>"
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def request_error_from(exc: ValidationError, *, prefix: str = "") -> RequestError:
    """Turn pydantic's first complaint into a ``RequestError`` that names the field, the value and the fix."""
    first = exc.errors(include_url=False)[0]
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, RequestError):
        return cause
    path = ".".join(str(part) for part in first["loc"] if part != "[key]")
    wrong, fix = complaint(first)
    value = None if first["type"] == "missing" else first["input"]
    return RequestError(wrong, field=f"{prefix}{path}", value=value, fix=fix)


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


TokenId = Annotated[int, Field(ge=0, strict=True)]


class SamplingParams(_Frozen):
    """How the next token is chosen and when generation ends. Greedy by default, so that runs repeat."""

    temperature: float = Field(0.0, ge=0.0, le=100.0, description="0 is greedy; higher is more random")
    top_k: int = Field(0, ge=0, description="keep the k most likely tokens; 0 keeps all")
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
    text: str | None = (
        None  # of the token by itself; of a part of a character it is U+FFFD. None without a tokenizer
    )
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


_END = object()


class GenerationHandle:
    """A running request: a future for its result, a stream of its tokens, and a way to cancel it.

    Cancelling the future cancels the request, too. Safe to use from any thread. The backend side calls ``push``,
    ``finish`` and ``fail``; each caller-visible outcome is delivered once.
    """

    def __init__(self, request: GenerationRequest, on_cancel: Callable[[], None]) -> None:
        self.request = request
        self.future: Future[GenerationResult] = Future()
        self._starting = threading.Lock()
        self._started = False
        self._on_start: list[Callable[[], None]] = []
        self._on_cancel = on_cancel
        self.future.add_done_callback(self._after_future)
        self._chunks: queue.SimpleQueue[Any] | None = queue.SimpleQueue() if request.stream else None
        self._forwarding = threading.Lock()
        self._receiver: Callable[[TokenChunk], None] | None = None

    @property
    def started(self) -> bool:
        """Whether it has left the backend's queue; set by the backend."""
        return self._started

    @started.setter
    def started(self, started: bool) -> None:
        with self._starting:
            self._started = started
            calls, self._on_start = self._on_start, []
        for call in calls:
            try:
                call()
            except BaseException:
                # The backend's thread works for everybody; one caller's fault must not end it.
                logger.exception(
                    "what was to be called at the start of request %s failed", self.request.request_id
                )

    def when_started(self, call: Callable[[], None]) -> None:
        """Call this once when it leaves the backend's queue; at once if it has left.

        That is on the backend's thread, so ``call`` must not block; what it raises is logged. A request that ends in
        the queue never starts.
        """
        with self._starting:
            if not self._started:
                self._on_start.append(call)
                return
        call()

    def result(self, timeout: float | None = None) -> GenerationResult:
        """Wait for the result; raises the request's error, or ``TimeoutError`` after ``timeout`` seconds."""
        return self.future.result(timeout)

    def cancel(self) -> None:
        """Ask for an early end. The result then has ``FinishReason.CANCELLED`` and what was generated."""
        self._on_cancel()

    def done(self) -> bool:
        """Whether the outcome is known."""
        return self.future.done()

    def stream(self) -> Iterator[TokenChunk]:
        """Yield chunks until the request ends; raises its error. Only for requests with ``stream=True``."""
        if self._chunks is None:
            raise RequestError("was not set on this request", field="stream", fix="Submit with stream=True")
        while True:
            item = self._chunks.get()
            if item is _END:
                self._chunks.put(_END)  # so that a second iteration ends, too
                self.future.result()
                return
            yield item

    def forward(self, receive: Callable[[TokenChunk], None]) -> None:
        """Give every chunk to ``receive`` instead of ``stream``, those that are there already at once.

        Later ones come on the backend's thread, so ``receive`` must not block; if it raises, the request fails and is
        given up. All of them come before the future is done. Only for requests with ``stream=True``.
        """
        if self._chunks is None:
            raise RequestError("was not set on this request", field="stream", fix="Submit with stream=True")
        with self._forwarding:  # no later chunk may overtake the ones that waited
            while not self._chunks.empty():
                item = self._chunks.get()
                if item is _END:
                    self._chunks.put(_END)
                    break
                receive(item)
            self._receiver = receive

    # ------------------------------------------------------------------------------------- the backend's side

    def push(self, chunk: TokenChunk) -> None:
        """Hand a chunk to the stream; ignored when the request does not stream, or has failed."""
        if self._chunks is None or self.future.done():
            return
        with self._forwarding:
            if self._receiver is None:
                self._chunks.put(chunk)
                return
            try:
                self._receiver(chunk)
                return
            except BaseException as exc:  # one caller's fault, on the thread that works for everybody
                error = TokenmillError(f"the receiver of the stream failed: {exc!r}")
                error.__cause__ = exc
        self.fail(error)
        self._on_cancel()

    def finish(self, result: GenerationResult) -> None:
        """Deliver the result; a second outcome is ignored."""
        self._settle(lambda: self.future.set_result(result))

    def fail(self, error: BaseException) -> None:
        """Deliver an error; a second outcome is ignored."""
        self._settle(lambda: self.future.set_exception(error))

    def _after_future(self, future: Future[GenerationResult]) -> None:
        if future.cancelled():  # by its holder, as asyncio does with a wrapped one: nobody waits for the rest
            self._on_cancel()

    def _settle(self, deliver: Callable[[], None]) -> None:
        try:
            deliver()
        except InvalidStateError:
            pass  # settled before, or the future was cancelled by its holder
        except (
            BaseException
        ):  # a callback of the future's that means to exit; other errors the future logs itself
            logger.exception("what was to be called at the end of request %s failed", self.request.request_id)
        if self._chunks is not None:
            self._chunks.put(_END)


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

    Every method is safe to call from any thread after ``start``. ``tests/engine/test_conformance.py`` states in
    code what an implementation must hold.
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
