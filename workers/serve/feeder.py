"""Turns batches of the API into jobs, and their ends into files; a thread of the server.

Any number of servers may run. Each batch is fed by one of them, which moves a counter in the batch's row; another
takes the batch over when the counter has not moved for some seconds on its own clock. Whatever is killed, nothing is
fed twice: lines that are in are passed over, and a line's id is unique in its batch.

What may take long, feeding a batch and writing its files, is done by a few threads, of which large batches leave one to
the small ones; tenants take turns. So nobody's small batch waits for the end of somebody's large one.

A batch whose tenant has as much open as it may goes on in a thread of its own, with its file open, as its jobs end; the
others do not wait for it. A large batch that is being cancelled has a thread of its own, too; where the server that was
at it has been killed, whoever feeds the batch goes on.
"""

from __future__ import annotations

import io
import logging
import tempfile
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from operator import itemgetter
from typing import IO, Any, TypeVar

from sqlalchemy import Connection

from backend.api import TokenmillError
from models_db import api_batches, batches, files
from models_db.api_batches import ApiBatchRecord
from models_db.batch_cancel import cancel_batch, to_cancel
from models_db.batch_expiry import expire_batch
from models_db.batch_rows import BatchRow
from models_db.errors import DatabaseError, DatabaseUnavailableError, DuplicateCustomIdError, TenantLimitError
from models_db.session import reading, transaction
from models_db.tables import BatchState
from workers.bulk import BulkRunner
from workers.bulk_export import write_rows
from workers.bulk_formats import Shape
from workers.bulk_input import BulkInputError, LineError, validate
from workers.bulk_source import BulkSource
from workers.client import Client
from workers.openai_lines import openai_lines

log = logging.getLogger(__name__)
T = TypeVar("T")

_LOOK_S = 1.0
_DEAD_AFTER_S = 15.0
# Batches of tenants with too much open that are fed at once, each in a thread and with a file.
_MOST_LIMITED = 8
# Batches that are fed or written at once: threads that compute take time from the server's answers.
_MOST_AT_WORK = 3
_MOST_LARGE = 2  # of them
_LARGE_BYTES = 4 * 2**20  # of input; about a second's work
_SPOOLED_BYTES = 32 * 2**20  # of a file that is read or written, in memory; the rest is on disk


class _LostError(Exception):
    """Another server has taken the batch over."""


class _StoppedError(Exception):
    """This server ends."""


class _Work(threading.Thread):
    """One batch's feeding or writing, beside the others'."""

    def __init__(self, name: str, do: Callable[[], None], then: Callable[[], None], *, large: bool) -> None:
        super().__init__(name=name, daemon=True)
        self.large = large
        self.over = False
        self._do, self._then = do, then
        self._error: Exception | None = None

    def run(self) -> None:
        """See the class."""
        try:
            self._do()
        except Exception as error:
            self._error = error
        self.over = True
        self._then()

    def result(self) -> None:
        """Raise what it met."""
        if self._error is not None:
            raise self._error


class BatchFeeder:
    """See the module.

    Args:
        client: with a database; used by this and its helpers alone.
    """

    def __init__(self, client: Client, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._client = client
        self._clock = clock
        self._id = str(uuid.uuid4())
        self._seen: dict[str, tuple[int, float]] = {}  # other servers' counters, and since when they stand
        self._next_beats: dict[str, float] = {}  # by batch; each is beaten for by one thread at a time
        self._limited: dict[str, threading.Thread | None] = {}  # batches whose tenant has too much open
        self._at_work: dict[str, _Work] = {}  # of the feeder's own thread alone
        self._cancelling: dict[str, threading.Thread] = {}
        self._lock = threading.Lock()  # of what is asked for from other threads
        self._stop = threading.Event()
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tokenmill-feeder", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def wake(self) -> None:
        """There is a new batch."""
        self._wake.set()

    def cancel(self, batch_id: str) -> None:
        """End the jobs of a batch that is marked as cancelling, in a thread of its own; nothing where one is at it."""
        with self._lock:
            if batch_id in self._cancelling or self._stop.is_set():
                return
            name = f"tokenmill-cancel-{batch_id[:8]}"
            thread = threading.Thread(target=self._cancel, args=[batch_id], name=name, daemon=True)
            self._cancelling[batch_id] = thread
            thread.start()

    def _cancel(self, batch_id: str) -> None:
        def pause(seconds: float) -> None:
            if self._stop.wait(seconds):
                raise _StoppedError

        try:
            cancel_batch(self._client.engine(), batch_id, pause=pause)
        except _StoppedError:
            pass  # another server, or the next one, takes it up
        except (DatabaseError, TokenmillError) as error:
            log.warning("cancelling batch %s goes on later: %s", batch_id, error)
        except Exception:
            log.exception("cancelling batch %s met a fault; it goes on later", batch_id)
        finally:
            with self._lock:
                del self._cancelling[batch_id]
        self.wake()

    def stop(self, timeout_s: float = 10.0) -> None:
        """End after the present chunk; another server, or the next one, goes on from there."""
        self._stop.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)  # begins no more of the others
        with self._lock:
            cancelling = list(self._cancelling.values())
        for thread in (*self._at_work.values(), *filter(None, self._limited.values()), *cancelling):
            thread.join(timeout_s)

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self.look()
            except (DatabaseError, TokenmillError) as error:
                log.warning("batches wait: %s", error)
            except Exception:
                log.exception("the feeder of batches met a fault; it goes on")
            self._wake.wait(_LOOK_S)
            self._wake.clear()

    def look(self) -> None:
        """Do what there is to do for every open batch; what may take long is only begun, where the feeder is started.

        Raises:
            Exception: the first that a batch met, once all have been looked at.
        """
        with reading(self._client.engine()) as conn:
            found = api_batches.open_api_batches(conn)
        open_now = {record.batch_id for record in found}
        # Of batches that are done with, nothing needs to be known.
        for kept in (self._seen, self._limited, self._next_beats):
            for batch_id in kept.keys() - open_now:
                kept.pop(batch_id)
        for batch_id in [each for each, work in self._at_work.items() if work.over and each not in open_now]:
            del self._at_work[batch_id]
        faults: list[Exception] = []
        for record in _by_turns(found):
            if self._stop.is_set():
                return
            try:
                self._take_up(record)
            except _StoppedError:
                return
            except DatabaseUnavailableError:
                raise
            except Exception as error:  # its own: the others go on
                faults.append(error)
        for fault in faults[1:]:
            log.warning("another batch waits: %s", fault)
        if faults:
            raise faults[0]

    def _take_up(self, record: ApiBatchRecord) -> None:
        try:
            begun = self._at_work.get(record.batch_id)
            if begun is not None:
                if begun.over:  # the next look knows what it has changed
                    del self._at_work[record.batch_id]
                    self.wake()
                    begun.result()
                return  # it shows by itself that it lives
            if self._is_mine(record):
                self._advance(record)
        except _LostError:
            log.warning("batch %s is fed by another server now", record.batch_id)
        except TenantLimitError as error:
            log.info("batch %s waits: %s", record.batch_id, error)
            self._limited[record.batch_id] = None
            self._feed_beside(record)
        except DuplicateCustomIdError:
            log.info("batch %s: another server has fed these lines", record.batch_id)

    def _do(self, record: ApiBatchRecord, work: Callable[[ApiBatchRecord], None]) -> bool:
        """Do what may take long: beside, once there is room, and at once in a look by hand; whether it is done."""
        if threading.current_thread() is not self._thread:
            work(record)
            return True
        busy = [each for each in self._at_work.values() if not each.over]
        if len(busy) < _MOST_AT_WORK:
            with reading(self._client.engine()) as conn:
                file = files.find_file(conn, record.input_file_id, record.tenant)
            large = file is None or file.bytes > _LARGE_BYTES
            if not large or sum(each.large for each in busy) < _MOST_LARGE:
                name = f"tokenmill-batch-{record.batch_id[:8]}"
                begun = _Work(name, partial(work, record), self.wake, large=large)
                self._at_work[record.batch_id] = begun
                begun.start()
                return False
        self._beat(record.batch_id)
        return False

    def _feed_beside(self, record: ApiBatchRecord) -> None:
        """Feed a limited batch in a thread of its own, as its tenant has room; later, where there are too many."""
        if sum(thread is not None for thread in self._limited.values()) >= _MOST_LIMITED:
            return
        name = f"tokenmill-feeder-{record.batch_id[:8]}"
        thread = threading.Thread(target=self._feed_patiently, args=[record], name=name, daemon=True)
        self._limited[record.batch_id] = thread
        thread.start()

    def _feed_patiently(self, record: ApiBatchRecord) -> None:
        try:
            self._feed(record, waiting=lambda error: None)
        except (_StoppedError, _LostError, DuplicateCustomIdError):
            pass  # the feeder sees it, too
        except (DatabaseError, TokenmillError) as error:
            log.warning("batch %s waits: %s", record.batch_id, error)
        except Exception:
            log.exception("feeding batch %s met a fault; it is tried again", record.batch_id)
        self.wake()

    def _is_mine(self, record: ApiBatchRecord) -> bool:
        if record.feeder == self._id:
            return True
        now = self._clock()
        beat, since = self._seen.get(record.batch_id, (-1, now))
        if beat != record.feeder_beat:
            since = now
            self._seen[record.batch_id] = (record.feeder_beat, now)
        if record.feeder is not None and now - since < _DEAD_AFTER_S:
            return False
        take = partial(
            api_batches.take_feeding,
            batch_id=record.batch_id,
            feeder=self._id,
            seen_beat=record.feeder_beat,
        )
        return transaction(self._client.engine(), take)

    def _advance(self, record: ApiBatchRecord) -> None:
        with reading(self._client.engine()) as conn:
            state, unended = batches.open_jobs(conn, record.batch_id, 1)
            left = state is BatchState.CANCELLING and bool(to_cancel(conn, record.batch_id, 1))
        if left:
            self.cancel(record.batch_id)
        beside = self._limited.get(record.batch_id)
        if beside is not None:
            if beside.is_alive():
                return  # it shows by itself that it lives
            del self._limited[record.batch_id]
        if state is BatchState.VALIDATING:
            if record.batch_id in self._limited:
                self._beat(record.batch_id)
                self._feed_beside(record)
                return
            if not self._do(record, self._feed):
                return
        elif unended and not state.terminal:
            self._beat(record.batch_id)
            expire_batch(self._client.engine(), record.batch_id)
            return
        end = partial(batches.finish_batch_if_done, batch_id=record.batch_id)
        ended = transaction(self._client.engine(), end)
        if ended is BatchState.FAILED:
            return  # nothing of it was run, so there is nothing to write
        if ended is not None and record.output_file_id is None:
            self._do(record, self._write)
        else:
            self._beat(record.batch_id)

    def _beat(self, batch_id: str) -> None:
        beat = partial(api_batches.beat_feeding, batch_id=batch_id, feeder=self._id)
        if not transaction(self._client.engine(), beat):
            raise _LostError

    def _live(self, batch_id: str) -> None:
        """Beat when it is time to, and end when the server does; cheap enough for every line of a file."""
        if self._clock() >= self._next_beats.get(batch_id, 0.0):
            self._between_chunks(batch_id, 0.0)

    def _living(self, batch_id: str, items: Iterable[T]) -> Iterator[T]:
        """The items, with a sign of life among them: what takes long must not look like a server that has died."""
        for item in items:
            self._live(batch_id)
            yield item

    # -------------------------------------------------------------------------------------------------- feeding

    def _feed(
        self, record: ApiBatchRecord, waiting: Callable[[TenantLimitError], None] | None = None
    ) -> None:
        """Make jobs of a batch's file.

        Args:
            waiting: told when the tenant has too much open, which is waited for then.

        Raises:
            TenantLimitError: it has, and nobody waits.
        """
        with tempfile.SpooledTemporaryFile(_SPOOLED_BYTES) as file:
            with reading(self._client.engine()) as conn:
                pieces = files.read_file(conn, record.input_file_id)
                files.copy_to(self._living(record.batch_id, pieces), file)
            try:
                source = self._checked(record, file)
            except BulkInputError as error:
                fail = partial(
                    batches.set_batch_state,
                    batch_id=record.batch_id,
                    state=BatchState.FAILED,
                    error=str(error),
                )
                transaction(self._client.engine(), fail)
                return
            pause = partial(self._between_chunks, record.batch_id)
            runner = BulkRunner(self._client, sleep=pause, waiting=waiting)
            ours = waiting is not None  # what is in we have published
            runner.feed(record.batch_id, source, file, bounded=False, doubtful=not ours)

    def _between_chunks(self, batch_id: str, seconds: float) -> None:
        if self._stop.wait(seconds):
            raise _StoppedError
        if self._clock() >= self._next_beats.get(batch_id, 0.0):
            self._next_beats[batch_id] = self._clock() + _LOOK_S
            self._beat(batch_id)

    def _checked(self, record: ApiBatchRecord, file: IO[bytes]) -> BulkSource:
        source = BulkSource(
            path=record.input_file_id,
            sha256="",
            lines=0,
            defaults={"tenant": record.tenant} if record.tenant else {},
            shape=Shape("openai", endpoint=record.endpoint).to_dict(),
        )
        settings = self._client.settings
        rows = source.rows(file, lambda payload: payload.check_limits(settings))
        found = validate(self._living(record.batch_id, rows))
        if found.num_errors == found.lines:
            errors = found.errors or [LineError(1, "the file holds no line", "empty_file")]
            raise BulkInputError(record.input_file_id, errors, max(found.num_errors, 1))
        total = partial(
            batches.set_batch_state, batch_id=record.batch_id, state=BatchState.VALIDATING, total=found.lines
        )
        transaction(self._client.engine(), total)
        return source

    # -------------------------------------------------------------------------------------------------- the end

    def _write(self, record: ApiBatchRecord) -> None:
        """Write the files of a batch that has ended: what succeeded, and, where there is any, what did not."""
        make = openai_lines(int(record.created_at.timestamp()), record.endpoint)

        def line(row: BatchRow, extra: Mapping[str, Any]) -> dict[str, Any]:
            self._live(record.batch_id)
            return make(row, extra)

        with (
            tempfile.SpooledTemporaryFile(_SPOOLED_BYTES) as results,
            tempfile.SpooledTemporaryFile(_SPOOLED_BYTES) as failures,
        ):
            texts = [io.TextIOWrapper(file, encoding="utf-8", newline="\n") for file in (results, failures)]
            with reading(self._client.engine()) as conn:
                ended_at = api_batches.ended_at(conn, record.batch_id)
                written = write_rows(conn, record.batch_id, *texts, line=line)
            for text in texts:
                text.detach()

            def store(conn: Connection) -> bool:
                if ended_at is None or api_batches.ended_at(conn, record.batch_id, lock=True) != ended_at:
                    # Jobs were queued again meanwhile; the files are written when those have ended.
                    return False
                # This locks the row, which is a sign of life for as long as the files take.
                if not api_batches.beat_feeding(conn, record.batch_id, self._id):
                    raise _LostError
                results.seek(0)  # the transaction may run more than once
                failures.seek(0)
                keep = partial(files.store_file, conn, tenant=record.tenant, purpose="batch_output")
                output = keep(results, filename=f"{record.batch_id}_output.jsonl")
                errors = None
                if written.errors:
                    errors = keep(failures, filename=f"{record.batch_id}_error.jsonl")
                done = api_batches.set_output(
                    conn,
                    record.batch_id,
                    self._id,
                    output_file_id=output.id,
                    error_file_id=None if errors is None else errors.id,
                    answered=written.results,
                    unanswered=written.errors,
                )
                if not done:
                    raise _LostError
                return done

            transaction(self._client.engine(), store)


def _by_turns(records: Iterable[ApiBatchRecord]) -> list[ApiBatchRecord]:
    """The oldest batch of each tenant, then the second oldest of each, and so on."""
    count: Counter[str] = Counter()
    ranked = []
    for record in records:
        ranked.append((count[record.tenant], record))
        count[record.tenant] += 1
    return [record for _, record in sorted(ranked, key=itemgetter(0))]
