"""Who waits and who runs, for backends that leave batching to someone else or need none.

Waiting rows are admitted into a fixed number of slots by priority, then arrival; nobody loses a slot once it has one.
A slot that becomes free while bulk runs in fewer than its share of them goes to bulk first. Cancels, deadlines and
a shutdown end a row early, whether it waits or runs. Nothing here locks: the owner calls under its own lock and
delivers outcomes after releasing it, because a caller's done-callback may call the backend again.
"""

from __future__ import annotations

import heapq
import itertools
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from backend.api import EngineDeadError, FinishReason, GenerationHandle, QueueFullError
from backend.config import BULK_PRIORITY
from backend.waiting import WaitingLine

logger = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class Row:
    """One accepted request. Subclasses add what generating it needs."""

    handle: GenerationHandle
    submitted: float
    started: float | None = None  # when it got its slot
    first_token: float | None = None
    done: bool = False

    @property
    def deadline(self) -> float | None:
        """The moment at which it ends with what it has."""
        seconds = self.handle.request.deadline_s
        return None if seconds is None else self.submitted + seconds

    @property
    def is_bulk(self) -> bool:
        """Whether it is bulk work."""
        return self.handle.request.priority >= BULK_PRIORITY


R = TypeVar("R", bound=Row)
_Entry = TypeVar("_Entry", bound=tuple[float, int, Row])


class Admission(Generic[R]):
    """The slots, and the queue before them."""

    def __init__(self, *, slots: int, max_waiting: int, min_bulk: int = 0) -> None:
        self.running: list[R] = []
        self._slots = slots
        self._max_waiting = max_waiting
        self._min_bulk = min_bulk
        self._num_bulk = 0  # of those that run
        self._order = itertools.count()
        self._urgent: WaitingLine[R] = WaitingLine(lambda row: not row.done)
        self._bulk: WaitingLine[R] = WaitingLine(lambda row: not row.done)
        # A heap, which may hold ended rows until those come to the top or are most of what there is.
        self._deadlines: list[tuple[float, int, R]] = []
        self._cancels: deque[R] = deque()

    @property
    def num_waiting(self) -> int:
        """Rows that wait for a slot."""
        return len(self._urgent) + len(self._bulk)

    def add(self, row: R) -> None:
        """Queue a row.

        Raises:
            QueueFullError: as many rows as allowed wait already.
        """
        if self.num_waiting >= self._max_waiting:
            raise QueueFullError(
                f"{self.num_waiting} requests wait already", fix="Submit again later, or raise max_waiting"
            )
        number = next(self._order)
        self._line(row).push(row.handle.request.priority, number, row)
        if row.deadline is not None:
            heapq.heappush(self._deadlines, (row.deadline, number, row))

    def cancel(self, row: R) -> None:
        """Let the next ``end_early`` end this row, if it has not ended."""
        if not row.done:
            self._cancels.append(row)

    def end_early(self, now: float, stop_at: float | None = None) -> list[tuple[R, FinishReason]]:
        """Take out the rows that were cancelled or are past their deadline.

        After a shutdown ``stop_at`` is the moment at which all that is left is cut short.
        """
        ended: list[tuple[R, FinishReason]] = []
        while self._cancels:
            self._end(self._cancels.popleft(), FinishReason.CANCELLED, ended)
        while self._deadlines and (self._deadlines[0][0] <= now or self._deadlines[0][2].done):
            self._end(heapq.heappop(self._deadlines)[2], FinishReason.DEADLINE, ended)
        if stop_at is not None and now >= stop_at:
            for row in [*self._urgent, *self._bulk, *self.running]:
                self._end(row, FinishReason.CANCELLED, ended)
        self._deadlines = _without_ended(self._deadlines, len(self))
        return ended

    def admit(self, now: float) -> list[R]:
        """Fill free slots; the rows that got one."""
        admitted: list[R] = []
        while self.num_waiting and len(self.running) < self._slots:
            owed = len(self._bulk) > 0 and self._num_bulk < self._min_bulk
            row = (self._bulk if owed or not self._urgent else self._urgent).pop()
            row.started = now
            row.handle.started = True
            self._num_bulk += row.is_bulk
            self.running.append(row)
            admitted.append(row)
        return admitted

    def finish(self, row: R) -> None:
        """Give the slot of a row back that has come to its end."""
        row.done = True
        self.running.remove(row)
        self._num_bulk -= row.is_bulk

    def abandon(self) -> list[R]:
        """Take every row out."""
        lost = [*self.running, *self._urgent, *self._bulk]
        for row in lost:
            row.done = True
        self.running, self._deadlines, self._num_bulk = [], [], 0
        self._urgent.clear()
        self._bulk.clear()
        return lost

    def __len__(self) -> int:
        """Rows that have not ended."""
        return self.num_waiting + len(self.running)

    def next_deadline(self) -> float:
        """The soonest moment at which ``end_early`` has something to do; infinite when there is none."""
        return self._deadlines[0][0] if self._deadlines else float("inf")

    def _line(self, row: R) -> WaitingLine[R]:
        return self._bulk if row.is_bulk else self._urgent

    def _end(self, row: R, reason: FinishReason, ended: list[tuple[R, FinishReason]]) -> None:
        if row.done:
            return
        if row.started is None:
            row.done = True
            self._line(row).drop()
        else:
            self.finish(row)
        ended.append((row, reason))


class Lifecycle:
    """Whether a backend takes requests, and who is told when it dies."""

    def __init__(self, name: str) -> None:
        self.stop_at: float | None = None  # set by shutdown: when what is left is cut short
        self.dead: EngineDeadError | None = None
        self._name = name
        self._closed = "has not been started"
        self._callbacks: list[Callable[[EngineDeadError], None]] = []

    def open(self) -> None:
        """Take requests from now on, unless a shutdown came first."""
        if self.stop_at is None:
            self._closed = ""

    def close(self, stop_at: float) -> None:
        """Take no more requests, and cut those in hand short at ``stop_at`` or earlier, if asked before."""
        self._closed = "has been shut down"
        self.stop_at = stop_at if self.stop_at is None else min(self.stop_at, stop_at)

    def check_open(self) -> None:
        """Refuse a request when the backend cannot run it.

        Raises:
            EngineDeadError: it has died, has been shut down or was never started.
        """
        if self.dead is not None:
            raise EngineDeadError(str(self.dead)) from self.dead
        if self._closed:
            raise EngineDeadError(f"the {self._name} backend {self._closed}")

    def die(self, cause: BaseException) -> EngineDeadError:
        """Record a fault; the error to tell everyone."""
        error = EngineDeadError(f"the {self._name} backend died of {type(cause).__name__}: {cause}")
        error.__cause__ = cause
        self.dead = error
        return error

    def tell_death(self) -> None:
        """Run the death callbacks, each once; to be called without the owner's lock."""
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            try:
                callback(self.dead or EngineDeadError(f"the {self._name} backend died"))
            except Exception:
                logger.exception("a death callback of the %s backend failed", self._name)

    def on_death(self, callback: Callable[[EngineDeadError], None]) -> EngineDeadError | None:
        """Remember a callback; the error instead, when the fault has happened already."""
        if self.dead is None:
            self._callbacks.append(callback)
        return self.dead


def _without_ended(heap: list[_Entry], live: int) -> list[_Entry]:
    """The heap, rebuilt once most of it has ended, so that neither memory nor a push grows without bound."""
    if len(heap) <= 2 * live + 64:
        return heap
    kept = [entry for entry in heap if not entry[2].done]
    heapq.heapify(kept)
    return kept
