"""One incarnation of a worker: its row, its heartbeat, its samples, and whom it holds for dead."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from celery.utils.log import get_logger
from sqlalchemy import Connection, select

from backend.api import Backend, BackendStats, TokenmillError
from models_db.callbacks import callback_counts
from models_db.deaths import HELD_FOR_DEAD, absolve
from models_db.errors import WriterStoppedError
from models_db.faults import Fault, classify, summary
from models_db.jobs import cancelled_running
from models_db.rollups import advance, advance_aside
from models_db.tables import Job, JobState, WorkerState
from models_db.upkeep import UpkeepThread
from models_db.workers import (
    LONGEST_START_S,
    NewSample,
    NewWorker,
    WorkerDetails,
    job_owners,
    set_worker_state,
    unended_workers,
)
from models_db.writer import DatabaseThread
from workers.metrics import MetricsServer
from workers.settings import Settings

logger = get_logger(__name__)

_COUNT_TIMEOUT_S = 2.0
_ROLL_UP_EVERY_S = 60.0
_ROLL_UP_AT_ONCE = timedelta(minutes=10)  # so that the thread is soon back


class DeclaredDeadError(TokenmillError):
    """Others hold this incarnation for dead and take its jobs over; it must start anew."""

    code = "declared_dead"


class HeartbeatError(TokenmillError):
    """This incarnation can show no longer that it lives; it must start anew."""

    code = "heartbeat"


class DeathWatch:
    """Who is dead: whose counter has not moved for ``dead_after_s`` on our own monotonic clock.

    No clock of anyone else is looked at. After a gap in our own sight every worker gets its full time again: we were
    blind, they need not have been still. But once only for each value of its counter, and of further gaps
    ``longest_gap_s`` counts: looks that are always late find the dead later, not never.
    """

    def __init__(self, dead_after_s: float, longest_gap_s: float) -> None:
        self._dead_after = dead_after_s
        self._longest_gap = longest_gap_s
        self._seen: dict[str, _Still] = {}
        self._last_look: float | None = None

    def look(self, counters: Mapping[str, int], now: float) -> frozenset[str]:
        """Take note of the counters of all workers that claim to live; returns those that do not."""
        gap = 0.0 if self._last_look is None else now - self._last_look
        self._last_look = now
        seen = {}
        for worker_id, counter in counters.items():
            before = self._seen.get(worker_id)
            if before is None or before.counter != counter:
                before = _Still(counter, now)
            elif gap > self._longest_gap and not before.excused:
                before = _Still(counter, now, excused=True)
            elif gap > self._longest_gap:
                before = replace(before, since=before.since + gap - self._longest_gap)
            seen[worker_id] = before
        self._seen = seen
        return frozenset(
            worker_id for worker_id, still in seen.items() if now - still.since > self._dead_after
        )


@dataclass(frozen=True, slots=True)
class _Still:
    """A counter, and since when it has not moved as far as we can tell."""

    counter: int
    since: float
    excused: bool = False  # it has had its full time again after a gap


@dataclass(frozen=True, slots=True)
class _Sight:
    """What one look at the database shows."""

    counters: dict[str, int]  # of all that claim to live
    starting: set[str]  # those of them that still load their model
    owners: set[str]  # of running jobs
    cancelled: list[str]  # our jobs that someone wants cancelled
    owned: dict[str, int] = field(default_factory=dict)  # our jobs, with their attempts


class Incarnation:
    """The life of one worker process as the database sees it.

    Args:
        on_cancel: takes ids of jobs of ours that carry the cancel flag; called on the database thread.
        on_dead: called when others hold us for dead, on the database thread; or when this cannot go on, on its own.
        on_gone: takes ids of other incarnations that are dead, or have stopped and left jobs behind; called on
            the database thread, again each time until they are buried.
        on_owned: takes the jobs that we own, with their attempts, after each look; called on the database thread.
        engine_lives: asked when others hold us for dead: only then is none of our jobs to blame.
    """

    def __init__(
        self,
        settings: Settings,
        row: NewWorker,
        *,
        on_cancel: Callable[[Collection[str]], None],
        on_dead: Callable[[TokenmillError], None],
        on_gone: Callable[[Collection[str]], None] = lambda worker_ids: None,
        on_owned: Callable[[Mapping[str, int]], None] = lambda attempts: None,
        engine_lives: Callable[[], bool] = lambda: True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.id = row.id
        self._settings = settings
        self._on_cancel = on_cancel
        self._on_dead = on_dead
        self._on_gone = on_gone
        self._on_owned = on_owned
        self._engine_lives = engine_lives
        self._blameless: bool | None = None  # known once others hold us for dead
        self._clock = clock
        gap = settings.dead_after_s / 2
        gap = max(gap, 2 * settings.heartbeat_interval_s)
        self._watch = DeathWatch(settings.dead_after_s, gap)
        # Loading may hold everything up for long, and who loads owns no job yet.
        self._starting_watch = DeathWatch(max(LONGEST_START_S, settings.dead_after_s), gap)
        self._db: DatabaseThread | None = None
        self._upkeep: UpkeepThread | None = None
        self._backend: Backend | None = None
        self._dead: frozenset[str] = frozenset()
        self._counter = 0
        self._alive_at = clock()
        self._beating: Future[Any] | None = None
        self._looking: Future[Any] | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._sampler: Sampler | None = None
        self._metrics: MetricsServer | None = None
        self._rolling: Future[bool] | None = None
        self._behind = False

    def dead_ids(self) -> frozenset[str]:
        """Incarnations whose jobs may be taken over; for the claim, from any thread."""
        return self._dead

    def silence_s(self) -> float:
        """Seconds since the database took a heartbeat, by which others judge, too; from any thread."""
        return self._clock() - self._alive_at

    def start(self, db: DatabaseThread, upkeep: UpkeepThread) -> None:
        """Begin to beat, before the model is loaded: loading can take longer than death.

        Args:
            upkeep: rolls up and counts, which takes the longer, the more jobs there are.
        """
        self._db = db
        self._upkeep = upkeep
        self._thread = threading.Thread(target=self._loop, name="heartbeat", daemon=True)
        self._thread.start()

    def online(self, backend: Backend) -> None:
        """The backend is loaded: say what it is, and sample it from now on.

        Raises:
            ConfigurationError: metrics are asked for and cannot be served.
        """
        info = backend.info()
        details = WorkerDetails(info.device, info.dtype, info.slots, dict(info.details))
        self._set_state(WorkerState.ONLINE, details)
        self._sampler = Sampler(self.id, self._clock(), backend.stats())
        self._backend = backend
        if self._settings.metrics_port is not None and self._db is not None:
            db = self._db
            self._metrics = MetricsServer(
                self._settings.metrics_host,
                self._settings.metrics_port,
                worker=self._settings.worker_name,
                info=info,
                stats=backend.stats,
                database=lambda: (db.healthy, db.pending),
                callbacks=self._callbacks,
            )

    def draining(self) -> None:
        """A shutdown has begun."""
        self._set_state(WorkerState.DRAINING)

    def stop(self) -> None:
        """Write the last sample and the end. The database thread commits them when it stops."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        if self._metrics is not None:
            self._metrics.close()
        self._absolve()
        self._sample()
        self._roll_up_present()
        self._set_state(WorkerState.STOPPED)

    def beat(self) -> None:
        """One heartbeat and one look around; each is left out while the last one is not committed.

        A heartbeat goes ahead of all that waits for the database, and so must not wait for a look, which does not.
        """
        if self._db is None:
            return
        if self._beating is None or self._beating.done():
            self._counter += 1
            self._beating = self._db.heartbeat(self._counter)
            self._beating.add_done_callback(self._on_alive)
        if self._looking is None or self._looking.done():
            self._looking = self._db.call(self._look)
            self._looking.add_done_callback(self._on_look)

    # ------------------------------------------------------------------------------------------------ internals

    def _loop(self) -> None:
        try:
            self._live()
        except Exception as exc:
            # Without a heartbeat others take our jobs over soon: better to hand them back now and to start anew.
            logger.critical("Fault in the heartbeat: %r", exc, exc_info=exc)
            self._on_dead(HeartbeatError(f"the heartbeat has ended with {type(exc).__name__}"))

    def _live(self) -> None:
        next_sample = self._clock() + self._settings.sample_interval_s
        next_roll_up = self._clock() + _ROLL_UP_EVERY_S
        while True:
            self.beat()
            if self._clock() >= next_sample:
                self._sample()
                next_sample += self._settings.sample_interval_s
            if self._behind or self._clock() >= next_roll_up:
                self._roll_up()
                next_roll_up = self._clock() + _ROLL_UP_EVERY_S
            if self._stop.wait(self._settings.heartbeat_interval_s):
                return

    def _look(self, conn: Connection) -> _Sight:
        # Owners first: one that registers between the two looks must not seem to be gone.
        owners = job_owners(conn)
        workers = unended_workers(conn)
        owned = select(Job.id, Job.attempt).where(Job.owner == self.id, Job.state == JobState.RUNNING)
        return _Sight(
            {worker.id: worker.heartbeat for worker in workers},
            {worker.id for worker in workers if worker.state is WorkerState.STARTING},
            owners,
            cancelled_running(conn, self.id),
            {row.id: row.attempt for row in conn.execute(owned)},
        )

    def _on_look(self, future: Future[_Sight]) -> None:
        if future.exception() is not None:
            return
        sight = future.result()
        now = self._clock()
        starting = {worker_id: sight.counters[worker_id] for worker_id in sight.starting}
        silent = (self._watch.look(sight.counters, now) - sight.starting) - {self.id}
        silent |= self._starting_watch.look(starting, now) - {self.id}
        gone = sight.owners - sight.counters.keys() - {self.id}  # stopped, or found dead by others
        for worker_id in sorted(silent - self._dead):
            logger.warning("Worker %s is dead: its heartbeat stands still", worker_id)
        self._dead = silent
        if silent or gone:
            self._on_gone(silent | gone)
        if sight.cancelled:
            self._on_cancel(sight.cancelled)
        self._on_owned(sight.owned)

    def _on_alive(self, future: Future[WorkerState | None]) -> None:
        if future.exception() is not None:
            return
        if future.result() is not WorkerState.DEAD:
            self._alive_at = self._clock()
        elif not self._stop.is_set():
            if self._blameless is None:
                self._blameless = self._engine_lives()
            self._absolve()  # with each heartbeat: more may have been counted since
            self._on_dead(DeclaredDeadError(HELD_FOR_DEAD))

    def _absolve(self) -> None:
        if not self._blameless or self._db is None:
            return
        with suppress(WriterStoppedError):
            self._db.call(partial(absolve, worker_id=self.id)).add_done_callback(_report_absolved)

    def _set_state(self, state: WorkerState, details: WorkerDetails | None = None) -> None:
        if self._db is not None:
            with suppress(WriterStoppedError):
                self._db.call(lambda conn: set_worker_state(conn, self.id, state, details=details))

    def _sample(self) -> None:
        if self._db is None or self._backend is None or self._sampler is None:
            return
        if sample := self._sampler.sample(self._clock(), self._backend.stats()):
            with suppress(WriterStoppedError):
                # By the clock of all stored times.
                self._db.sample(replace(sample, sampled_at=self._db.now()))

    def _callbacks(self) -> Mapping[str, int] | None:
        """For the metrics, on their thread; ``None`` where there are none, or the database has no time for it."""
        if not self._settings.callback_hosts or self._db is None or not self._db.healthy:
            return None
        if self._upkeep is None:
            return None
        try:
            return self._upkeep.call(callback_counts).result(_COUNT_TIMEOUT_S)
        except Exception:  # a scrape without these numbers is better than none
            return None

    def _roll_up(self) -> None:
        """Every worker offers this each minute, and the first one does it for all.

        Beside the database thread, which goes on claiming meanwhile: a minute of 10,000 jobs takes a quarter of a
        second (``benchmarks.rollup_sqlite``), and after a break up to ten minutes come at once.
        """
        if self._upkeep is None or (self._rolling is not None and not self._rolling.done()):
            return
        self._behind = False
        with suppress(WriterStoppedError):
            self._rolling = self._upkeep.submit(partial(advance_aside, longest=_ROLL_UP_AT_ONCE))
            self._rolling.add_done_callback(self._on_rolled_up)

    def _roll_up_present(self) -> None:
        """At the end, when nothing is claimed any more: with the last sample, which the same thread writes first."""
        if self._db is None:
            return
        with suppress(WriterStoppedError):
            rolled = self._db.call(partial(advance, longest=_ROLL_UP_AT_ONCE, with_present=True))
            rolled.add_done_callback(self._on_rolled_up)

    def _on_rolled_up(self, future: Future[bool]) -> None:
        if future.cancelled() or isinstance(error := future.exception(), WriterStoppedError):
            return
        if error is None:
            self._behind = future.result()
        elif classify(error) is not Fault.AWAY:  # which the database thread tells
            logger.error("The roll-ups could not be computed and are tried again: %s", summary(error))


def _report_absolved(future: Future[list[str]]) -> None:
    if future.cancelled() or isinstance(error := future.exception(), WriterStoppedError):
        return
    if error is not None:
        logger.error("That jobs were present at a death which was none is not taken back: %s", summary(error))
    elif jobs := future.result():
        logger.warning("This worker lives: its death no longer counts against %d jobs", len(jobs))


class Sampler:
    """Turns a backend's growing counters into rows of ``engine_sample``."""

    def __init__(self, worker_id: str, now: float, stats: BackendStats) -> None:
        self._worker_id = worker_id
        self._at = now
        self._before = stats

    def sample(self, now: float, stats: BackendStats) -> NewSample | None:
        """The interval since the last call; none when no time has passed."""
        interval = now - self._at
        if interval <= 0:
            return None
        before, self._before, self._at = self._before, stats, now
        busy = max(0.0, stats.busy_s - before.busy_s)
        used = 1 - stats.kv_blocks_free / stats.kv_blocks_total if stats.kv_blocks_total else 0.0
        return NewSample(
            worker_id=self._worker_id,
            interval_s=interval,
            running=stats.running,
            waiting=stats.waiting,
            prompt_tokens=stats.prompt_tokens - before.prompt_tokens,
            cached_tokens=stats.cached_tokens - before.cached_tokens,
            generated_tokens=stats.generated_tokens - before.generated_tokens,
            steps=stats.steps - before.steps,
            requests_finished=stats.requests_finished - before.requests_finished,
            requests_failed=stats.requests_failed - before.requests_failed,
            preemptions=stats.preemptions - before.preemptions,
            busy_s=busy,
            prepare_s=max(0.0, stats.prepare_s - before.prepare_s),
            active_fraction=min(1.0, busy / interval),
            kv_used_fraction=min(1.0, max(0.0, used)),
        )


def new_worker(settings: Settings) -> NewWorker:
    """The row of this process as it starts."""
    config = settings.engine_config
    try:
        release = version("tokenmill")
    except PackageNotFoundError:
        release = "unknown"
    return NewWorker(
        name=settings.worker_name,
        host=socket.gethostname(),
        pid=os.getpid(),
        version=release,
        backend=settings.backend,
        model=settings.model,
        device=config.device,
        dtype=config.dtype,
        slots=config.max_num_seqs,
        config=config.model_dump(mode="json"),
    )
