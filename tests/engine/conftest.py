"""Tiny models, loaded once a session, and what transformers itself makes of them."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import FAMILIES, VOCAB, save_tiny_model, save_tiny_tokenizer

from backend.assembly import probe_layers
from backend.config import EngineConfig
from backend.kv_cache import LayerShape
from backend.loading import LoadedModel, load_model

NEW_TOKENS = 14


@pytest.fixture(scope="session", autouse=True)
def _one_torch_thread() -> Iterator[None]:
    """Tiny tensors gain nothing from threads, and lose much to their start."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _no_engine_thread_left() -> Iterator[None]:
    yield
    left = [t.name for t in threading.enumerate() if t.name in ("tokenmill-engine", "tokenmill-output")]
    assert not left


@dataclass
class TinyModel:
    """A family's model on the paged engine, and in transformers' own hands."""

    family: str
    folder: Path
    loaded: LoadedModel
    layers: list[LayerShape]
    native: Any
    prompts: list[list[int]] = field(default_factory=list)
    _greedy: dict[tuple[int, ...], list[int]] = field(default_factory=dict)

    def greedy(self, prompt: list[int], count: int = NEW_TOKENS) -> list[int]:
        """The first ``count`` new tokens of transformers' greedy ``generate``, which nothing ends early."""
        key = tuple(prompt)
        if len(self._greedy.get(key, ())) < count:
            output = self.native.generate(
                torch.tensor([prompt]),
                max_new_tokens=max(count, NEW_TOKENS),
                do_sample=False,
                eos_token_id=None,
            )
            self._greedy[key] = output[0, len(prompt) :].tolist()
        return self._greedy[key][:count]


def make_prompts(vocab: int) -> list[list[int]]:
    """Prompts of many lengths; some begin alike, by whole blocks and by parts of one."""
    rng = random.Random(7)
    base = [rng.randrange(3, vocab) for _ in range(48)]
    prompts = [[rng.randrange(3, vocab) for _ in range(n)] for n in (1, 2, 3, 4, 7, 8, 9, 16, 17, 31)]
    prompts += [base[:n] for n in (5, 8, 16, 33)]
    prompts += [base[:k] + [rng.randrange(3, vocab) for _ in range(n)] for k, n in ((8, 1), (12, 4), (16, 9))]
    return prompts


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], TinyModel]:
    """``tiny(family)``: made once a session."""
    from transformers import AutoModelForCausalLM

    made: dict[str, TinyModel] = {}

    def get(family: str) -> TinyModel:
        if family not in made:
            folder = save_tiny_model(family, tmp_path_factory.mktemp("models") / family)
            save_tiny_tokenizer(folder)
            loaded = load_model(EngineConfig(model=str(folder), dtype="float64", device="cpu"))
            native = AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
            ).eval()
            # None in the call means "the configuration's own".
            native.generation_config.eos_token_id = None
            made[family] = TinyModel(
                family, folder, loaded, probe_layers(loaded), native, prompts=make_prompts(VOCAB)
            )
        return made[family]

    return get


@pytest.fixture(scope="session")
def llama(tiny: Callable[[str], TinyModel]) -> TinyModel:
    return tiny("llama")


@pytest.fixture(scope="session", params=sorted(FAMILIES))
def any_model(request: pytest.FixtureRequest, tiny: Callable[[str], TinyModel]) -> TinyModel:
    model: TinyModel = tiny(request.param)
    return model
