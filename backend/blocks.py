"""Blocks of the key/value cache: who holds which, and which hold a reusable prompt beginning.

A block is ``block_size`` consecutive tokens of one sequence, in every layer. Full blocks can be registered under
a chained digest of all tokens up to their end, so that another sequence with the same beginning shares them.
A block that nobody holds stays findable until it is handed out again, least recently used first.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict, deque
from collections.abc import Sequence

import numpy as np

from backend.api import TokenmillError

ROOT_DIGEST = b""


class BlockError(TokenmillError):
    """A block was released more often than it was taken: a fault of the engine, never of a request."""

    code = "block_accounting"


def chain_digest(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Digest of a full block: 128 bits of BLAKE2b over the parent's digest and the tokens (as int32)."""
    return hashlib.blake2b(parent + np.asarray(tokens, dtype=np.int32).tobytes(), digest_size=16).digest()


class BlockAllocator:
    """Hands out block ids ``0 … num_blocks - 1`` with reference counts and a prefix cache.

    The engine thread is its only caller.
    """

    def __init__(self, num_blocks: int, *, prefix_cache: bool = True) -> None:
        self.num_blocks = num_blocks
        self._prefix_cache = prefix_cache
        self._references = [0] * num_blocks
        self._digest_of: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}
        self._plain_free: deque[int] = deque(range(num_blocks))
        self._cached_free: OrderedDict[int, None] = OrderedDict()  # least recently used first

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds, reusable cached ones included."""
        return len(self._plain_free) + len(self._cached_free)

    @property
    def num_cached(self) -> int:
        """Blocks that can be found by their contents."""
        return len(self._block_of)

    def allocate(self) -> int | None:
        """Take one block, or ``None`` when every block is held. Evicts the oldest unused cached block."""
        if self._plain_free:
            block = self._plain_free.popleft()
        elif self._cached_free:
            block, _ = self._cached_free.popitem(last=False)
            self._forget(block)
        else:
            return None
        self._references[block] = 1
        return block

    def release(self, blocks: Sequence[int]) -> None:
        """Give up one reference to each block, the last one first, so that chains are evicted from their end."""
        for block in reversed(blocks):
            count = self._references[block] - 1
            if count < 0:
                raise BlockError(f"block {block} was released twice")
            self._references[block] = count
            if count == 0:
                if self._digest_of[block] is None:
                    self._plain_free.append(block)
                else:
                    self._cached_free[block] = None

    def register(self, block: int, digest: bytes) -> None:
        """Make a full block findable. The first block with the same contents stays the one that is found."""
        if not self._prefix_cache or digest in self._block_of or self._digest_of[block] is not None:
            return
        self._block_of[digest] = block
        self._digest_of[block] = digest

    def match(self, digests: Sequence[bytes]) -> list[int]:
        """Take a reference to each cached block of the longest known beginning of ``digests``."""
        found: list[int] = []
        for digest in digests:
            block = self._block_of.get(digest)
            if block is None:
                break
            if self._references[block] == 0:
                del self._cached_free[block]
            self._references[block] += 1
            found.append(block)
        return found

    def check(self, held: Sequence[Sequence[int]]) -> None:
        """Compare the counts with the block lists of all living sequences.

        Raises:
            BlockError: a block is leaked, lost or counted wrongly.
        """
        expected = [0] * self.num_blocks
        for blocks in held:
            for block in blocks:
                expected[block] += 1
        if expected != self._references:
            wrong = [i for i in range(self.num_blocks) if expected[i] != self._references[i]]
            raise BlockError(f"reference counts of blocks {wrong[:8]} are off")
        free = set(self._plain_free) | set(self._cached_free)
        if len(free) != self.num_free or free != {i for i, n in enumerate(expected) if n == 0}:
            raise BlockError("the free lists disagree with the reference counts")

    def _forget(self, block: int) -> None:
        digest = self._digest_of[block]
        if digest is not None:
            self._digest_of[block] = None
            del self._block_of[digest]
