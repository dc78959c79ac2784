"""The JSON Schema of the payload and the validator: what one accepts, the other accepts."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from backend.api import RequestError
from workers.payload import GeneratePayload
from workers.payload_schema import payload_schema

VALIDATOR = jsonschema.Draft202012Validator(payload_schema())

NULL = st.none()
WHOLE = st.sampled_from([-1, 0, 1, 2, 9, 10, 20, 21, 10**7, 10**9 - 1, 10**9, 2**63 - 1, 2**63, 10**40])
DECIMAL = st.sampled_from([-100.5, -2.5, -0.5, 0.5, 1.5, 2.5, 100.5, 315_360_000.5])
TEXT = st.one_of(
    st.text(st.characters(codec="utf-8"), max_size=5),
    st.sampled_from(["", "a\x00b", "\n", "a\n", "x" * 255, "x" * 256, "🦆" * 255, "x" * 1000, "x" * 1001]),
)
ANYTHING = st.one_of(NULL, WHOLE, DECIMAL, TEXT, st.booleans(), st.just([]), st.just({}))
# Text and truth may stand for a number.
NO_TEXT: st.SearchStrategy[Any] = st.one_of(NULL, WHOLE, DECIMAL, st.just([]), st.just({}))
TOKENS = st.lists(st.one_of(WHOLE, DECIMAL, TEXT), max_size=3) | st.just([5] * 65)
TURN = st.dictionaries(st.sampled_from(["role", "content", "name"]), TEXT | NULL | WHOLE, max_size=3)
BIAS_TOKEN = st.sampled_from(["0", "5", "999999999", "-1", "x", "", "1.5", "1000000000", "9" * 20])

NUMBERS = (
    *("temperature", "top_k", "top_p", "min_p", "seed", "repetition_penalty", "presence_penalty"),
    *("frequency_penalty", "max_tokens", "logprobs", "priority", "deadline_s"),
)
FIELDS: dict[str, st.SearchStrategy[Any]] = dict.fromkeys(NUMBERS, NO_TEXT) | {
    "version": st.sampled_from([1, 0, -1, None, "1", True, False, 1.5, [], {}]),
    "model": ANYTHING,
    "prompt": ANYTHING,
    "messages": st.lists(st.one_of(TURN, TEXT), max_size=2) | ANYTHING,
    "token_ids": TOKENS | ANYTHING,
    "stop": st.lists(ANYTHING, max_size=3) | TEXT | st.just(["x"] * 17) | ANYTHING,
    "stop_token_ids": TOKENS | ANYTHING,
    "logit_bias": st.dictionaries(BIAS_TOKEN, st.one_of(NULL, WHOLE, DECIMAL, st.booleans()), max_size=2)
    | st.just({str(token): 0.5 for token in range(1025)})
    | ANYTHING,
    "ignore_eos": st.sampled_from([True, False, None, [], {}]),
    "return_token_ids": st.sampled_from([True, False, None, [], {}]),
    "stream": st.sampled_from([True, False, None, [], {}]),
    "tenant": ANYTHING,
    "custom_id": ANYTHING,
    "callback_url": st.sampled_from(["https://hooks.example.com/x", None, "", "x" * 2048, "x" * 2049, 5, []]),
    "callback_include_output": st.sampled_from([True, False, None, [], {}]),
    "unknown": ANYTHING,
}
GOOD = {"model": "smollm2", "prompt": "hello"}
LEFT_OUT = "min_tokens"  # that it is within max_tokens is more than a schema can say


def parsed(payload: object) -> GeneratePayload | None:
    try:
        return GeneratePayload.parse(json.loads(json.dumps(payload)))
    except RequestError:
        return None


@settings(max_examples=1500, deadline=None)
@given(
    st.fixed_dictionaries({}, optional=FIELDS),
    st.sets(st.sampled_from(sorted(FIELDS)), max_size=3),
    st.booleans(),
)
@example({"stop": "one"}, {"stop"}, True)
@example({"messages": None}, {"messages"}, True)
@example({"prompt": None, "token_ids": None}, {"prompt", "token_ids"}, True)
@example({"callback_include_output": True, "callback_url": None}, {"callback_include_output"}, True)
@example({"logit_bias": {"5": -101}}, {"logit_bias"}, True)
@example({"tenant": "a\x00b"}, {"tenant"}, True)
@example({"version": True}, {"version"}, True)
def test_what_one_accepts_the_other_accepts(fields: dict[str, Any], few: set[str], good: bool) -> None:
    payload = (GOOD if good else {}) | {name: fields[name] for name in few if name in fields}
    made = parsed(payload)
    assert VALIDATOR.is_valid(payload) == (made is not None), payload
    if made is not None:
        assert VALIDATOR.is_valid(made.to_dict())


def test_every_field_is_tried() -> None:
    assert set(GeneratePayload.model_fields) == set(FIELDS) - {"unknown"} | {LEFT_OUT}


@pytest.mark.parametrize("named", ["messages", "token_ids"])
def test_a_form_that_is_null_is_not_given(named: str) -> None:
    assert VALIDATOR.is_valid(GOOD | {named: None})
    assert parsed(GOOD | {named: None}) is not None


def test_what_a_schema_cannot_say_is_refused_by_the_validator_and_said_in_the_guide() -> None:
    for fields, wrong in (
        ({"min_tokens": 9, "max_tokens": 3}, "min_tokens"),
        ({"stop_token_ids": [5.0]}, "stop_token_ids.0"),
    ):
        assert VALIDATOR.is_valid(GOOD | fields)
        with pytest.raises(RequestError) as caught:
            GeneratePayload.parse(GOOD | fields)
        assert caught.value.field == wrong
