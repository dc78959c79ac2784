"""Any interleaving of arrivals, steps, cancels, deadlines and late devices, against a model in plain Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from backend.api import FinishReason, RequestError
from backend.scheduler import StepPlan
from backend.sequence import Sequence, Status
from backend.slots import StepLayout
from tests.engine.engine_driver import Driver
from tests.engine.tagged_runner import BROKEN, LazySlot, LazyStreams, TaggedRunner, expected_output

CONTEXT = 40
tokens = st.integers(0, BROKEN - 1)


def padded_layout(config: dict[str, Any]) -> Callable[[StepPlan], StepLayout]:
    """Sizes as captured graphs have them: the next power of two of rows or tokens, tables of full width."""
    block_size, slots = config["block_size"], config.get("max_num_seqs", 32)
    most = max(config.get("max_num_batched_tokens", 512), slots)

    def layout(plan: StepPlan) -> StepLayout:
        decode = plan.num_decode == len(plan.sequences)
        size = min(1 << (plan.num_tokens - 1).bit_length(), slots if decode else most)
        rows = size if decode else slots
        return StepLayout(size, rows, rows, -(-CONTEXT // block_size), config["num_blocks"] * block_size)

    return layout


def make_driver(streams: LazyStreams | None, *, padded: bool = False, **config: Any) -> Driver:
    """A driver whose device is a ``TaggedRunner``, lazy if it gets streams."""
    driver = Driver(
        lambda made: TaggedRunner(config["num_blocks"], made.block_size, streams),
        max_model_len=CONTEXT,
        layout=padded_layout(config) if padded else None,
        **config,
    )
    if streams is not None:
        limits, device = driver.core.slots[0]._limits, driver.core.slots[0]._device
        slots = [LazySlot(limits, device, streams, poison=True) for _ in range(2)]
        for slot in slots:
            slot.lazy = streams
        driver.core.slots = (slots[0], slots[1])
        driver.core.streams = streams
    return driver


def check_outcome(sequence: Sequence, driver: Driver) -> None:
    """A sequence has ended as the model says."""
    wanted = expected_output(sequence)
    got = sequence.output_ids
    assert sequence.status is Status.FINISHED
    assert got == wanted[: len(got)]
    error = driver.sink.errors.get(sequence.number)
    if error is not None:
        assert isinstance(error, RequestError)
        assert wanted[-1] == -1
        assert got == wanted[:-1]
    elif sequence.finish_reason is FinishReason.STOP:
        assert got == wanted
        assert got[-1] in sequence.ending_ids
        assert sequence.stop_reason == got[-1]
        assert len(got) > sequence.sampling.min_tokens
    elif sequence.finish_reason is FinishReason.LENGTH:
        assert got == wanted
        assert len(got) == sequence.max_new_tokens
        assert got[-1] not in sequence.ending_ids or len(got) <= sequence.sampling.min_tokens
    else:
        assert len(got) < len(wanted)


class EngineMachine(RuleBasedStateMachine):
    """The engine core as a state machine."""

    driver: Driver
    streams: LazyStreams | None

    @initialize(
        mode=st.sampled_from(["async", "async", "sync"]),
        block_size=st.sampled_from([1, 2, 3, 4, 8]),
        pool=st.sampled_from([CONTEXT, CONTEXT, 60, 200]),
        slots=st.sampled_from([1, 2, 3, 4, 5, 5]),
        extra=st.sampled_from([0, 1, 2, 7, 64]),
        prefix_cache=st.booleans(),
        lazy=st.booleans(),
        padded=st.booleans(),
        bulk_min_share=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
        # Often long outputs.
        eos=st.sampled_from([frozenset(), frozenset(), frozenset({0}), frozenset({1, 4})]),
    )
    def start(
        self,
        mode: str,
        block_size: int,
        pool: int,
        slots: int,
        extra: int,
        prefix_cache: bool,
        lazy: bool,
        padded: bool,
        bulk_min_share: float,
        eos: frozenset[int],
    ) -> None:
        self.streams = LazyStreams() if lazy else None
        self.driver = make_driver(
            self.streams,
            mode=mode,
            block_size=block_size,
            num_blocks=max(2, -(-pool // block_size)),
            max_num_seqs=slots,
            max_num_batched_tokens=slots + extra,
            prefix_cache=prefix_cache,
            bulk_min_share=bulk_min_share,
            eos_ids=eos,
            padded=padded,
        )

    @rule(
        letters=st.sampled_from([2, BROKEN]),  # two make many prompts begin alike
        prompt=st.one_of(
            st.lists(tokens, min_size=1, max_size=12), st.lists(tokens, min_size=1, max_size=CONTEXT - 1)
        ),
        broken=st.sampled_from([False] * 9 + [True]),
        max_tokens=st.integers(1, CONTEXT),
        min_tokens=st.sampled_from([0, 0, 2, 9]),
        stops=st.sampled_from([frozenset(), frozenset(), frozenset({7})]),
        penalised=st.booleans(),
        ignore_eos=st.booleans(),
        priority=st.sampled_from([0, 3, 3, 6, 9]),
        deadline_s=st.sampled_from([None, None, None, None, 2, 9, 30]),
        copies=st.sampled_from([1, 1, 2, 4]),
    )
    def add(
        self,
        letters: int,
        prompt: list[int],
        broken: bool,
        max_tokens: int,
        min_tokens: int,
        stops: frozenset[int],
        penalised: bool,
        ignore_eos: bool,
        priority: int,
        deadline_s: int | None,
        copies: int,
    ) -> None:
        prompt = [token % letters for token in prompt]
        if broken:
            prompt[-1] = BROKEN
        for _ in range(copies):
            self.driver.submit(
                prompt,
                priority=priority,
                deadline_s=deadline_s,
                max_tokens=max_tokens,
                min_tokens=min(min_tokens, max_tokens),
                stop_token_ids=tuple(stops),
                ignore_eos=ignore_eos,
                repetition_penalty=1.5 if penalised else 1.0,
                seed=len(prompt),
            )

    @rule(count=st.integers(1, 12))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.driver.step()

    @precondition(lambda self: self.driver.sequences)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        """Of any sequence: waiting, running or ended."""
        self.driver.cancel(data.draw(st.sampled_from(self.driver.sequences)))

    @precondition(lambda self: self.streams is not None)
    @rule(count=st.integers(1, 8))
    def device_gets_on(self, count: int) -> None:
        assert self.streams is not None
        self.streams.advance(count)

    @rule(seconds=st.integers(1, 3))
    def time_passes(self, seconds: int) -> None:
        self.driver.clock.now += seconds

    @invariant()
    def books_are_right(self) -> None:
        if hasattr(self, "driver"):
            self.driver.check()

    def teardown(self) -> None:
        if not hasattr(self, "driver"):
            return
        self.driver.run()
        for sequence in self.driver.sequences:
            check_outcome(sequence, self.driver)


EngineMachine.TestCase.settings = settings(
    max_examples=200,
    stateful_step_count=25,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestInterleavings = EngineMachine.TestCase


def test_late_rows_are_computed_and_discarded() -> None:
    """An end is known one step late in async mode: that row costs a computation, and nothing else."""
    computed = {}
    for mode in ("sync", "async"):
        driver = make_driver(None, num_blocks=20, block_size=4, mode=mode, eos_ids=frozenset(range(BROKEN)))
        sequence = driver.submit([1, 2, 3], max_tokens=10, seed=3)
        driver.run()
        assert len(sequence.output_ids) == 1
        assert driver.core.generated_tokens == 1
        runner = driver.core._runner
        assert isinstance(runner, TaggedRunner)
        computed[mode] = runner.rows_computed
    assert computed == {"sync": 1, "async": 2}


def test_a_length_stop_is_known_before_its_step() -> None:
    for mode in ("sync", "async"):
        driver = make_driver(None, num_blocks=20, block_size=4, mode=mode)
        sequence = driver.submit([1, 2, 3], max_tokens=4, seed=3)
        driver.run()
        runner = driver.core._runner
        assert isinstance(runner, TaggedRunner)
        assert runner.rows_computed == len(sequence.output_ids) == 4


def test_the_copy_in_may_be_as_late_as_the_wait_for_its_step() -> None:
    """With a device that does nothing until it is waited for, a buffer rewritten too early would show."""
    streams = LazyStreams()
    driver = make_driver(streams, num_blocks=20, block_size=4, max_num_seqs=3)
    for n in (3, 5, 8):
        driver.submit(list(range(n)), max_tokens=12, seed=n)
    most = 0
    while driver.core.has_work():
        driver.step()
        most = max(most, len(streams.queue))
    assert most > 0
    driver.run()
    for sequence in driver.sequences:
        check_outcome(sequence, driver)


def test_a_preempted_sequence_keeps_the_token_in_flight() -> None:
    driver = make_driver(
        None, num_blocks=10, block_size=4, max_num_seqs=3, max_num_batched_tokens=40, prefix_cache=False
    )
    for n in (9, 10, 11):
        driver.submit([n % BROKEN] * n, max_tokens=20, seed=n)
    plan_step = driver.core.scheduler.schedule
    kept: list[int] = []

    def watched(now: float) -> StepPlan | None:
        plan = plan_step(now)
        for s in driver.sequences:
            if s.status is Status.WAITING and s.in_flight:
                kept.append(s.number)
                assert plan is None or s not in plan.sequences
        return plan

    driver.core.scheduler.schedule = watched  # type: ignore[method-assign]
    driver.run()
    assert kept
    for sequence in driver.sequences:
        check_outcome(sequence, driver)


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_a_deadline_is_kept_to_the_step(mode: str) -> None:
    """It is looked at when a step is planned; a running sequence keeps what has retired by then."""
    driver = make_driver(None, num_blocks=20, block_size=4, max_num_seqs=1, mode=mode)
    running = driver.submit([1, 2, 3], max_tokens=30, seed=3, deadline_s=5)
    waiting = driver.submit([1, 2], max_tokens=30, seed=2, deadline_s=5)
    for _ in range(5):  # a second passes after each step
        driver.step()
        assert (running.status, waiting.status) == (Status.RUNNING, Status.WAITING)
    driver.step()
    assert running.finish_reason is waiting.finish_reason is FinishReason.DEADLINE
    assert len(running.output_ids) == (4 if mode == "async" else 5)
    assert waiting.output_ids == []
    driver.run()


def test_deadlines_that_are_never_reached_do_not_pile_up() -> None:
    driver = make_driver(None, num_blocks=20, block_size=4, max_num_seqs=2)
    for _ in range(300):
        driver.submit([1], max_tokens=1, seed=1, deadline_s=10_000)
        driver.run()
    assert len(driver.core._deadlines) < 100
