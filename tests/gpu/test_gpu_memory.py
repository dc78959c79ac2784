"""What the engine takes of a GPU's memory: while it loads, and when there is hardly enough."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from backend.api import ConfigurationError, Prompt
from backend.assembly import build_engine, choose_forward, choose_kernel
from backend.config import EngineConfig
from backend.engine import AsyncEngine
from backend.graphs import GraphRunner
from backend.kv_cache import MIB
from backend.loading import load_model
from backend.memory import CudaMemory
from backend.probe import probe_layers
from tests.engine.engine_driver import RecordingSink
from tests.gpu.gpu_driver import submit
from tests.gpu.gpu_models import DEVICE

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

ALONE = True  # what is free on the device is measured, and others' tests would take some of it meanwhile

HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, SIZE, VOCAB, CONTEXT = 2048, 6144, 8, 16, 4, 128, 32000, 4096
LAYER_BYTES = 2 * HIDDEN * ((HEADS + 2 * KV_HEADS) * SIZE + HEADS * SIZE + 3 * INNER)
WEIGHT_BYTES = LAYERS * LAYER_BYTES + 2 * 2 * VOCAB * HIDDEN


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A configuration of a billion bytes of weights; they are made up on the device."""
    from transformers import AutoConfig

    path = tmp_path_factory.mktemp("llama")
    AutoConfig.for_model(
        "llama",
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=SIZE,
        vocab_size=VOCAB,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
        eos_token_id=None,
    ).save_pretrained(path)
    return path


@pytest.fixture
def memory() -> Iterator[CudaMemory]:
    """The device with nothing of other tests on it, and without this process's limit afterwards."""
    gc.collect()
    memory = CudaMemory(DEVICE)
    memory.watch()
    yield memory
    torch.cuda.set_per_process_memory_fraction(1.0, DEVICE)
    gc.collect()
    memory.free()


def limit(extra: int) -> None:
    """Let this process take so many more bytes of the device."""
    total = torch.cuda.mem_get_info(DEVICE)[1]
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved(DEVICE) + extra) / total, DEVICE)


def config(folder: Path, **options: Any) -> EngineConfig:
    return EngineConfig(
        **{
            "model": str(folder),
            "load_format": "dummy",
            "tokenizer": "none",
            "device": str(DEVICE),
            "dtype": "bfloat16",
            "max_num_seqs": 64,
            "max_num_batched_tokens": 1024,
            **options,
        }
    )


def test_loading_takes_the_weights_and_one_layer(folder: Path, memory: CudaMemory) -> None:
    before = torch.cuda.memory_allocated(DEVICE)
    options = config(folder)
    loaded = load_model(options)
    probe = probe_layers(loaded)
    kernel = choose_kernel(options, loaded, probe)
    forward = choose_forward(options, loaded, probe, kernel)
    peak = torch.cuda.max_memory_allocated(DEVICE) - before
    left = torch.cuda.memory_allocated(DEVICE) - before
    assert type(forward).__name__ == "FusedDecoder"
    assert peak <= WEIGHT_BYTES + LAYER_BYTES + 64 * MIB
    assert left <= WEIGHT_BYTES + 64 * MIB


@pytest.mark.parametrize("options", [{}, {"fused": False}, {"cuda_graphs": False}], ids=str)
def test_a_small_gpu_is_used_to_its_end_and_never_over_it(
    folder: Path, memory: CudaMemory, options: dict[str, Any], record_property: Any
) -> None:
    limit(WEIGHT_BYTES + 1300 * MIB)
    engine = AsyncEngine(config(folder, kv_memory_fraction=1.0, **options))
    engine.start()
    try:
        details = engine.info().details
        blocks = int(details["num_kv_blocks"])
        assert CONTEXT // 16 <= blocks < 64 * CONTEXT // 16  # the memory, not the slots, was the limit
        prompts = [tuple(range(10 + i, 1010 + i)) for i in range(80)]
        handles = [
            submit(engine, Prompt(token_ids=prompt), max_tokens=200, temperature=i % 2, top_p=0.9, logprobs=5)
            for i, prompt in enumerate(prompts)
        ]
        assert all(len(handle.result(timeout=120).token_ids) == 200 for handle in handles)
        record_property("blocks", blocks)
        record_property("MiB free of the limit", memory.free() // MIB)
    finally:
        engine.shutdown(drain=False)


def test_graphs_take_no_more_than_was_kept_for_them(
    folder: Path, memory: CudaMemory, monkeypatch: pytest.MonkeyPatch, record_property: Any
) -> None:
    from backend import assembly

    kept = []
    measure = assembly.measure_needs
    monkeypatch.setattr(assembly, "measure_needs", lambda *args: kept.append(measure(*args)) or kept[-1])
    parts = build_engine(config(folder, num_kv_blocks=300), lambda _loaded: RecordingSink(), lambda: 0.0)
    assert isinstance(parts.runner, GraphRunner)
    taken = parts.runner.pool_bytes + parts.runner.shared_bytes
    record_property("graphs", parts.runner.num_graphs)
    record_property("MiB taken and kept", f"{taken / MIB:.0f} {kept[0].graphs / MIB:.0f} {kept[0]}")
    assert taken <= kept[0].graphs + kept[0].margin
    assert kept[0].graphs <= 2 * taken


def test_what_cannot_fit_is_said_with_its_bytes_before_anything_is_loaded(
    folder: Path, memory: CudaMemory
) -> None:
    before = torch.cuda.memory_allocated(DEVICE)
    limit(WEIGHT_BYTES - 1)
    with pytest.raises(ConfigurationError, match=rf"needs {WEIGHT_BYTES // MIB}\d? MiB for its weights"):
        load_model(config(folder))
    limit(WEIGHT_BYTES + 60 * MIB)  # one sequence takes 64
    with pytest.raises(ConfigurationError, match=r"one sequence of 4096 tokens needs 64 MiB"):
        load_model(config(folder))
    assert torch.cuda.memory_allocated(DEVICE) == before
    limit(WEIGHT_BYTES + 150 * MIB)  # it would fit, but not beside a step
    with pytest.raises(ConfigurationError, match=r"does not fit.* MiB"):
        build_engine(config(folder), lambda _loaded: RecordingSink(), lambda: 0.0)
