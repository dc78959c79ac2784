"""Pieces of a stream that are bounded twice: by how many there are and by how large they are together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

T = TypeVar("T")

LARGEST_CHUNK = 8_000_000
"""Characters of prompts: several such pieces lie in memory at once, in several forms."""


def take_chunk(
    items: Iterator[T], count: int, size: Callable[[T], int], most: int = LARGEST_CHUNK
) -> list[T]:
    """The next ``count`` items, fewer when they reach ``most`` in size before that; none at the end."""
    taken: list[T] = []
    total = 0
    while len(taken) < count and total < most and (item := next(items, None)) is not None:
        taken.append(item)
        total += size(item)
    return taken
