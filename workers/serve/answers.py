"""The bodies of the answers: whole, in chunks, and their usage."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Literal

from models_db.records import StoredResult

Endpoint = Literal["/v1/chat/completions", "/v1/completions"]
CHAT: Endpoint = "/v1/chat/completions"
COMPLETION: Endpoint = "/v1/completions"

DONE = "data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Choice:
    """One answer with its counts."""

    text: str
    finish_reason: str | None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    logprobs: Sequence[Mapping[str, Any]] | None = None  # as ``result.logprobs`` keeps them

    @classmethod
    def of(cls, result: StoredResult) -> Choice:
        """The answer that SQL holds."""
        return cls(
            result.text,
            result.finish_reason,
            result.prompt_tokens,
            result.completion_tokens,
            result.cached_tokens,
            result.logprobs,
        )


def finish_reason(reason: str | None) -> str:
    """Ours as the API's: a deadline cuts an answer as a length does."""
    return "stop" if reason == "stop" else "length"


def answer_id(endpoint: Endpoint, job_id: str) -> str:
    """The answer's id: the first job's, marked with its kind."""
    return f"{'chatcmpl' if endpoint == CHAT else 'cmpl'}-{job_id}"


def token_name(token_id: int, text: str | None) -> str:
    """How a token is written in log-probabilities: as its text, or by its id where it is no text by itself."""
    return f"token_id:{token_id}" if not text or "\ufffd" in text else text


def logprobs(endpoint: Endpoint, entries: Sequence[Mapping[str, Any]] | None) -> dict[str, Any] | None:
    """The log-probabilities of an answer's tokens, in the form of the endpoint."""
    if entries is None:
        return None
    tops = [
        [
            (token_name(token_id, text), value)
            for (token_id, value), text in zip_longest(entry["top"], entry.get("top_texts") or ())
        ]
        for entry in entries
    ]
    named = [(token_name(entry["token_id"], entry.get("text")), entry["logprob"]) for entry in entries]
    if endpoint == COMPLETION:
        return {
            "tokens": [token for token, _ in named],
            "token_logprobs": [value for _, value in named],
            "top_logprobs": [dict(top) for top in tops] if any(tops) else None,
            "text_offset": None,
        }

    def shown(token: str, value: float) -> dict[str, Any]:
        known = None if token.startswith("token_id:") else list(token.encode())
        return {"token": token, "logprob": value, "bytes": known}

    content = [
        shown(*own) | {"top_logprobs": [shown(*each) for each in top]}
        for own, top in zip(named, tops, strict=True)
    ]
    return {"content": content, "refusal": None}


def usage(choices: Sequence[Choice], prompts: int = 1) -> dict[str, Any]:
    """Token counts; the choices of one prompt share its tokens, which count once."""
    each = max(1, len(choices) // max(1, prompts))
    prompt = sum(choice.prompt_tokens for choice in choices[::each])
    completion = sum(choice.completion_tokens for choice in choices)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(choice.cached_tokens for choice in choices[::each])},
    }


def whole(
    endpoint: Endpoint, job_id: str, model: str, created: int, choices: Sequence[Choice], prompts: int = 1
) -> dict[str, Any]:
    """A complete answer."""
    rendered = []
    for index, choice in enumerate(choices):
        body: dict[str, Any] = {"index": index, "finish_reason": finish_reason(choice.finish_reason)}
        if endpoint == CHAT:
            body["message"] = {"role": "assistant", "content": choice.text, "refusal": None}
        else:
            body["text"] = choice.text
        rendered.append(body | {"logprobs": logprobs(endpoint, choice.logprobs)})
    return {
        "id": answer_id(endpoint, job_id),
        "object": "chat.completion" if endpoint == CHAT else "text_completion",
        "created": created,
        "model": model,
        "choices": rendered,
        "usage": usage(choices, prompts),
    }


class Chunks:
    """Makes the server-sent events of one streamed answer."""

    def __init__(self, endpoint: Endpoint, job_id: str, model: str, created: int) -> None:
        self._endpoint = endpoint
        self._chat = endpoint == CHAT
        self._head = {
            "id": answer_id(endpoint, job_id),
            "object": "chat.completion.chunk" if self._chat else "text_completion",
            "created": created,
            "model": model,
        }

    def first(self, index: int) -> str:
        """Says whose turn it is; nothing for completions."""
        if not self._chat:
            return ""
        return self._event(
            [{"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]
        )

    def text(self, index: int, text: str) -> str:
        """A piece of an answer."""
        piece: dict[str, Any] = {"delta": {"content": text}} if self._chat else {"text": text}
        return self._event([{"index": index, **piece, "finish_reason": None}])

    def finish(
        self, index: int, reason: str | None, entries: Sequence[Mapping[str, Any]] | None = None
    ) -> str:
        """The end of an answer, with the log-probabilities of all its tokens where they were asked for."""
        piece: dict[str, Any] = {"delta": {}} if self._chat else {"text": ""}
        if entries is not None:
            piece["logprobs"] = logprobs(self._endpoint, entries)
        return self._event([{"index": index, **piece, "finish_reason": finish_reason(reason)}])

    def usage(self, choices: Sequence[Choice], prompts: int) -> str:
        """The counts of all answers."""
        return self._event([], usage=usage(choices, prompts))

    def _event(self, choices: list[dict[str, Any]], **more: Any) -> str:
        return sse(self._head | {"choices": choices} | more)


def sse(data: object) -> str:
    """One server-sent event."""
    return f"data: {json.dumps(data, ensure_ascii=False, separators=(',', ':'))}\n\n"
