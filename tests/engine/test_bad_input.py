"""Every bad request gets an error that names field, value and fix, at submission, and disturbs nobody."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from backend.api import (
    GenerationRequest,
    KVCapacityError,
    Prompt,
    PromptTooLongError,
    RequestError,
    SamplingParams,
    request_error_from,
)
from tests.engine.conftest import MakeEngine, RunningEngine, TinyModel
from tests.engine.tiny_models import CONTEXT, VOCAB

# kwargs, kind of error, field, part of the message, part of the fix
BAD_PARAMS: list[tuple[dict[str, Any], str, str]] = [
    ({"max_tokens": 0}, "max_tokens", "at least 1"),
    ({"max_tokens": -5}, "max_tokens", "at least 1"),
    ({"temperature": -0.1}, "temperature", "at least 0"),
    ({"temperature": float("nan")}, "temperature", "finite"),
    ({"temperature": float("inf")}, "temperature", "finite"),
    ({"top_p": 0.0}, "top_p", "above 0"),
    ({"top_p": 1.01}, "top_p", "at most 1"),
    ({"min_p": -0.5}, "min_p", "at least 0"),
    ({"top_k": -1}, "top_k", "at least 0"),
    ({"seed": -1}, "seed", "at least 0"),
    ({"seed": 2**63}, "seed", "at most"),
    ({"repetition_penalty": 0.0}, "repetition_penalty", "above 0"),
    ({"presence_penalty": 3.0}, "presence_penalty", "at most 2"),
    ({"logprobs": 21}, "logprobs", "at most 20"),
    ({"logit_bias": {-1: 1.0}}, "logit_bias", "must not be negative"),
    ({"logit_bias": {1: 101.0}}, "logit_bias", "between -100 and 100"),
    ({"stop": [""]}, "stop", "must not be empty"),
    ({"stop": "a\x00b"}, "stop", "NUL"),
    ({"stop_token_ids": [-1]}, "stop_token_ids", "at least 0"),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens", "must not exceed max_tokens"),
    ({"temprature": 1.0}, "temprature", "unknown field"),
]


def refusal(model: type[BaseModel], values: dict[str, Any]) -> RequestError:
    """The error that a caller shows: pydantic's, turned into ours, or ours at once."""
    try:
        model.model_validate(values)
    except ValidationError as exc:
        return request_error_from(exc)
    except RequestError as exc:
        return exc
    raise AssertionError("nothing was refused")


@pytest.mark.parametrize(("params", "field", "message"), BAD_PARAMS)
def test_parameters_that_no_model_takes(params: dict[str, Any], field: str, message: str) -> None:
    error = refusal(SamplingParams, params)
    assert error.field.startswith(field)
    assert message in str(error)
    assert error.fix


@pytest.mark.parametrize(
    ("prompt", "field", "message"),
    [
        ({"prompt": ""}, "prompt", "must not be empty"),
        ({"token_ids": []}, "token_ids", "must not be empty"),
        ({"messages": []}, "messages", "must not be empty"),
        ({}, "prompt", "exactly one"),
        ({"prompt": "a", "token_ids": [1]}, "prompt", "exactly one"),
        ({"prompt": "a\x00b"}, "prompt", "NUL character at position 1"),
        ({"prompt": "ab\ud800"}, "prompt", "U+D800"),
        ({"messages": [{"role": "user", "content": "\udfff"}]}, "messages.content", "U+DFFF"),
        ({"messages": [{"role": "", "content": "a"}]}, "messages.0.role", "must not be empty"),
        ({"messages": [{"role": "user", "content": "a", "name": "x"}]}, "messages.0.name", "unknown field"),
        ({"token_ids": [-3]}, "token_ids.0", "at least 0"),
        ({"token_ids": [1.5]}, "token_ids.0", "whole number"),
        ({"token_ids": [True]}, "token_ids.0", "whole number"),
    ],
)
def test_prompts_that_no_model_takes(prompt: dict[str, Any], field: str, message: str) -> None:
    error = refusal(Prompt, prompt)
    assert error.field == field
    assert message in str(error)
    assert error.fix


@pytest.mark.parametrize(
    "options", [{"priority": 10}, {"priority": -1}, {"deadline_s": 0}, {"colour": "red"}]
)
def test_requests_that_no_backend_takes(options: dict[str, Any]) -> None:
    error = refusal(GenerationRequest, {"request_id": "r", "prompt": {"prompt": "a"}, **options})
    assert error.field == next(iter(options))


@pytest.fixture
def busy(make_engine: MakeEngine, llama: TinyModel) -> Iterator[RunningEngine]:
    """An engine at work, whose requests must come out right whatever is refused meanwhile."""
    running = make_engine(num_kv_blocks=12, max_num_seqs=3)  # 48 tokens: half a context
    running.gate.close(after=2)
    handles = [running.submit(llama.prompts[i], max_tokens=9, ignore_eos=True) for i in (3, 4, 5)]
    running.gate.wait_until_reached()
    yield running
    running.gate.open()
    for handle, i in zip(handles, (3, 4, 5), strict=True):
        assert list(handle.result(30).token_ids) == llama.greedy(llama.prompts[i], 9)
    stats = running.engine.stats()
    assert (stats.requests_finished, stats.requests_failed) == (3, 0)
    running.check_idle()


@pytest.mark.parametrize(
    ("prompt", "options", "kind", "field", "message", "fix"),
    [
        ([VOCAB], {}, RequestError, "token_ids", "token id 128 is outside", "from 0 to 127"),
        ([5] * CONTEXT, {}, PromptTooLongError, "prompt", "context of 96", "at most 95 tokens"),
        ("cat " * 200, {}, PromptTooLongError, "prompt", "context of 96", "at most 95 tokens"),
        (
            [5] * 40,
            {"max_tokens": 10},
            KVCapacityError,
            "max_tokens",
            "need 13 KV blocks of 4",
            "Lower max_tokens",
        ),
        ([5], {"max_tokens": 10_000_000}, KVCapacityError, "max_tokens", "12 in all", "larger KV cache"),
        ([5], {"top_k": VOCAB + 1}, RequestError, "top_k", "(got 129)", "at most 128"),
        ([5], {"logit_bias": {VOCAB: 1.0}}, RequestError, "logit_bias", "outside the vocabulary", "0 to 127"),
        (
            [5],
            {"stop_token_ids": (VOCAB,)},
            RequestError,
            "stop_token_ids",
            "outside the vocabulary",
            "0 to 127",
        ),
        ("\u2603", {}, RequestError, "prompt", "no token at all", "at least one token"),
        ([("tool", "x")], {}, RequestError, "messages", "no tools here", "roles"),
    ],
)
def test_requests_that_this_model_does_not_take(
    busy: RunningEngine,
    prompt: Any,
    options: dict[str, Any],
    kind: type[RequestError],
    field: str,
    message: str,
    fix: str,
) -> None:
    with pytest.raises(RequestError) as caught:
        busy.submit(prompt, **{"max_tokens": 2, **options})
    error = caught.value
    assert type(error) is kind
    assert error.field == field
    assert message in str(error)
    assert fix in error.fix


def test_the_largest_request_that_fits_runs(busy: RunningEngine, llama: TinyModel) -> None:
    """The last token is never fed back, so 40 and 9 tokens fit 48 places."""
    ids = [5] * 40
    handle = busy.submit(ids, max_tokens=9, ignore_eos=True)
    busy.gate.open()
    assert list(handle.result(30).token_ids) == llama.greedy(ids, 9)
    # The fixture counts what has finished: this one, too.
    busy.core.finished -= 1


def test_without_a_tokenizer(make_engine: MakeEngine) -> None:
    running = make_engine(tokenizer="none")
    for source, options, field in (
        ("the cat", {}, "prompt"),
        ([("user", "the cat")], {}, "messages"),
        ([5], {"stop": "x"}, "stop"),
    ):
        with pytest.raises(RequestError, match=r"without (a tokenizer|one)") as caught:
            running.submit(source, **options)  # type: ignore[arg-type]
        assert caught.value.field == field
        assert caught.value.fix
    running.check_idle()
