"""The backends that the conformance suite runs, on a tiny random model with a byte tokenizer of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from backend.api import Backend, GenerationRequest
from backend.config import EngineConfig
from backend.echo import EchoBackend
from backend.engine import AsyncEngine
from backend.transformers_backend import TransformersBackend

EOS = 256
VOCAB_SIZE = 264
MODEL_LEN = 4096  # long enough that a request is surely running when a test cancels it
CHAT_TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


def save_tiny_model(folder: Path) -> Path:
    """Write a random two-layer Llama and a tokenizer whose tokens are bytes."""
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MODEL_LEN,
        eos_token_id=EOS,
        bos_token_id=None,
        pad_token_id=None,
        initializer_range=0.3,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {character: index for index, character in enumerate(alphabet)} | {"<|end|>": EOS}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|end|>")
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


class Fault:
    """Makes a backend die at its next step, once armed."""

    def __init__(self) -> None:
        self.armed = False

    def __call__(self, *_: Any) -> None:
        if self.armed:
            raise RuntimeError("injected fault")


Build = Callable[[EngineConfig, Fault], Backend]


def build_echo(config: EngineConfig, fault: Fault) -> Backend:
    """Paced, so that tests can catch a request while it runs."""

    def before_step(_: Sequence[GenerationRequest]) -> None:
        fault()

    paced = config.model_copy(update={"echo_tokens_per_s": 1000.0, "max_model_len": MODEL_LEN})
    backend = EchoBackend(paced, before_step=before_step)
    backend.start()
    return backend


def build_transformers(config: EngineConfig, fault: Fault) -> Backend:
    """The peer, with the fault in the model's embedding."""
    backend = TransformersBackend(config)
    backend.start()
    backend._loaded.model.get_input_embeddings().register_forward_pre_hook(fault)
    return backend


def build_async(config: EngineConfig, fault: Fault) -> Backend:
    """Our engine, with the fault in the model's embedding."""
    backend = AsyncEngine(config)
    backend.start()
    assert backend._parts is not None
    backend._parts.loaded.model.get_input_embeddings().register_forward_pre_hook(fault)
    return backend


@dataclass(frozen=True)
class Kind:
    """A backend under test, and what it does not claim."""

    name: str
    build: Build
    settings: dict[str, Any]
    refuses: frozenset[str] = frozenset()  # sampling parameters that it refuses by name

    def config(self, folder: Path, **changes: Any) -> EngineConfig:
        """A small configuration: float64, so that other neighbours cannot change a token."""
        fields = {"model": str(folder), "dtype": "float64", "max_num_seqs": 4, "max_num_batched_tokens": 64}
        return EngineConfig.model_validate(fields | self.settings | changes)


PEER_REFUSES = frozenset(
    {
        "temperature",
        "min_tokens",
        "logprobs",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "logit_bias",
    }
)
_CACHE = {"block_size": 16, "num_kv_blocks": 1088}
KINDS = (
    Kind("echo", build_echo, {}),
    Kind("transformers", build_transformers, _CACHE, PEER_REFUSES),
    Kind("async", build_async, _CACHE | {"mode": "async", "debug_poison": True}),
    Kind("sync", build_async, _CACHE | {"mode": "sync", "debug_poison": True}),
)
