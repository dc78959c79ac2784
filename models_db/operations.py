"""What the database thread (``models_db.writer``) is asked to do: operations, and batches of them."""

from __future__ import annotations

from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from enum import Enum
from typing import Any

MAX_BREAKS = 5  # times that a large batch may break a connection that works before it is held to be the cause
LARGE_BYTES = 1_000_000


class Kind(Enum):
    """What an operation does."""

    HEARTBEAT = "heartbeat"
    FINISH = "finish"
    RELEASE = "release"
    CLAIM = "claim"
    SAMPLE = "sample"
    CALL = "call"


@dataclass(slots=True, eq=False)
class Op:
    """One operation, with the future that its caller has."""

    kind: Kind
    payload: Any
    future: Future[Any] = field(default_factory=Future)

    def __str__(self) -> str:
        item = getattr(self.payload, "job", self.payload)
        job_id = getattr(item, "id", None) or getattr(item, "job_id", None)
        return f"A {self.kind.value}" + (f" of job {job_id}" if job_id else "")

    def settle(self, value: Any) -> None:
        """Give the caller this value, or the error of a ``Failure``."""
        with suppress(InvalidStateError):
            if isinstance(value, Failure):
                self.future.set_exception(value.error)
            else:
                self.future.set_result(value)

    def suspicious(self) -> bool:
        """Whether it may break a connection."""
        return self.kind is Kind.CALL or self.size() >= LARGE_BYTES

    def size(self) -> int:
        """Roughly the bytes that it sends."""
        if self.kind is Kind.CLAIM:
            body = (self.payload.job.message or {}).get("body")
            return 1000 + (2 * len(body) if isinstance(body, str) else 0)
        result = self.payload.result if self.kind is Kind.FINISH else None
        if result is None:
            return 1000
        return 1000 + len(result.text) + 6 * len(result.token_ids or ()) + 300 * len(result.logprobs or ())


@dataclass(slots=True, frozen=True)
class Failure:
    """The value of an operation that failed."""

    error: BaseException


@dataclass(slots=True)
class Batch:
    """Operations of one transaction."""

    ops: list[Op]
    now: datetime | None = None  # of its first try; stays the same, so that a replay recognises its own rows
    replay: bool = False  # a commit may have gone through although its answer got lost
    breaks: int = 0
    losses: int = 0  # times that it met a lock or a limit
    due: float = 0.0  # when it may be tried again, on the writer's clock

    def part(self, ops: list[Op]) -> Batch:
        """Some of its operations, to be run by themselves."""
        return Batch(ops, self.now, self.replay, losses=self.losses)

    def parts(self) -> list[Batch]:
        """Smaller batches, in which what is to blame will be found: the heartbeats, which are not, come first."""
        beats = [op for op in self.ops if op.kind is Kind.HEARTBEAT]
        if self.breaks >= MAX_BREAKS:
            suspects = [op for op in self.ops if op.suspicious()]
            pieces = [beats, [op for op in self.ops if op not in suspects and op not in beats]]
            pieces += [[op] for op in suspects]
        elif beats:
            pieces = [beats, [op for op in self.ops if op not in beats]]
        else:
            half = len(self.ops) // 2
            pieces = [self.ops[:half], self.ops[half:]]
        return [self.part(piece) for piece in pieces if piece]

    def to_blame(self) -> bool:
        """Whether it may be what breaks the connection, as a row larger than the server's largest packet does.

        Connections are also cut again and again by others, and no job may end for that.
        """
        return self.breaks >= MAX_BREAKS and any(op.suspicious() for op in self.ops)
