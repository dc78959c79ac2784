"""What every backend must hold, whatever generates the tokens."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from backend.api import (
    Backend,
    BackendStats,
    ChatMessage,
    EngineDeadError,
    FinishReason,
    GenerationHandle,
    GenerationRequest,
    GenerationResult,
    Prompt,
    PromptTooLongError,
    RequestError,
    SamplingParams,
    TokenmillError,
)
from tests.engine.backend_kinds import KINDS, MODEL_LEN, Fault, Kind, save_tiny_model

WAIT_S = 60.0
LONG = 4000  # tokens: seconds of work for each backend
COUNTERS = (
    "steps",
    "prompt_tokens",
    "cached_tokens",
    "generated_tokens",
    "requests_finished",
    "requests_failed",
    "preemptions",
    "busy_s",
    "prepare_s",
    "wall_s",
)

Start = Callable[..., Backend]


@pytest.fixture(autouse=True)
def _no_engine_thread_left(shared: Backend) -> Iterator[None]:
    """In place of the fixture of this name for all engine tests: a shared backend outlives the test here."""
    before = set(threading.enumerate())
    yield
    named = ("tokenmill-engine", "tokenmill-output", "echo-backend", "transformers-backend")
    assert not [thread for thread in set(threading.enumerate()) - before if thread.name in named]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: str(kind.name))
def kind(request: pytest.FixtureRequest) -> Kind:
    found: Kind = request.param
    return found


@pytest.fixture(scope="module")
def shared(kind: Kind, folder: Path) -> Iterator[Backend]:
    """A backend with four slots that most tests of a module share, as jobs do."""
    backend = kind.build(kind.config(folder), Fault())
    yield backend
    backend.shutdown(drain=False)


@pytest.fixture
def backend(shared: Backend) -> Iterator[Backend]:
    """The shared backend; after the test nothing of its requests may be left in it."""
    yield shared
    assert_idle(shared)


@pytest.fixture
def start(kind: Kind, folder: Path) -> Iterator[Start]:
    """Start backends of one's own, which end with the test."""
    started: list[Backend] = []

    def build(fault: Fault | None = None, **changes: Any) -> Backend:
        started.append(kind.build(kind.config(folder, **changes), fault or Fault()))
        return started[-1]

    yield build
    for backend in started:
        backend.shutdown(drain=False)


def ask(
    *token_ids: int,
    max_tokens: int = 8,
    stream: bool = False,
    priority: int = 3,
    deadline_s: float | None = None,
    request_id: str = "r",
    **sampling: Any,
) -> GenerationRequest:
    return GenerationRequest(
        request_id=request_id,
        prompt=Prompt(token_ids=token_ids or (1, 2, 3)),
        sampling=SamplingParams(max_tokens=max_tokens, ignore_eos=True, **sampling),
        priority=priority,
        deadline_s=deadline_s,
        stream=stream,
    )


def eventually(condition: Callable[[], bool], what: str) -> None:
    """Wait for something that has no event to wait for: gauges are read, not announced."""
    limit = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < limit, f"never came true: {what}"
        time.sleep(0.002)


def assert_idle(backend: Backend) -> None:
    def idle() -> bool:
        stats = backend.stats()
        return stats.running == stats.waiting == 0 and stats.kv_blocks_free == stats.kv_blocks_total

    eventually(idle, "nothing runs, waits or holds a block")


def run_long(backend: Backend, count: int = 1) -> list[GenerationHandle]:
    """Requests that run until they are cancelled, each of which has produced its first token."""
    handles = [
        backend.submit(ask(5 + number, max_tokens=LONG, stream=True, priority=0)) for number in range(count)
    ]
    for handle in handles:
        next(handle.stream())
    return handles


def end(handles: list[GenerationHandle]) -> list[GenerationResult]:
    for handle in handles:
        handle.cancel()
    return [handle.result(WAIT_S) for handle in handles]


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


# --------------------------------------------------------------------------------------------------- bad requests


def bad_requests(vocab_size: int) -> list[tuple[str, GenerationRequest]]:
    too_long = tuple([1] * MODEL_LEN)
    return [
        ("token_ids", ask(vocab_size)),
        ("token_ids", ask(1, 2**40)),
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


def test_a_request_id_may_be_reused(backend: Backend) -> None:
    expected = [backend.submit(ask(20 + n, max_tokens=10)).result(WAIT_S).token_ids for n in range(8)]
    handles = [backend.submit(ask(20 + n, max_tokens=10, request_id="same")) for n in range(8)]
    cancelled = backend.submit(ask(40, max_tokens=LONG, request_id="same"))
    cancelled.cancel()
    assert [handle.result(WAIT_S).token_ids for handle in handles] == expected
    assert cancelled.result(WAIT_S).finish_reason is FinishReason.CANCELLED


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


# ------------------------------------------------------------------------------------------- order and concurrency


def test_priority_then_arrival(start: Start) -> None:
    backend = start(max_num_seqs=1)
    blocker = run_long(backend)
    order: list[int] = []
    priorities = [9, 3, 0, 3, 9, 0, 5]
    handles = []
    for number, priority in enumerate(priorities):
        handle = backend.submit(ask(max_tokens=1, priority=priority))
        handle.future.add_done_callback(lambda _, number=number: order.append(number))  # type: ignore[misc]
        handles.append(handle)
    assert backend.stats().waiting == len(priorities)
    end(blocker)
    for handle in handles:
        handle.result(WAIT_S)
    assert order == sorted(range(len(priorities)), key=lambda number: (priorities[number], number))
    assert_idle(backend)


def test_bulk_gets_the_slot_that_it_keeps(start: Start) -> None:
    backend = start(max_num_seqs=2, bulk_min_share=0.5)
    blockers = run_long(backend, 2)
    order: list[int] = []
    handles = []
    for priority in (0, 6, 3, 6, 0):
        handle = backend.submit(ask(max_tokens=2, priority=priority))
        handle.future.add_done_callback(lambda _, priority=priority: order.append(priority))  # type: ignore[misc]
        handles.append(handle)
    end(blockers[:1])
    for handle in handles:
        handle.result(WAIT_S)
    assert order == [6, 6, 0, 0, 3]
    end(blockers[1:])
    assert_idle(backend)


def test_submit_from_many_threads(backend: Backend) -> None:
    expected = {n: backend.submit(ask(n, max_tokens=6)).result(WAIT_S).token_ids for n in range(1, 9)}
    gate = threading.Barrier(8)

    def submit_some(first: int) -> list[tuple[int, tuple[int, ...]]]:
        gate.wait(WAIT_S)
        numbers = [1 + (first + step) % 8 for step in range(12)]
        handles = [(n, backend.submit(ask(n, max_tokens=6))) for n in numbers]
        return [(n, handle.result(WAIT_S).token_ids) for n, handle in handles]

    with ThreadPoolExecutor(8) as threads:
        outcomes = [pair for pairs in threads.map(submit_some, range(8)) for pair in pairs]
    assert len(outcomes) == 96
    assert all(tokens == expected[n] for n, tokens in outcomes)


def test_done_callbacks_run_once_and_may_use_the_backend(backend: Backend) -> None:
    calls: list[int] = []
    follow_ups: list[GenerationHandle] = []

    def done(_: object) -> None:
        calls.append(backend.stats().running)
        follow_ups.append(backend.submit(ask(max_tokens=2)))

    handles = [backend.submit(ask(max_tokens=3)) for _ in range(6)]
    for handle in handles:
        handle.future.add_done_callback(done)
    wait([handle.future for handle in handles], WAIT_S)
    eventually(lambda: len(follow_ups) == 6, "each callback has run")
    assert [handle.result(WAIT_S).completion_tokens for handle in follow_ups] == [2] * 6
    assert len(calls) == 6


def test_counters_only_grow_and_add_up(backend: Backend) -> None:
    before = backend.stats()
    seen = [before]
    stop = threading.Event()

    def watch() -> None:
        while not stop.is_set():
            seen.append(backend.stats())
            stop.wait(0.001)

    watcher = threading.Thread(target=watch)
    watcher.start()
    handles = [backend.submit(ask(*range(1, 2 + n), max_tokens=5 + n)) for n in range(20)]
    handles[7].cancel()
    results = [handle.result(WAIT_S) for handle in handles]
    assert_idle(backend)
    stop.set()
    watcher.join(WAIT_S)
    after = backend.stats()
    for earlier, later in zip(seen, [*seen[1:], after], strict=True):
        for name in COUNTERS:
            assert getattr(earlier, name) <= getattr(later, name), name
    assert max(stats.running for stats in seen) <= backend.info().slots
    assert after.requests_finished - before.requests_finished == 20
    assert after.requests_failed == before.requests_failed
    assert after.generated_tokens - before.generated_tokens == sum(r.completion_tokens for r in results)
    assert after.wall_s > before.wall_s


# -------------------------------------------------------------------------------------------------- start and end


def test_shutdown_without_drain_answers_everyone(start: Start) -> None:
    backend = start()
    running = run_long(backend, 4)
    waiting = [backend.submit(ask()) for _ in range(5)]
    calls: list[object] = []
    for handle in (*running, *waiting):
        handle.future.add_done_callback(calls.append)
    backend.shutdown(drain=False)
    assert [handle.result(0).finish_reason for handle in (*running, *waiting)] == [FinishReason.CANCELLED] * 9
    assert all(handle.result(0).completion_tokens >= 1 for handle in running)
    assert all(handle.result(0).completion_tokens == 0 for handle in waiting)
    assert len(calls) == 9
    assert_idle(backend)


def test_shutdown_with_drain_finishes_what_was_accepted(start: Start) -> None:
    backend = start(max_num_seqs=2)
    running = [backend.submit(ask(max_tokens=300, stream=True)) for _ in range(2)]
    for handle in running:
        next(handle.stream())
    waiting = [backend.submit(ask(max_tokens=5)) for _ in range(3)]
    backend.shutdown(drain=True, timeout_s=WAIT_S)
    assert [handle.result(0).completion_tokens for handle in (*running, *waiting)] == [300, 300, 5, 5, 5]
    assert_idle(backend)


def test_a_drain_ends_at_its_timeout(start: Start) -> None:
    backend = start()
    running = run_long(backend, 4)
    waiting = backend.submit(ask())
    began = time.monotonic()
    backend.shutdown(drain=True, timeout_s=0.2)
    assert 0.2 <= time.monotonic() - began < WAIT_S
    assert waiting.result(0).finish_reason is FinishReason.CANCELLED
    for handle in running:
        result = handle.result(0)
        assert result.finish_reason is FinishReason.CANCELLED
        assert 1 <= result.completion_tokens < LONG


def test_after_a_shutdown_nothing_is_accepted(start: Start) -> None:
    backend = start()
    backend.submit(ask()).result(WAIT_S)
    stoppers = [threading.Thread(target=backend.shutdown, kwargs={"drain": True}) for _ in range(3)]
    for thread in stoppers:
        thread.start()
    for thread in stoppers:
        thread.join(WAIT_S)
        assert not thread.is_alive()
    with pytest.raises(EngineDeadError):
        backend.submit(ask())
    backend.shutdown(drain=False)
    assert backend.stats().requests_finished == 1


def test_a_shutdown_races_with_submissions(start: Start) -> None:
    backend = start()
    handles: list[GenerationHandle] = []
    going = threading.Event()

    def submit_until_refused() -> None:
        for number in range(100_000):
            try:
                handles.append(backend.submit(ask(max_tokens=3)))
            except EngineDeadError:
                return
            if number == 5:
                going.set()

    thread = threading.Thread(target=submit_until_refused)
    thread.start()
    assert going.wait(WAIT_S)
    backend.shutdown(drain=False)
    thread.join(WAIT_S)
    assert not thread.is_alive()
    for handle in handles:
        assert handle.result(WAIT_S).finish_reason in (FinishReason.LENGTH, FinishReason.CANCELLED)


def test_a_fault_is_told_to_everyone_once(start: Start) -> None:
    fault = Fault()
    backend = start(fault)
    deaths: list[EngineDeadError] = []
    told = threading.Event()
    backend.add_death_callback(deaths.append)
    backend.add_death_callback(lambda _: told.set())
    running = run_long(backend, 4)
    waiting = [backend.submit(ask()) for _ in range(3)]
    fault.armed = True
    for handle in (*running, *waiting):
        with pytest.raises(EngineDeadError, match="injected fault"):
            handle.result(WAIT_S)
    with pytest.raises(EngineDeadError):
        list(running[0].stream())
    assert told.wait(WAIT_S)
    with pytest.raises(EngineDeadError):
        backend.submit(ask())
    backend.shutdown(drain=True, timeout_s=WAIT_S)
    assert len(deaths) == 1
    late: list[EngineDeadError] = []
    backend.add_death_callback(late.append)
    assert len(late) == 1
    stats = backend.stats()
    assert (stats.running, stats.waiting, stats.requests_failed) == (0, 0, 7)


# ----------------------------------------------------------------------------------------------------- any mixture

JOB = st.fixed_dictionaries(
    {
        # Around the blocks of 16. Few, because what each leads to alone is computed once.
        "prompt": st.sampled_from((1, 2, 15, 16, 17, 32, 33, 40)),
        "first": st.integers(1, 3),
        "max_tokens": st.integers(1, 60),
        "priority": st.integers(0, 9),
        "cancel": st.sampled_from([None, None, "at once", "later"]),
        "deadline_s": st.sampled_from([None, None, None, 0.001, 0.02]),
        "stream": st.booleans(),
    }
)


@settings(
    max_examples=12,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(jobs=st.lists(JOB, min_size=1, max_size=16))
def test_any_mixture_ends_and_each_answer_is_a_beginning_of_its_own(
    backend: Backend, solo: dict[tuple[int, ...], tuple[int, ...]], jobs: list[dict[str, Any]]
) -> None:
    handles = []
    for job in jobs:
        prompt = tuple((job["first"] + n) % 50 for n in range(job["prompt"]))
        request = ask(
            *prompt,
            max_tokens=job["max_tokens"],
            priority=job["priority"],
            deadline_s=job["deadline_s"],
            stream=job["stream"],
        )
        handle = backend.submit(request)
        if job["cancel"] == "at once":
            handle.cancel()
        handles.append((job, prompt, handle))
    for job, _, handle in handles:
        if job["cancel"] == "later":
            handle.cancel()
    for job, prompt, handle in handles:
        result = handle.result(WAIT_S)
        if prompt not in solo:
            solo[prompt] = backend.submit(ask(*prompt, max_tokens=60)).result(WAIT_S).token_ids
        assert result.token_ids == solo[prompt][: result.completion_tokens]
        if result.finish_reason is FinishReason.LENGTH:
            assert result.completion_tokens == job["max_tokens"]
        elif result.finish_reason is FinishReason.CANCELLED:
            assert job["cancel"] is not None
        else:
            assert job["deadline_s"] is not None
        if job["stream"]:
            chunks = list(handle.stream())
            assert tuple(token for chunk in chunks for token in chunk.token_ids) == result.token_ids
            assert "".join(chunk.text for chunk in chunks) == result.text
    assert_idle(backend)


@pytest.fixture(scope="module")
def solo(kind: Kind) -> dict[tuple[int, ...], tuple[int, ...]]:
    """What each prompt leads to when it runs alone, for one kind of backend."""
    return {}


def test_stats_of_an_idle_backend_are_still(backend: Backend) -> None:
    assert_idle(backend)

    def work_done(stats: BackendStats) -> tuple[int, ...]:
        return (stats.steps, stats.generated_tokens, stats.prompt_tokens, stats.requests_finished)

    backend.submit(ask()).result(WAIT_S)
    assert_idle(backend)
    eventually(
        lambda: work_done(backend.stats()) == work_done(backend.stats()), "an idle backend does nothing"
    )
