"""The words in which a wrong value is refused: what it must be, what it was, and what to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import pytest
from pydantic import BaseModel, Field, ValidationError
from pydantic_core import core_schema

from backend.api import RequestError
from backend.complaints import complaint
from workers.payload import GeneratePayload
from workers.serve.errors import ApiError
from workers.serve.requests import ChatRequest, CompletionRequest, parse_chat, parse_completion

ASK = [{"role": "user", "content": "a"}]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_tokens": 0}, "max_tokens: must be at least 1 (got 0). Use 1 or more"),
        ({"max_tokens": 10**8}, "max_tokens: must be at most 10000000 (got 100000000). Use 10000000 or less"),
        ({"top_p": 0}, "top_p: must be above 0 (got 0). Use more than 0"),
        (
            {"temperature": float("nan")},
            "temperature: must be a finite number (got nan). Use a finite number",
        ),
        ({"max_tokens": "many"}, "max_tokens: must be a whole number (got 'many'). Use a whole number"),
        ({"max_tokens": None}, "max_tokens: must be a whole number, not null. Use a whole number"),
        ({"messages": "a"}, "messages: must be a list (got 'a'). Give a list"),
        ({"messages": ["a"]}, "messages.0: must be an object (got 'a'). Give an object with named fields"),
        ({"messages": [{"role": "user"}]}, "messages.0.content: required field is missing. Add it"),
        ({"tenant": ""}, "tenant: must not be empty (got ''). Give at least one character"),
        ({"stream": "maybe"}, "stream: must be true or false (got 'maybe'). Use true or false"),
        ({"stop": ["a"] * 17}, "stop: has more than 16 items"),
        ({"logit_bias": {"x": 1}}, "logit_bias.x: must be a whole number (got 'x'). Use a whole number"),
        ({"promt": "a"}, "promt: unknown field (got 'a'). Remove it or correct its spelling"),
    ],
)
def test_a_payload_is_refused_in_plain_words(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError) as caught:
        GeneratePayload.parse({"model": "m"} | ({} if "messages" in fields else {"prompt": "a"}) | fields)
    assert str(caught.value).startswith(words)
    assert caught.value.fix


def _numbers_of(model: type[BaseModel]) -> list[str]:
    """The fields that the schema says are numbers."""

    def kinds(schema: dict[str, Any]) -> set[str]:
        return {schema.get("type", "")}.union(*(kinds(each) for each in schema.get("anyOf", [])))

    found = model.model_json_schema()["properties"].items()
    return [name for name, schema in found if kinds(schema) & {"integer", "number"} and "const" not in schema]


@pytest.mark.parametrize("name", _numbers_of(GeneratePayload))
def test_true_is_no_number_in_a_payload(name: str) -> None:
    with pytest.raises(RequestError) as caught:
        GeneratePayload.parse({"model": "m", "prompt": "a", name: True})
    assert str(caught.value) == f"{name}: must be a number (got True). Use a number"


@pytest.mark.parametrize(
    ("read", "prompt", "name"),
    [(parse_chat, {"messages": ASK}, name) for name in _numbers_of(ChatRequest)]
    + [
        (parse_completion, {"prompt": "a"}, name)
        for name in _numbers_of(CompletionRequest)
        if name != "prompt"
    ],
)
def test_true_is_no_number_over_http(
    read: Callable[[object], object], prompt: dict[str, Any], name: str
) -> None:
    with pytest.raises(ApiError, match=f"{name}: must be a number .got True") as caught:
        read({"model": "m", name: True} | prompt)
    assert caught.value.param == name


def test_true_is_no_bias() -> None:
    with pytest.raises(RequestError, match="logit_bias: must be a number"):
        GeneratePayload.parse({"model": "m", "prompt": "a", "logit_bias": {"5": True}})


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"messages": []}, "messages: must not be empty (got []). Give at least one item"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages.0.content.0.type: the models here read text alone (got 'image_url'). Leave the part out",
        ),
        (
            {"messages": [{"role": "user", "content": None}]},
            "messages.0.content: must be text, not null. Give a string",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "messages.0.content.0.text: required field is missing. Add it",
        ),
        ({"stream": "maybe"}, "stream: must be true or false (got 'maybe'). Use true or false"),
        ({"n": 0}, "n: must be at least 1 (got 0). Use 1 or more"),
        ({"service_tier": "fast"}, "service_tier: is not known (got 'fast'). Use one of auto, "),
    ],
)
def test_a_chat_is_refused_in_plain_words(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ApiError) as caught:
        parse_chat({"model": "m", "messages": ASK} | fields)
    assert caught.value.message.startswith(words)
    assert caught.value.param == words.partition(": ")[0]


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        (5, "prompt: must be text (got 5). Give a string"),
        ([], "prompt: must not be empty (got ()). Give at least one token of input"),
        ([1, "a"], "prompt.1: must be a whole number (got 'a'). Use a whole number"),
        (["a"] * 17, "prompt: asks for 17 answers, and a request may have 16. Send them"),
    ],
)
def test_a_completion_is_refused_in_plain_words(prompt: Any, words: str) -> None:
    with pytest.raises(ApiError) as caught:
        parse_completion({"model": "m", "prompt": prompt})
    assert caught.value.message.startswith(words)


def test_no_complaint_of_pydantic_s_is_too_odd_to_be_told() -> None:
    """Also those that none of our classes makes today."""
    context = {"ge": 1, "le": 1, "gt": 1, "lt": 1, "expected": "x", "min_length": 2, "max_length": 1}
    for kind in get_args(core_schema.ErrorType):
        error = {"type": kind, "ctx": context, "msg": "Input should be something", "input": 1}
        wrong, fix = complaint(error)
        assert wrong
        assert fix
        assert "nput should" not in wrong


def test_bounds_of_numbers_are_shown_as_they_are_written() -> None:
    class Bounded(BaseModel):
        share: float = Field(ge=0.25, lt=2.5)

    for value, words in ((0, "must be at least 0.25"), (3, "must be below 2.5")):
        with pytest.raises(ValidationError) as caught:
            Bounded(share=value)
        assert complaint(caught.value.errors()[0])[0] == words
