"""The packaged SmolLM2 with its real weights, in float32, against transformers' ``generate``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from backend.api import GenerationHandle, GenerationRequest, Prompt, SamplingParams
from backend.config import EngineConfig
from backend.engine import AsyncEngine
from backend.model_source import resolve_model

pytestmark = pytest.mark.model

QUESTIONS = [
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "List three colours.",
    "What is 2 + 2?",
    "Who wrote Romeo and Juliet?",
    "Translate 'good morning' into Spanish.",
]
NEW_TOKENS = 24


@pytest.fixture(scope="module")
def engine() -> Iterator[AsyncEngine]:
    made = AsyncEngine(
        EngineConfig(
            model="smollm2",
            device="cpu",
            max_num_seqs=8,
            max_num_batched_tokens=48,
            max_model_len=512,
            debug_poison=True,
        )
    )
    made.start()
    yield made
    made.shutdown(drain=False)


@pytest.fixture(autouse=True)
def _no_engine_thread_left() -> None:
    """Instead of the session's check: here the engine lives as long as the module."""


def ask(engine: AsyncEngine, prompt: Prompt, **options: Any) -> GenerationHandle:
    stream = options.pop("stream", False)
    sampling = SamplingParams(**{"max_tokens": NEW_TOKENS, **options})
    return engine.submit(GenerationRequest(request_id="r", prompt=prompt, sampling=sampling, stream=stream))


def chat(question: str) -> Prompt:
    return Prompt.model_validate({"messages": [{"role": "user", "content": question}]})


def test_greedy_answers_equal_generate(engine: AsyncEngine) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = resolve_model("smollm2").location
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    handles = [ask(engine, chat(question), stream=i % 2 == 0) for i, question in enumerate(QUESTIONS)]
    for question, handle in zip(QUESTIONS, handles, strict=True):
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
        )
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
        with torch.inference_mode():
            output = model.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False)
        wanted = output[0, ids.shape[1] :].tolist()
        result = handle.result(120)
        assert list(result.token_ids) == wanted, question
        assert result.prompt_tokens == ids.shape[1]
        assert result.text == tokenizer.decode(
            wanted, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )


def test_answers_make_sense(engine: AsyncEngine) -> None:
    result = ask(engine, chat(QUESTIONS[0])).result(120)
    assert "Paris" in result.text
    assert result.cached_tokens > 0 or result.prompt_tokens < 16  # the system prompt was seen before
    completion = ask(engine, Prompt(prompt="The capital of France is"), max_tokens=4).result(120)
    assert "Paris" in completion.text


def test_log_probabilities_name_their_tokens(engine: AsyncEngine) -> None:
    handles = [
        ask(engine, chat(QUESTIONS[0]), logprobs=2, stream=stream, ignore_eos=True, max_tokens=12)
        for stream in (False, True)
    ]
    for handle in handles:
        result = handle.result(120)
        assert result.logprobs is not None
        assert "".join(entry.text or "" for entry in result.logprobs).startswith(result.text[:20])
        for entry in result.logprobs:
            assert entry.top_texts is not None
            assert entry.top_texts[0] == entry.text  # greedy: the most likely one
            assert len(entry.top_texts) == len(entry.top) == 2


def test_a_stop_string_in_real_text(engine: AsyncEngine) -> None:
    whole = ask(engine, chat(QUESTIONS[0])).result(120)
    stop = whole.text[len(whole.text) // 2 : len(whole.text) // 2 + 4]
    cut = ask(engine, chat(QUESTIONS[0]), stop=stop, stream=True)
    pieces = "".join(chunk.text for chunk in cut.stream())
    assert pieces == cut.result(120).text == whole.text[: whole.text.index(stop)]
    assert cut.result().stop_reason == stop


def test_seeded_sampling_repeats_among_neighbours(engine: AsyncEngine) -> None:
    options: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95, "seed": 12, "max_tokens": 16}
    alone = ask(engine, chat(QUESTIONS[1]), **options).result(120)
    handles = [ask(engine, chat(q), temperature=1.0, seed=i, max_tokens=8) for i, q in enumerate(QUESTIONS)]
    again = ask(engine, chat(QUESTIONS[1]), **options).result(120)
    for handle in handles:
        handle.result(120)
    assert again.text == alone.text
    assert again.seed == 12
