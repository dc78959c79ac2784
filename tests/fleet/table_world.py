"""Delivery tables in one process, on a real SQLite database, with everything else under the test's hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

from sqlalchemy import Connection, Engine, select

from backend.api import (
    BackendInfo,
    BackendStats,
    EngineDeadError,
    FinishReason,
    GenerationHandle,
    GenerationRequest,
    GenerationResult,
)
from models_db import claims
from models_db.claims import ClaimItem, ClaimOutcome, FinishItem, ReleaseItem
from models_db.deaths import bury
from models_db.jobs import job_result, job_status
from models_db.tables import Attempt, Job, JobState
from models_db.workers import NewWorker, register_worker
from workers.delivery import DeliveryTable
from workers.intake import Call, Delivery
from workers.settings import Settings, load_settings
from workers.tasks import Outcome

T = TypeVar("T")
Action = Callable[[], None]


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.seconds = 1000.0

    def __call__(self) -> float:
        return self.seconds

    def now(self) -> datetime:
        return datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=self.seconds)


def failing(error: BaseException) -> Future[Any]:
    """What an operation answers that the database refuses."""
    future: Future[Any] = Future()
    future.set_exception(error)
    return future


class FakeBackend:
    """Takes requests and ends them when told to; begins them at once unless ``starts`` is false."""

    name = "fake"

    def __init__(self, slots: int = 4) -> None:
        self._slots = slots
        self.handles: dict[str, GenerationHandle] = {}
        self.submitted: list[str] = []
        self.cancelled: list[str] = []
        self.refuse: BaseException | None = None
        self.starts = True
        self.tokens_of_cancelled = 2

    def start(self) -> None: ...

    def info(self) -> BackendInfo:
        return BackendInfo("fake", "echo", "none", "none", self._slots, 100, 100)

    def stats(self) -> BackendStats:
        return BackendStats()

    def add_death_callback(self, callback: Callable[[EngineDeadError], None]) -> None: ...

    def shutdown(self, *, drain: bool, timeout_s: float | None = None) -> None: ...

    def submit(self, request: GenerationRequest) -> GenerationHandle:
        if self.refuse is not None:
            raise self.refuse
        job_id = request.request_id
        handle = GenerationHandle(request, lambda: self._cancel(job_id, handle))
        self.submitted.append(job_id)
        self.handles[job_id] = handle
        handle.started = self.starts
        return handle

    def _cancel(self, job_id: str, handle: GenerationHandle) -> None:
        self.cancelled.append(job_id)
        handle.finish(answer(FinishReason.CANCELLED, self.tokens_of_cancelled))

    def finish(self, job_id: str, reason: FinishReason = FinishReason.STOP, tokens: int = 2) -> None:
        self.handles[job_id].finish(answer(reason, tokens))


def answer(reason: FinishReason = FinishReason.STOP, tokens: int = 2) -> GenerationResult:
    return GenerationResult("an answer", tuple(range(tokens)), reason, 3, tokens)


class SqlStore:
    """The database thread without a thread. ``away`` keeps operations back until ``settle``.

    Those that are kept back can be cancelled, unless ``on_the_way`` says that they are in a transaction by then.
    """

    def __init__(self, engine: Engine, worker_id: str, now: Callable[[], datetime]) -> None:
        self._engine = engine
        self._now = now
        self._worker_id = worker_id
        self.dead: set[str] = set()
        self.away = False
        self.on_the_way = False
        self._waiting: list[Action] = []
        self.finish_error: BaseException | None = None

    def claim(self, item: ClaimItem) -> Future[ClaimOutcome]:
        return self._do(
            lambda conn: claims.claim(conn, [item], self._worker_id, self.dead, now=self._now())[0]
        )

    def finish(self, item: FinishItem) -> Future[bool]:
        if error := self.finish_error:
            self.finish_error = None
            return failing(error)
        return self._do(lambda conn: claims.finish(conn, [item], self._worker_id, now=self._now())[0])

    def release(self, item: ReleaseItem) -> Future[bool]:
        return self._do(lambda conn: claims.release(conn, [item], self._worker_id, now=self._now())[0])

    def call(self, work: Callable[[Connection], T]) -> Future[T]:
        return self._do(work)

    def settle(self) -> None:
        """The database is back."""
        self.away = False
        waiting, self._waiting = self._waiting, []
        for action in waiting:
            action()

    def _do(self, work: Callable[[Connection], T]) -> Future[T]:
        future: Future[T] = Future()
        begun = self.away and self.on_the_way
        if begun:
            future.set_running_or_notify_cancel()

        def act() -> None:
            if not begun and not future.set_running_or_notify_cancel():
                return
            try:
                with self._engine.begin() as conn:
                    value = work(conn)
            except Exception as exc:
                future.set_exception(exc)
            else:
                future.set_result(value)

        if self.away:
            self._waiting.append(act)
        else:
            act()
        return future


class FakeRequest:
    """What the table needs of ``GenerateRequest``; ``log`` says what it was told, in order."""

    def __init__(self, job_id: str, args: Any, kwargs: Any = None) -> None:
        self.id = job_id
        self.args = args
        self.kwargs = kwargs or {}
        self.delivery_info = {"routing_key": "tokenmill.echo"}
        self.message = None
        self.delivery: Delivery | None = None
        self.abandoned = False
        self.ignore_result = False
        self.is_revoked = False
        self.stored = False
        self.table: DeliveryTable | None = None
        self.log: list[str] = []
        self.outcome: Outcome | None = None

    @property
    def ended(self) -> bool:
        return bool({"acknowledged", "front", "back"} & set(self.log))

    def looks_revoked(self) -> bool:
        return self.is_revoked

    def revoked(self) -> bool:
        assert self.table is not None
        if self.is_revoked:
            self.table.revoke(self, JobState.CANCELLED)  # type: ignore[arg-type]
        return self.is_revoked

    def settle(self) -> None:
        self.log.append("settled")

    def drop(self) -> None:
        self._end("acknowledged")

    def end(self) -> None:
        self._end("acknowledged")

    def hand_back(self, *, front: bool = True) -> None:
        if not self.abandoned:
            self._end("front" if front else "back")

    def abandon(self) -> None:
        """Celery cancels it, as it does when the connection is lost."""
        self.abandoned = True
        assert self.delivery is not None
        self.delivery.terminate()

    def _end(self, how: str) -> None:
        assert not self.ended, f"{self.id} ends twice: {self.log} then {how}"
        self.log.append(how)

    def on_accepted(self, pid: int, at: float) -> None:
        self.log.append("accepted")

    def on_success(self, outcome: Any) -> None:
        assert "settled" in self.log, "a callback before the commit"
        self.log.append("called back")
        self._end("acknowledged")

    def on_timeout(self, soft: bool, limit: float | None) -> None:
        self.log.append("soft limit" if soft else "hard limit")
        if not soft:
            self._end("acknowledged")


class InlineTracer:
    """Calls back at once, with the outcome written on the request; ``signalled`` are beginnings and ends."""

    def __init__(self, post: Callable[[Action], None]) -> None:
        self._post = post
        self.traced: list[str] = []
        self.signalled: list[tuple[str, str]] = []
        self._begun: set[int] = set()

    def started(self, delivery: Delivery) -> None:
        self._begun.add(delivery.number)
        self.signalled.append((delivery.job_id, "began"))

    def ended(self, delivery: Delivery, state: str, error: BaseException | None = None) -> None:
        if delivery.number in self._begun:
            self._begun.remove(delivery.number)
            self.signalled.append((delivery.job_id, state))

    def trace(self, delivery: Delivery, outcome: Outcome, runtime_s: float | None, then: Action) -> None:
        self.traced.append(outcome.job_id)
        assert delivery.accepted == (delivery.number in self._begun)
        self.ended(delivery, str(outcome.state))

        def complete() -> None:
            request: Any = delivery.request
            request.settle()
            if not delivery.abandoned:
                request.outcome = outcome
                request.on_success((0, "", runtime_s))
            then()

        self._post(complete)


@dataclass
class World:
    """Workers of one database. ``run`` lets everything happen that can."""

    engine: Engine
    clock: Clock = field(default_factory=Clock)
    slots: int = 4
    workers: dict[str, TestWorker] = field(default_factory=dict)
    published: list[str] = field(default_factory=list)  # what a sweeper would publish again

    def worker(self, name: str = "a", **settings: Any) -> TestWorker:
        worker = TestWorker(self, name, settings)
        self.workers[name] = worker
        return worker

    def run(self) -> None:
        while sum(worker.step() for worker in self.workers.values() if not worker.killed):
            pass

    def bury(self, name: str) -> None:
        """The others have noticed that this worker is dead."""
        with self.engine.begin() as conn:
            burial = bury(conn, name, now=self.clock.now())
        self.published += [*burial.queued, *burial.ended, *burial.untold]

    def status(self, job_id: str) -> Any:
        with self.engine.connect() as conn:
            return job_status(conn, job_id)

    def state(self, job_id: str) -> JobState:
        return JobState(self.status(job_id).state)

    def result(self, job_id: str) -> Any:
        with self.engine.connect() as conn:
            return job_result(conn, job_id)

    def attempts(self, job_id: str) -> list[Any]:
        with self.engine.connect() as conn:
            return list(
                conn.scalars(select(Attempt.outcome).where(Attempt.job_id == job_id).order_by(Attempt.number))
            )

    def states(self) -> dict[str, JobState]:
        with self.engine.connect() as conn:
            return {job_id: JobState(state) for job_id, state in conn.execute(select(Job.id, Job.state))}


class TestWorker:
    """One delivery table with its surroundings."""

    __test__ = False

    def __init__(self, world: World, name: str, settings: dict[str, Any]) -> None:
        self.world = world
        self.name = name
        self.killed = False
        self.settings: Settings = load_settings(model="echo", models=("other",), **settings)
        with world.engine.begin() as conn:
            register_worker(
                conn,
                NewWorker(
                    name, "host", 1, "0", "fake", "echo", id=name, slots=4, device="none", dtype="none"
                ),
            )
        self.store = SqlStore(world.engine, name, world.clock.now)
        self.backend = FakeBackend(world.slots)
        self.fatal: list[BaseException] = []
        self.mail: list[Action] = []
        self.tracer = InlineTracer(self.mail.append)
        self.requests: list[FakeRequest] = []
        self.table = DeliveryTable(
            self.settings,
            self.store,
            self.backend,
            self.tracer,
            self.mail.append,
            self.fatal.append,
            clock=world.clock,
            now=world.clock.now,
            announce=world.published.extend,
            pause=self._pause,
            worker_id=name,
            silence_s=self._silence_s,
        )
        self.paused = False
        self._heard_at = world.clock()
        self.table.suspects.start()
        self.table.outage.start()

    def _silence_s(self) -> float:
        """Heartbeats get through at any moment at which operations do."""
        if not self.store.away:
            self._heard_at = self.world.clock()
        return self.world.clock() - self._heard_at

    def _pause(self, paused: bool) -> None:
        self.paused = paused

    def deliver(
        self, job_id: str, payload: Any = None, *, args: Any = None, stored: bool = False, **limits: float
    ) -> FakeRequest:
        """Hand a delivery to the pool's table, as ``on_apply`` does."""
        payload = {"model": "echo", "prompt": "some words"} if payload is None else payload
        request = FakeRequest(job_id, [payload] if args is None else args)
        request.table, request.stored = self.table, stored
        request.delivery = Delivery(
            request=request,  # type: ignore[arg-type]
            call=Call(lambda: None, (), {}),
            accept=request.on_accepted,
            callback=request.on_success,
            timeout=request.on_timeout,
            **limits,  # type: ignore[arg-type]
        )
        self.table.deliver(request.delivery)
        self.requests.append(request)
        return request

    def step(self) -> int:
        """Handle events and mail; returns how many there were."""
        count = self.table.run_pending()
        mail, self.mail[:] = list(self.mail), []
        for action in mail:
            action()
        return count + len(mail)

    def kill(self) -> Sequence[FakeRequest]:
        """SIGKILL: nothing of it happens any more; returns the requests that had not ended."""
        self.killed = True
        return [request for request in self.requests if not request.ended]
