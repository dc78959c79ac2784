# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Which tokens a sequence has seen and produced, on the device, for its penalties.

A word for each token of a row: the sign bit says that the token is in the prompt, the other bits count it among the
outputs. A word of 0 is a token not seen. The sampling kernels read the words and count what they sample.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit(do_not_specialize=["start"])
def _start_rows_kernel(packed, start, words, vocab_size, tile: tl.constexpr):
    header = packed + start + tl.program_id(0) * 4
    row = tl.load(header)
    first, middle, end = tl.load(header + 1), tl.load(header + 2), tl.load(header + 3)
    own = words + row.to(tl.int64) * vocab_size
    for at in range(0, vocab_size, tile):
        token = at + tl.arange(0, tile)
        tl.store(own + token, tl.zeros([tile], tl.int32), mask=token < vocab_size)
    tl.debug_barrier()
    for at in range(first, middle, tile):
        entry = at + tl.arange(0, tile)
        token = tl.load(packed + start + entry, mask=entry < middle, other=-1)
        tl.atomic_or(own + token, -2147483648, mask=(entry < middle) & (token >= 0) & (token < vocab_size))
    tl.debug_barrier()
    for at in range(middle, end, tile):
        entry = at + tl.arange(0, tile)
        token = tl.load(packed + start + entry, mask=entry < end, other=-1)
        tl.atomic_add(own + token, 1, mask=(entry < end) & (token >= 0) & (token < vocab_size))


def start_rows(packed: Tensor, start: int, count: int, words: Tensor) -> None:
    """Rebuild rows of ``words`` from whole sequences, before the first step that samples from them.

    Args:
        packed: int32, contiguous. From ``start`` on lie ``count`` headers of four numbers, a row and the borders of
            its prompt and output tokens (first of the prompt, first of the outputs, end), counted from ``start``.
        start: where the headers begin.
        count: rows to rebuild.
        words: int32 [rows, V], contiguous.
    """
    if count:
        _start_rows_kernel[(count,)](packed, start, words, words.shape[1], tile=2048, num_warps=16)


def num_bytes(max_rows: int, vocab_size: int) -> int:
    """Device memory of so many rows."""
    return max_rows * vocab_size * torch.int32.itemsize
