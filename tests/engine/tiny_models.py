"""Tiny random models of each supported family, small enough for thousands of steps in float64 on a CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

VOCAB = 128
CONTEXT = 96
EOS = 2

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": 1,
    "eos_token_id": EOS,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
    "initializer_range": 0.4,  # the usual 0.02 makes all tokens nearly equally likely
}

# model_type and what the family needs or is here for
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"num_hidden_layers": 3}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "mistral-window": ("mistral", {"sliding_window": 8}),
    "gemma2": (
        "gemma2",
        {
            "head_dim": 8,
            "sliding_window": 8,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 8.0,
            "query_pre_attn_scalar": 8,
        },
    ),
    "gemma3": (
        "gemma3_text",
        {
            "head_dim": 8,
            "sliding_window": 8,
            "query_pre_attn_scalar": 8,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "qwen3-moe": (
        "qwen3_moe",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 8},
    ),
    "gpt-oss": (
        "gpt_oss",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "head_dim": 8,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
}


def save_tiny_model(family: str, folder: Path, **changes: Any) -> Path:
    """Write a seeded random model of ``family`` into ``folder`` in transformers' format; returns the folder."""
    model_type, own = FAMILIES[family]
    return save_random_model(
        model_type, folder, seed=20 + sorted(FAMILIES).index(family), **{**own, **changes}
    )


def save_random_model(
    model_type: str, folder: Path, *, seed: int, noise: float = 0.0, **changes: Any
) -> Path:
    """The same for any type of model: small, but for what ``changes`` say of its configuration.

    ``noise`` is added to norm weights and biases, which are ones and zeros otherwise and would show no mistake.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(model_type, **{**_COMMON, **changes})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float64)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("sinks"):
                    parameter.normal_(0.0, 1.0)  # visible in the softmax
                elif noise and parameter.dim() == 1:
                    parameter.add_(torch.randn_like(parameter), alpha=noise)
    model.save_pretrained(folder)
    return folder


def save_tiny_tokenizer(folder: Path) -> None:
    """Write a byte-level BPE tokenizer of at most ``VOCAB`` tokens with a chat template into ``folder``."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    # Not the whole byte alphabet: 256 tokens would not fit. Text outside the corpus' letters comes to nothing.
    corpus = ["the cat sat on the mat", "a dog and a cat", "hello world", "user: assistant: stop end é 世"]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=["<pad>", "<s>", "</s>"], show_progress=False
    )
    tokenizer.train_from_iterator(corpus * 4, trainer)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        clean_up_tokenization_spaces=False,
        chat_template=(
            "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
            "{{ m.role }}: {{ m.content }} {% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
        ),
    ).save_pretrained(folder)
