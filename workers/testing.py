"""For the tests of a web app: a whole service in this process, without Redis, a worker or a model.

Example::

    from workers.testing import LocalFleet

    def test_my_view():
        with LocalFleet() as fleet:
            app.client = fleet.client          # a workers.client.Client like any other
            job = fleet.client.submit("say this back", max_tokens=3)
            assert job.wait(timeout_s=5).text == "say this back"

Jobs really go through SQL (a temporary SQLite file) and through the echo backend, which repeats the words of the
prompt, so validation, idempotency, cancelling, errors and states are the real ones. ``hold()`` keeps jobs queued, and
``fail_next()`` makes one fail, for the paths that are hard to reach otherwise.
"""

from __future__ import annotations

import base64
import json
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

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
from workers.client import Client, JobFailedError, StreamEnd, StreamEvent
from workers.incarnation import new_worker
from workers.intake import stored_result
from workers.payload import GeneratePayload, queue_for
from workers.settings import load_settings

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
    """A client whose streams come out of SQL, once the job has ended, word by word."""

    def stream(
        self, job_id: str, *, last_id: str | None = None, timeout_s: float | None = None
    ) -> Iterator[StreamEvent]:
        """See ``Client.stream``."""
        try:
            result = self.wait(job_id, timeout_s)
        except JobFailedError as error:
            status = error.status
            end = StreamEnd(
                str(status.state), error_type=status.error_type, error_message=status.error_message
            )
            yield StreamEvent("1-0", "end", end=end)
            return
        pieces = result.text.split(" ")
        events = [
            StreamEvent(f"{number}-0", "text", text=piece if number == 1 else f" {piece}", tokens=1)
            for number, piece in enumerate(pieces, 1)
        ]
        end = StreamEnd("succeeded", result.finish_reason, result.prompt_tokens, result.completion_tokens)
        events.append(StreamEvent(f"{len(events) + 1}-0", "end", end=end))
        known = [event.id for event in events]
        yield from events[known.index(last_id) + 1 if last_id in known else 0 :]


class LocalFleet:
    """See the module. ``client`` is there inside the ``with`` block.

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

    def __enter__(self) -> Self:
        self._folder = tempfile.TemporaryDirectory(prefix="tokenmill-test-")
        url = f"sqlite:///{Path(self._folder.name) / 'test.db'}"
        given = {"backend": "echo", "model": self._model, "database_url": url} | self._more
        self.settings = load_settings(**given)
        upgrade(url)
        self.client = _LocalClient(self.settings, broker=_LocalBroker(self))
        self._worker = new_worker(self.settings)
        transaction(self.client.engine(), partial(register_worker, worker=self._worker))
        self._backend = create_backend("echo", self._config)
        self._backend.start()
        self._watch = threading.Thread(target=self._watch_cancels, daemon=True)
        self._watch.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._watch.join()
        self._backend.shutdown(drain=False, timeout_s=1.0)
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
            self._finish(
                FinishItem(job_id, won.attempt, JobState.FAILED, None, type(error).__name__, str(error))
            )
            return
        with self._lock:
            self._handles[job_id] = handle

        def done(_: object) -> None:
            with self._lock:
                self._handles.pop(job_id, None)
            if self._over.is_set():
                return
            try:
                result = handle.result(0)
            except TokenmillError as error:
                item = FinishItem(
                    job_id, won.attempt, JobState.FAILED, None, type(error).__name__, str(error)
                )
            else:
                cancelled = result.finish_reason is FinishReason.CANCELLED
                state = JobState.CANCELLED if cancelled else JobState.SUCCEEDED
                item = FinishItem(job_id, won.attempt, state, stored_result(result, payload), None, None)
            self._finish(item)

        handle.future.add_done_callback(done)

    def _finish(self, item: FinishItem) -> None:
        transaction(self.client.engine(), lambda conn: finish(conn, [item], worker_id=self._worker.id))

    def _watch_cancels(self) -> None:
        while not self._over.wait(_LOOK_S):
            with reading(self.client.engine()) as conn:
                wanted = cancelled_running(conn, self._worker.id)
            with self._lock:
                handles = [self._handles[job_id] for job_id in wanted if job_id in self._handles]
            for handle in handles:
                handle.cancel()
