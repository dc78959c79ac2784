"""What every backend must hold when a caller is at fault: bad requests fail alone, as do callers' own functions."""

from __future__ import annotations

from typing import Any

import pytest

from backend.api import (
    MAX_TOKEN_ID,
    Backend,
    FinishReason,
    GenerationRequest,
    PromptTooLongError,
    RequestError,
    SamplingParams,
    TokenmillError,
)
from tests.engine.backend_kinds import MODEL_LEN, Kind
from tests.engine.backend_requests import WAIT_S, Start, ask, assert_idle, end, run_long

# --------------------------------------------------------------------------------------------------- bad requests


def bad_requests(vocab_size: int) -> list[tuple[str, GenerationRequest]]:
    too_long = tuple([1] * MODEL_LEN)
    return [
        ("token_ids", ask(vocab_size)),
        ("token_ids", ask(1, MAX_TOKEN_ID)),
        ("top_k", ask(top_k=vocab_size + 1)),
        ("stop_token_ids", ask(stop_token_ids=(vocab_size,))),
        ("prompt", ask(*too_long)),
    ]


def test_a_bad_request_fails_alone(backend: Backend) -> None:
    running = run_long(backend)
    before = backend.stats()
    for field, request in bad_requests(backend.info().vocab_size):
        with pytest.raises(RequestError) as caught:
            backend.submit(request)
        assert caught.value.field == field
        assert caught.value.fix
    with pytest.raises(PromptTooLongError):
        backend.submit(ask(*([1] * MODEL_LEN)))
    assert not running[0].done()
    after = backend.stats()
    assert (after.running, after.waiting, after.requests_failed) == (1, 0, before.requests_failed)
    assert end(running)[0].finish_reason is FinishReason.CANCELLED


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", 0.7),
        ("min_tokens", 2),
        ("logprobs", 1),
        ("repetition_penalty", 1.1),
        ("presence_penalty", 0.5),
        ("frequency_penalty", 0.5),
        ("logit_bias", {3: 1.0}),
    ],
)
def test_a_parameter_is_honoured_or_refused_by_name(
    backend: Backend, kind: Kind, name: str, value: Any
) -> None:
    sampling = SamplingParams.model_validate({"max_tokens": 5, "seed": 1, name: value})
    request = ask().model_copy(update={"sampling": sampling})
    if name in kind.refuses:
        with pytest.raises(RequestError) as caught:
            backend.submit(request)
        assert caught.value.field == name
    else:
        result = backend.submit(request).result(WAIT_S)
        assert 1 <= result.completion_tokens <= 5
        if name == "temperature":
            assert result.seed == 1
        assert (result.logprobs is not None) == (name == "logprobs")


# ------------------------------------------------------------------------------------------------ callers' own faults


class Leave(BaseException):
    """What no ``except Exception`` catches, as the ``SystemExit`` of a callback that means to end its program."""


@pytest.mark.parametrize("fault", [ValueError, Leave])
@pytest.mark.parametrize("where", ["start", "chunk", "end"])
def test_what_a_callers_own_function_raises_is_its_own_trouble(
    start: Start, where: str, fault: type[BaseException]
) -> None:
    backend = start()

    def fail(*_: object) -> None:
        raise fault("a caller's fault")

    neighbour = backend.submit(ask(max_tokens=6))
    blocker = run_long(backend, 4)  # fills the slots, so that what comes next waits
    handle = backend.submit(ask(max_tokens=6, stream=True))
    if where == "start":
        handle.when_started(fail)
    elif where == "chunk":
        handle.forward(fail)
    else:
        handle.future.add_done_callback(fail)
    end(blocker)
    if where == "chunk":
        with pytest.raises(TokenmillError, match="receiver of the stream failed"):
            handle.result(WAIT_S)
    else:
        assert handle.result(WAIT_S).completion_tokens == 6
    assert neighbour.result(WAIT_S).completion_tokens == 6
    assert backend.submit(ask(max_tokens=3)).result(WAIT_S).completion_tokens == 3
    assert_idle(backend)
