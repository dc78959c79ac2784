"""Random paged caches for the kernels' tests."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(slots=True)
class PagedRows:
    """A cache whose rows' blocks are scattered, with garbage in every slot that no row may read."""

    keys: Tensor
    values: Tensor
    block_table: Tensor
    kv_lengths: Tensor


def make_rows(
    lengths: list[int], *, kv_heads: int, head_size: int, block_size: int, dtype: torch.dtype, device: str
) -> PagedRows:
    """Rows of these lengths; unread slots hold NaN, so that a kernel that touches one cannot pass."""
    blocks = [-(-length // block_size) for length in lengths]
    width = max(max(blocks), 1) + 1
    order = torch.randperm(sum(blocks)) + 1
    table = torch.zeros(len(lengths), width, dtype=torch.int32)
    shape = (sum(blocks) + 1, block_size, kv_heads, head_size)
    keys, values = torch.full(shape, float("nan")), torch.full(shape, float("nan"))
    used = 0
    for row, (length, count) in enumerate(zip(lengths, blocks, strict=True)):
        mine = order[used : used + count]
        used += count
        table[row, :count] = mine.int()
        for pages in (keys, values):
            fresh = torch.full((count * block_size, kv_heads, head_size), float("nan"))
            fresh[:length] = torch.randn(length, kv_heads, head_size)
            pages[mine] = fresh.view(count, *shape[1:])
    return PagedRows(
        keys.to(device, dtype),
        values.to(device, dtype),
        table.to(device),
        torch.tensor(lengths, device=device).int(),
    )
