"""The line of the log that says what an engine's start came to."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import pytest

from backend.assembly import build_engine
from backend.config import EngineConfig
from backend.kv_cache import MIB
from backend.memory import Needs
from tests.engine.engine_driver import RecordingSink
from tests.engine.tiny_models import save_tiny_model


def test_what_was_chosen_and_where_the_memory_went_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = save_tiny_model("llama", tmp_path)
    config = EngineConfig(
        model=str(folder), tokenizer="none", device="cpu", dtype="float32", block_size=8, num_kv_blocks=700
    )
    with caplog.at_level(logging.INFO, "backend.assembly"):
        parts = build_engine(config, lambda _loaded: RecordingSink(), time.monotonic)
    # Three layers, keys and values of two heads of 8 float32 numbers, 5,600 tokens: 2.05 MiB.
    chosen = (
        f"{folder} on cpu: attention sdpa, that of long prompts sdpa; layers modules; no CUDA graphs; "
        "KV cache 700 blocks of 8 tokens in 2 MiB; "
    )
    (line,) = [r.getMessage() for r in caplog.records if r.getMessage().startswith(chosen)]
    assert line.endswith(" MiB free")
    needs = Needs(step=3 * MIB, graphs=4 * MIB, state=5 * MIB, margin=6 * MIB)
    assert parts.summary(1234 * MIB, needs) == (
        f"{chosen}18 MiB kept for steps, graphs and sampling; 1234 MiB free"
    )
