"""Watching a batch: its progress, jobs that are to be published again, and its end."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

from sqlalchemy import Engine

from models_db import batches, jobs
from models_db.batch_expiry import expire_batch
from models_db.batches import BatchProgress
from models_db.errors import UnknownBatchError
from models_db.session import reading, transaction
from models_db.tables import BatchState
from workers.broker import Broker, BrokerUnavailableError

log = logging.getLogger(__name__)
POLL_S = 0.2
_CHUNK = 500  # jobs a round trip
_POLL_SHARE = 20  # counting everything may take one part in this many of the time
_REPUBLISH_S = 5.0


class BatchWatch:
    """Looks at a batch again and again.

    Args:
        report: called with the batch's progress after each look at all of it.
        sleep: between two looks; may raise ``KeyboardInterrupt``.
    """

    def __init__(
        self,
        engine: Engine,
        broker: Broker,
        *,
        report: Callable[[BatchProgress], None],
        clock: Callable[[], float],
        sleep: Callable[[float], None],
    ) -> None:
        self._engine = engine
        self._broker = broker
        self._report = report
        self._clock = clock
        self._sleep = sleep
        self._next_republish = clock() + _REPUBLISH_S
        self._next_report = clock()

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

    def watch(self, batch_id: str) -> BatchProgress:
        """Wait until every job has ended."""
        while True:
            state, unended = self.look(batch_id, 1)
            if state.terminal or not unended:
                began = self._clock()
                ended = transaction(self._engine, lambda conn: batches.finish_batch_if_done(conn, batch_id))
                if ended is not None:
                    return self.progress(batch_id)
                self._sleep(_POLL_SHARE * (self._clock() - began))

    def look(self, batch_id: str, most: int, pause_s: float = POLL_S) -> tuple[BatchState, int]:
        """Wait a little, mend what there is to mend; then ``batches.open_jobs``.

        Without a pause, nothing is mended: while all lines go in at once, looking among them costs more and more.
        All counts are reported, too, but the dearer that was, the less often: they grow with the batch.
        """
        self._sleep(pause_s)
        if pause_s and self._clock() >= self._next_republish:
            self.republish(batch_id)
            expire_batch(self._engine, batch_id)
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
