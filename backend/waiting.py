"""A line of those who wait: by priority, then arrival. Who ends while it waits is dropped without a search."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class WaitingLine(Generic[T]):
    """A heap whose ended entries are dropped when they surface, or when they are most of it.

    ``waits`` says of an entry whether it still waits; once it does not, ``drop`` is called, and it is never pushed
    again.
    """

    def __init__(self, waits: Callable[[T], bool]) -> None:
        self._waits = waits
        self._heap: list[tuple[int, int, T]] = []
        self._count = 0

    def __len__(self) -> int:
        """How many wait."""
        return self._count

    def __iter__(self) -> Iterator[T]:
        """Those who wait, in no order."""
        return (item for _, _, item in self._heap if self._waits(item))

    def push(self, priority: int, number: int, item: T) -> None:
        """Queue an item. ``number`` is its place among those of its priority, and its own."""
        heapq.heappush(self._heap, (priority, number, item))
        self._count += 1

    def peek(self) -> T | None:
        """The first in line."""
        while self._heap and not self._waits(self._heap[0][2]):
            heapq.heappop(self._heap)
        return self._heap[0][2] if self._heap else None

    def pop(self) -> T:
        """Take the first in line out; somebody must wait."""
        while not self._waits(item := heapq.heappop(self._heap)[2]):
            pass
        self._count -= 1
        return item

    def in_order(self) -> Iterator[T]:
        """Those who wait, first in line first; the work is for those taken, not for the whole line.

        The line must not change meanwhile.
        """
        heap = self._heap
        frontier = [(heap[0], 0)] if heap else []
        while frontier:
            (_, _, item), index = heapq.heappop(frontier)
            if self._waits(item):
                yield item
            for child in range(2 * index + 1, min(2 * index + 3, len(heap))):
                heapq.heappush(frontier, (heap[child], child))

    def drop(self) -> None:
        """Count an item out that has stopped waiting where it stands."""
        self._count -= 1
        if len(self._heap) > 2 * self._count + 64:
            # Ended entries may stay below the top for as long as something more urgent waits.
            self._heap = [entry for entry in self._heap if self._waits(entry[2])]
            heapq.heapify(self._heap)

    def clear(self) -> None:
        """Forget everyone."""
        self._heap, self._count = [], 0
