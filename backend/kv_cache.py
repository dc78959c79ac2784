"""The paged key/value cache: its tensors, and how many blocks fit."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from backend.api import ConfigurationError

MIB = 2**20


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Key/value heads and head size of one layer."""

    heads: int
    head_size: int


def bytes_per_block(layers: list[LayerShape], block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block over all layers, keys and values."""
    return sum(2 * block_size * layer.heads * layer.head_size * dtype.itemsize for layer in layers)


def available_memory(device: torch.device, control_group: Path = Path("/sys/fs/cgroup")) -> int:
    """Free bytes on a device: of the GPU, or of the machine's (and its control group's) main memory.

    A limit that the process has set itself by ``torch.cuda.set_per_process_memory_fraction`` counts too.
    """
    if device.type == "cuda":
        on_device, total = torch.cuda.mem_get_info(device)
        limit = int(torch.cuda.get_per_process_memory_fraction(device) * total)
        return max(0, min(on_device, limit - torch.cuda.memory_reserved(device)))
    import psutil

    free = int(psutil.virtual_memory().available)
    try:
        limit = int((control_group / "memory.max").read_text())
        used = int((control_group / "memory.current").read_text())
    except (OSError, ValueError):
        return free  # no control group, or no limit ("max")
    return max(0, min(free, limit - used + _reclaimable(control_group)))


def _reclaimable(control_group: Path) -> int:
    """Bytes of files that a control group keeps in memory only as long as nobody needs it, weights just read among
    them; the machine's own figure leaves them out already."""
    try:
        lines = (control_group / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("inactive_file ")), 0)


def memory_fraction(asked: float | None, device: torch.device) -> float:
    """Share of the memory that is left for the cache: as asked for, else 0.9 of a GPU's and 0.5 of a machine's."""
    return asked or (0.9 if device.type == "cuda" else 0.5)


def check_num_blocks(num_blocks: int, *, free_bytes: int, block_bytes: int, needed_bytes: int = 0) -> int:
    """A number of blocks that the configuration asks for.

    Args:
        needed_bytes: of the free ones, for what else the engine will take.

    Raises:
        ConfigurationError: they are more than the memory could ever hold.
    """
    left = max(0, free_bytes - needed_bytes)
    if (num_blocks + 1) * block_bytes > left:  # and the dummy block
        beside = f", of which steps need {needed_bytes / MIB:.0f} MiB" if needed_bytes else ""
        raise ConfigurationError(
            f"num_kv_blocks is {num_blocks}, which takes {num_blocks * block_bytes / MIB:.0f} MiB, but "
            f"{free_bytes / MIB:.0f} MiB are free{beside}. Use at most {max(0, left // block_bytes - 1)}, or leave "
            "it unset"
        )
    return num_blocks


def choose_num_blocks(
    *,
    free_bytes: int,
    fraction: float,
    block_bytes: int,
    block_size: int,
    max_num_seqs: int,
    max_model_len: int,
    needed_bytes: int = 0,
) -> int:
    """How many blocks to make: what the memory holds, but no more than all slots at full length could use.

    Args:
        needed_bytes: of the free ones, for what else the engine will take; ``fraction`` is of the rest.

    Raises:
        ConfigurationError: not even one sequence of ``max_model_len`` tokens fits; names the bytes.
    """
    one_sequence = -(-max_model_len // block_size)
    wanted = one_sequence * max_num_seqs
    budget = int(max(0, free_bytes - needed_bytes) * fraction)
    blocks = min(wanted, budget // block_bytes - 1)  # one is the dummy
    if blocks < one_sequence:
        beside = f", less {needed_bytes / MIB:.1f} MiB that steps need," if needed_bytes else ""
        raise ConfigurationError(
            f"the KV cache does not fit: one sequence of {max_model_len} tokens needs "
            f"{(one_sequence + 1) * block_bytes / MIB:.1f} MiB, and {fraction:.3g} of the {free_bytes / MIB:.1f} MiB "
            f"that are free{beside} is {budget / MIB:.1f} MiB. Lower max_model_len, raise kv_memory_fraction, or "
            "free memory on the device"
        )
    return blocks


class KVCache:
    """Keys and values of all layers, each ``[num_blocks, block_size, heads, head_size]``.

    One more block than the allocator hands out exists at the end: padding rows write there.
    """

    def __init__(
        self,
        layers: list[LayerShape],
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        shapes = [(num_blocks + 1, block_size, layer.heads, layer.head_size) for layer in layers]
        self.keys = [_zeros(shape, dtype, device) for shape in shapes]
        self.values = [_zeros(shape, dtype, device) for shape in shapes]
        self._flat_keys = [tensor.flatten(0, 1) for tensor in self.keys]
        self._flat_values = [tensor.flatten(0, 1) for tensor in self.values]

    @property
    def dummy_block(self) -> int:
        """The block that no sequence ever holds; finite numbers are all that is in it."""
        return self.num_blocks

    @property
    def dummy_slot(self) -> int:
        """A token slot that no sequence ever reads."""
        return self.num_blocks * self.block_size

    @property
    def num_bytes(self) -> int:
        """Bytes of all layers."""
        return sum(t.numel() * t.element_size() for t in (*self.keys, *self.values))

    def write(self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store keys and values ``[T, heads, head_size]`` of the tokens at int64 ``slots [T]``."""
        self._flat_keys[layer].index_copy_(0, slots, keys)
        self._flat_values[layer].index_copy_(0, slots, values)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    # Zeros rather than garbage: a masked position has weight 0, and 0 times a stray NaN would be NaN.
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # NumPy's zeros are mapped lazily, so that a large cache costs only what it comes to hold.
    size = int(np.prod(shape)) * dtype.itemsize
    return torch.from_numpy(np.zeros(size, dtype=np.uint8)).view(dtype).view(shape)
