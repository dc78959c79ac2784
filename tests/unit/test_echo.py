"""What is special about the echo backend. What it shares with all others is in tests/engine/test_conformance*.py."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backend.api import (
    ChatMessage,
    EngineDeadError,
    FinishReason,
    GenerationHandle,
    GenerationRequest,
    Prompt,
    QueueFullError,
    RequestError,
    SamplingParams,
)
from backend.config import EngineConfig
from backend.echo import VOCAB_SIZE, EchoBackend

WAIT_S = 20.0


class ManualClock:
    """A clock that moves when the test says so."""

    def __init__(self) -> None:
        self._now = 100.0
        self._conditions: set[threading.Condition] = set()
        self.waiting = threading.Event()

    def now(self) -> float:
        return self._now

    def wait(self, condition: threading.Condition, timeout_s: float | None) -> None:
        self._conditions.add(condition)
        self.waiting.set()
        condition.wait()

    def settle(self) -> None:
        """Return when the backend has nothing left to do at this moment."""
        self._wake(0.0)
        assert self.waiting.wait(WAIT_S)

    def advance(self, seconds: float) -> None:
        """Let the backend do all that is due after so many seconds."""
        self.settle()
        self._wake(seconds)
        assert self.waiting.wait(WAIT_S)

    def strike(self, seconds: float) -> None:
        """Move on without waiting for the backend, which may end of what is due."""
        self.settle()
        self._wake(seconds)

    def _wake(self, seconds: float) -> None:
        assert self.waiting.wait(WAIT_S)
        for condition in self._conditions:
            with condition:
                self._now += seconds
                self.waiting.clear()
                condition.notify_all()


Make = Callable[..., EchoBackend]


@pytest.fixture
def make() -> Iterator[Make]:
    """Start echo backends that end with the test."""
    made: list[EchoBackend] = []

    def start(
        clock: ManualClock | None = None,
        before_step: Callable[[Sequence[GenerationRequest]], None] | None = None,
        **config: object,
    ) -> EchoBackend:
        backend = EchoBackend(
            EngineConfig.model_validate(config), clock=clock, draw_seed=lambda: 77, before_step=before_step
        )
        made.append(backend)
        backend.start()
        return backend

    yield start
    for backend in made:
        backend.shutdown(drain=False)


def ask(prompt: str = "one two three", *, stream: bool = False, **sampling: object) -> GenerationRequest:
    return GenerationRequest(
        request_id="r",
        prompt=Prompt(prompt=prompt),
        sampling=SamplingParams.model_validate(sampling),
        stream=stream,
    )


def test_words_repeat_until_max_tokens(make: Make) -> None:
    result = make().submit(ask(max_tokens=5)).result(WAIT_S)
    assert result.text == "one two three one two"
    assert result.finish_reason is FinishReason.LENGTH
    assert (result.prompt_tokens, result.completion_tokens, len(result.token_ids)) == (3, 5, 5)
    assert result.token_ids[0] == result.token_ids[3] != result.token_ids[1]


def test_token_ids_come_back_as_they_are(make: Make) -> None:
    request = GenerationRequest(
        request_id="r", prompt=Prompt(token_ids=(7, 0, 131_071)), sampling=SamplingParams(max_tokens=4)
    )
    result = make().submit(request).result(WAIT_S)
    assert result.token_ids == (7, 0, 131_071, 7)
    assert result.text == "7 0 131071 7"


def test_the_last_message_is_repeated_and_all_are_counted(make: Make) -> None:
    turns = (ChatMessage(role="system", content="be brief"), ChatMessage(role="user", content="hi there"))
    request = GenerationRequest(
        request_id="r", prompt=Prompt(messages=turns), sampling=SamplingParams(max_tokens=2)
    )
    result = make().submit(request).result(WAIT_S)
    assert (result.text, result.prompt_tokens) == ("hi there", 4)


def test_a_stop_string_across_words_is_cut_and_its_tokens_are_kept(make: Make) -> None:
    result = make().submit(ask(max_tokens=50, stop=["ree on", "never"])).result(WAIT_S)
    assert result.text == "one two th"
    assert (result.finish_reason, result.stop_reason) == (FinishReason.STOP, "ree on")
    assert result.completion_tokens == len(result.token_ids) == 4


def test_a_stop_token_ends_it_but_not_before_min_tokens(make: Make) -> None:
    backend = make()
    first = backend.submit(ask(max_tokens=1)).result(WAIT_S).token_ids[0]
    early = backend.submit(ask(max_tokens=9, stop_token_ids=[first])).result(WAIT_S)
    late = backend.submit(ask(max_tokens=9, stop_token_ids=[first], min_tokens=3)).result(WAIT_S)
    assert (early.completion_tokens, early.stop_reason) == (1, first)
    assert (late.completion_tokens, late.stop_reason) == (4, first)


def test_a_stop_string_ends_it_but_not_before_min_tokens(make: Make) -> None:
    early = make().submit(ask("a b", max_tokens=9, stop=["a b", "b"], min_tokens=2)).result(WAIT_S)
    late = make().submit(ask("a b", max_tokens=9, stop=["a b", "b"], min_tokens=3)).result(WAIT_S)
    assert (early.text, early.completion_tokens) == ("", 2)
    assert (late.text, late.completion_tokens) == ("a b ", 4)


def test_a_start_after_the_shutdown_takes_nothing() -> None:
    backend = EchoBackend(EngineConfig())
    backend.shutdown(drain=True)
    backend.start()
    with pytest.raises(EngineDeadError, match="shut down"):
        backend.submit(ask())


def test_logprobs_are_those_of_certainty(make: Make) -> None:
    result = make().submit(ask(max_tokens=2, logprobs=1)).result(WAIT_S)
    assert result.logprobs is not None
    assert [entry.logprob for entry in result.logprobs] == [0.0, 0.0]
    assert [entry.top[0][0] for entry in result.logprobs] == list(result.token_ids)


def test_an_unset_seed_is_drawn_and_reported(make: Make) -> None:
    backend = make()
    assert backend.submit(ask(max_tokens=1)).result(WAIT_S).seed == 77
    assert backend.submit(ask(max_tokens=1, seed=5)).result(WAIT_S).seed == 5


@settings(max_examples=60, deadline=None)
@given(
    words=st.lists(st.text(alphabet="abc", min_size=1, max_size=4), min_size=1, max_size=6),
    stops=st.lists(st.text(alphabet="abc ", min_size=1, max_size=6), max_size=3),
    max_tokens=st.integers(1, 200),
)
def test_text_ends_where_the_first_stop_would_be_found(
    words: list[str], stops: list[str], max_tokens: int
) -> None:
    backend = EchoBackend(EngineConfig())
    backend.start()
    try:
        handle = backend.submit(ask(" ".join(words), max_tokens=max_tokens, stop=stops, stream=True))
        chunks = list(handle.stream())
        result = handle.result(WAIT_S)
    finally:
        backend.shutdown(drain=False)
    whole = ""
    kept = 0
    for index in range(max_tokens):
        whole += (" " if index else "") + words[index % len(words)]
        kept += 1
        if any(stop in whole for stop in stops):
            break
    cut = min((whole.find(stop) for stop in stops if stop in whole), default=len(whole))
    assert result.text == whole[:cut]
    assert result.completion_tokens == len(result.token_ids) == kept
    assert "".join(chunk.text for chunk in chunks) == result.text
    assert [token for chunk in chunks for token in chunk.token_ids] == list(result.token_ids)


def test_pace_follows_the_clock_for_each_request(make: Make) -> None:
    clock = ManualClock()
    backend = make(clock, echo_tokens_per_s=10.0, max_num_seqs=4)
    handles = [backend.submit(ask(max_tokens=5)) for _ in range(3)]
    clock.settle()
    assert backend.stats().running == 3
    clock.advance(0.45)
    assert backend.stats().generated_tokens == 12
    assert not any(handle.done() for handle in handles)
    clock.advance(0.05)
    results = [handle.result(WAIT_S) for handle in handles]
    assert [result.completion_tokens for result in results] == [5, 5, 5]
    assert results[0].latency_s == pytest.approx(0.5)
    assert results[0].time_to_first_token_s == pytest.approx(0.45)


def test_a_deadline_hands_out_what_there_is(make: Make) -> None:
    clock = ManualClock()
    backend = make(clock, echo_tokens_per_s=10.0, max_num_seqs=1)
    running = backend.submit(ask(max_tokens=100).model_copy(update={"deadline_s": 0.35}))
    waiting = backend.submit(ask(max_tokens=100).model_copy(update={"deadline_s": 0.2}))
    clock.advance(0.2)
    late = waiting.result(WAIT_S)
    assert (late.finish_reason, late.completion_tokens, late.text) == (FinishReason.DEADLINE, 0, "")
    assert late.time_to_first_token_s is None
    assert late.queue_time_s == pytest.approx(0.2)
    clock.advance(0.1)
    clock.advance(0.05)
    result = running.result(WAIT_S)
    assert (result.finish_reason, result.text) == (FinishReason.DEADLINE, "one two three")


def submit_until_refused(backend: EchoBackend) -> None:
    for _ in range(1_000_000):
        backend.submit(ask()).cancel()


def test_a_drain_finishes_what_was_accepted_until_its_timeout(make: Make) -> None:
    clock = ManualClock()
    backend = make(clock, echo_tokens_per_s=10.0, max_num_seqs=2)
    short = backend.submit(ask(max_tokens=3))
    endless = backend.submit(ask(max_tokens=10_000))
    waiting = [backend.submit(ask(max_tokens=count)) for count in (4, 10_000)]
    clock.settle()
    stopper = threading.Thread(target=backend.shutdown, kwargs={"drain": True, "timeout_s": 1.0})
    stopper.start()
    with pytest.raises(EngineDeadError, match="shut down"):
        submit_until_refused(backend)
    clock.advance(0.5)
    assert short.result(WAIT_S).finish_reason is FinishReason.LENGTH
    assert not endless.done()
    clock.advance(0.4)
    assert waiting[0].result(WAIT_S).text == "one two three one"
    clock.strike(0.1)
    results = [handle.result(WAIT_S) for handle in (endless, waiting[1])]
    assert [result.finish_reason for result in results] == [FinishReason.CANCELLED] * 2
    assert results[0].completion_tokens == 9
    stopper.join(WAIT_S)
    assert not stopper.is_alive()


def test_a_fault_fails_all_and_is_told_once(make: Make) -> None:
    def fault(requests: Sequence[GenerationRequest]) -> None:
        if any(request.request_id == "poison" for request in requests):
            raise RuntimeError("injected")

    clock = ManualClock()
    backend = make(clock, before_step=fault, max_num_seqs=1, echo_tokens_per_s=1.0)
    deaths: list[EngineDeadError] = []
    backend.add_death_callback(deaths.append)
    handles: list[GenerationHandle] = [
        backend.submit(ask().model_copy(update={"request_id": name})) for name in ("poison", "b", "c")
    ]
    clock.strike(1.0)
    for handle in handles:
        with pytest.raises(EngineDeadError, match="RuntimeError: injected"):
            handle.result(WAIT_S)
    with pytest.raises(EngineDeadError, match="injected"):
        backend.submit(ask())
    backend.shutdown(drain=True)
    assert len(deaths) == 1
    backend.add_death_callback(deaths.append)
    assert len(deaths) == 2
    stats = backend.stats()
    assert (stats.running, stats.waiting, stats.requests_failed) == (0, 0, 3)


def test_a_full_queue_refuses_and_keeps_what_it_has(make: Make) -> None:
    clock = ManualClock()
    backend = make(clock, max_num_seqs=1, max_waiting=2, echo_tokens_per_s=1.0)
    running = backend.submit(ask(max_tokens=1))
    clock.settle()
    waiting = [backend.submit(ask(max_tokens=1)) for _ in range(2)]
    with pytest.raises(QueueFullError, match="2 requests wait already"):
        backend.submit(ask())
    for _ in range(3):
        clock.advance(1.0)
    assert [handle.result(WAIT_S).text for handle in (running, *waiting)] == ["one"] * 3


def test_cancelled_rows_do_not_pile_up_in_the_queue(make: Make) -> None:
    clock = ManualClock()
    backend = make(clock, max_num_seqs=1, echo_tokens_per_s=1.0)
    backend.submit(ask(max_tokens=1000).model_copy(update={"priority": 0}))
    clock.settle()
    for _ in range(300):
        request = ask(max_tokens=1).model_copy(update={"priority": 9, "deadline_s": 1e6})
        handle = backend.submit(request)
        handle.cancel()
        assert handle.result(WAIT_S).finish_reason is FinishReason.CANCELLED
    assert backend.stats().waiting == 0
    assert len(backend._rows._bulk._heap) < 100
    assert len(backend._rows._deadlines) < 100


@pytest.mark.parametrize(
    ("request_fields", "field"),
    [
        ({"prompt": Prompt(prompt=" \t\n")}, "prompt"),
        ({"prompt": Prompt(token_ids=(VOCAB_SIZE,))}, "token_ids"),
        ({"sampling": SamplingParams(top_k=VOCAB_SIZE + 1)}, "top_k"),
        ({"sampling": SamplingParams(logit_bias={VOCAB_SIZE: 1.0})}, "logit_bias"),
        ({"sampling": SamplingParams(stop_token_ids=(VOCAB_SIZE,))}, "stop_token_ids"),
        ({"prompt": Prompt(prompt="w " * 64)}, "prompt"),
    ],
)
def test_what_cannot_run_is_refused_by_name(
    make: Make, request_fields: dict[str, object], field: str
) -> None:
    backend = make(max_model_len=64)
    with pytest.raises(RequestError) as caught:
        backend.submit(ask().model_copy(update=request_fields))
    assert caught.value.field == field
    assert caught.value.fix
    assert backend.stats().waiting == 0


def test_the_context_limit_ends_a_long_answer(make: Make) -> None:
    result = make(max_model_len=8).submit(ask(max_tokens=100)).result(WAIT_S)
    assert (result.completion_tokens, result.finish_reason) == (5, FinishReason.LENGTH)


def test_one_thread_whatever_the_number_of_requests(make: Make) -> None:
    before = threading.active_count()
    clock = ManualClock()
    backend = make(clock, max_num_seqs=256, echo_tokens_per_s=1.0)
    handles = [backend.submit(ask(max_tokens=1)) for _ in range(256)]
    assert threading.active_count() == before + 1
    clock.settle()
    clock.advance(1.0)
    assert all(handle.result(WAIT_S).completion_tokens == 1 for handle in handles)
