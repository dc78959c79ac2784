"""The bodies of ``/v1/chat/completions`` and ``/v1/completions``, and the jobs that they ask for.

What this service cannot do is refused by name, not ignored: an answer that silently leaves out a tool or a format
would be worse than none. A field that asks for nothing (``tools: []``) is taken. Fields that only concern how a
provider keeps books are accepted and have no effect.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from backend.api import MAX_LOGPROBS, MAX_SEED, RequestError
from backend.complaints import refuse_truth
from workers.serve.errors import ApiError, from_exception, from_validation, invalid, refused, unsupported

R = TypeVar("R", bound="_Request")

DEFAULT_MAX_TOKENS = 1024
MAX_CHOICES = 16
_PRIORITIES = {"auto": 3, "default": 3, "priority": 0, "flex": 6}

# Numbers that a job takes under the same name.
_NUMBERS = (
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "min_tokens",
)

# Accepted and without effect here.
_BOOKKEEPING = frozenset(
    {
        "user",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "store",
        "metadata",
        "parallel_tool_calls",
    }
)
# Values that ask for nothing, so that clients which always send the field are served.
_NOTHING: dict[str, tuple[Any, ...]] = {
    "tools": ([], None),
    "tool_choice": ("none", "auto", None),
    "functions": ([], None),
    "function_call": ("none", "auto", None),
    "response_format": ({"type": "text"}, None),
    "reasoning_effort": ("none", None),
    "verbosity": ("medium", None),
    "modalities": (["text"], None),
    "audio": (None,),
    "prediction": (None,),
    "web_search_options": (None,),
    "moderation": (None,),
    "echo": (False, None),
    "suffix": (None, ""),
    "best_of": (1, None),
}
# What to do instead, where there is something better than leaving the field out.
_INSTEAD = {
    "response_format": "Leave it out, say in the messages what the answer is to look like, and check it",
    "tools": "Leave it out, or describe the tools in the messages and read the calls from the text",
    "functions": "Leave it out, or describe the functions in the messages and read the calls from the text",
    "max_completion_tokens": "Use max_tokens",
    "messages": "Send it to /v1/chat/completions",
    "prompt": "Send it to /v1/completions, or use messages",
    "best_of": "Use n and choose yourself",
    "echo": "Leave it out and put the prompt before the answer yourself",
    "reasoning_effort": "Leave it out; a model that reasons does so as its messages say",
}
# Accepted in a part of a message and without effect: marks for a provider's cache.
_BOOKKEEPING_IN_A_PART = ("prompt_cache_breakpoint", "cache_control")
# Parts of a message that an answer has, which people send back as they got it.
_EMPTY_IN_A_MESSAGE = ("refusal", "annotations", "audio", "tool_calls", "function_call", "name")


class _Loose(BaseModel):
    model_config = ConfigDict(frozen=True, extra="allow", allow_inf_nan=False)


class StreamOptions(_Loose):
    """``stream_options``."""

    include_usage: bool = False
    include_obfuscation: bool | None = None  # padding against listeners; a proxy with TLS is the place for it

    @model_validator(mode="after")
    def _known(self) -> Self:
        for name in self.model_extra or {}:
            raise ValueError(f"has no field {name}. Leave it out")
        return self


class TextPart(BaseModel):
    """A part of a message's content; only text can be read here."""

    model_config = ConfigDict(frozen=True, extra="allow")

    type: str
    text: str

    @model_validator(mode="after")
    def _nothing_else(self) -> Self:
        for name, value in (self.model_extra or {}).items():
            if name not in _BOOKKEEPING_IN_A_PART and value is not None:
                raise ValueError(f"{name}: the models here read text alone. Leave it out")
        return self

    @model_validator(mode="before")
    @classmethod
    def _only_text(cls, data: Any) -> Any:
        kind = data.get("type") if isinstance(data, Mapping) else None
        if isinstance(kind, str) and kind != "text":
            shown = RequestError(
                "the models here read text alone", field="type", value=kind, fix="Leave the part out"
            )
            raise ValueError(str(shown))
        return data


class Message(BaseModel):
    """One turn of a conversation."""

    model_config = ConfigDict(frozen=True, extra="allow")

    role: Literal["system", "developer", "user", "assistant"]
    content: str | tuple[TextPart, ...]

    @model_validator(mode="after")
    def _nothing_else(self) -> Self:
        for name, value in (self.model_extra or {}).items():
            if name not in _EMPTY_IN_A_MESSAGE or value not in (None, [], ""):
                raise ValueError(f"{name}: the models here read role and content alone. Leave it out")
        return self

    def turn(self) -> dict[str, str]:
        """As a job takes it."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class _Request(_Loose):
    """What both endpoints share. Defaults are OpenAI's, so ``temperature`` is 1."""

    model: str = Field(min_length=1)
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    stop: str | tuple[str, ...] | None = None
    max_tokens: int | None = Field(None, ge=1)
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    service_tier: str | None = None

    @field_validator("temperature", "seed", "max_tokens", "n", *_NUMBERS, mode="before")
    @classmethod
    def _numbers(cls, value: Any) -> Any:
        return refuse_truth(value)

    @field_validator("service_tier")
    @classmethod
    def _known_tier(cls, value: str | None) -> str | None:
        if value is not None and value not in _PRIORITIES:
            known = ", ".join(_PRIORITIES)
            raise ValueError(f"is not known (got {value[:80]!r}). Use one of {known}, or leave it out")
        return value

    @model_validator(mode="after")
    def _options_of_a_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: is only for a stream. Set stream, or leave it out")
        return self

    @property
    def choices(self) -> int:
        """Answers asked for."""
        return self.n or 1

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def alternatives(self) -> int | None:
        """How many log-probabilities to report for each token beside its own; ``None``: none at all."""
        raise NotImplementedError

    def own(self, error: RequestError) -> ApiError:
        """What is wrong with a job, told of the field that the caller wrote."""
        if error.field == "max_tokens" and getattr(self, "max_completion_tokens", None) is not None:
            name = "max_completion_tokens"
        elif error.field.partition(".")[0] == "token_ids":
            name = "prompt"
        else:
            return from_exception(error)
        wrong = str(error).removeprefix(f"{error.field}: ")
        return invalid(f"{name}: {wrong}", param=name, code=error.code)

    def _payload(self, max_tokens: int | None) -> dict[str, Any]:
        names = (*_NUMBERS, "stop", "ignore_eos")
        fields = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        if self.alternatives is not None:
            fields["logprobs"] = self.alternatives
        return fields | {
            "model": self.model,
            "temperature": 1.0 if self.temperature is None else self.temperature,
            "max_tokens": max_tokens or DEFAULT_MAX_TOKENS,
            "priority": _PRIORITIES[self.service_tier or "auto"],
        }

    def _seeded(self, payload: dict[str, Any]) -> list[dict[str, Any]]:
        """One payload for each choice; with a seed, each has its own."""
        if self.seed is None:
            return [payload] * self.choices
        return [payload | {"seed": (self.seed + index) % (MAX_SEED + 1)} for index in range(self.choices)]


class ChatRequest(_Request):
    """The body of ``/v1/chat/completions``."""

    messages: Annotated[tuple[Message, ...], Field(min_length=1)]
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)

    @field_validator("max_completion_tokens", "top_logprobs", mode="before")
    @classmethod
    def _more_numbers(cls, value: Any) -> Any:
        return refuse_truth(value)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs: needs logprobs. Set logprobs to true")
        return self

    @property
    def alternatives(self) -> int | None:
        """See ``_Request``."""
        return (self.top_logprobs or 0) if self.logprobs else None

    def payloads(self) -> list[dict[str, Any]]:
        """The jobs' payloads, one for each choice."""
        payload = self._payload(self.max_completion_tokens or self.max_tokens)
        return self._seeded(payload | {"messages": [message.turn() for message in self.messages]})


class CompletionRequest(_Request):
    """The body of ``/v1/completions``: one or more prompts to be continued as they are."""

    prompt: str | tuple[int, ...] | tuple[str, ...] | tuple[tuple[int, ...], ...]
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)

    @field_validator("logprobs", mode="before")
    @classmethod
    def _more_numbers(cls, value: Any) -> Any:
        return refuse_truth(value)

    @property
    def alternatives(self) -> int | None:
        """See ``_Request``."""
        return self.logprobs

    def payloads(self) -> list[dict[str, Any]]:
        """The jobs' payloads: the choices of the first prompt, then of the second …"""
        payload = self._payload(self.max_tokens)
        prompts = self.prompt
        if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
            prompts = (prompts,)  # type: ignore[assignment]
        jobs = []
        for prompt in prompts:
            name = "prompt" if isinstance(prompt, str) else "token_ids"
            jobs += self._seeded(payload | {name: prompt})
        return jobs


def parse_chat(data: object) -> ChatRequest:
    """Read the body.

    Raises:
        ApiError: it is wrong, or asks for what this service cannot do; names the field.
    """
    return _parse(ChatRequest, data)


def parse_completion(data: object) -> CompletionRequest:
    """As ``parse_chat``; more prompts than ``MAX_CHOICES`` answers are refused."""
    request = _parse(CompletionRequest, data)
    if not request.prompt:
        raise refused(
            "must not be empty", param="prompt", value=request.prompt, fix="Give at least one token of input"
        )
    if len(request.payloads()) > MAX_CHOICES:
        raise refused(
            f"asks for {len(request.payloads())} answers, and a request may have {MAX_CHOICES}",
            param="prompt",
            fix="Send them as a batch or one by one",
        )
    return request


def refuse_in_batch(request: ChatRequest | CompletionRequest) -> None:
    """Refuse what a line of a batch would ask for in vain.

    Raises:
        ApiError: names the field.
    """
    if request.stream:
        raise unsupported("stream", True, "a batch answers by a file", "Leave it out, or set it to false")
    if request.service_tier == "priority":
        fix = "Leave it out, or send the request by itself"
        raise unsupported("service_tier", "priority", "a batch goes behind other requests", fix)


def _parse(kind: type[R], data: object) -> R:
    if not isinstance(data, dict):
        raise invalid("the body must be a JSON object")
    try:
        request = kind.model_validate(data)
    except ValidationError as error:
        raise from_validation(error) from None
    for name, value in (request.model_extra or {}).items():
        if name in _BOOKKEEPING or any(value == nothing for nothing in _NOTHING.get(name, ())):
            continue
        known = "this service cannot do that" if name in _NOTHING else "no such field"
        fix = _INSTEAD.get(name, "Leave it out")
        raise unsupported(name, value, known, fix)
    return request
