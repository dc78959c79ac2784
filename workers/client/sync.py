"""``Client``: the synchronous client."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import datetime
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

import redis
from sqlalchemy import Connection, Engine

from backend.api import RequestError
from backend.errors import short_repr
from models_db import jobs
from models_db.clock import DatabaseClock
from models_db.errors import CommitUnknownError, DatabaseError, DatabaseUnavailableError, UnknownJobError
from models_db.jobs import AttemptRecord, JobStatus, NewJob, StoredResult
from models_db.schema import check_schema
from models_db.session import certain, make_engine, reading
from models_db.tables import JobState
from models_db.tenants import TenantLimit
from models_db.text import clean_text
from workers.broker import Broker, BrokerUnavailableError, stream_connection
from workers.chunks import take_chunk
from workers.client.arguments import check_arguments, checked_list
from workers.client.errors import (
    JobFailedError,
    JobNotFinishedError,
    NoDatabaseError,
    SubmissionUnknownError,
    WaitTimeoutError,
)
from workers.client.fields import PayloadFields
from workers.client.handle import JobHandle
from workers.client.streaming import check_last_id, concluded, read_stream
from workers.client.submission import Submission, delivery
from workers.client.waiting import check_timeout, pauses
from workers.payload import PAYLOAD_VERSION, GeneratePayload, NewerPayloadError
from workers.settings import Settings, load_settings
from workers.streams import StreamEvent

__all__ = ["Client", "JobHandle", "Submission"]

log = logging.getLogger(__name__)
T = TypeVar("T")
_CHUNK = 500  # rows a transaction and messages a round trip, for submit_many
# A client that freezes within a transaction keeps the locks of its jobs and tenant for no longer than this.
_IDLE_IN_TRANSACTION_S = 30.0
_CLOCK_AGE_S = 60.0  # until the database's clock is looked at again


class Client:
    """Submits jobs and reads them back. Safe to share between threads; make one per process.

    Args:
        settings: as ``workers.settings.load_settings()`` gives them, which is the default.
        broker_url: overrides the setting.
        database_url: overrides the setting; ``None`` means Redis only (see the package's text).
        clock: of what is submitted; the database's when unset.
    """

    def __init__(
        self,
        settings: Settings | None = None,
        *,
        broker_url: str | None = None,
        database_url: str | None = "",
        broker: Broker | None = None,
        clock: Callable[[], datetime] | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        overrides = {"broker_url": broker_url, "database_url": database_url}
        check_arguments(settings, overrides)
        given = {name: value for name, value in overrides.items() if value}
        if settings is None:
            settings = load_settings(**given)
        elif given:
            settings = load_settings(**(settings.model_dump(exclude_unset=True) | given))
        self.settings = settings
        self._broker = broker or Broker(settings.broker_url)
        self._engine: Engine | None = None
        self._streams: redis.Redis | None = None
        self.has_database = database_url is not None
        self._opening = threading.Lock()
        self._clock = clock
        self._database_clock = DatabaseClock(_CLOCK_AGE_S)
        self._sleep = sleep

    # ------------------------------------------------------------------------------------------------- submit

    def submit(
        self,
        /,
        prompt: str | None = None,
        *,
        messages: Sequence[Mapping[str, str]] | None = None,
        token_ids: Sequence[int] | None = None,
        model: str | None = None,
        idempotency_key: str | None = None,
        **params: Unpack[PayloadFields],
    ) -> JobHandle:
        """Accept one job and publish it; returns as soon as it is accepted, without waiting for a worker.

        Args:
            prompt: text to continue. Give exactly one of prompt, messages and token_ids.
            messages: chat turns ``{"role", "content"}``, rendered with the model's chat template.
            token_ids: the prompt as token ids.
            model: the served model; the settings' own when unset.
            idempotency_key: the same key gives the same job, however often it is submitted.
            params: any other field of the payload: ``max_tokens``, ``priority``, ``callback_url``, … (see
                ``PayloadFields``).

        Raises:
            RequestError: the request is bad; nothing was stored.
            IdempotencyConflictError: the key belongs to a job with another payload.
            TenantLimitError: the payload's tenant has as much open as it may; nothing was stored.
            SubmissionUnknownError: the database went away while it stored the job, and did not come back soon. The job
                may be stored, and then runs: with an ``idempotency_key``, submit it again; without one, look for its
                id first (``error.job_ids``).
            DatabaseUnavailableError, SchemaError: nothing was stored.
            BrokerUnavailableError: only without a database; with one the job is kept and published later.
        """
        ours = {"prompt": prompt, "messages": messages, "token_ids": token_ids, "model": model}
        payload = self.payload(
            {name: value for name, value in ours.items() if value is not None} | {**params}
        )
        return self.submit_payloads([Submission(payload, idempotency_key=idempotency_key)])[0]

    def submit_many(self, requests: Iterable[Mapping[str, Any]]) -> list[JobHandle]:
        """Accept many jobs, some hundreds a transaction and a round trip; handles come in the order given.

        Each request has the fields of the payload, and may have an ``idempotency_key``. All are checked before the
        first is stored. For more than fit in memory there is ``submit_each``.

        Raises:
            RequestError: one of the requests is bad; nothing was stored.
            DatabaseError: as ``submit``, of one chunk: all of it is stored, or nothing. Chunks before it have been
                accepted, and the error's notes say how many jobs those are. To be able to send the whole list again,
                give each request an ``idempotency_key``.
        """
        checked = [self._submission(request) for request in checked_list(requests)]
        handles: list[JobHandle] = []
        try:
            handles.extend(self._accept_each(iter(checked)))  # keeps those that came before an error
        except Exception as error:
            error.add_note(f"submit_many: the first {len(handles)} of {len(checked)} jobs have been accepted")
            raise
        return handles

    def submit_each(self, requests: Iterable[Mapping[str, Any]]) -> Iterator[JobHandle]:
        """As ``submit_many`` for any number of requests, in constant memory: they are taken as handles are asked for.

        So nothing is submitted unless you iterate, and up to a thousand requests are read ahead. A bad request raises
        before its own chunk is stored; the chunks before it have been accepted and their handles given out. While a
        chunk is being stored, the next one is read and checked.
        """
        return self._accept_each(map(self._submission, checked_list(requests)))

    def _accept_each(self, submissions: Iterator[Submission]) -> Iterator[JobHandle]:
        def ready() -> list[NewJob]:
            return self.new_jobs(take_chunk(submissions, _CHUNK, lambda each: each.payload.prompt_chars))

        chunk = ready()
        with ThreadPoolExecutor(1, "tokenmill-submit") as beside:
            while chunk:
                accepting = beside.submit(self.submit_jobs, chunk)
                try:
                    chunk = ready()
                except Exception:
                    yield from accepting.result()
                    raise
                yield from accepting.result()

    def payload(self, fields: Mapping[str, Any]) -> GeneratePayload:
        """Validate a request, with the settings' model where it names none.

        Raises:
            RequestError: names the field, the value and the fix.
        """
        try:
            payload = GeneratePayload.parse({"model": self.settings.model} | dict(fields))
        except NewerPayloadError:  # which tells a worker to be upgraded
            raise RequestError(
                f"is newer than {PAYLOAD_VERSION}, the newest known here",
                field="version",
                value=fields["version"],
                fix="Leave it out",
            ) from None
        payload.check_limits(self.settings)
        return payload

    def new_jobs(self, submissions: Sequence[Submission]) -> list[NewJob]:
        """The rows that ``submit_payloads`` would insert, which are not inserted here."""
        now = self.now()
        return [each.new_job(now, self.settings, stored=self.has_database) for each in submissions]

    def now(self) -> datetime:
        """The present, by which what is submitted is dated: by the database's clock, as workers judge it.

        Raises:
            DatabaseUnavailableError, SchemaError: as ``submit``; a clock that was read before goes on without it.
        """
        if self._clock is not None:
            return self._clock()
        if self.has_database and self._database_clock.due:
            try:
                with reading(self.engine()) as connection:
                    self._database_clock.read(connection)
            except DatabaseError:
                if not self._database_clock.known:
                    raise
                self._database_clock.put_off()
        return self._database_clock()

    def submit_payloads(self, submissions: Sequence[Submission]) -> list[JobHandle]:
        """Accept validated payloads in one transaction, then publish them in one round trip."""
        return self.submit_jobs(self.new_jobs(submissions))

    def submit_jobs(self, new: Sequence[NewJob], *, limited: bool = True) -> list[JobHandle]:
        """``submit_payloads`` for what ``new_jobs`` made, each of which may be submitted once.

        Args:
            limited: the tenants' limits apply.
        """
        if not self.has_database:
            if any(job.idempotency_key for job in new):
                raise NoDatabaseError("an idempotency key")
            self._broker.push(map(delivery, new))
            return [JobHandle(job.id, client=self) for job in new]
        limits = self._limits(new) if limited else None
        outcomes = self._insert(new, limits)
        created = [job for job, outcome in zip(new, outcomes, strict=True) if outcome.created]
        published = self._publish(created)
        return [JobHandle(outcome.id, outcome.created, published, self) for outcome in outcomes]

    def _insert(
        self, new: Sequence[NewJob], limits: Mapping[str, TenantLimit] | None
    ) -> list[jobs.InsertOutcome]:
        """Store them once, also where the answer to the commit is lost: the ids are ours, so they can be looked up."""
        try:
            return certain(
                self.engine(),
                lambda connection, replay: jobs.insert_jobs(connection, new, limits, replay=replay),
                sleep=self._sleep,
            )
        except CommitUnknownError as error:
            raise SubmissionUnknownError([job.id for job in new], error) from error

    def _limits(self, new: Sequence[NewJob]) -> dict[str, TenantLimit]:
        """Of those tenants that have one."""
        if not self.settings.limits_tenants:
            return {}
        found = {job.tenant: self.settings.tenant_limit(job.tenant) for job in new if job.tenant is not None}
        return {
            tenant: TenantLimit(jobs=limit.jobs, tokens=limit.tokens)
            for tenant, limit in found.items()
            if limit is not None
        }

    def _publish(self, accepted: Sequence[NewJob]) -> bool:
        """Publish what is stored as published already: whoever is killed in between leaves it to the sweeper."""
        if not accepted:
            return True
        try:
            self._broker.push(map(delivery, accepted))
        except BrokerUnavailableError as error:
            log.warning("%d accepted job(s) wait in SQL to be published: %s", len(accepted), error)
        else:
            return True
        ids = [job.id for job in accepted]
        at = accepted[0].created_at
        try:
            self._write("submit", lambda connection: jobs.mark_unpublished(connection, ids, at=at))
        except DatabaseError as failure:
            # They are stored; an error here would make the caller submit them again. A worker's sweeper finds them.
            log.warning("%d job(s) are marked as published and are not: %s", len(accepted), failure)
        return False

    def _submission(self, request: Mapping[str, Any]) -> Submission:
        if not isinstance(request, Mapping):
            raise RequestError(
                "must be a mapping of fields",
                field="requests",
                value=type(request).__name__,
                fix='Give {"prompt": …, "max_tokens": …} for each job',
            )
        fields = dict(request)
        key = fields.pop("idempotency_key", None)
        return Submission(self.payload(fields), idempotency_key=key)

    # --------------------------------------------------------------------------------------------------- read

    def status(self, job_id: str) -> JobStatus:
        """Where the job is now.

        Raises:
            UnknownJobError: no row has this id.
        """
        with self._read("status") as connection:
            return _status(connection, job_id)

    def result(self, job_id: str) -> StoredResult:
        """The result of a job that has succeeded, without waiting.

        Raises:
            JobNotFinishedError: it is queued or running.
            JobFailedError: it failed, was cancelled or expired.
            UnknownJobError: no row has this id.
        """
        with self._read("result") as connection:
            status = _status(connection, job_id)
            if not status.state.terminal:
                raise JobNotFinishedError(status)
            stored = jobs.job_result(connection, job_id) if status.state is JobState.SUCCEEDED else None
        if stored is None:
            raise JobFailedError(status)
        return stored

    def attempts(self, job_id: str) -> list[AttemptRecord]:
        """Every run of the job with its worker, oldest first."""
        with self._read("attempts") as connection:
            return jobs.job_attempts(connection, _checked_id(job_id))

    def wait(self, job_id: str, timeout_s: float | None = None) -> StoredResult:
        """The result, as soon as there is one. Asks SQL, first often and then once a second.

        Raises:
            WaitTimeoutError: ``timeout_s`` seconds have passed; the job goes on.
            JobFailedError: it failed, was cancelled or expired.
            UnknownJobError: no row has this id.
            RequestError: ``timeout_s`` is no number of seconds.
        """
        for pause_s in pauses(timeout_s, job_id):
            try:
                return self.result(job_id)
            except JobNotFinishedError as error:
                if pause_s is None:
                    assert timeout_s is not None
                    raise WaitTimeoutError(error.status, timeout_s) from None
            self._sleep(pause_s)
        raise AssertionError("the pauses end with None")

    def stream(
        self, job_id: str, *, last_id: str | None = None, timeout_s: float | None = None
    ) -> Iterator[StreamEvent]:
        """The text of a job that was submitted with ``stream=True``, as it comes, then its end.

        Texts together are the result's text. An event ``restart`` voids what came before it: the job has begun
        again on another worker. The last event is ``end``; a failure is told there, not raised. A stream can be
        read by many, and again as long as Redis keeps it (``stream_expires_s``); later, the text comes from SQL in
        one piece.

        Args:
            last_id: go on after this event's ``id``.
            timeout_s: for the whole of it.

        Raises:
            StreamTimeoutError: the time is over; the job goes on.
            BrokerUnavailableError: Redis does not answer. Go on later with the last event's id.
            RequestError: ``last_id`` is no id, or ``timeout_s`` no number; before the first event is asked for.
            UnknownJobError: no row has this id; likewise.
        """
        check_timeout(timeout_s)
        if last_id is not None:
            check_last_id(last_id)
        if self.has_database:
            self.status(job_id)
        connection, url = self._stream_connection(), self.settings.broker_url
        return read_stream(
            connection, job_id, lambda: self.concluded(job_id), url=url, last_id=last_id, timeout_s=timeout_s
        )

    def concluded(self, job_id: str) -> tuple[JobStatus, StoredResult | None] | None:
        """Status and result of a job that has ended, else ``None``; also where SQL cannot be asked."""
        if not self.has_database:
            return None
        try:
            with self._read("stream") as connection:
                return concluded(connection, job_id)
        except DatabaseUnavailableError as error:
            log.warning("the stream of job %s goes on without SQL: %s", job_id, error)
            return None

    def cancel(self, job_id: str) -> JobState:
        """Ask for the job to be cancelled; returns its state after that.

        A queued job is ``cancelled`` at once. A running one is still ``running``: its worker ends it within a
        second or so. A job that has ended stays as it is.
        """
        _checked_id(job_id)
        now = self.now() if self.has_database else None
        states = self._write("cancel", lambda connection: jobs.request_cancel(connection, [job_id], at=now))
        if job_id not in states:
            raise UnknownJobError(job_id)
        return states[job_id]

    # -------------------------------------------------------------------------------------------- open, close

    def engine(self) -> Engine:
        """The connection pool, opened when first used.

        Raises:
            DatabaseUnavailableError, SchemaError: it cannot be used; the message says how to mend it.
        """
        with self._opening:
            if self._engine is None:
                engine = make_engine(self.settings.database_url, idle_in_transaction_s=_IDLE_IN_TRANSACTION_S)
                try:
                    check_schema(engine)
                except BaseException:
                    engine.dispose()
                    raise
                self._engine = engine
            return self._engine

    def _stream_connection(self) -> redis.Redis:
        with self._opening:
            if self._streams is None:
                self._streams = stream_connection(self.settings.broker_url)
            return self._streams

    @contextmanager
    def _read(self, what: str) -> Iterator[Connection]:
        if not self.has_database:
            raise NoDatabaseError(what)
        with reading(self.engine()) as connection:
            yield connection

    def _write(self, what: str, work: Callable[[Connection], T]) -> T:
        if not self.has_database:
            raise NoDatabaseError(what)
        # Doing any of these twice is as doing them once.
        return certain(self.engine(), lambda connection, _replay: work(connection), sleep=self._sleep)

    def close(self) -> None:
        """Close the connections; the client can be used again and opens new ones."""
        with self._opening:
            engine, self._engine = self._engine, None
            streams, self._streams = self._streams, None
        if streams is not None:
            streams.close()
        if engine is not None:
            engine.dispose()
        self._broker.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _checked_id(job_id: str) -> str:
    """The id. One that no job can have is unknown, rather than an error of the database's driver.

    Raises:
        UnknownJobError: it cannot be stored.
    """
    if not isinstance(job_id, str) or clean_text(job_id) != job_id:
        raise UnknownJobError(short_repr(job_id))
    return job_id


def _status(connection: Connection, job_id: str) -> JobStatus:
    status = jobs.job_status(connection, _checked_id(job_id))
    if status is None:
        raise UnknownJobError(job_id)
    return status
