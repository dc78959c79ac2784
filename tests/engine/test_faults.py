"""What goes wrong stays where it belongs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from backend.api import RequestError
from tests.engine.conftest import TinyModel
from tests.engine.engine_driver import model_driver

POISONED = 77  # a token whose embedding is NaN


@pytest.fixture
def poisoned(llama: TinyModel) -> Iterator[TinyModel]:
    """A model that cannot digest one of its tokens."""
    embedding = llama.loaded.model.get_input_embeddings().weight
    kept = embedding[POISONED].clone()
    embedding[POISONED] = float("nan")
    yield llama
    embedding[POISONED] = kept


def clean(model: TinyModel) -> list[int]:
    """Prompts of a model without the poisoned token, in them or in what follows."""
    return [
        i for i, p in enumerate(model.prompts) if POISONED not in p and POISONED not in model.greedy(p, 10)
    ]


@pytest.mark.parametrize("mode", ["async", "sync"])
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_unusable_logits_fail_their_request_alone(poisoned: TinyModel, mode: str, prefix_cache: bool) -> None:
    """Its keys and values stay in blocks that others get, and in rows whose tables others read past their end."""
    good = clean(poisoned)
    driver = model_driver(
        poisoned.loaded,
        poisoned.layers,
        mode=mode,
        prefix_cache=prefix_cache,
        num_blocks=24,
        block_size=4,
        max_num_seqs=4,
        max_num_batched_tokens=12,
    )
    healthy, broken = [], []
    for round_ in range(6):
        broken.append(driver.submit([5, POISONED, *range(10, 10 + 3 * round_)], max_tokens=10))
        healthy += [
            driver.submit(poisoned.prompts[i], max_tokens=10) for i in good[round_ * 2 : round_ * 2 + 2]
        ]
        for _ in range(3):
            driver.step()
    driver.run()
    for sequence in broken:
        error = driver.sink.errors[sequence.number]
        assert isinstance(error, RequestError)
        assert "NaN" in str(error)
        assert "output token 0" in str(error)
        assert sequence.output_ids == []
    assert len(driver.sink.errors) == len(broken) == driver.core.failed
    for sequence in healthy:
        assert sequence.output_ids == poisoned.greedy(sequence.prompt_ids, 10)


def test_unusable_logits_in_mid_generation_keep_what_came_before_to_themselves(poisoned: TinyModel) -> None:
    """The request samples the poisoned token itself, steps after its neighbours were batched with it."""
    good = clean(poisoned)
    driver = model_driver(poisoned.loaded, poisoned.layers, block_size=4, max_num_seqs=4)
    neighbours = [driver.submit(poisoned.prompts[i], max_tokens=10) for i in good[:3]]
    broken = driver.submit(poisoned.prompts[3], max_tokens=10, min_tokens=10, logit_bias={POISONED: 100.0})
    later = [driver.submit(poisoned.prompts[i], max_tokens=10) for i in good[3:6]]
    driver.run()
    assert list(driver.sink.errors) == [broken.number]
    assert "output token 1" in str(driver.sink.errors[broken.number])
    for sequence in (*neighbours, *later):
        assert sequence.output_ids == poisoned.greedy(sequence.prompt_ids, 10)


def test_infinite_bias_like_logits_do_not_kill_the_engine(llama: TinyModel) -> None:
    """Banning every token leaves no finite logit: the request fails, the next one runs."""
    driver = model_driver(llama.loaded, llama.layers, eos_ids=frozenset(range(128)))
    hopeless = driver.submit(llama.prompts[3], max_tokens=5, min_tokens=5)
    neighbour = driver.submit(llama.prompts[4], max_tokens=5, ignore_eos=True)
    driver.run()
    assert list(driver.sink.errors) == [hopeless.number]
    assert neighbour.output_ids == llama.greedy(llama.prompts[4], 5)
