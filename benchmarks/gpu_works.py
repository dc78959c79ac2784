"""What the GPU measurement works on: the model's shape, the works, and the least time the memory allows them."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROMPT_TOKENS = 64
MIXED_SLOTS = 256
MIXED_FILE = Path(__file__).with_name("mixed_1319.json")  # where its lengths come from is said in it
# Up to here the engine lets kernels start early, so longer works get an engine of their own.
SHORT_CONTEXT = 2048
SPARE_CONTEXT = 16
_UNIFORM = re.compile(r"([1-9]\d*)x([2-9]|[1-9]\d+)(?:@([1-9]\d*))?")
_MIXED = re.compile(r"mixed(?:-([1-9]\d*))?")

LLAMA_8B: Mapping[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 128000,
    "eos_token_id": 128001,
}
TINY: Mapping[str, Any] = {
    **LLAMA_8B,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def weight_bytes(shape: Mapping[str, Any]) -> int:
    """Bytes of the bf16 matrices that a step reads whole; of the embedding it reads a few rows."""
    hidden, inner = shape["hidden_size"], shape["intermediate_size"]
    heads, kv_heads, size = shape["num_attention_heads"], shape["num_key_value_heads"], shape["head_dim"]
    layer = hidden * size * (2 * heads + 2 * kv_heads) + 3 * hidden * inner
    return int(2 * (shape["num_hidden_layers"] * layer + shape["vocab_size"] * hidden))


def kv_bytes_a_token(shape: Mapping[str, Any]) -> int:
    """Bytes of one token's keys and values in bf16."""
    return int(2 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * shape["head_dim"] * 2)


@dataclass(frozen=True)
class Work:
    """Requests that arrive at once: prompt tokens and new tokens of each, and how many may run together."""

    name: str
    requests: tuple[tuple[int, int], ...]
    slots: int

    @property
    def new_tokens(self) -> int:
        """New tokens in all."""
        return sum(new for _, new in self.requests)

    @property
    def longest(self) -> int:
        """Tokens of the longest request, prompt included."""
        return max(prompt + new for prompt, new in self.requests)

    @property
    def steps(self) -> int | None:
        """Decode steps after the prompts, where all requests run together and are alike; else ``None``."""
        alike = len(set(self.requests)) == 1 and len(self.requests) <= self.slots
        return self.requests[0][1] - 1 if alike else None

    @property
    def context(self) -> int:
        """The context limit that an engine for this work gets."""
        return self.longest + SPARE_CONTEXT

    def prompts(self, vocabulary: int) -> list[tuple[int, ...]]:
        """Random token ids, the same each time."""
        top = min(120_000, vocabulary)
        draws = (random.Random(index) for index in range(len(self.requests)))
        return [
            tuple(draw.randrange(5, top) for _ in range(count))
            for draw, (count, _) in zip(draws, self.requests, strict=True)
        ]

    def floor_s(self, shape: Mapping[str, Any], rate: float) -> float:
        """Seconds to read the weights once a step and each request's keys and values once a token.

        ``rate`` is in bytes/s. Each request's first token comes from its prompt's step, so it is no decode step. Of
        other than uniform works the steps are as few as full slots allow, and prompts cost nothing.
        """
        decoded = self.new_tokens - len(self.requests)
        steps = self.steps if self.steps is not None else -(-decoded // self.slots)
        contexts = sum(prompt * (new - 1) + new * (new - 1) // 2 for prompt, new in self.requests)
        return (steps * weight_bytes(shape) + contexts * kv_bytes_a_token(shape)) / rate


def uniform(rows: int, new: int, prompt: int = PROMPT_TOKENS) -> Work:
    """``rows`` requests of ``prompt`` tokens, ``new`` tokens each, all running together."""
    name = f"{rows}x{new}" + (f"@{prompt}" if prompt != PROMPT_TOKENS else "")
    return Work(name, ((prompt, new),) * rows, rows)


def mixed(
    path: Path = MIXED_FILE, *, count: int | None = None, slots: int = MIXED_SLOTS, shorten: int = 1
) -> Work:
    """The mixed work, or its first ``count`` requests; with ``shorten`` of so many times fewer new tokens."""
    requests = json.loads(path.read_text(encoding="utf-8"))["requests"][:count]
    name = "mixed" if count is None else f"mixed-{len(requests)}"
    name += f"/{shorten}" if shorten > 1 else ""
    return Work(name, tuple((prompt, max(1, new // shorten)) for prompt, new in requests), slots)


def parse_works(text: str, mixed_file: Path = MIXED_FILE) -> list[Work]:
    """Works by name: ``32x256``, ``32x256@4096`` for prompts of 4096 tokens, ``mixed``, ``mixed-64`` for its first 64.

    Raises:
        ValueError: a name is of no such kind.
    """
    works = []
    for name in filter(None, text.split(",")):
        if match := _UNIFORM.fullmatch(name):
            works.append(uniform(*(int(number) for number in match.groups() if number)))
        elif match := _MIXED.fullmatch(name):
            works.append(mixed(mixed_file, count=int(match[1]) if match[1] else None))
        else:
            raise ValueError(
                f"work {name!r} is neither ROWSxNEW (32x256), with two new tokens or more, ROWSxNEW@PROMPT, nor 'mixed'"
            )
    return works
