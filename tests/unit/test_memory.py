"""What steps and graphs will take, measured against a memory whose every byte the test knows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from backend.api import ConfigurationError
from backend.kv_cache import MIB, check_num_blocks, choose_num_blocks
from backend.memory import GRAPH_BYTES, GraphKind, Needs, graph_bytes, memory_errors, step_bytes


class FakeMemory:
    """So many bytes, of which some are taken for good and some in passing."""

    def __init__(self, free: int) -> None:
        self._free = free
        self._most = 0

    def take(self, kept: int, passing: int = 0) -> None:
        if passing + kept > self._free:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has less. If")
        self._free -= kept
        self._most = max(self._most, passing)

    def free(self) -> int:
        return self._free

    def watch(self) -> None:
        self._most = 0

    def peak(self) -> int:
        return self._most


class Graph:
    """Holds its bytes as long as it lives."""

    def __init__(self, memory: FakeMemory, size: int) -> None:
        self._memory, self._size = memory, size
        memory.take(size)

    def __del__(self) -> None:
        self._memory.take(-self._size)


def captures(memory: FakeMemory, *sizes: int) -> list[Callable[[], object]]:
    return [lambda size=size: Graph(memory, size) for size in sizes]


def test_a_step_takes_what_it_takes_in_passing() -> None:
    memory = FakeMemory(1000)
    memory.take(0, passing=900)
    assert step_bytes(memory, lambda: memory.take(100, passing=300)) == 300
    assert memory.free() == 900


def test_graphs_take_the_first_and_as_often_as_they_are_what_the_second_adds() -> None:
    memory = FakeMemory(1000 * MIB)
    kinds = [
        GraphKind(10, captures(memory, 300 * MIB, 4 * MIB)),
        GraphKind(20, captures(memory, 7 * MIB, 2 * MIB)),
    ]
    assert graph_bytes(memory, kinds) == (300 + 9 * 4 + 7 + 19 * 2) * MIB
    assert memory.free() == 1000 * MIB  # given up again


def test_a_graph_that_fits_into_what_the_driver_holds_is_not_free_of_charge() -> None:
    memory = FakeMemory(1000 * MIB)
    assert graph_bytes(memory, [GraphKind(5, captures(memory, 100 * MIB, 0))]) == 100 * MIB + 4 * GRAPH_BYTES


def test_needs_come_before_the_cache() -> None:
    needs = Needs(step=10 * MIB, graphs=20 * MIB, state=5 * MIB, margin=15 * MIB)
    assert needs.total == 50 * MIB
    options = {"block_bytes": MIB, "block_size": 16, "max_num_seqs": 100, "max_model_len": 160}
    blocks = choose_num_blocks(free_bytes=150 * MIB, fraction=0.5, needed_bytes=needs.total, **options)
    assert blocks == 49  # and the dummy block
    with pytest.raises(
        ConfigurationError, match=r"needs 11\.0 MiB.* 60\.0 MiB that are free, less 50\.0 MiB .*5\.0"
    ):
        choose_num_blocks(free_bytes=60 * MIB, fraction=0.5, needed_bytes=needs.total, **options)
    with pytest.raises(ConfigurationError, match="KV cache does not fit"):
        choose_num_blocks(free_bytes=40 * MIB, fraction=1.0, needed_bytes=needs.total, **options)


def test_blocks_that_were_asked_for_leave_room_for_the_needs() -> None:
    assert check_num_blocks(9, free_bytes=30 * MIB, block_bytes=MIB, needed_bytes=20 * MIB) == 9
    with pytest.raises(
        ConfigurationError, match=r"30 MiB are free, of which steps need 20 MiB\. Use at most 9,"
    ):
        check_num_blocks(10, free_bytes=30 * MIB, block_bytes=MIB, needed_bytes=20 * MIB)


def test_running_out_of_memory_names_the_bytes() -> None:
    memory = FakeMemory(3 * MIB)
    with (
        pytest.raises(
            ConfigurationError, match=r"The largest step .*Tried to allocate 2\.00 GiB, and 3 MiB .*Lower it"
        ),
        memory_errors("The largest step", memory, "Lower it"),
    ):
        step_bytes(memory, lambda: memory.take(0, passing=4 * MIB))
