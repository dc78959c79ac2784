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
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import IO, Any, Literal

from sqlalchemy import Connection

from backend.api import ConfigurationError, RequestError, check_text
from models_db import batches, jobs
from models_db.batches import BatchProgress, EndedLine
from models_db.callbacks import NewCallback, insert_batch_callback
from models_db.errors import TenantLimitError, UnknownBatchError
from models_db.session import reading, transaction
from models_db.tables import BatchState, JobState
from workers.broker import Broker, BrokerUnavailableError
from workers.bulk_formats import Shape, check_shape, read_carried_rows, read_rows
from workers.bulk_input import (
    BulkInputError,
    BulkLine,
    CarriedLine,
    LineError,
    LineOptions,
    Validated,
    distinct,
    size_of,
    validate,
)
from workers.bulk_reuse import Reuser
from workers.callbacks.wanted import wanted_callback
from workers.chunks import take_chunk
from workers.client import Client, Submission
from workers.payload import GeneratePayload, queue_for

log = logging.getLogger(__name__)
DEFAULT_IN_FLIGHT = 1000
_CHUNK = 500  # jobs a transaction and a round trip
_PAGE = 10_000  # positions read at once
_POLL_S = 0.2
_LONGEST_WAIT_S = 2.0  # between two questions whether a tenant has room
_POLL_SHARE = 20  # counting everything may take one part in this many of the time
_REPUBLISH_S = 5.0
_LONGEST_ID = 255  # characters of a custom id
_STDIN = "-"

Order = Literal["input", "completion"]


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
    shape: Mapping[str, Any] = field(default_factory=dict)
    order: str = "input"
    reuse_days: float | None = None

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

    def made_of(self) -> Shape:
        """What its lines are."""
        return Shape(**self.shape)

    def rows(
        self, file: IO[bytes], check: Callable[[GeneratePayload], None] | None = None
    ) -> Iterator[BulkLine | LineError]:
        """Every line from the beginning, checked, also by ``check``, which raises RequestError."""
        file.seek(0)
        return distinct(read_rows(file, self.made_of(), replace(self.options(), check=check)))

    def carried(self, file: IO[bytes]) -> Iterator[CarriedLine]:
        """What the lines' own keys are, from the beginning."""
        file.seek(0)
        return read_carried_rows(file, self.made_of(), self.options())

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


def validate_source(
    path: str,
    file: IO[bytes],
    options: LineOptions,
    shape: Shape | None = None,
    *,
    refuse_bad: bool = False,
    order: Order = "input",
    reuse_days: float | None = None,
) -> tuple[BulkSource, Validated]:
    """Check every line before anything starts. Bad ones become lines of the errors file.

    Args:
        refuse_bad: nothing is started when a line is bad.

    Raises:
        BulkInputError: names bad lines (the first few of many): all are bad, or ``refuse_bad``.
        RequestError: the file holds no line, or does not fit the options.
    """
    shape = shape or Shape()
    check_shape(shape, file)
    sha256 = digest(file)
    found = validate(distinct(read_rows(file, shape, options)))
    if found.num_errors and (refuse_bad or found.num_errors == found.lines):
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
        shape=shape.to_dict(),
        order=order,
        reuse_days=reuse_days,
    )
    return source, found


class BulkRunner:
    """Takes one batch from its file to its last terminal job.

    Args:
        client: with a database.
        in_flight: jobs of the batch that wait or run at once, at most; the rest stays in the file.
        report: called with the batch's progress after each look at it.
        sleep: between two looks; may raise ``KeyboardInterrupt`` (see ``workers.interrupt``).
        waiting: told why when feeding first waits until a tenant has less open. Without it, feeding ends with the
            ``TenantLimitError`` and can be begun again.
    """

    def __init__(
        self,
        client: Client,
        *,
        in_flight: int = DEFAULT_IN_FLIGHT,
        report: Callable[[BatchProgress], None] = lambda progress: None,
        broker: Broker | None = None,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
        sleep: Callable[[float], None] = time.sleep,
        waiting: Callable[[TenantLimitError], None] | None = None,
    ) -> None:
        if in_flight < 1:
            raise ConfigurationError(f"--in-flight must be at least 1 (got {in_flight})")
        self._client = client
        self._engine = client.engine()
        self._in_flight = in_flight
        self._reuser = Reuser(client, now)
        self._report = report
        self._broker = broker or Broker(client.settings.broker_url)
        self._clock = clock
        self._now = now
        self._sleep = sleep
        self._waiting = waiting
        self._told_waiting = False
        self._next_republish = clock() + _REPUBLISH_S
        self._next_report = clock()

    def create(
        self,
        name: str,
        source: BulkSource,
        *,
        deadline_s: float | None = None,
        callback: NewCallback | None = None,
    ) -> str:
        """Make the batch's row; returns its id.

        Args:
            deadline_s: what has not ended after so many seconds expires.
            callback: told when the whole batch has ended.
        """
        deadline_at = None if deadline_s is None else self._now() + timedelta(seconds=deadline_s)

        def make(conn: Connection) -> str:
            batch_id = batches.create_batch(
                conn, name=name, source=source.to_json(), total=source.lines, deadline_at=deadline_at
            )
            if callback is not None:
                insert_batch_callback(conn, batch_id, callback)
            return batch_id

        return transaction(self._engine, make)

    def run(self, batch_id: str, source: BulkSource, file: IO[bytes]) -> BatchProgress:
        """Feed what has not been fed yet and watch until every job has ended.

        Raises:
            KeyboardInterrupt: as it came; the batch stays as it is and can be resumed or cancelled.
            ConfigurationError: the file has changed while it was read.
        """
        self.feed(batch_id, source, file)
        return self.watch(batch_id)

    def feed(
        self,
        batch_id: str,
        source: BulkSource,
        file: IO[bytes],
        *,
        bounded: bool = True,
        doubtful: bool = True,
    ) -> None:
        """Make jobs of the lines that have not been fed yet.

        Args:
            bounded: no more than ``in_flight`` at once, so that it takes as long as the work; else all of them.
            doubtful: the lines that are in may not all be published: whoever fed them may have been killed.

        Raises:
            TenantLimitError: a tenant has too much open, and nobody wants to be told and wait (``waiting``).
        """
        progress = self.progress(batch_id)
        if progress.state is BatchState.VALIDATING:
            if doubtful and progress.inserted:
                self._publish_doubtful(batch_id)
            self._feed(batch_id, source, file, progress, bounded)
            if not bounded:
                self.republish(batch_id)

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

    def _feed(
        self, batch_id: str, source: BulkSource, file: IO[bytes], progress: BatchProgress, bounded: bool
    ) -> None:
        fed, state, unended = progress.inserted, progress.state, progress.inserted - progress.done
        settings = self._client.settings
        rows = source.rows(file, lambda payload: payload.check_limits(settings))
        lines = self._missing(batch_id, rows)
        # While a chunk is stored and published, the next one is read and made ready; never more than that.
        with ThreadPoolExecutor(1, "tokenmill-feed") as beside:
            storing: _Storing | None = None
            while state is BatchState.VALIDATING:
                while (room := self._in_flight - unended if bounded else _CHUNK) > 0:
                    chunk = take_chunk(lines, min(room, _CHUNK), size_of)
                    steps = self._steps(batch_id, progress.deadline_at, chunk, source.reuse_days)
                    if storing is not None and not self._stored(storing, batch_id):
                        break
                    if not chunk:
                        self._begin_progress(batch_id)
                        return
                    storing = _Storing(beside, steps)
                    fed, unended = fed + len(chunk), unended + len(chunk)
                    self._sleep(0.0)  # a moment at which a signal may end it
                    if not bounded and fed % (_CHUNK * 50) < _CHUNK:
                        break  # someone may have cancelled it
                if storing is not None and not self._stored(storing, batch_id):
                    break
                most, pause_s = (self._in_flight, _POLL_S) if bounded else (1, 0.0)
                state, unended = self._look(batch_id, most, pause_s)
        # Someone else has cancelled it, perhaps before our last jobs went in.
        transaction(self._engine, lambda conn: batches.request_cancel_batch(conn, batch_id))

    def _stored(self, storing: _Storing, batch_id: str) -> bool:
        """Wait until a chunk is in, also for its tenant to have less open; false when the batch has been cancelled."""
        pause_s, left = _POLL_S, storing.lines
        while True:
            try:
                storing.result()
            except TenantLimitError as error:
                if self._waiting is None:
                    raise
                if not self._told_waiting:
                    self._told_waiting = True
                    self._waiting(error)
                pause_s = _POLL_S if storing.lines < left else min(2 * pause_s, _LONGEST_WAIT_S)
                left = storing.lines
                if self._look(batch_id, 1, pause_s)[0] is not BatchState.VALIDATING:
                    return False
                storing.again()
            else:
                return True

    def _missing(self, batch_id: str, rows: Iterator[BulkLine | LineError]) -> Iterator[BulkLine | LineError]:
        """The lines that are not in yet: both are in ascending order, so one look beside the other will do."""
        present = self._positions(batch_id)
        current = next(present, None)
        passed = 0
        for row in rows:
            while current is not None and current < row.line:
                current = next(present, None)
            if current != row.line:
                yield row
                continue
            passed += 1
            if passed % _CHUNK == 0:
                self._sleep(0.0)  # as between two chunks: passing over a million lines takes minutes

    def _positions(self, batch_id: str) -> Iterator[int]:
        last = 0
        while True:
            with reading(self._engine) as conn:
                page = batches.positions_after(conn, batch_id, last, _PAGE)
            yield from page
            if len(page) < _PAGE:
                return
            last = page[-1]

    def _publish_doubtful(self, batch_id: str) -> None:
        """Publish the last chunk again: who fed it may have been killed between storing and publishing it."""

        def doubt(conn: Connection) -> None:
            jobs.mark_unpublished(conn, batches.last_queued(conn, batch_id, _CHUNK))

        transaction(self._engine, doubt)
        self.republish(batch_id)

    def _steps(
        self,
        batch_id: str,
        deadline_at: datetime | None,
        chunk: Sequence[BulkLine | LineError],
        reuse_days: float | None,
    ) -> list[Callable[[], object]]:
        """What is to be done with the lines: bad ones have ended, the others are jobs or come too late."""
        steps: list[Callable[[], object]] = []
        for kind, group in groupby(chunk, type):
            if kind is LineError:
                bad = [_bad_line(row) for row in group if isinstance(row, LineError)]
                steps.append(partial(self._insert_ended, batch_id, bad))
            else:
                good = [row for row in group if isinstance(row, BulkLine)]
                accept = partial(self._accept, batch_id, deadline_at, reuse_days)
                steps.append(_Accepting(good, accept))
        return steps

    def _accept(
        self, batch_id: str, deadline_at: datetime | None, reuse_days: float | None, lines: Sequence[BulkLine]
    ) -> None:
        """Make jobs of the lines, as of now: they may have waited long for their tenant.

        Raises:
            TenantLimitError: none of them is in.
        """
        left = None if deadline_at is None else (deadline_at - self._now()).total_seconds()
        if left is not None and left <= 0:
            self._insert_ended(batch_id, [self._late_line(line) for line in lines])
            return
        submissions = [_submission(batch_id, line, left) for line in lines]
        if reuse_days is None:
            self._client.submit_payloads(submissions)
        else:
            self._reuser.submit(submissions, reuse_days)

    def _late_line(self, line: BulkLine) -> EndedLine:
        message = "the batch's deadline passed before the line was submitted"
        return EndedLine(
            line.line,
            line.custom_id,
            JobState.EXPIRED,
            "expired",
            message,
            callback=wanted_callback(line.payload, self._client.settings),
            tenant=line.payload.tenant,
        )

    def _insert_ended(self, batch_id: str, lines: Sequence[EndedLine]) -> None:
        model = self._client.settings.model
        transaction(
            self._engine,
            lambda conn: batches.insert_ended_lines(
                conn, batch_id, lines, model=model, queue=queue_for(model)
            ),
        )

    def _begin_progress(self, batch_id: str) -> None:
        def move(conn: Connection) -> None:
            progress = batches.batch_progress(conn, batch_id)
            if progress is not None and progress.state is BatchState.VALIDATING:
                batches.set_batch_state(conn, batch_id, BatchState.IN_PROGRESS)

        transaction(self._engine, move)

    def watch(self, batch_id: str) -> BatchProgress:
        """Wait until every job has ended."""
        while True:
            state, unended = self._look(batch_id, 1)
            if state.terminal or not unended:
                began = self._clock()
                ended = transaction(self._engine, lambda conn: batches.finish_batch_if_done(conn, batch_id))
                if ended is not None:
                    return self.progress(batch_id)
                self._sleep(_POLL_SHARE * (self._clock() - began))

    def _look(self, batch_id: str, most: int, pause_s: float = _POLL_S) -> tuple[BatchState, int]:
        """Wait a little, mend what there is to mend; then ``batches.open_jobs``.

        Without a pause, nothing is mended: while all lines go in at once, looking among them costs more and more.
        All counts are reported, too, but the dearer that was, the less often: they grow with the batch.
        """
        self._sleep(pause_s)
        if pause_s and self._clock() >= self._next_republish:
            self.republish(batch_id)
        if (began := self._clock()) >= self._next_report:
            self.progress(batch_id)
            ended = self._clock()
            self._next_report = ended + _POLL_SHARE * (ended - began)
        with reading(self._engine) as conn:
            return batches.open_jobs(conn, batch_id, most)

    def republish(self, batch_id: str) -> None:
        """Publish jobs of the batch that are not in Redis: it was away at first, or they are to run again."""
        self._next_republish = self._clock() + _REPUBLISH_S
        while True:
            with reading(self._engine) as conn:
                ids = batches.unpublished(conn, batch_id, _CHUNK)
                messages = jobs.stored_messages(conn, ids)
            ready = {job_id: held.message for job_id, held in messages.items() if held.message is not None}
            if not ready:
                return
            try:
                self._broker.publish(list(ready.values()))
            except BrokerUnavailableError as error:
                log.warning("%d job(s) of the batch still wait to be published: %s", len(ready), error)
                return
            transaction(self._engine, partial(jobs.mark_published, ids=list(ready)))
            if len(ids) < _CHUNK:
                return


class _Storing:
    """The steps of one chunk, taken in a thread beside; after an error, ``again`` goes on at the step that failed."""

    def __init__(self, beside: ThreadPoolExecutor, steps: Iterable[Callable[[], object]]) -> None:
        self._beside = beside
        self._left = deque(steps)
        self.again()

    @property
    def lines(self) -> int:
        """Good lines that are not in yet; exact while no step is being taken."""
        return sum(len(step.left) for step in self._left if isinstance(step, _Accepting))

    def again(self) -> None:
        self._future = self._beside.submit(self._take)

    def result(self) -> None:
        """Wait for the last step; raises what one of them raised."""
        self._future.result()

    def _take(self) -> None:
        while self._left:
            self._left[0]()
            self._left.popleft()


class _Accepting:
    """Accepts lines and takes them off ``left``, in pieces where a tenant has room for some only.

    A call raises ``TenantLimitError`` when there is no room for the next one; another call goes on from there.
    """

    def __init__(self, lines: list[BulkLine], accept: Callable[[Sequence[BulkLine]], object]) -> None:
        self.left = lines
        self._accept = accept

    def __call__(self) -> None:
        size = len(self.left)
        while self.left:
            size = min(size, len(self.left))
            try:
                self._accept(self.left[:size])
            except TenantLimitError as error:
                room = error.limit - error.present
                if size == 1 or room <= 0:
                    raise
                # So many jobs fit, whoever's they are; of tokens, lines may want very different numbers.
                fits = room if error.what == "jobs" else min(size // 2, size * room // error.wanted)
                size = max(1, min(size - 1, fits))
            else:
                del self.left[:size]


def _submission(batch_id: str, line: BulkLine, left_s: float | None) -> Submission:
    payload = line.payload
    if left_s is not None:
        limits = [limit for limit in (payload.deadline_s, left_s) if limit is not None]
        payload = payload.model_copy(update={"deadline_s": min(limits)})
    return Submission(payload, batch_id=batch_id, position=line.line)


def _bad_line(error: LineError) -> EndedLine:
    return EndedLine(error.line, _storable(error.custom_id), JobState.FAILED, error.code, error.message)


def _storable(text: str | None) -> str | None:
    """The text, where a database takes it as it is."""
    if not text or len(text) > _LONGEST_ID:
        return None
    try:
        return check_text(text, "custom_id")
    except RequestError:
        return None
