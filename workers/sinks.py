"""Where the runs of a worker go: what they need of the database's thread, and of the writer of token streams."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol, TypeVar

from sqlalchemy import Connection

from backend.api import GenerationHandle
from models_db.claims import ClaimItem, ClaimOutcome, FinishItem, ReleaseItem
from workers.streams import StreamEnd

T = TypeVar("T")


class Store(Protocol):
    """The part of ``models_db.writer.DatabaseThread`` that deliveries need."""

    def claim(self, item: ClaimItem) -> Future[ClaimOutcome]: ...

    def finish(self, item: FinishItem) -> Future[bool]: ...

    def release(self, item: ReleaseItem) -> Future[bool]: ...

    def call(self, work: Callable[[Connection], T]) -> Future[T]: ...


class StreamSink(Protocol):
    """The part of ``workers.stream_writer.StreamWriter`` that runs need."""

    def begin(self, job_id: str, attempt: int, handle: GenerationHandle) -> None: ...

    def end(self, job_id: str, attempt: int, end: StreamEnd) -> None: ...

    def forget(self, job_id: str, attempt: int) -> None: ...
