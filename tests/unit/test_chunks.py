"""Chunks are bounded by count and by size."""

from __future__ import annotations

import pytest

from workers.chunks import take_chunk


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([], []),
        ([1, 1, 1, 1], [[1, 1, 1], [1]]),
        ([10, 1, 1, 9], [[10], [1, 1, 9]]),
        ([4, 6, 1], [[4, 6], [1]]),
        ([0, 0, 0, 0, 0, 0], [[0, 0, 0], [0, 0, 0]]),
    ],
)
def test_a_chunk_ends_at_its_count_or_when_it_is_large_and_loses_nothing(
    sizes: list[int], expected: list[list[int]]
) -> None:
    items = iter(sizes)
    found = []
    while some := take_chunk(items, 3, lambda size: size, most=10):
        found.append(some)
    assert found == expected
