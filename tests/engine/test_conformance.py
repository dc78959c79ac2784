"""What every backend must hold, whatever generates the tokens: its results, its streams, and how a request ends."""

from __future__ import annotations

import pytest

from backend.api import (
    Backend,
    ChatMessage,
    FinishReason,
    Prompt,
    RequestError,
    SamplingParams,
)
from tests.engine.backend_kinds import MODEL_LEN, Kind
from tests.engine.backend_requests import LONG, WAIT_S, ask, end, run_long

# --------------------------------------------------------------------------------------------- shape and results


def test_it_is_a_backend(backend: Backend, kind: Kind) -> None:
    assert isinstance(backend, Backend)
    info = backend.info()
    assert info.backend == backend.name == ("async" if kind.name == "sync" else kind.name)
    assert (info.slots, info.max_model_len) == (4, MODEL_LEN)
    assert info.vocab_size > 0
    backend.stats()


@pytest.mark.parametrize("max_tokens", [1, 2, 17, 200])
def test_max_tokens_is_honoured(backend: Backend, max_tokens: int) -> None:
    result = backend.submit(ask(1, 2, 3, 4, max_tokens=max_tokens)).result(WAIT_S)
    assert result.finish_reason is FinishReason.LENGTH
    assert result.completion_tokens == len(result.token_ids) == max_tokens
    assert result.prompt_tokens == 4
    assert result.stop_reason is None
    assert result.time_to_first_token_s is not None
    assert 0 <= result.queue_time_s <= result.time_to_first_token_s <= result.latency_s
    assert result.to_dict()["finish_reason"] == "length"


def test_the_context_limit_counts_as_length(backend: Backend) -> None:
    prompt = tuple(1 + number % 200 for number in range(MODEL_LEN - 3))
    result = backend.submit(ask(*prompt, max_tokens=50)).result(WAIT_S)
    assert (result.completion_tokens, result.finish_reason) == (3, FinishReason.LENGTH)


@pytest.mark.parametrize(
    "prompt",
    [
        Prompt(prompt="Tell me a story. ÄÖ 猫"),
        Prompt(messages=(ChatMessage(role="user", content="Hello there"),)),
        Prompt(token_ids=(9, 8, 7)),
    ],
    ids=["text", "messages", "token_ids"],
)
def test_each_kind_of_prompt(backend: Backend, prompt: Prompt) -> None:
    request = ask(max_tokens=6).model_copy(update={"prompt": prompt})
    first, second = (backend.submit(request).result(WAIT_S) for _ in range(2))
    assert first.completion_tokens == 6
    assert first.prompt_tokens > 0
    assert first.text
    assert (first.text, first.token_ids) == (second.text, second.token_ids)


def test_neighbours_change_nothing(backend: Backend) -> None:
    prompts = [tuple(range(1, 2 + 7 * number)) for number in range(9)]
    alone = [backend.submit(ask(*prompt, max_tokens=20)).result(WAIT_S).token_ids for prompt in prompts]
    together = [backend.submit(ask(*prompt, max_tokens=20)) for prompt in prompts]
    assert [handle.result(WAIT_S).token_ids for handle in together] == alone


def test_the_end_of_sequence_is_the_models_unless_ignored(backend: Backend, kind: Kind) -> None:
    request = ask(max_tokens=30)
    respecting = request.model_copy(update={"sampling": SamplingParams(max_tokens=30)})
    ignoring, result = (backend.submit(r).result(WAIT_S) for r in (request, respecting))
    assert ignoring.completion_tokens == 30
    assert result.token_ids == ignoring.token_ids[: result.completion_tokens]
    assert (result.finish_reason is FinishReason.LENGTH) == (result.completion_tokens == 30)


def test_a_stop_token_ends_it_and_is_kept(backend: Backend) -> None:
    free = backend.submit(ask(1, 2, 3, max_tokens=12)).result(WAIT_S)
    stop = free.token_ids[-1]
    at = free.token_ids.index(stop)
    result = backend.submit(ask(1, 2, 3, max_tokens=100, stop_token_ids=(stop,))).result(WAIT_S)
    assert result.token_ids == free.token_ids[: at + 1]
    assert (result.finish_reason, result.stop_reason) == (FinishReason.STOP, stop)


def test_a_stop_string_is_cut_and_its_tokens_are_kept(backend: Backend) -> None:
    free = backend.submit(ask(1, 2, 3, max_tokens=40)).result(WAIT_S)
    stop = free.text[10:13]
    assert len(stop) == 3
    at = free.text.index(stop)
    handle = backend.submit(ask(1, 2, 3, max_tokens=1000, stop=(stop,), stream=True))
    chunks = list(handle.stream())
    result = handle.result(WAIT_S)
    assert result.text == free.text[:at] == "".join(chunk.text for chunk in chunks)
    assert (result.finish_reason, result.stop_reason) == (FinishReason.STOP, stop)
    assert result.token_ids == free.token_ids[: result.completion_tokens]
    assert result.token_ids == tuple(token for chunk in chunks for token in chunk.token_ids)


def test_a_stream_says_what_the_result_says(backend: Backend) -> None:
    handle = backend.submit(ask(1, 2, 3, max_tokens=64, stream=True))
    chunks = list(handle.stream())
    result = handle.result(WAIT_S)
    assert "".join(chunk.text for chunk in chunks) == result.text
    assert tuple(token for chunk in chunks for token in chunk.token_ids) == result.token_ids
    assert len(chunks) > 1
    assert list(handle.stream()) == []
    quiet = backend.submit(ask(1, 2, 3, max_tokens=64)).result(WAIT_S)
    assert (quiet.text, quiet.token_ids) == (result.text, result.token_ids)


def test_only_a_streaming_request_streams(backend: Backend) -> None:
    handle = backend.submit(ask())
    with pytest.raises(RequestError, match="stream=True"):
        next(handle.stream())
    handle.result(WAIT_S)


# ------------------------------------------------------------------------------------------------- ending early


def test_cancel_while_running_hands_out_what_there_is(backend: Backend) -> None:
    (handle,) = run_long(backend)
    handle.cancel()
    handle.cancel()
    result = handle.result(WAIT_S)
    assert result.finish_reason is FinishReason.CANCELLED
    assert 1 <= result.completion_tokens == len(result.token_ids) < LONG
    handle.cancel()
    assert handle.result() == result


def test_cancel_while_waiting(backend: Backend) -> None:
    running = run_long(backend, 4)
    handle = backend.submit(ask())
    assert backend.stats().waiting == 1
    handle.cancel()
    result = handle.result(WAIT_S)
    assert (result.finish_reason, result.token_ids, result.text) == (FinishReason.CANCELLED, (), "")
    assert result.time_to_first_token_s is None
    assert not any(other.done() for other in running)
    end(running)


def test_cancel_after_the_end_changes_nothing(backend: Backend) -> None:
    handle = backend.submit(ask())
    result = handle.result(WAIT_S)
    handle.cancel()
    assert handle.result() == result
    assert backend.submit(ask()).result(WAIT_S).token_ids == result.token_ids


def test_a_deadline_ends_a_running_and_a_waiting_request(backend: Backend) -> None:
    for deadline_s in (0.3, 1.0, 3.0):  # a machine that is held up may not begin within the first
        handle = backend.submit(ask(max_tokens=LONG, deadline_s=deadline_s, stream=True))
        begun = next(handle.stream(), None)
        others = run_long(backend, 3)
        waiting = backend.submit(ask(deadline_s=0.05))
        late = waiting.result(WAIT_S)
        result = handle.result(WAIT_S)
        assert result.finish_reason is FinishReason.DEADLINE
        assert result.latency_s >= deadline_s
        assert late.finish_reason in (FinishReason.DEADLINE, FinishReason.LENGTH)
        end(others)
        if begun is not None:
            break
    assert 1 <= result.completion_tokens < LONG
    blockers = run_long(backend, 4)
    late = backend.submit(ask(deadline_s=0.05)).result(WAIT_S)
    assert (late.finish_reason, late.completion_tokens) == (FinishReason.DEADLINE, 0)
    assert late.latency_s >= 0.05
    end(blockers)


def test_a_deadline_that_is_met_changes_nothing(backend: Backend) -> None:
    result = backend.submit(ask(deadline_s=WAIT_S)).result(WAIT_S)
    assert result.finish_reason is FinishReason.LENGTH


def test_a_request_id_may_be_reused(backend: Backend) -> None:
    expected = [backend.submit(ask(20 + n, max_tokens=10)).result(WAIT_S).token_ids for n in range(8)]
    handles = [backend.submit(ask(20 + n, max_tokens=10, request_id="same")) for n in range(8)]
    cancelled = backend.submit(ask(40, max_tokens=LONG, request_id="same"))
    cancelled.cancel()
    assert [handle.result(WAIT_S).token_ids for handle in handles] == expected
    assert cancelled.result(WAIT_S).finish_reason is FinishReason.CANCELLED
