"""The asynchronous engine under faults, with a tiny random model: its blocks are real, and so are its answers.

What the model says is a function of the prompt: decoding is greedy, and in float64 no neighbour in a batch changes a
token. So an engine in the harness's own process, to which nothing happens, says what each job must say.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from backend.api import GenerationRequest, Prompt, SamplingParams
from backend.config import EngineConfig
from backend.engine import AsyncEngine

TINY = "tiny"
_VOCAB = 160
_CONTEXT = 1024
_BLOCKS = 96  # fewer than eight long jobs fill, so that some are preempted
_ANSWERS_S = 120.0


class Tiny:
    """A model in a folder, and what it says."""

    # So that a job is as long as it says.
    request: Mapping[str, Any] = {"ignore_eos": True}

    def __init__(self, folder: Path) -> None:
        self._engine = {"model": str(folder), "dtype": "float64", "device": "cpu", "num_kv_blocks": _BLOCKS}
        self._undisturbed = AsyncEngine(EngineConfig(**self._engine))
        self._undisturbed.start()

    def settings(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """These settings of a worker, with this model in the engine."""
        engine = self._engine | settings.get("engine", {})
        return {"backend": "tests.chaos.backends:paced_engine", "model": TINY} | settings | {"engine": engine}

    def answers(self, requests: Sequence[Mapping[str, Any]]) -> list[str]:
        """What it says to each of them while nothing goes wrong."""
        handles = [
            self._undisturbed.submit(
                GenerationRequest(
                    request_id=str(number),
                    prompt=Prompt(prompt=fields["prompt"]),
                    sampling=SamplingParams(**{"max_tokens": fields["max_tokens"]} | self.request),
                )
            )
            for number, fields in enumerate(requests)
        ]
        return [handle.result(_ANSWERS_S).text for handle in handles]

    def close(self) -> None:
        """End the engine, which finds out whether it holds blocks still."""
        self._undisturbed.shutdown(drain=True)


@contextlib.contextmanager
def tiny_model(folder: Path) -> Iterator[Tiny]:
    """A random model in this folder."""
    from tests.engine.tiny_models import save_tiny_model

    save_tiny_model("llama", folder, vocab_size=_VOCAB, max_position_embeddings=_CONTEXT)
    _save_tokenizer(folder)
    model = Tiny(folder)
    try:
        yield model
    finally:
        model.close()


def _save_tokenizer(folder: Path) -> None:
    """One that knows every printable character, so that no two prompts are the same to the model."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCAB,
        special_tokens=["<pad>", "<s>", "</s>"],
        initial_alphabet=[chr(code) for code in range(33, 127)] + ["Ġ"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(["job says this", "very long", "unseen"] * 4, trainer)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        clean_up_tokenization_spaces=False,
    ).save_pretrained(folder)
