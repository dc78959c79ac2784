"""Sizing of the key/value cache, and its tensors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from backend.api import ConfigurationError
from backend.kv_cache import KVCache, LayerShape, available_memory, bytes_per_block, choose_num_blocks

LAYERS = [LayerShape(2, 8), LayerShape(1, 16)]
BLOCK_BYTES = bytes_per_block(LAYERS, 4, torch.float32)


def choose(free_bytes: int, **changes: int) -> int:
    options = {"block_bytes": BLOCK_BYTES, "block_size": 4, "max_num_seqs": 3, "max_model_len": 10} | changes
    return choose_num_blocks(free_bytes=free_bytes, fraction=0.5, **options)


def test_bytes_of_a_block() -> None:
    assert BLOCK_BYTES == 2 * 4 * (2 * 8 + 16) * 4
    cache = KVCache(LAYERS, num_blocks=7, block_size=4, dtype=torch.float32, device=torch.device("cpu"))
    assert cache.num_bytes == 8 * BLOCK_BYTES  # and the dummy block


def test_no_more_than_all_slots_could_use() -> None:
    assert choose(10**9) == 3 * 3


def test_what_the_memory_holds() -> None:
    assert choose(2 * 6 * BLOCK_BYTES) == 5  # and the dummy block
    assert choose(2 * 6 * BLOCK_BYTES + 2 * BLOCK_BYTES - 2) == 5


def test_one_whole_sequence_must_fit() -> None:
    assert choose(2 * 4 * BLOCK_BYTES) == 3
    with pytest.raises(ConfigurationError, match=r"one sequence of 10 tokens needs .* Lower max_model_len"):
        choose(2 * 4 * BLOCK_BYTES - 2)


def test_the_dummy_block_is_nobodys() -> None:
    cache = KVCache(LAYERS, num_blocks=7, block_size=4, dtype=torch.float64, device=torch.device("cpu"))
    assert cache.dummy_block == 7
    assert cache.dummy_slot == 28
    assert [t.shape for t in cache.keys] == [(8, 4, 2, 8), (8, 4, 1, 16)]
    assert all(t.dtype == torch.float64 and not t.any() for t in (*cache.keys, *cache.values))


def test_writing_goes_to_the_named_slots_only() -> None:
    cache = KVCache(LAYERS, num_blocks=3, block_size=4, dtype=torch.bfloat16, device=torch.device("cpu"))
    keys, values = torch.ones(2, 2, 8), torch.full((2, 2, 8), 2.0)
    cache.write(0, torch.tensor([1, 9]), keys.bfloat16(), values.bfloat16())
    touched = cache.keys[0].flatten(0, 1).any(dim=-1).any(dim=-1).nonzero().squeeze(1).tolist()
    assert touched == [1, 9]
    assert cache.values[0][2, 1].eq(2).all()
    assert not cache.keys[1].any()


def test_available_memory_of_this_machine() -> None:
    assert available_memory(torch.device("cpu")) > 0


def test_files_that_the_system_keeps_in_memory_count_as_free(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("900\n")
    assert available_memory(torch.device("cpu"), tmp_path) == 100
    (tmp_path / "memory.stat").write_text("anon 100\nfile 790\ninactive_file 700\nactive_file 90\n")
    assert available_memory(torch.device("cpu"), tmp_path) == 800
    (tmp_path / "memory.max").write_text("max\n")
    assert available_memory(torch.device("cpu"), tmp_path) > 1000
