"""The engine on a CUDA device, graphs and kernels included, against transformers' ``generate``."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from backend.api import GenerationRequest, Prompt, SamplingParams
from backend.config import EngineConfig
from backend.engine import AsyncEngine

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

VOCAB = 512
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "mistral": {"model_type": "mistral", "sliding_window": 24},
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3"},
    "gemma2": {"model_type": "gemma2", "sliding_window": 16, "query_pre_attn_scalar": 32},
    "gemma3": {"model_type": "gemma3_text", "sliding_window": 16, "query_pre_attn_scalar": 32},
}


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random float32 model of one family."""
    from transformers import AutoConfig, AutoModelForCausalLM

    options = dict(FAMILIES[request.param])
    config = AutoConfig.for_model(
        options.pop("model_type"),
        hidden_size=128,
        intermediate_size=192,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        vocab_size=VOCAB,
        max_position_embeddings=512,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=0,
        **options,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.08)
    path = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(path)
    return path


def make_prompts(count: int) -> list[tuple[int, ...]]:
    rng = random.Random(1)
    return [tuple(rng.randrange(1, VOCAB) for _ in range(rng.randint(1, 90))) for _ in range(count)]


def generate(folder: Path, prompts: list[tuple[int, ...]], new: int) -> list[list[int]]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).cuda()
    texts = []
    for prompt in prompts:
        ids = torch.tensor([prompt], device="cuda")
        out = model.generate(ids, max_new_tokens=new, do_sample=False, eos_token_id=None, pad_token_id=0)
        texts.append(out[0, len(prompt) :].tolist())
    return texts


def run(folder: Path, prompts: list[tuple[int, ...]], lengths: list[int], **options: Any) -> list[list[int]]:
    settings: dict[str, Any] = {
        "max_num_seqs": 20,
        "max_num_batched_tokens": 64,
        "num_kv_blocks": 200,
        "debug_poison": True,
    }
    engine = AsyncEngine(
        EngineConfig(
            model=str(folder), tokenizer="none", device="cuda", dtype="float32", **(settings | options)
        )
    )
    engine.start()
    try:
        handles = [
            engine.submit(
                GenerationRequest(
                    request_id=str(i),
                    prompt=Prompt(token_ids=prompt),
                    sampling=SamplingParams(max_tokens=new, ignore_eos=True),
                )
            )
            for i, (prompt, new) in enumerate(zip(prompts, lengths, strict=True))
        ]
        results = [list(handle.result(timeout=120).token_ids) for handle in handles]
        assert engine.stats().kv_blocks_free == engine.stats().kv_blocks_total
        return results
    finally:
        engine.shutdown(drain=True)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"mode": "sync"},
        {"cuda_graphs": False},
        {"fused": False},
        {"num_kv_blocks": 40},
        {"max_num_batched_tokens": 20, "block_size": 32},
    ],
    ids=str,
)
def test_greedy_tokens_equal_generate(folder: Path, options: dict[str, Any]) -> None:
    prompts = make_prompts(40)
    expected = generate(folder, prompts, 48)
    rng = random.Random(2)
    lengths = [rng.randint(1, 48) for _ in prompts]
    got = run(folder, prompts, lengths, **options)
    wrong = [i for i, (g, e, n) in enumerate(zip(got, expected, lengths, strict=True)) if g != e[:n]]
    assert not wrong
