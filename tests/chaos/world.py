"""One fleet with servers of its own, jobs that have one right answer, and faults that are noted with their times."""

from __future__ import annotations

import contextlib
import gc
import itertools
import logging
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import redis
from celery.result import AsyncResult
from kombu import pools
from sqlalchemy import ColumnElement, Connection, Engine, func, make_url, select
from sqlalchemy.exc import DBAPIError

from models_db import jobs as job_rows
from models_db.errors import DatabaseError
from models_db.migrate import upgrade
from models_db.session import make_engine, reading
from models_db.tables import Attempt, EngineSample, Job, JobState, Result, Worker, WorkerState
from tests.chaos import witness
from tests.chaos.backends import POISON
from tests.chaos.jobs import ENDED_WELL, Expected, echo
from tests.chaos.judge import Harm, judge
from tests.chaos.plan import NotDoneError
from tests.chaos.proxy import Proxy
from tests.chaos.recovery import Fault, Kill, Timeline
from tests.chaos.seats import Seat
from tests.chaos.services import ChaosRedis, database
from tests.chaos.tiny import TINY, Tiny, tiny_model
from tests.chaos.verdict import Verdict, write_figures
from tests.fleet.fleet import wait_until
from tests.messages import publish
from tests.servers import Kind, Server
from workers.app import TokenmillApp, make_app
from workers.client import Client
from workers.client.sync import Submission
from workers.payload import GeneratePayload, queue_for, wire
from workers.settings import load_settings

T = TypeVar("T")
MODEL = "echo"
POLL_S = 0.2
IDLE_S = 30.0  # that workers get to have nothing left
FIGURES_VARIABLE = "CHAOS_FIGURES"  # a file that gathers the numbers of many tests
_LEASE_SETTINGS = {"heartbeat_interval_s", "dead_after_s", "visibility_timeout_s", "lease_interval_s"}


@dataclass
class World:
    """See the module; made by ``world``. Leases and heartbeats are those of production unless a test says so."""

    folder: Path
    redis: ChaosRedis
    database_url: str
    server: Server | None
    settings: dict[str, Any]
    engine: Engine
    client: Client
    app: TokenmillApp
    redis_proxy: Proxy
    database_proxy: Proxy | None
    model: str
    queue: str
    seats: list[Seat] = field(default_factory=list)
    expected: dict[str, Expected] = field(default_factory=dict)
    harms: list[Harm] = field(default_factory=list)
    timeline: Timeline = field(default_factory=Timeline)
    verdict: Verdict | None = None  # the last one
    tiny: Tiny | None = None  # the model, where a real engine runs one
    _keys: Iterator[int] = field(default_factory=itertools.count)

    # ------------------------------------------------------------------------------------------------ workers

    def seat(
        self,
        *,
        supervised: bool = False,
        start: bool = True,
        variables: Mapping[str, str] | None = None,
        **settings: Any,
    ) -> Seat:
        """A further seat, its worker started but not waited for; see ``ready``."""
        made = Seat(
            f"seat{len(self.seats)}",
            self.settings | settings,
            supervised=supervised,
            variables=variables or {},
        )
        self.seats.append(made)
        if start:
            made.start()
        return made

    def workers(self, count: int, **options: Any) -> list[Seat]:
        """Several seats, with their workers ready."""
        made = [self.seat(**options) for _ in range(count)]
        for seat in made:
            seat.ready()
        return made

    def kill(self, *seats: Seat) -> Kill:
        """SIGKILL these workers at once, and note what they held."""
        pids = [pid for seat in seats if (pid := seat.pid()) is not None]
        self.harm(*pids)
        with contextlib.suppress(DatabaseError, DBAPIError):
            held, incarnations = self._held(pids)
            at = time.time()
            for seat in seats:
                seat.kill()
            return self.timeline.killed(Kill(at, frozenset(incarnations), frozenset(held)))
        at = time.time()  # the database is away: what they held nobody knows
        for seat in seats:
            seat.kill()
        return self.timeline.killed(Kill(at, frozenset(), frozenset()))

    def harm(self, *pids: int) -> list[Harm]:
        """Note that what these processes run now dies with them, through us, unless the harm is said to have ended."""
        harms = [Harm(pid, time.time()) for pid in pids]
        self.harms += harms
        return harms

    def _held(self, pids: Sequence[int]) -> tuple[list[str], list[str]]:
        with reading(self.engine) as conn:
            alive = (WorkerState.STARTING, WorkerState.ONLINE, WorkerState.DRAINING)
            query = select(Worker.id).where(Worker.pid.in_(pids), Worker.state.in_(alive))
            incarnations = list(conn.scalars(query))
            return list(conn.scalars(select(Job.id).where(Job.owner.in_(incarnations)))), incarnations

    @contextlib.contextmanager
    def fault(self, kind: str) -> Iterator[None]:
        """Note that something is out of order for as long as the block lasts, unless that raises NotDoneError."""
        begun, happened = time.time(), True
        try:
            yield
        except NotDoneError:
            happened = False
            raise
        finally:
            if happened:
                self.timeline.faults.append(Fault(kind, begun, time.time()))

    # ------------------------------------------------------------------------------------------------ jobs in

    def submit(
        self, requests: Sequence[Mapping[str, Any]], *, states: frozenset[str] | None = None
    ) -> list[str]:
        """Accept these jobs as a client does, however often the database has to be asked; their ids."""
        requests = [self._defaults | dict(request) for request in requests]
        payloads = [GeneratePayload.parse(request) for request in requests]
        answers = self._answers(requests)
        # A key each: a commit whose answer was lost must not become a second job.
        submissions = [
            Submission(payload, idempotency_key=f"{os.getpid()}-{next(self._keys)}") for payload in payloads
        ]
        handles = self.persist(lambda: self.client.submit_payloads(submissions))
        for handle, fields, answer in zip(handles, requests, answers, strict=True):
            kills = POISON in fields["prompt"]
            self.expected[handle.id] = Expected(answer, states or ENDED_WELL, kills)
        return [handle.id for handle in handles]

    @property
    def _defaults(self) -> dict[str, Any]:
        return {"model": self.model} | ({} if self.tiny is None else self.tiny.request)

    def _answers(self, requests: Sequence[Mapping[str, Any]]) -> list[str] | list[None]:
        """What an undisturbed backend says to them, where that is known."""
        if self.tiny is not None:
            return self.tiny.answers(requests)
        if self.model == MODEL:
            return [echo(request["prompt"], request["max_tokens"]) for request in requests]
        return [None] * len(requests)

    def submit_words(self, count: int, tokens: int, **fields: Any) -> list[str]:
        """Jobs of one length, each with words of its own."""
        start = len(self.expected)
        return self.submit(
            [{"prompt": f"job{start + n} says this", "max_tokens": tokens} | fields for n in range(count)]
        )

    def insert_only(self, requests: Sequence[Mapping[str, Any]]) -> list[str]:
        """Accepted jobs whose publication Redis never saw, as when it was away."""
        broker = self.client._broker
        self.client._broker = _Nobody()  # type: ignore[assignment]
        try:
            return self.submit(requests)
        finally:
            self.client._broker = broker

    def publish_again(self, ids: Sequence[str]) -> int:
        """A further delivery of each of these jobs, as often as it is named; how many there were."""
        with reading(self.engine) as conn:
            stored = job_rows.stored_messages(conn, sorted(set(ids)))
        messages = [message for job_id in ids if job_id in stored and (message := stored[job_id].message)]
        publish(self.redis.client.pipeline(), messages)
        return len(messages)

    def push(self, data: bytes) -> None:
        """Put raw bytes into the queue."""
        self.redis.client.lpush(self.queue, data)

    def push_message(self, message: Mapping[str, Any]) -> None:
        """Put a message into the queue that its ``delivery_info`` names."""
        key, data = wire(message)
        self.redis.client.lpush(key, data)

    def persist(self, work: Callable[[], T], timeout_s: float = 180) -> T:
        """Do it again until the servers let us: they may be away on purpose."""
        end = time.monotonic() + timeout_s
        while True:
            try:
                return work()
            except (DatabaseError, DBAPIError, redis.RedisError):
                if time.monotonic() > end:
                    raise
                time.sleep(0.2)

    # ----------------------------------------------------------------------------------------------- jobs out

    def read(self, work: Callable[[Connection], T]) -> T:
        """Read from the database, waiting for it where it is away."""

        def attempt() -> T:
            with reading(self.engine) as conn:
                return work(conn)

        return self.persist(attempt)

    def states(self) -> dict[str, JobState]:
        """The state of every job there is."""
        return self.read(
            lambda conn: {row.id: JobState(row.state) for row in conn.execute(select(Job.id, Job.state))}
        )

    def state(self, job_id: str) -> JobState | None:
        return self.states().get(job_id)

    def wait_state(self, job_id: str, state: JobState, timeout_s: float = 30) -> None:
        wait_until(lambda: self.state(job_id) is state, timeout_s, f"{job_id} to be {state}")

    def wait_running(self, ids: Iterable[str], timeout_s: float = 30) -> None:
        """Wait until all of these run."""
        wanted = list(ids)

        def running() -> bool:
            states = self.states()
            return all(states.get(job_id) is JobState.RUNNING for job_id in wanted)

        wait_until(running, timeout_s, f"{len(wanted)} jobs to run")

    def wait_some(self, state: JobState, count: int = 1, timeout_s: float = 30) -> None:
        """Wait until this many jobs are in the state."""
        wait_until(
            lambda: list(self.states().values()).count(state) >= count, timeout_s, f"{count} {state} jobs"
        )

    def wait_samples(self, count: int, timeout_s: float = 30) -> None:
        """Wait until workers have written so many more samples, a second apart each: a measure of what they lived."""
        query = select(func.count()).select_from(EngineSample)
        before = self.read(lambda conn: conn.scalar(query) or 0)
        wait_until(
            lambda: self.read(lambda conn: conn.scalar(query) or 0) >= before + count,
            timeout_s,
            f"{count} more samples",
        )

    def seat_of(self, job_id: str) -> Seat:
        """Where the job runs."""
        return wait_until(lambda: self._seat_with(Job.id == job_id), 30, f"{job_id} to run")

    def busy_seat(self) -> Seat:
        """A seat that runs some job."""
        return wait_until(lambda: self._seat_with(Job.owner.is_not(None)), 30, "a job to run")

    def _seat_with(self, condition: ColumnElement[bool]) -> Seat | None:
        query = select(Worker.pid).join(Job, Job.owner == Worker.id).where(condition).limit(1)
        pid = self.read(lambda conn: conn.scalar(query))
        return next((seat for seat in self.seats if pid is not None and seat.pid() == pid), None)

    def texts(self, ids: Sequence[str]) -> list[str]:
        """What these jobs have said, in their order."""
        query = select(Result.job_id, Result.text).where(Result.job_id.in_(ids))
        found = self.read(lambda conn: {row.job_id: row.text for row in conn.execute(query)})
        return [found[job_id] for job_id in ids]

    def attempts(self, job_id: str) -> list[str]:
        """The outcomes of the job's attempts, in order; an open one is ``open``."""
        query = select(Attempt.outcome).where(Attempt.job_id == job_id).order_by(Attempt.number)
        return self.read(lambda conn: [str(outcome or "open") for outcome in conn.scalars(query)])

    # ------------------------------------------------------------------------------------------------ verdict

    def finish(self, stall_s: float = 60, *, for_later: Collection[str] = (), stop: bool = True) -> Verdict:
        """Wait for every job to end and for Redis to be empty, stop the workers warmly, then judge.

        No job ending for ``stall_s`` means that the others are lost.
        ``for_later`` are jobs that only a newer version can run: their messages may stay in the queue, and those that
        have got a row stay queued.
        """
        verdict = Verdict()
        self._wait_ended(stall_s, for_later)
        self._wait_drained(len(for_later))
        self._wait_idle(verdict)
        if stop:
            for seat in self.seats:
                verdict.exit_codes += seat.stop()
        verdict.unacked = self.redis.unacked() + max(0, self.redis.queued(self.queue) - len(for_later))
        self.read(lambda conn: judge(conn, verdict, self.expected, self.harms, self.timeline, for_later))
        for seat in self.seats:
            verdict.note_log(seat.name, seat.log)
        if self.settings.keys() & _LEASE_SETTINGS:
            verdict.recoveries = []  # not what production would take
        self.verdict = verdict
        return verdict

    def _wait_ended(self, stall_s: float, for_later: Collection[str]) -> None:
        """Wait until every job has ended, or until none has for ``stall_s``; the verdict says which have not."""
        ended = -1
        give_up = 0.0
        while True:
            states = self.states()
            now = sum(state.terminal or job_id in for_later for job_id, state in states.items())
            if now == len(states) and self.expected.keys() <= states.keys():
                return
            if now > ended:
                ended, give_up = now, time.monotonic() + stall_s
            if time.monotonic() > give_up:
                return
            time.sleep(POLL_S)

    def _wait_drained(self, left_in_queue: int) -> None:
        def drained() -> bool:
            return self.redis.unacked() == 0 and self.redis.queued(self.queue) <= left_in_queue

        with contextlib.suppress(AssertionError):
            wait_until(lambda: self.persist(drained), 30, "everything acknowledged")

    def _wait_idle(self, verdict: Verdict) -> None:
        """Wait until each worker that is online says that it runs nothing and that all blocks are free.

        What it said before the last job had ended does not count: a real engine has used blocks since.
        """
        count = select(func.count()).select_from(EngineSample)
        online = select(Worker.id).where(Worker.state == WorkerState.ONLINE)

        def samples(conn: Connection) -> dict[str, int]:
            return {
                worker: conn.scalar(count.where(EngineSample.worker_id == worker)) or 0
                for worker in conn.scalars(online).all()
            }

        real = self.tiny is not None or self.settings["backend"] == "async"
        before = self.read(samples) if real else {}

        def silent(conn: Connection) -> list[str]:
            """Those who have not said anything since; two samples, as one may have been on its way."""
            now = samples(conn)
            return [worker for worker, number in before.items() if now.get(worker, number + 2) < number + 2]

        def busy(conn: Connection) -> list[str]:
            found = [f"{worker}: says nothing more" for worker in silent(conn)]
            for worker in conn.scalars(online).all():
                columns = (EngineSample.running, EngineSample.waiting, EngineSample.kv_used_fraction)
                query = select(*columns).where(EngineSample.worker_id == worker)
                last = conn.execute(query.order_by(EngineSample.sampled_at.desc()).limit(1)).one_or_none()
                if last is not None and any(last):
                    found.append(f"{worker}: running {last[0]}, waiting {last[1]}, blocks used {last[2]:g}")
            return found

        with contextlib.suppress(AssertionError):
            wait_until(lambda: not self.read(busy), IDLE_S, "idle workers")
        verdict.busy = self.read(busy)

    def close(self) -> None:
        """Kill what is left."""
        if self.verdict is not None and (path := os.environ.get(FIGURES_VARIABLE)):
            write_figures(Path(path), self.verdict.figures())
        for seat in self.seats:
            seat.destroy()
            (self.folder / f"{seat.name}.log").write_text(seat.log)
        self.redis_proxy.close()
        if self.database_proxy is not None:
            self.database_proxy.close()
        self.client.close()
        self.engine.dispose()
        for thing in gc.get_objects():  # a result that outlives this Redis would try to reach it
            if issubclass(type(thing), AsyncResult) and thing.app is self.app:
                thing.backend = None
        self.app.close()
        pools.reset()


class _Nobody:
    """A broker that takes nothing and says nothing."""

    def push(self, deliveries: Iterable[object]) -> None:
        """Lose them."""

    def close(self) -> None:
        """Nothing to close."""


@contextlib.contextmanager
def world(
    folder: Path, kind: Kind = "postgresql", *, persistent: bool = False, real: bool = False, **settings: Any
) -> Iterator[World]:
    """A world of its own; workers reach Redis and the database through proxies, the harness reaches them directly.

    ``real`` has the asynchronous engine run a tiny model in place of the echo, at the same pace.
    """
    folder.mkdir(parents=True, exist_ok=True)
    logging.getLogger("workers.client.sync").setLevel(logging.ERROR)  # says each time that Redis is away
    server_redis = ChaosRedis(folder, persistent=persistent)
    with contextlib.ExitStack() as stack:
        stack.callback(server_redis.stop)
        server_redis.start()
        url, server = stack.enter_context(database(kind, folder))
        upgrade(url)
        engine = make_engine(url)
        witness.install(engine)
        redis_proxy = Proxy(server_redis.port)
        database_proxy = None
        workers_url = url
        target = make_url(url)
        server_at = target.port or target.query.get("unix_socket")
        if server_at is not None:
            assert not isinstance(server_at, tuple)
            database_proxy = Proxy(server_at)
            through = target.set(host="127.0.0.1", port=database_proxy.port, query={})
            workers_url = through.render_as_string(hide_password=False)
        tiny = stack.enter_context(tiny_model(folder / TINY)) if real else None
        if tiny is not None:
            settings = tiny.settings(settings)
        theirs = {
            "broker_url": f"redis://127.0.0.1:{redis_proxy.port}/0",
            "database_url": workers_url,
            "backend": "echo",
            "model": MODEL,
            "sample_interval_s": 1.0,
            "spool_dir": str(folder / "spool"),
        } | settings
        ours = load_settings(**(theirs | {"broker_url": server_redis.url, "database_url": url}))
        made = World(
            folder=folder,
            redis=server_redis,
            database_url=url,
            server=server,
            settings=theirs,
            engine=engine,
            client=Client(ours),
            app=make_app(ours),
            redis_proxy=redis_proxy,
            database_proxy=database_proxy,
            model=ours.model,
            queue=queue_for(ours.model),
            tiny=tiny,
        )
        stack.callback(made.close)
        yield made
