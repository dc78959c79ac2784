"""A request's tokens depend on the request alone: not on neighbours, timing, chunks, preemption or the prefix cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from backend.sequence import Sequence
from tests.engine.conftest import TinyModel
from tests.engine.engine_driver import Driver, model_driver
from tests.engine.tiny_models import VOCAB

EOS = frozenset({5, 9, 60, 61, 62, 63, 64, 65, 66})  # often enough that min_tokens matters
_SETTINGS = settings(
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

samplings = st.fixed_dictionaries(
    {"max_tokens": st.integers(1, 12)},
    optional={
        "temperature": st.sampled_from([0.5, 1.0, 1.7]),
        "seed": st.integers(0, 2**63 - 1),
        "top_k": st.sampled_from([1, 5, 40, VOCAB]),
        "top_p": st.sampled_from([0.3, 0.9]),
        "min_p": st.sampled_from([0.01, 0.2]),
        "repetition_penalty": st.sampled_from([0.8, 1.3, 5.0]),
        "presence_penalty": st.sampled_from([-2.0, 1.5]),
        "frequency_penalty": st.sampled_from([-2.0, 0.7]),
        "logit_bias": st.dictionaries(
            st.integers(0, VOCAB - 1), st.sampled_from([-100.0, -3.0, 2.5]), max_size=4
        ),
        "ignore_eos": st.booleans(),
        "stop_token_ids": st.lists(st.integers(0, VOCAB - 1), max_size=9).map(tuple),
        "logprobs": st.sampled_from([0, 1, 5]),
    },
)


@st.composite
def requests(draw: st.DrawFn) -> tuple[int, dict[str, Any]]:
    sampling = draw(samplings)
    if draw(st.booleans()):
        sampling["min_tokens"] = draw(st.integers(0, sampling["max_tokens"]))
    return draw(st.integers(0, 16)), sampling


@st.composite
def engines(draw: st.DrawFn) -> dict[str, Any]:
    block_size = draw(st.sampled_from([1, 3, 4, 16]))
    slots = draw(st.integers(1, 5))
    return {
        "mode": draw(st.sampled_from(["async", "sync"])),
        "block_size": block_size,
        "num_blocks": -(-draw(st.sampled_from([48, 60, 200])) // block_size),
        "max_num_seqs": slots,
        "max_num_batched_tokens": slots + draw(st.sampled_from([0, 1, 3, 64])),
        "prefix_cache": draw(st.booleans()),
    }


def outcome(sequence: Sequence) -> tuple[Any, ...]:
    return tuple(sequence.output_ids), sequence.finish_reason, sequence.stop_reason


def alone(model: TinyModel, prompt: int, sampling: dict[str, Any]) -> Sequence:
    """The plainest engine there is: one slot, whole prompts, no cache to hit, each step retired at once."""
    driver = model_driver(
        model.loaded,
        model.layers,
        eos_ids=EOS,
        mode="sync",
        num_blocks=8,
        block_size=16,
        max_num_seqs=1,
        prefix_cache=False,
    )
    sequence = driver.submit(model.prompts[prompt], **sampling)
    driver.run()
    return sequence


def run_together(
    model: TinyModel, engine: dict[str, Any], batch: list[tuple[int, dict[str, Any]]], steps: list[int]
) -> tuple[Driver, list[Sequence]]:
    driver = model_driver(model.loaded, model.layers, eos_ids=EOS, **engine)
    sequences = []
    for (prompt, sampling), pause in zip(batch, steps, strict=False):
        for _ in range(pause):
            if driver.core.has_work():
                driver.step()
        sequences.append(driver.submit(model.prompts[prompt], **sampling))
    driver.run()
    return driver, sequences


@settings(_SETTINGS, max_examples=60)  # the same ones each time
@given(
    engine=engines(),
    batch=st.lists(requests(), min_size=1, max_size=6),
    steps=st.lists(st.integers(0, 5), min_size=6, max_size=6),
)
def test_among_neighbours_equals_alone(
    llama: TinyModel, engine: dict[str, Any], batch: list[tuple[int, dict[str, Any]]], steps: list[int]
) -> None:
    _, sequences = run_together(llama, engine, batch, steps)
    for (prompt, sampling), sequence in zip(batch, sequences, strict=True):
        single = alone(llama, prompt, sampling)
        assert outcome(sequence) == outcome(single)
        if single.logprobs is None:
            assert sequence.logprobs is None
            continue
        assert sequence.logprobs is not None
        assert [e.token_id for e in sequence.logprobs] == sequence.output_ids
        for got, wanted in zip(sequence.logprobs, single.logprobs, strict=True):
            assert got.logprob == pytest.approx(wanted.logprob, abs=1e-5)
            assert [i for i, _ in got.top] == [i for i, _ in wanted.top]
            assert len(got.top) == sampling["logprobs"]


@settings(_SETTINGS, max_examples=10)
@given(engine=engines(), batch=st.lists(requests(), min_size=2, max_size=5))
def test_of_every_family(
    any_model: TinyModel, engine: dict[str, Any], batch: list[tuple[int, dict[str, Any]]]
) -> None:
    _, sequences = run_together(any_model, engine, batch, [0, 2, 0, 3, 1])
    for (prompt, sampling), sequence in zip(batch, sequences, strict=True):
        assert outcome(sequence) == outcome(alone(any_model, prompt, sampling))


PENALTIES: dict[str, Any] = {
    "max_tokens": 12,
    "repetition_penalty": 1.6,
    "presence_penalty": 0.9,
    "frequency_penalty": 1.1,
    "ignore_eos": True,
}


def test_penalty_counts_start_anew_when_the_last_chunk_is_one_token(llama: TinyModel) -> None:
    """Such a row looks like a decode row; its state row still holds the counts of the owner before it."""
    driver = model_driver(
        llama.loaded, llama.layers, eos_ids=EOS, max_num_seqs=1, max_num_batched_tokens=4, prefix_cache=False
    )
    first = driver.submit(llama.prompts[8], **PENALTIES)
    second = driver.submit(llama.prompts[10], **PENALTIES)  # five tokens: a chunk of four and one of one
    driver.run()
    assert len(second.prompt_ids) == 5
    assert outcome(first) == outcome(alone(llama, 8, PENALTIES))
    assert outcome(second) == outcome(alone(llama, 10, PENALTIES))


def test_penalty_counts_survive_preemption(llama: TinyModel) -> None:
    driver = model_driver(
        llama.loaded,
        llama.layers,
        eos_ids=EOS,
        num_blocks=10,
        block_size=4,
        max_num_seqs=3,
        prefix_cache=False,
    )
    sequences = [driver.submit(llama.prompts[i], **PENALTIES) for i in (4, 5, 6)]
    driver.run()
    assert sum(s.preemptions for s in sequences) > 0
    for i, sequence in zip((4, 5, 6), sequences, strict=True):
        assert outcome(sequence) == outcome(alone(llama, i, PENALTIES))


def test_prefix_hits_change_nothing_and_are_counted(llama: TinyModel) -> None:
    driver = model_driver(llama.loaded, llama.layers, eos_ids=EOS, block_size=4, max_num_seqs=4)
    sampling = {"max_tokens": 8, "temperature": 1.0, "seed": 11, "ignore_eos": True}
    first = driver.submit(llama.prompts[13], **sampling)  # 33 tokens
    driver.run()
    again = driver.submit(llama.prompts[13], **sampling)
    shares = driver.submit(llama.prompts[12], **sampling)  # its first 16 tokens
    driver.run()
    assert (first.cached_tokens, again.cached_tokens, shares.cached_tokens) == (0, 32, 12)
    assert outcome(again) == outcome(first)
    assert outcome(shares) == outcome(alone(llama, 12, sampling))
    assert driver.core.scheduler.cached_tokens == 44
    assert driver.core.scheduler.prompt_tokens == 33 + 33 + 16


def test_generated_blocks_are_hit_by_a_conversation_that_goes_on(llama: TinyModel) -> None:
    driver = model_driver(llama.loaded, llama.layers, block_size=4)
    first = driver.submit(llama.prompts[5], max_tokens=12)  # 8 tokens
    driver.run()
    history = first.prompt_ids + first.output_ids
    second = driver.submit([*history, 7, 8], max_tokens=6)
    driver.run()
    # The last token's keys and values were never computed, so the block that it ends is not there.
    assert second.cached_tokens == 16
    assert second.output_ids == llama.greedy([*history, 7, 8], 6)


def test_equal_prompts_of_one_step_share_their_blocks(llama: TinyModel) -> None:
    driver = model_driver(llama.loaded, llama.layers, block_size=4, max_num_seqs=4)
    twins = [driver.submit(llama.prompts[13], max_tokens=6) for _ in range(3)]
    driver.step()
    assert [s.cached_tokens for s in twins] == [0, 32, 32]
    assert twins[0].blocks[:8] == twins[1].blocks[:8] == twins[2].blocks[:8]
    assert len({s.blocks[8] for s in twins}) == 3
    driver.run()
    assert [s.output_ids for s in twins] == [llama.greedy(llama.prompts[13], 6)] * 3


def test_an_aligned_prompt_keeps_one_token_to_compute(llama: TinyModel) -> None:
    driver = model_driver(llama.loaded, llama.layers, block_size=4)
    for cached in (0, 4):  # eight tokens: the second block must be computed again for its last token's logits
        sequence = driver.submit(llama.prompts[5], max_tokens=4)
        driver.run()
        assert sequence.cached_tokens == cached
        assert sequence.output_ids == llama.greedy(llama.prompts[5], 4)


def test_tied_logits_give_the_lowest_token_in_any_batch(llama: TinyModel) -> None:
    """A zero output layer ties all tokens: greedy takes the lowest id, and seeded sampling what the seed says."""
    head = llama.loaded.model.lm_head.weight
    kept = head.detach().clone()
    sampled = {"max_tokens": 6, "temperature": 1.0, "seed": 3, "ignore_eos": True}
    try:
        head.zero_()
        single = alone(llama, 3, sampled)
        driver = model_driver(
            llama.loaded, llama.layers, max_num_seqs=3, max_num_batched_tokens=7, block_size=3
        )
        greedy = driver.submit(llama.prompts[9], max_tokens=5)
        driver.step()
        random = driver.submit(llama.prompts[3], **sampled)
        other = driver.submit(llama.prompts[6], max_tokens=5)
        driver.run()
    finally:
        head.copy_(kept)
    assert greedy.output_ids == other.output_ids == [0] * 5
    assert random.output_ids == single.output_ids
    assert len(set(random.output_ids)) > 1


def test_logprobs_are_the_log_softmax_of_generates_raw_scores(any_model: TinyModel) -> None:
    prompt = any_model.prompts[6]
    driver = model_driver(any_model.loaded, any_model.layers, block_size=4, max_num_seqs=3)
    plain = driver.submit(prompt, max_tokens=8, logprobs=3)
    driver.submit(any_model.prompts[4], max_tokens=8, logprobs=20)
    chosen_only = driver.submit(any_model.prompts[5], max_tokens=8, logprobs=0)
    driver.run()
    native = any_model.native.generate(
        torch.tensor([prompt]),
        max_new_tokens=8,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    assert plain.logprobs is not None
    for entry, raw in zip(plain.logprobs, native.logits, strict=True):
        wanted = raw[0].float().log_softmax(dim=-1)
        top = wanted.topk(3)
        assert entry.logprob == pytest.approx(wanted[entry.token_id].item(), abs=1e-4)
        assert [i for i, _ in entry.top] == top.indices.tolist()
        assert [x for _, x in entry.top] == pytest.approx(top.values.tolist(), abs=1e-4)
        assert entry.top[0] == (entry.token_id, entry.logprob)
    assert [e.token_id for e in plain.logprobs] == plain.output_ids
    assert chosen_only.logprobs is not None
    assert len(chosen_only.logprobs) == 8
    assert all(e.top == () for e in chosen_only.logprobs)


def test_logprobs_are_of_the_raw_logits_under_bias_and_penalties(llama: TinyModel) -> None:
    driver = model_driver(llama.loaded, llama.layers)
    prompt = llama.prompts[3]
    favourite = llama.greedy(prompt, 1)[0]
    biased = driver.submit(prompt, max_tokens=1, logprobs=1, logit_bias={favourite: -100.0})
    plain = driver.submit(prompt, max_tokens=1, logprobs=1)
    driver.run()
    assert biased.logprobs is not None
    assert plain.logprobs is not None
    assert biased.output_ids != [favourite]
    assert biased.logprobs[0].top == plain.logprobs[0].top
    assert biased.logprobs[0].logprob < plain.logprobs[0].logprob
