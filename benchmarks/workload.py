"""The work that every system gets: the same prompts as token ids, and how many new tokens each is to have."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROMPTS = Path(__file__).with_name("prompts.jsonl")
SHORTEST, LONGEST = 16, 128
UNIFORM = 64


@dataclass(frozen=True)
class Work:
    """One workload; ``prompts[i]`` is to be continued by exactly ``new_tokens[i]`` tokens."""

    name: str
    prompts: tuple[tuple[int, ...], ...]
    new_tokens: tuple[int, ...]

    @property
    def total(self) -> int:
        """New tokens in all."""
        return sum(self.new_tokens)

    def head(self, count: int, new_tokens: int) -> Work:
        """A small piece of it, to warm up with."""
        return Work(
            f"{self.name} warm-up", self.prompts[:count], (new_tokens,) * min(count, len(self.prompts))
        )


def load_prompts(
    tokenizer: Any, path: Path = PROMPTS, limit: int | None = None
) -> tuple[tuple[int, ...], ...]:
    """The prompts of a JSONL file, each as one chat turn in the model's own template."""
    prompts = []
    for line in path.read_text(encoding="utf-8").splitlines()[:limit]:
        turn = [{"role": "user", "content": json.loads(line)["prompt"]}]
        text = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
        prompts.append(tuple(tokenizer(text, add_special_tokens=False)["input_ids"]))
    return tuple(prompts)


def mixed(prompts: tuple[tuple[int, ...], ...], seed: int = 0) -> Work:
    """Lengths drawn evenly from 16 to 128, as jobs of many kinds in one queue have."""
    draw = random.Random(seed)
    return Work("mixed", prompts, tuple(draw.randint(SHORTEST, LONGEST) for _ in prompts))


def uniform(prompts: tuple[tuple[int, ...], ...]) -> Work:
    """The same length for all, which suits static batches best."""
    return Work("uniform", prompts, (UNIFORM,) * len(prompts))
