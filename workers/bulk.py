"""A file of prompts through the fleet: validate, feed with a bounded number in flight, watch.

The batch and its jobs live in SQL, so that whoever started it may go away: ``resume`` feeds the rest.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import IO, Any

from sqlalchemy import Connection, select

from backend.api import ConfigurationError, RequestError
from models_db import batches, jobs
from models_db.batches import BatchProgress
from models_db.errors import UnknownBatchError
from models_db.session import reading, transaction
from models_db.tables import BatchState, Job, JobState
from workers.broker import Broker, BrokerUnavailableError
from workers.bulk_input import (
    BulkInputError,
    BulkLine,
    LineError,
    LineOptions,
    Validated,
    read_lines,
    validate,
)
from workers.client import Client, Submission

log = logging.getLogger(__name__)
DEFAULT_IN_FLIGHT = 1000
_CHUNK = 200  # jobs a transaction and a round trip
_POLL_S = 0.2
_POLL_SHARE = 20  # a look at the counts may take one part in this many of the time
_REPUBLISH_S = 5.0
_STDIN = "-"


@dataclass(frozen=True, slots=True)
class BulkSource:
    """The input of a batch and how it is read, as ``batch.source`` keeps it."""

    path: str
    sha256: str
    lines: int
    defaults: Mapping[str, Any] = field(default_factory=dict)
    chat: bool = True
    strict: bool = False
    limit: int | None = None

    def to_json(self) -> str:
        """For ``batch.source``."""
        return json.dumps(
            {name: getattr(self, name) for name in self.__dataclass_fields__}, ensure_ascii=False
        )

    @classmethod
    def from_json(cls, text: str | None) -> BulkSource:
        """Read it back.

        Raises:
            ConfigurationError: the batch was not made by ``bulk run``.
        """
        try:
            return cls(**json.loads(text or ""))
        except (ValueError, TypeError):
            raise ConfigurationError("this batch does not say which file it came from") from None

    def options(self) -> LineOptions:
        """How its lines are read."""
        return LineOptions(defaults=self.defaults, chat=self.chat, strict=self.strict, limit=self.limit)

    @contextmanager
    def reopen(self) -> Iterator[IO[bytes]]:
        """The unchanged input file.

        Raises:
            ConfigurationError: it is gone or is not what it was.
        """
        if self.path == _STDIN:
            raise ConfigurationError("the batch was read from standard input, which is gone")
        try:
            with open(self.path, "rb") as file:
                if digest(file) != self.sha256:
                    raise ConfigurationError(f"{self.path} has changed since the batch was made")
                yield file
        except OSError as error:
            raise ConfigurationError(f"{self.path} cannot be read ({error.strerror})") from error


@contextmanager
def open_input(path: str) -> Iterator[IO[bytes]]:
    """The input, seekable; ``-`` is standard input, kept in a temporary file.

    Raises:
        RequestError: it cannot be read.
    """
    if path == _STDIN:
        with tempfile.TemporaryFile() as kept:
            shutil.copyfileobj(sys.stdin.buffer, kept)
            kept.seek(0)
            yield kept
        return
    try:
        with open(path, "rb") as file:
            yield file
    except OSError as error:
        raise RequestError(
            f"{path} cannot be read ({error.strerror})", field="INPUT", fix="Correct the path"
        ) from error


def digest(file: IO[bytes]) -> str:
    """SHA-256 of the whole file, which is then at its beginning again."""
    file.seek(0)
    value = hashlib.sha256()
    while block := file.read(1 << 20):
        value.update(block)
    file.seek(0)
    return value.hexdigest()


def validate_source(path: str, file: IO[bytes], options: LineOptions) -> tuple[BulkSource, Validated]:
    """Check every line before anything starts.

    Raises:
        BulkInputError: names each bad line (the first few of many).
        RequestError: the file holds no line.
    """
    sha256 = digest(file)
    found = validate(file, options)
    if found.num_errors:
        raise BulkInputError(path, found.errors, found.num_errors)
    if not found.lines:
        raise RequestError(f"{path} holds no line", field="INPUT", fix="Give one JSON object a line")
    source = BulkSource(
        path=path if path == _STDIN else str(Path(path).absolute()),
        sha256=sha256,
        lines=found.lines,
        defaults=dict(options.defaults),
        chat=options.chat,
        strict=options.strict,
        limit=options.limit,
    )
    return source, found


class BulkRunner:
    """Takes one batch from its file to its last terminal job.

    Args:
        client: with a database.
        in_flight: jobs of the batch that wait or run at once, at most; the rest stays in the file.
        report: called with the batch's progress after each look at it.
        sleep: between two looks; may raise ``KeyboardInterrupt`` (see ``workers.interrupt``).
    """

    def __init__(
        self,
        client: Client,
        *,
        in_flight: int = DEFAULT_IN_FLIGHT,
        report: Callable[[BatchProgress], None] = lambda progress: None,
        broker: Broker | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        if in_flight < 1:
            raise ConfigurationError(f"--in-flight must be at least 1 (got {in_flight})")
        self._client = client
        self._engine = client.engine()
        self._in_flight = in_flight
        self._report = report
        self._broker = broker or Broker(client.settings.broker_url)
        self._clock = clock
        self._sleep = sleep
        self._next_republish = clock() + _REPUBLISH_S
        self._look_cost_s = 0.0

    def create(self, name: str, source: BulkSource) -> str:
        """Make the batch's row; returns its id."""
        return transaction(
            self._engine,
            lambda conn: batches.create_batch(conn, name=name, source=source.to_json(), total=source.lines),
        )

    def run(self, batch_id: str, source: BulkSource, file: IO[bytes]) -> BatchProgress:
        """Feed what has not been fed yet and watch until every job has ended.

        Raises:
            KeyboardInterrupt: as it came; the batch stays as it is and can be resumed or cancelled.
            ConfigurationError: the file has changed while it was read.
        """
        progress = self.progress(batch_id)
        if progress.state is BatchState.VALIDATING:
            self._feed(batch_id, source, file, progress)
        return self._watch(batch_id)

    def progress(self, batch_id: str) -> BatchProgress:
        """The batch as it is now.

        Raises:
            UnknownBatchError: there is none with this id.
        """
        with reading(self._engine) as conn:
            progress = batches.batch_progress(conn, batch_id)
        if progress is None:
            raise UnknownBatchError(batch_id)
        self._report(progress)
        return progress

    def _feed(self, batch_id: str, source: BulkSource, file: IO[bytes], progress: BatchProgress) -> None:
        fed = progress.inserted  # lines go in one after the other, so this many are in
        lines = islice(_good_lines(source, file), fed, None)
        while progress.state is BatchState.VALIDATING:
            while (room := self._in_flight - (fed - progress.done)) > 0:
                chunk = list(islice(lines, min(room, _CHUNK)))
                if not chunk:
                    self._begin_progress(batch_id)
                    return
                self._client.submit_payloads([_submission(batch_id, line) for line in chunk])
                fed += len(chunk)
                self._sleep(0.0)  # a moment at which a signal may end it
            progress = self._look(batch_id)
        # Someone else has cancelled it, perhaps before our last jobs went in.
        transaction(self._engine, lambda conn: batches.request_cancel_batch(conn, batch_id))

    def _begin_progress(self, batch_id: str) -> None:
        def move(conn: Connection) -> None:
            progress = batches.batch_progress(conn, batch_id)
            if progress is not None and progress.state is BatchState.VALIDATING:
                batches.set_batch_state(conn, batch_id, BatchState.IN_PROGRESS)

        transaction(self._engine, move)

    def _watch(self, batch_id: str) -> BatchProgress:
        while True:
            progress = self._look(batch_id)
            if progress.state.terminal or progress.done >= progress.inserted:
                ended = transaction(self._engine, lambda conn: batches.finish_batch_if_done(conn, batch_id))
                if ended is not None:
                    return self.progress(batch_id)

    def _look(self, batch_id: str) -> BatchProgress:
        """Wait a little and read the counts; the dearer that was, the longer the wait."""
        self._sleep(max(_POLL_S, self._look_cost_s * _POLL_SHARE))
        self._republish(batch_id)
        began = self._clock()
        progress = self.progress(batch_id)
        self._look_cost_s = self._clock() - began
        return progress

    def _republish(self, batch_id: str) -> None:
        """Publish jobs whose first publication failed because Redis was away."""
        now = self._clock()
        if now < self._next_republish:
            return
        self._next_republish = now + _REPUBLISH_S
        with reading(self._engine) as conn:
            ids = unpublished(conn, batch_id, _CHUNK)
            messages = jobs.stored_messages(conn, ids)
        ready = {job_id: held.message for job_id, held in messages.items() if held.message is not None}
        if not ready:
            return
        try:
            self._broker.publish(list(ready.values()))
        except BrokerUnavailableError as error:
            log.warning("%d job(s) of the batch still wait to be published: %s", len(ready), error)
            return
        transaction(self._engine, lambda conn: jobs.mark_published(conn, list(ready)))
        if len(ids) == _CHUNK:
            self._next_republish = now  # there may be more


def unpublished(conn: Connection, batch_id: str, limit: int) -> list[str]:
    """Queued jobs of a batch that have never reached Redis, in input order."""
    statement = (
        select(Job.id)
        .where(Job.batch_id == batch_id, Job.state == JobState.QUEUED, Job.published_at.is_(None))
        .order_by(Job.position)
        .limit(limit)
    )
    return list(conn.scalars(statement))


def _good_lines(source: BulkSource, file: IO[bytes]) -> Iterator[BulkLine]:
    file.seek(0)
    for item in read_lines(file, source.options()):
        if isinstance(item, LineError):
            raise ConfigurationError(f"{source.path} has changed: line {item.line} {item.message}")
        yield item


def _submission(batch_id: str, line: BulkLine) -> Submission:
    return Submission(line.payload, batch_id=batch_id, position=line.line)
