# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Asking for memory ahead of its use."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def prefetch(address):
    """Ask for the cache line at each address to be brought to the L2 cache."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [address], dtype=tl.int32, is_pure=False, pack=1
    )
