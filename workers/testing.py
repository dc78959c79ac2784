"""For the tests of a web app: a whole service in this process, without Redis, a worker or a model.

Example::

    from workers.testing import LocalFleet

    def test_my_view():
        with LocalFleet() as fleet:
            app.client = fleet.client          # a workers.client.Client like any other
            job = fleet.client.submit("say this back", max_tokens=3)
            assert job.wait(timeout_s=5).text == "say this back"

For an asyncio application there is ``fleet.async_client``, an ``AsyncClient`` like any other, for any loop. Both
clients see the same jobs.

Jobs really go through SQL (a temporary SQLite file) and through the echo backend, which repeats the words of the
prompt, and their tokens through the worker's own writer, so validation, idempotency, cancelling, streams, errors and
states are the real ones. ``hold()`` keeps jobs queued, and ``fail_next()`` makes one fail, for the paths that are
hard to reach otherwise.
"""

from __future__ import annotations

import base64
import json
import tempfile
import threading
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast

import redis
import redis.asyncio

from backend.api import FinishReason, GenerationHandle, TokenmillError
from backend.config import EngineConfig
from backend.registry import create_backend
from models_db.claims import ClaimItem, ClaimKind, FinishItem, claim, finish
from models_db.jobs import cancelled_running
from models_db.migrate import upgrade
from models_db.records import NewJob
from models_db.session import reading, transaction
from models_db.tables import JobState
from models_db.workers import register_worker
from workers.broker import Broker
from workers.client import AsyncClient, Client, StreamEnd
from workers.incarnation import new_worker
from workers.intake import stored_result
from workers.local_streams import AsyncLocalStreams, LocalStreams
from workers.payload import GeneratePayload, queue_for
from workers.settings import Settings, load_settings
from workers.stream_writer import StreamWriter

_LOOK_S = 0.05  # between two looks for cancelled jobs


class _LocalBroker(Broker):
    """Hands messages to the fleet instead of Redis."""

    def __init__(self, fleet: LocalFleet) -> None:
        self._fleet = fleet

    def push(self, deliveries: Iterable[tuple[str, bytes]]) -> None:
        self._fleet._deliver([json.loads(data) for _, data in deliveries])

    def info(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        pass


class _LocalClient(Client):
    """A client whose streams come from this process."""

    def __init__(self, settings: Settings, broker: Broker, streams: LocalStreams) -> None:
        super().__init__(settings, broker=broker)
        self._local = streams

    def _stream_connection(self) -> redis.Redis:
        return cast(redis.Redis, self._local)


class _LocalAsyncClient(AsyncClient):
    """The same for asyncio. An application may close it, as it does at its end, and another take it up."""

    def __init__(self, settings: Settings, broker: Broker, streams: LocalStreams) -> None:
        super().__init__(settings, broker=broker)
        self._local = AsyncLocalStreams(streams)

    def _stream_connection(self) -> redis.asyncio.Redis:
        return cast(redis.asyncio.Redis, self._local)

    async def close(self) -> None:
        """Leave it to the fleet."""

    def end(self) -> None:
        """The fleet is over."""
        self.sync.close()
        self._threads.shutdown(wait=False)


class LocalFleet:
    """See the module. ``client`` and ``async_client`` are there inside the ``with`` block.

    Args:
        model: the name that payloads ask for.
        tokens_per_s: speed of each answer; at once when unset.
        settings: any other setting, such as ``max_prompt_chars``.
    """

    def __init__(self, *, model: str = "smollm2", tokens_per_s: float | None = None, **settings: Any) -> None:
        self._model = model
        self._more = settings
        self._config = EngineConfig(echo_tokens_per_s=tokens_per_s)
        self._lock = threading.Lock()
        self._handles: dict[str, GenerationHandle] = {}
        self._held: list[Mapping[str, Any]] = []
        self._holding = False
        self._failures: list[str] = []
        self._over = threading.Event()
        self.client: Client
        self.async_client: AsyncClient

    def __enter__(self) -> Self:
        self._folder = tempfile.TemporaryDirectory(prefix="tokenmill-test-")
        url = f"sqlite:///{Path(self._folder.name) / 'test.db'}"
        given = {"backend": "echo", "model": self._model, "database_url": url} | self._more
        self.settings = load_settings(**given)
        upgrade(url)
        self._streams, broker = LocalStreams(), _LocalBroker(self)
        self.client = _LocalClient(self.settings, broker, self._streams)
        self.async_client = self._async_client = _LocalAsyncClient(self.settings, broker, self._streams)
        self._worker = new_worker(self.settings)
        transaction(self.client.engine(), partial(register_worker, worker=self._worker))
        self._backend = create_backend("echo", self._config)
        self._backend.start()
        self._writer = StreamWriter(
            cast(redis.Redis, self._streams),
            interval_s=self.settings.stream_interval_s,
            expires_s=self.settings.stream_expires_s,
            max_entries=self.settings.stream_max_entries,
        )
        self._writer.start()
        self._watch = threading.Thread(target=self._watch_cancels, daemon=True)
        self._watch.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._watch.join()
        self._backend.shutdown(drain=False, timeout_s=1.0)
        self._writer.stop(1.0)
        self._async_client.end()
        self.client.close()
        self._folder.cleanup()

    def hold(self) -> None:
        """Let new jobs wait in state ``queued`` until ``release``."""
        with self._lock:
            self._holding = True

    def release(self) -> None:
        """Run what was held."""
        with self._lock:
            self._holding = False
            held, self._held = self._held, []
        for message in held:
            self._run(message)

    def fail_next(self, message: str = "made to fail by the test") -> None:
        """Let the next job end as ``failed`` with this message."""
        with self._lock:
            self._failures.append(message)

    # ------------------------------------------------------------------------------------------------ inside

    def _deliver(self, messages: Sequence[Mapping[str, Any]]) -> None:
        with self._lock:
            if self._holding:
                self._held += messages
                return
        for message in messages:
            self._run(message)

    def _run(self, message: Mapping[str, Any]) -> None:
        """What a worker does with a delivery, on the caller's thread."""
        job_id = str(message["headers"]["id"])
        payload = GeneratePayload.parse(json.loads(base64.b64decode(message["body"]))[0][0])
        job = NewJob(id=job_id, model=payload.model, queue=queue_for(payload.model), params={}, prompt={})
        engine = self.client.engine()
        (won,) = transaction(
            engine, lambda conn: claim(conn, [ClaimItem(job)], worker_id=self._worker.id, dead_ids=())
        )
        if won.kind is not ClaimKind.CLAIMED:
            return
        with self._lock:
            failure = self._failures.pop(0) if self._failures else None
        try:
            if failure is not None:
                raise TokenmillError(failure)
            handle = self._backend.submit(payload.to_request(job_id))
        except TokenmillError as error:
            self._finish(_failed(job_id, won.attempt, error), payload)
            return
        with self._lock:
            self._handles[job_id] = handle
        if payload.stream:
            self._writer.begin(job_id, won.attempt, handle)

        def done(_: object) -> None:
            with self._lock:
                self._handles.pop(job_id, None)
            if self._over.is_set():
                return
            try:
                result = handle.result(0)
            except TokenmillError as error:
                item = _failed(job_id, won.attempt, error)
            else:
                cancelled = result.finish_reason is FinishReason.CANCELLED
                state = JobState.CANCELLED if cancelled else JobState.SUCCEEDED
                item = FinishItem(job_id, won.attempt, state, stored_result(result, payload), None, None)
            self._finish(item, payload)

        handle.future.add_done_callback(done)

    def _finish(self, item: FinishItem, payload: GeneratePayload) -> None:
        transaction(self.client.engine(), lambda conn: finish(conn, [item], worker_id=self._worker.id))
        if not payload.stream:
            self._streams.ended(item.job_id)
            return
        end = StreamEnd.of(str(item.state), item.result, item.error_type, item.error_message)
        self._writer.end(item.job_id, item.attempt, end)

    def _watch_cancels(self) -> None:
        while not self._over.wait(_LOOK_S):
            with reading(self.client.engine()) as conn:
                wanted = cancelled_running(conn, self._worker.id)
            with self._lock:
                handles = [self._handles[job_id] for job_id in wanted if job_id in self._handles]
            for handle in handles:
                handle.cancel()


def _failed(job_id: str, attempt: int, error: TokenmillError) -> FinishItem:
    """The end of an attempt that came to nothing."""
    return FinishItem(job_id, attempt, JobState.FAILED, None, type(error).__name__, str(error))
