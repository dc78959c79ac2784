"""The ``async`` backend end to end on a tiny model: texts, ends, streams."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from backend.api import FinishReason, RequestError
from tests.engine.conftest import MakeEngine, TinyModel
from tests.engine.tiny_models import CONTEXT, EOS, save_tiny_model


def decode(model: TinyModel, ids: list[int]) -> str:
    text: str = model.loaded.tokenizer.decode(  # type: ignore[union-attr]
        ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
    return text


def readable(model: TinyModel) -> list[int]:
    """A prompt after which the greedy model says letters for a while: the vocabulary is wider than the tokenizer's."""
    known = len(model.loaded.tokenizer)  # type: ignore[arg-type]
    rng = random.Random(3)
    best: list[int] = []
    most = -1
    for _ in range(40):
        prompt = [rng.randrange(3, known) for _ in range(3)]
        count = sum(3 <= token < known for token in model.greedy(prompt))
        if count > most:
            best, most = prompt, count
    assert most >= 8
    return best


def test_token_ids_text_and_chat_come_to_the_same_prompt(make_engine: MakeEngine, llama: TinyModel) -> None:
    running = make_engine()
    tokenizer = llama.loaded.tokenizer
    assert tokenizer is not None
    text = "user: the cat sat assistant:"
    ids = tokenizer(text)["input_ids"]
    wanted = llama.greedy(ids, 6)
    for source in (ids, text, [("user", "the cat sat")]):
        result = running.submit(source, max_tokens=6, ignore_eos=True).result(30)
        assert list(result.token_ids) == wanted
        assert result.text == decode(llama, wanted)
        assert result.finish_reason is FinishReason.LENGTH
        assert (result.prompt_tokens, result.completion_tokens) == (len(ids), 6)
        assert result.stop_reason is None
        assert result.seed is None
        assert result.logprobs is None
    running.check_idle()


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_end_of_sequence_given_as_a_list(
    make_engine: MakeEngine, llama: TinyModel, tmp_path: Any, mode: str
) -> None:
    """As ``generate`` does it, with its own reading of the same folder."""
    from transformers import AutoModelForCausalLM

    prompt = llama.prompts[6]
    free = llama.greedy(prompt)
    ends = [free[9], free[4]]
    assert free[4] not in free[:4]
    folder = save_tiny_model("llama", tmp_path / "m", eos_token_id=ends)
    native = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
    wanted = native.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)[
        0, len(prompt) :
    ].tolist()
    running = make_engine(model=str(folder), tokenizer="none", mode=mode)
    result = running.submit(prompt, max_tokens=12).result(30)
    assert list(result.token_ids) == wanted == free[:5]
    assert result.finish_reason is FinishReason.STOP
    assert result.stop_reason == free[4]
    assert result.completion_tokens == 5
    assert result.text == ""  # no tokenizer
    assert running.engine.stats().generated_tokens == 5
    ignored = running.submit(prompt, max_tokens=12, ignore_eos=True).result(30)
    assert list(ignored.token_ids) == free[:12]
    running.check_idle()


def test_the_ending_token_is_kept_and_counted_but_not_in_the_text(
    make_engine: MakeEngine, llama: TinyModel
) -> None:
    prompt = readable(llama)
    greedy = llama.greedy(prompt)
    position = next(i for i in range(2, 14) if greedy[i] not in greedy[:i])
    running = make_engine()
    for options in ({}, {"stream": True}):
        result = running.submit(
            prompt, max_tokens=14, stop_token_ids=(greedy[position],), logprobs=1, ignore_eos=True, **options
        ).result(30)
        assert list(result.token_ids) == greedy[: position + 1]
        assert result.text == decode(llama, greedy[:position])
        assert (result.finish_reason, result.stop_reason) == (FinishReason.STOP, greedy[position])
        assert result.logprobs is not None
        assert len(result.logprobs) == result.completion_tokens == position + 1


def test_one_token(make_engine: MakeEngine, llama: TinyModel) -> None:
    running = make_engine()
    for prompt in llama.prompts[:6]:
        result = running.submit(prompt, max_tokens=1, ignore_eos=True).result(30)
        assert list(result.token_ids) == llama.greedy(prompt, 1)
        assert result.finish_reason is FinishReason.LENGTH
    assert running.engine.stats().generated_tokens == 6
    running.check_idle()


@pytest.mark.parametrize("mode", ["async", "sync"])
@pytest.mark.parametrize("block_size", [4, 5])
def test_the_context_limit_to_the_token(
    make_engine: MakeEngine, llama: TinyModel, mode: str, block_size: int
) -> None:
    rng = random.Random(5)
    long = [rng.randrange(3, 100) for _ in range(CONTEXT)]
    running = make_engine(mode=mode, block_size=block_size, num_kv_blocks=-(-(CONTEXT - 1) // block_size))
    for room in (1, 2, 5):
        prompt = long[: CONTEXT - room]
        result = running.submit(prompt, max_tokens=1000, ignore_eos=True).result(30)
        assert list(result.token_ids) == llama.greedy(prompt, room)
        assert result.finish_reason is FinishReason.LENGTH
        assert result.prompt_tokens + result.completion_tokens == CONTEXT
    with pytest.raises(RequestError, match=f"at most {CONTEXT - 1} tokens"):
        running.submit(long, max_tokens=1)
    running.check_idle()


def test_a_context_limit_of_ones_own(make_engine: MakeEngine, llama: TinyModel) -> None:
    running = make_engine(max_model_len=20)
    result = running.submit(llama.prompts[7], max_tokens=100, ignore_eos=True).result(30)  # 16 tokens
    assert list(result.token_ids) == llama.greedy(llama.prompts[7], 4)


@pytest.mark.parametrize("mode", ["async", "sync"])
@pytest.mark.parametrize("stream", [True, False])
def test_stop_strings_across_token_borders(
    make_engine: MakeEngine, llama: TinyModel, mode: str, stream: bool
) -> None:
    """Every piece of text of up to five characters as a stop string, against decoding ever longer beginnings."""
    prompt = readable(llama)
    greedy = llama.greedy(prompt)
    text = decode(llama, greedy)
    stops = sorted({text[i : i + n] for i in range(len(text)) for n in (1, 2, 3, 5)} - {""})
    stops = [stop for stop in stops if "\ufffd" not in stop]
    running = make_engine(mode=mode, max_num_seqs=8)
    handles = [
        running.submit(prompt, max_tokens=14, stop=stop, stream=stream, logprobs=0, ignore_eos=True)
        for stop in stops
    ]
    across = 0
    for stop, handle in zip(stops, handles, strict=True):
        chunks = list(handle.stream()) if stream else []
        result = handle.result(30)
        count = next(n for n in range(1, 15) if stop in decode(llama, greedy[:n]))
        assert list(result.token_ids) == greedy[:count]
        assert result.text == text[: text.index(stop)]
        assert (result.finish_reason, result.stop_reason) == (FinishReason.STOP, stop)
        assert result.completion_tokens == count
        assert result.logprobs is not None
        assert [e.token_id for e in result.logprobs] == greedy[:count]
        if stream:
            assert "".join(chunk.text for chunk in chunks) == result.text
            assert [t for chunk in chunks for t in chunk.token_ids] == list(result.token_ids)
        across += all(stop not in decode(llama, [token]) for token in greedy[:count])
    assert across > 5
    running.check_idle()


def test_streams_add_up_to_the_result(make_engine: MakeEngine, llama: TinyModel) -> None:
    running = make_engine(max_num_seqs=3, num_kv_blocks=24)
    handles = [
        running.submit(prompt, max_tokens=14, stream=True, temperature=1.0, seed=4, ignore_eos=True)
        for prompt in llama.prompts
    ]
    for handle in handles:
        chunks = list(handle.stream())
        result = handle.result(30)
        assert "".join(chunk.text for chunk in chunks) == result.text == decode(llama, list(result.token_ids))
        assert [t for chunk in chunks for t in chunk.token_ids] == list(result.token_ids)
        assert list(handle.stream()) == []  # ends at once
    running.check_idle()


def test_a_stream_that_was_not_asked_for(make_engine: MakeEngine) -> None:
    handle = make_engine().submit([5], max_tokens=1)
    with pytest.raises(RequestError, match="stream"):
        next(handle.stream())


def test_stop_strings_and_min_tokens(make_engine: MakeEngine, llama: TinyModel) -> None:
    prompt = readable(llama)
    greedy = llama.greedy(prompt)
    first = decode(llama, greedy[:1])
    assert first
    running = make_engine()
    result = running.submit(prompt, max_tokens=14, stop=first, min_tokens=9, ignore_eos=True).result(30)
    assert result.completion_tokens >= 9
    assert result.text.startswith(first)


def test_a_seed_that_was_given_is_told_even_where_it_decides_nothing(
    make_engine: MakeEngine, llama: TinyModel
) -> None:
    result = make_engine().submit(llama.prompts[4], max_tokens=1, seed=7).result(30)
    assert result.seed == 7


def test_an_unset_seed_is_drawn_and_told(make_engine: MakeEngine, llama: TinyModel) -> None:
    running = make_engine(rng=random.Random(1))
    results = [
        running.submit(llama.prompts[4], max_tokens=10, temperature=1.5, ignore_eos=True).result(30)
        for _ in range(2)
    ]
    assert results[0].seed != results[1].seed
    assert results[0].token_ids != results[1].token_ids
    for result in results:
        again = running.submit(
            llama.prompts[4], max_tokens=10, temperature=1.5, seed=result.seed, ignore_eos=True
        ).result(30)
        assert again.token_ids == result.token_ids


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_many_threads_at_once(make_engine: MakeEngine, llama: TinyModel, mode: str) -> None:
    running = make_engine(mode=mode, max_num_seqs=4, num_kv_blocks=20, max_num_batched_tokens=9)
    jobs = [(i % 17, 1 + i % 14) for i in range(60)]

    def one(job: tuple[int, int]) -> list[int]:
        prompt, count = job
        return list(
            running.submit(llama.prompts[prompt], max_tokens=count, ignore_eos=True).result(60).token_ids
        )

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(one, jobs))
    for (prompt, count), tokens in zip(jobs, results, strict=True):
        assert tokens == llama.greedy(llama.prompts[prompt], count)
    stats = running.engine.stats()
    assert stats.requests_finished == 60
    assert stats.requests_failed == 0
    assert stats.generated_tokens == sum(count for _, count in jobs)
    assert stats.prompt_tokens == sum(len(llama.prompts[prompt]) for prompt, _ in jobs)
    assert 0 < stats.cached_tokens < stats.prompt_tokens
    assert (stats.running, stats.waiting) == (0, 0)
    assert stats.kv_blocks_free == stats.kv_blocks_total == 20
    assert 0 < stats.busy_s <= stats.wall_s
    assert 0 < stats.prepare_s < stats.wall_s
    running.check_idle()


def test_what_info_says(make_engine: MakeEngine, llama: TinyModel) -> None:
    info = make_engine(max_num_seqs=7).engine.info()
    assert (info.backend, info.device, info.dtype, info.slots) == ("async", "cpu", "float64", 7)
    assert (info.max_model_len, info.vocab_size, info.model) == (CONTEXT, 128, str(llama.folder))
    assert info.details["num_kv_blocks"] == 64
    assert info.details["kv_cache_bytes"] == 65 * 4 * sum(2 * s.heads * s.head_size * 8 for s in llama.layers)


def test_float32_with_packed_weights(make_engine: MakeEngine, llama: TinyModel) -> None:
    """Tiny random models have no near ties in these prompts: float32 gives the same tokens."""
    running = make_engine(dtype="float32")
    for prompt in llama.prompts:
        result = running.submit(prompt, max_tokens=8, ignore_eos=True).result(30)
        assert list(result.token_ids) == llama.greedy(prompt, 8)


def test_dummy_weights_without_a_tokenizer(make_engine: MakeEngine) -> None:
    runs = []
    for _ in range(2):
        running = make_engine(load_format="dummy", tokenizer="none", dtype="float32")
        result = running.submit([5, 6, 7], max_tokens=6, ignore_eos=True).result(30)
        assert result.text == ""
        runs.append(result.token_ids)
    assert runs[0] == runs[1]  # the same random weights each time


def test_times_add_up(make_engine: MakeEngine) -> None:
    result = make_engine().submit([EOS + 1, 7], max_tokens=6, ignore_eos=True).result(30)
    assert result.time_to_first_token_s is not None
    assert 0 <= result.queue_time_s <= result.time_to_first_token_s <= result.latency_s


def test_no_more_is_computed_once_a_stop_string_is_found(make_engine: MakeEngine, llama: TinyModel) -> None:
    prompt = readable(llama)
    running = make_engine()
    running.gate.close(after=3)  # the second token has retired by then
    handle = running.submit(
        prompt, max_tokens=60, stop=decode(llama, llama.greedy(prompt, 2)), ignore_eos=True
    )
    assert handle.result(30).completion_tokens <= 2
    told = threading.Event()
    assert running.engine._output is not None
    running.engine._output._events.put(told.set)  # behind the word to the engine
    assert told.wait(30)
    running.gate.open()
    running.check_idle()
    assert running.engine.stats().generated_tokens <= 4


def test_every_family_in_float32(make_engine: MakeEngine, any_model: TinyModel) -> None:
    """Through ``start``, with its comparison, packed weights and grouped products for mixtures of experts."""
    running = make_engine(model=str(any_model.folder), dtype="float32", max_num_seqs=6)
    handles = [running.submit(prompt, max_tokens=8, ignore_eos=True) for prompt in any_model.prompts]
    for prompt, handle in zip(any_model.prompts, handles, strict=True):
        assert list(handle.result(30).token_ids) == any_model.greedy(prompt, 8)
    running.check_idle()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_starts_and_runs(make_engine: MakeEngine, llama: TinyModel, dtype: str) -> None:
    running = make_engine(dtype=dtype)
    result = running.submit(llama.prompts[4], max_tokens=8, ignore_eos=True, logprobs=2).result(30)
    assert result.completion_tokens == 8
    assert running.engine.info().dtype == dtype
    running.check_idle()
