"""Random models for the tests on a GPU: large enough for its kernels' tiles, small enough to start in seconds."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_works import LLAMA_8B
from tests.engine import tiny_models
from tests.engine.tiny_models import save_random_model

VOCAB = 512
CONTEXT = 512
NEW_TOKENS = 40
DEVICE = torch.device("cuda", 0)

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.08,
    "eos_token_id": None,
}
_HEAD = {"head_dim": 32}
_WINDOW = {"sliding_window": 24}
_ALTERNATING = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}

# What the GPU's families have beyond, or unlike, those of the engine's tests on a CPU.
_CHANGES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "mistral-window": _WINDOW,
    "gemma2": {**_WINDOW, "head_dim": 8},  # less than the kernels' matrix products take
    "gemma3": {**_WINDOW, **_ALTERNATING, "query_pre_attn_scalar": 32},
    "mixtral": {},
    "qwen3-moe": {"moe_intermediate_size": 64},
    "gpt-oss": {**_WINDOW, **_ALTERNATING},
}
_MORE: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("qwen2", {}),  # biases of queries, keys and values
    "llama-heads-of-80": ("llama", {"hidden_size": 320, "head_dim": 80, "attention_bias": True}),
    # Parts as in the fused pattern, but one layer without rotation: it must run through its own modules.
    "smollm3": ("smollm3", {"no_rope_layers": [1, 0, 1]}),
    # A rotary embedding that looks at the positions on the host: no graphs.
    "phi3-longrope": (
        "phi3",
        {
            "max_position_embeddings": 2 * CONTEXT,
            "original_max_position_embeddings": CONTEXT,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "short_factor": [1.0 + i / 16 for i in range(16)],
                "long_factor": [2.0 + i / 4 for i in range(16)],
                "original_max_position_embeddings": CONTEXT,
            },
        },
    ),
    "granite": (
        "granite",
        {
            "residual_multiplier": 0.5,
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.2,
            "logits_scaling": 0.5,
        },
    ),
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    **{
        name: (kind, {**own, **_HEAD, **_CHANGES[name]}) for name, (kind, own) in tiny_models.FAMILIES.items()
    },
    **_MORE,
}
# Two layers of Llama 3.1 8B's own shape: only such products have kernels of their own, for few rows in bfloat16.
LARGE = "llama-8b-layers"
_LARGE: dict[str, Any] = {
    **LLAMA_8B,
    "num_hidden_layers": 2,
    "vocab_size": 4096,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": 1,
    "eos_token_id": None,
}
UNFUSED = ("gemma2", "gemma3", "mixtral", "qwen3-moe", "gpt-oss", "smollm3", "phi3-longrope", "granite")


def save_family(family: str, folder: Path, **changes: Any) -> Path:
    """Write the seeded random model of a family; returns the folder."""
    model_type, own = FAMILIES[family]
    seed = sorted(FAMILIES).index(family)
    return save_random_model(
        model_type, folder, seed=seed, noise=0.05, **{**_SIZES, **_HEAD, **own, **changes}
    )


def save_large(folder: Path) -> Path:
    """Write ``LARGE``, made on the device, where its half a billion weights take no time; returns the folder."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    with torch.random.fork_rng(devices=[DEVICE]), torch.device(DEVICE), torch.no_grad():
        torch.manual_seed(8)
        model = AutoModelForCausalLM.from_config(LlamaConfig(**_LARGE), dtype=torch.bfloat16)
        for parameter in model.parameters():
            if parameter.dim() == 1:  # norms, which are ones otherwise and would show no mistake
                parameter.add_(torch.randn_like(parameter), alpha=0.05)
    model.save_pretrained(folder)
    return folder


def large_products() -> set[tuple[int, int, int]]:
    """The products of ``LARGE`` that have kernels of their own: padded rows, outputs, inputs."""
    from backend.kernels.skinny_linear import _FASTER

    return {key for key in _FASTER if key[1] != LLAMA_8B["vocab_size"]}


def make_prompts(count: int, lengths: tuple[int, ...] = (1, 5, 16, 33, 64, 90)) -> list[list[int]]:
    """Prompts of few lengths, so that ``generate`` can take those of one length together."""
    rng = random.Random(1)
    return [[rng.randrange(3, VOCAB) for _ in range(lengths[i % len(lengths)])] for i in range(count)]


def native(folder: Path | str, dtype: torch.dtype = torch.float32, *, experts: str = "eager") -> Any:
    """The model in transformers' own hands."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager", experts_implementation=experts
    )
    return model.to(DEVICE).eval()


def generate(folder: Path | str, prompts: list[list[int]], new: int = NEW_TOKENS) -> list[list[int]]:
    """Greedy float32 tokens of transformers' ``generate``, which no end token ends; no prompt is padded."""
    model = native(folder, experts="batched_mm")  # the fastest of transformers' own for a few tokens
    model.generation_config.eos_token_id = None
    found: dict[int, list[int]] = {}
    for length in sorted({len(prompt) for prompt in prompts}):
        group = [i for i, prompt in enumerate(prompts) if len(prompt) == length]
        ids = torch.tensor([prompts[i] for i in group], device=DEVICE)
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False, pad_token_id=0
        )
        found.update(zip(group, output[:, length:].tolist(), strict=True))
    return [found[i] for i in range(len(prompts))]
