"""What the engine will take of a device's memory besides the cache: measured before the cache gets the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch

from backend.api import ConfigurationError
from backend.kv_cache import MIB, available_memory

# What nothing here measures on a GPU: code of kernels that are loaded later, and what allocators round up.
MARGIN_BYTES = 128 * MIB
# A graph takes at least this much for its nodes, also where the driver still had room from the one before.
GRAPH_BYTES = 1 * MIB


class DeviceMemory(Protocol):
    """The memory of the device that an engine runs on."""

    def free(self) -> int:
        """Bytes that can be taken now; what the process holds without use goes back first."""

    def watch(self) -> None:
        """From here on note the most that is taken."""

    def peak(self) -> int:
        """Most bytes taken since ``watch`` beyond those that are still taken now."""


class CudaMemory:
    """Of a GPU, through PyTorch's allocator, which must be the only one that this process uses."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def free(self) -> int:
        """See ``DeviceMemory.free``."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        return available_memory(self._device)

    def watch(self) -> None:
        """See ``DeviceMemory.watch``."""
        self.free()
        torch.cuda.reset_peak_memory_stats(self._device)

    def peak(self) -> int:
        """See ``DeviceMemory.peak``."""
        most = torch.cuda.max_memory_reserved(self._device)
        self.free()
        return max(0, most - torch.cuda.memory_reserved(self._device))


class HostMemory:
    """Of the machine. What steps take there is small beside the half that the cache leaves, and is not watched."""

    def free(self) -> int:
        """See ``DeviceMemory.free``."""
        return available_memory(torch.device("cpu"))

    def watch(self) -> None:
        """See ``DeviceMemory.watch``."""

    def peak(self) -> int:
        """See ``DeviceMemory.peak``."""
        return 0


def device_memory(device: torch.device) -> DeviceMemory:
    """The memory of a device."""
    return CudaMemory(device) if device.type == "cuda" else HostMemory()


@dataclass(frozen=True, slots=True)
class Needs:
    """Bytes that are taken after the cache has been made."""

    step: int = 0  # passing tensors of the largest step
    graphs: int = 0  # all graphs of both slots, and what they share
    state: int = 0  # what the first request that asks for it brings about, and stays
    margin: int = 0

    @property
    def total(self) -> int:
        """All of it."""
        return self.step + self.graphs + self.state + self.margin


def step_bytes(memory: DeviceMemory, run: Callable[[], object]) -> int:
    """Bytes that ``run``, the largest step, takes while it runs."""
    memory.watch()
    run()
    return memory.peak()


@dataclass(frozen=True, slots=True)
class GraphKind:
    """Graphs that differ in size and slot only: how many there will be, and how to capture the largest of them."""

    count: int
    captures: Sequence[Callable[[], object]]  # of each slot; the result holds the graph


def graph_bytes(memory: DeviceMemory, kinds: Sequence[GraphKind]) -> int:
    """Bytes that all graphs will take, from the largest of each kind, captured on trial and given up again.

    The first holds the memory that all others work in; the next shows what each of them adds.
    """
    total = 0
    held: list[object] = []
    free = memory.free()
    for kind in kinds:
        taken = []
        for capture in kind.captures:
            held.append(capture())
            free_now = memory.free()
            taken.append(max(free - free_now, GRAPH_BYTES))
            free = free_now
        total += taken[0] + (kind.count - 1) * max(taken[1:], default=GRAPH_BYTES)
    held.clear()
    return total


@contextmanager
def memory_errors(what: str, memory: DeviceMemory, advice: str) -> Iterator[None]:
    """Turn a device's running out of memory into an error that names the bytes.

    Raises:
        ConfigurationError: in place of PyTorch's own.
    """
    try:
        yield
    except torch.OutOfMemoryError as exc:
        asked = str(exc).split(". ", 2)[1:2]
        raise ConfigurationError(
            f"{what} does not fit on the device: {(asked or [str(exc)])[0].strip()}, and "
            f"{memory.free() / MIB:.0f} MiB are free without it. {advice}"
        ) from exc
