"""Answers and errors as OpenAI's clients read them."""

from __future__ import annotations

import pytest

from backend.api import KVCapacityError, PromptTooLongError, RequestError
from workers.client import StreamEvent
from workers.serve.answers import CHAT, COMPLETION, logprobs
from workers.serve.errors import ApiError, from_end
from workers.serve.generation import Continuous
from workers.streams import StreamEnd

ENTRIES = [
    {
        "token_id": 5,
        "logprob": -0.5,
        "top": [[5, -0.5], [6, -1.0]],
        "text": " é",
        "top_texts": [" é", "\ufffd"],
    },
    {"token_id": 9, "logprob": -2.0, "top": [], "text": None, "top_texts": None},
    {"token_id": 7, "logprob": -3.0, "top": [[8, -0.1]]},  # of a worker that knows no texts
]


def test_tokens_of_chats_have_text_and_bytes_where_they_are_text() -> None:
    found = logprobs(CHAT, ENTRIES)
    assert found is not None
    first, second, third = found["content"]
    assert (first["token"], first["bytes"]) == (" é", [0x20, 0xC3, 0xA9])
    assert [(top["token"], top["bytes"]) for top in first["top_logprobs"]] == [
        (" é", [0x20, 0xC3, 0xA9]),
        ("token_id:6", None),
    ]
    assert (second["token"], second["bytes"], second["top_logprobs"]) == ("token_id:9", None, [])
    assert (third["token"], third["top_logprobs"][0]["token"]) == ("token_id:7", "token_id:8")


def test_alternatives_of_completions_are_named_apart() -> None:
    found = logprobs(COMPLETION, ENTRIES)
    assert found is not None
    assert found["tokens"] == [" é", "token_id:9", "token_id:7"]
    assert found["top_logprobs"] == [{" é": -0.5, "token_id:6": -1.0}, {}, {"token_id:8": -0.1}]
    assert logprobs(COMPLETION, None) is None


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (PromptTooLongError, "context_length_exceeded"),
        (KVCapacityError, "request_failed"),
        (RequestError, "request_failed"),
    ],
)
def test_what_only_a_worker_can_refuse_is_the_callers_fault(kind: type[RequestError], code: str) -> None:
    error = from_end("j", StreamEnd("failed", error_type=kind.__name__, error_message="prompt: is too long"))
    assert (error.status, error.kind, error.code) == (400, "invalid_request_error", code)
    assert error.message == "job j: prompt: is too long"


def test_an_answer_that_begins_again_continues_where_it_was() -> None:
    again = Continuous()
    events = [
        StreamEvent("1-0", "text", text="one "),
        StreamEvent("2-0", "text", text="two"),
        StreamEvent("3-0", "restart"),
        StreamEvent("4-0", "text", text="on"),
        StreamEvent("5-0", "text", text="e two three"),
    ]
    assert [again.feed(event) for event in events] == ["one ", "two", "", "", " three"]
    again.feed(StreamEvent("6-0", "restart"))
    with pytest.raises(ApiError, match="differently"):
        again.feed(StreamEvent("7-0", "text", text="other"))
