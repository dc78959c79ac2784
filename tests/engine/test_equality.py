"""Greedy tokens equal transformers' ``generate``, whatever the batch, the chunks, the blocks and the timing."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from backend.api import FinishReason
from backend.attention.sdpa import SdpaKernel
from backend.probe import native_logits, verify_paged
from backend.runner import ModuleForward
from backend.sequence import Sequence
from tests.engine.conftest import NEW_TOKENS, TinyModel
from tests.engine.engine_driver import Driver, model_driver

PROMPTS = 17
_SETTINGS = settings(
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@dataclass(frozen=True)
class Arrival:
    prompt: int
    max_tokens: int
    step: int
    priority: int
    cancel_after: int | None  # steps after the arrival
    deadline_s: int | None  # a second passes a step


@dataclass(frozen=True)
class Scenario:
    mode: str
    block_size: int
    num_blocks: int
    max_num_seqs: int
    extra_tokens: int  # of a step, beyond one for each slot
    prefix_cache: bool
    eos_from: tuple[int, int] | None  # prompt and position whose greedy token ends sequences
    arrivals: tuple[Arrival, ...]


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    block_size = draw(st.sampled_from([1, 2, 3, 4, 8, 16]))
    arrivals = draw(
        st.lists(
            st.builds(
                Arrival,
                prompt=st.integers(0, PROMPTS - 1),
                max_tokens=st.integers(1, NEW_TOKENS),
                step=st.integers(0, 12),
                priority=st.sampled_from([3, 3, 6, 0, 9]),
                cancel_after=st.one_of(st.none(), st.none(), st.none(), st.integers(0, 20)),
                deadline_s=st.one_of(st.none(), st.none(), st.none(), st.integers(1, 20)),
            ),
            min_size=1,
            max_size=7,
        )
    )
    return Scenario(
        mode=draw(st.sampled_from(["async", "sync"])),
        block_size=block_size,
        num_blocks=-(-draw(st.sampled_from([48, 48, 64, 200])) // block_size),
        max_num_seqs=draw(st.integers(1, 5)),
        extra_tokens=draw(st.sampled_from([0, 0, 1, 2, 5, 64])),
        prefix_cache=draw(st.booleans()),
        eos_from=draw(st.one_of(st.none(), st.tuples(st.integers(0, PROMPTS - 1), st.integers(0, 9)))),
        arrivals=tuple(arrivals),
    )


def play(model: TinyModel, scenario: Scenario, **changes: object) -> tuple[Driver, list[Sequence]]:
    """Run a scenario to its end."""
    eos: frozenset[int] = frozenset()
    if scenario.eos_from is not None:
        prompt, position = scenario.eos_from
        eos = frozenset({model.greedy(model.prompts[prompt])[position]})
    options: dict[str, object] = {
        "mode": scenario.mode,
        "block_size": scenario.block_size,
        "max_num_seqs": scenario.max_num_seqs,
        "max_num_batched_tokens": scenario.max_num_seqs + scenario.extra_tokens,
        "prefix_cache": scenario.prefix_cache,
    }
    driver = model_driver(
        model.loaded, model.layers, eos_ids=eos, num_blocks=scenario.num_blocks, **{**options, **changes}
    )
    sequences: list[Sequence] = []
    cancels: list[tuple[int, Sequence]] = []
    for step in range(34):
        for arrival in scenario.arrivals:
            if arrival.step == step:
                sequence = driver.submit(
                    model.prompts[arrival.prompt],
                    max_tokens=arrival.max_tokens,
                    priority=arrival.priority,
                    deadline_s=arrival.deadline_s,
                )
                sequences.append(sequence)
                if arrival.cancel_after is not None:
                    cancels.append((step + arrival.cancel_after, sequence))
        for when, sequence in cancels:
            if when == step:
                driver.cancel(sequence)
                driver.check()
        if driver.core.has_work():
            driver.step()
    driver.run()
    return driver, sequences


def expect_greedy(model: TinyModel, driver: Driver, sequences: list[Sequence]) -> None:
    """Each sequence has what ``generate`` gives, up to where it ended, and ended for the right reason."""
    for sequence in sequences:
        wanted = model.greedy(sequence.prompt_ids)[: sequence.max_new_tokens]
        end = next((i + 1 for i, token in enumerate(wanted) if token in driver.eos_ids), None)
        wanted = wanted[:end]
        if sequence.finish_reason in (FinishReason.CANCELLED, FinishReason.DEADLINE):
            assert sequence.output_ids == wanted[: len(sequence.output_ids)]
            assert len(sequence.output_ids) < len(wanted)
        else:
            assert sequence.output_ids == wanted
            assert sequence.finish_reason is (FinishReason.LENGTH if end is None else FinishReason.STOP)
            assert sequence.stop_reason == (None if end is None else wanted[-1])
    assert driver.core.generated_tokens == sum(len(s.output_ids) for s in sequences)
    assert not driver.sink.errors


def test_paged_logits_equal_native_ones(any_model: TinyModel) -> None:
    for block_size in (1, 3, 16):
        forward = ModuleForward(any_model.loaded.model, SdpaKernel())
        native = native_logits(any_model.loaded)
        verify_paged(any_model.loaded, any_model.layers, native, forward, block_size)


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_a_batch_of_every_length_equals_generate(any_model: TinyModel, mode: str) -> None:
    driver = model_driver(any_model.loaded, any_model.layers, mode=mode, num_blocks=200, block_size=4)
    sequences = [driver.submit(prompt, max_tokens=NEW_TOKENS) for prompt in any_model.prompts]
    driver.run()
    expect_greedy(any_model, driver, sequences)


@settings(_SETTINGS, max_examples=20)
@given(scenario=scenarios())
def test_every_family_in_any_scenario_equals_generate(any_model: TinyModel, scenario: Scenario) -> None:
    driver, sequences = play(any_model, scenario)
    expect_greedy(any_model, driver, sequences)


@settings(_SETTINGS, max_examples=200)
@given(scenario=scenarios())
def test_any_scenario_equals_generate(llama: TinyModel, scenario: Scenario) -> None:
    driver, sequences = play(llama, scenario)
    expect_greedy(llama, driver, sequences)


@pytest.mark.parametrize("tokens", [1, 2, 3])
def test_smallest_chunks(any_model: TinyModel, tokens: int) -> None:
    driver = model_driver(
        any_model.loaded, any_model.layers, max_num_seqs=tokens, max_num_batched_tokens=tokens, block_size=3
    )
    sequences = [driver.submit(any_model.prompts[i], max_tokens=5) for i in (9, 0, 13, 6)]
    driver.run()
    expect_greedy(any_model, driver, sequences)


def test_tiny_pools_do_preempt_and_change_nothing(any_model: TinyModel) -> None:
    driver = model_driver(
        any_model.loaded, any_model.layers, num_blocks=12, block_size=4, max_num_seqs=4, prefix_cache=False
    )
    sequences = [driver.submit(any_model.prompts[i], max_tokens=NEW_TOKENS) for i in (5, 6, 7, 8)]
    driver.run()
    assert driver.core.scheduler.num_preemptions > 0
    expect_greedy(any_model, driver, sequences)
