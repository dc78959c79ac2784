"""A file of prompts through the fleet: feed with a bounded number in flight, watch.

The batch and its jobs live in SQL, so that whoever started it may go away: ``resume`` feeds the rest.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta
from functools import partial
from typing import IO

from sqlalchemy import Connection

from backend.api import ConfigurationError
from models_db import batches, jobs
from models_db.batch_cancel import cancel_batch
from models_db.batches import BatchProgress
from models_db.callbacks import NewCallback, insert_batch_callback
from models_db.errors import BatchClosedError, CommitUnknownError, TenantLimitError
from models_db.ids import uuid7
from models_db.session import certain, reading, transaction
from models_db.tables import BatchState
from workers.broker import Broker
from workers.bulk_input import BulkLine, LineError, size_of
from workers.bulk_source import BulkSource
from workers.bulk_store import LineStore, Storing
from workers.bulk_watch import POLL_S, BatchWatch
from workers.chunks import take_chunk
from workers.client import Client
from workers.client.errors import CreationUnknownError

DEFAULT_IN_FLIGHT = 1000
_CHUNK = 500  # jobs a transaction and a round trip
_PAGE = 10_000  # positions read at once
_LONGEST_WAIT_S = 2.0  # between two questions whether a tenant has room


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
        now: Callable[[], datetime] | None = None,
        sleep: Callable[[float], None] = time.sleep,
        waiting: Callable[[TenantLimitError], None] | None = None,
    ) -> None:
        if in_flight < 1:
            raise ConfigurationError(f"--in-flight must be at least 1 (got {in_flight})")
        self._client = client
        self._engine = client.engine()
        self._in_flight = in_flight
        self._now = now or client.now
        self._sleep = sleep
        self._waiting = waiting
        self._told_waiting = False
        self._watch = BatchWatch(
            self._engine,
            broker or Broker(client.settings.broker_url),
            report=report,
            clock=clock,
            sleep=sleep,
        )

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

        Raises:
            CreationUnknownError: the database went away and did not come back, so that the batch is there or not.
        """
        batch_id = uuid7()
        deadline_at = None if deadline_s is None else self._now() + timedelta(seconds=deadline_s)

        def make(conn: Connection, replay: bool) -> str:
            if replay and batches.batch_progress(conn, batch_id) is not None:
                return batch_id
            batches.create_batch(
                conn,
                name=name,
                source=source.to_json(),
                total=source.lines,
                deadline_at=deadline_at,
                batch_id=batch_id,
            )
            if callback is not None:
                insert_batch_callback(conn, batch_id, callback)
            return batch_id

        try:
            return certain(self._engine, make, sleep=self._sleep)
        except CommitUnknownError as error:
            look = (
                f"Ask for tokenmill bulk status {batch_id}; where it is there, resume it instead of a new run"
            )
            raise CreationUnknownError("batch", batch_id, look, error) from error

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
        return self._watch.progress(batch_id)

    def watch(self, batch_id: str) -> BatchProgress:
        """Wait until every job has ended. A cancel that was cut off half-way is taken up."""
        with reading(self._engine) as conn:
            state, _ = batches.open_jobs(conn, batch_id, 1)
        if state is BatchState.CANCELLING:
            cancel_batch(self._engine, batch_id, pause=self._sleep)
        return self._watch.watch(batch_id)

    def republish(self, batch_id: str) -> None:
        """Publish jobs of the batch that are not in Redis: it was away at first, or they are to run again."""
        self._watch.republish(batch_id)

    def _feed(
        self, batch_id: str, source: BulkSource, file: IO[bytes], progress: BatchProgress, bounded: bool
    ) -> None:
        fed, state, unended = progress.inserted, progress.state, progress.inserted - progress.done
        settings = self._client.settings
        rows = source.rows(file, lambda payload: payload.check_limits(settings))
        lines = self._missing(batch_id, rows)
        store = LineStore(
            self._client,
            batch_id,
            now=self._now,
            deadline_at=progress.deadline_at,
            reuse_days=source.reuse_days,
        )
        # While a chunk is stored and published, the next one is read and made ready; never more than that.
        with ThreadPoolExecutor(1, "tokenmill-feed") as beside:
            storing: Storing | None = None
            while state is BatchState.VALIDATING:
                while (room := self._in_flight - unended if bounded else _CHUNK) > 0:
                    chunk = take_chunk(lines, min(room, _CHUNK), size_of)
                    steps = store.steps(chunk)
                    if storing is not None and not self._stored(storing, batch_id):
                        break
                    if not chunk:
                        begin = partial(
                            batches.set_batch_state, batch_id=batch_id, state=BatchState.IN_PROGRESS
                        )
                        transaction(self._engine, begin)
                        return
                    storing = Storing(beside, steps)
                    fed, unended = fed + len(chunk), unended + len(chunk)
                    self._sleep(0.0)  # a moment at which a signal may end it
                    if not bounded and fed % (_CHUNK * 50) < _CHUNK:
                        break  # someone may have cancelled it
                if storing is not None and not self._stored(storing, batch_id):
                    break
                most, pause_s = (self._in_flight, POLL_S) if bounded else (1, 0.0)
                state, unended = self._watch.look(batch_id, most, pause_s)

    def _stored(self, storing: Storing, batch_id: str) -> bool:
        """Wait until a chunk is in, also for its tenant to have less open; false when the batch has been cancelled."""
        pause_s, left = POLL_S, storing.lines
        while True:
            try:
                storing.result()
            except TenantLimitError as error:
                if self._waiting is None:
                    raise
                if not self._told_waiting:
                    self._told_waiting = True
                    self._waiting(error)
                pause_s = POLL_S if storing.lines < left else min(2 * pause_s, _LONGEST_WAIT_S)
                left = storing.lines
                if self._watch.look(batch_id, 1, pause_s)[0] is not BatchState.VALIDATING:
                    return False
                storing.again()
            except BatchClosedError:
                return False  # whoever has cancelled it cancels what is in
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
