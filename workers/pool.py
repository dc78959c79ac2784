"""Celery's pool, which runs jobs in a backend instead of threads or processes.

``on_apply`` only puts a delivery into the table (``workers.delivery``). The rest of this file brings a worker up
(schema, row, heartbeat, backend) and down (drain, hand back, commit) in the order that loses nothing.
"""

from __future__ import annotations

import gc
import os
import time
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from celery.concurrency.base import BasePool
from celery.exceptions import CPendingDeprecationWarning, WorkerShutdown
from celery.signals import worker_process_init, worker_process_shutdown
from celery.utils.log import get_logger
from celery.worker import state
from sqlalchemy import Engine

from backend.api import Backend, ConfigurationError, EngineDeadError, TokenmillError
from backend.registry import create_backend
from models_db.claims import accept
from models_db.errors import DatabaseError, DatabaseUnavailableError
from models_db.faults import summary
from models_db.jobs import mark_callbacks_sent
from models_db.planner import Planner
from models_db.schema import check_schema
from models_db.session import make_engine, transaction
from models_db.upkeep import UpkeepThread
from models_db.workers import register_worker
from models_db.writer import DatabaseThread
from workers.banner import banner
from workers.broker import stream_connection
from workers.delivery import DeliveryTable
from workers.exits import EXIT_CONFIGURATION, EXIT_ENGINE_DEAD, EXIT_TRY_AGAIN
from workers.finaliser import Finaliser, Threads
from workers.foreign import ForeignResult, ForeignTasks
from workers.in_hand import job_in_hand
from workers.incarnation import Incarnation, new_worker
from workers.intake import Call, Delivery
from workers.late_commands import LateCommands
from workers.leftovers import replay
from workers.mailbox import Mailbox
from workers.payload import TASK_NAME, queue_for
from workers.queues import QueueView
from workers.redaction import redact_text
from workers.revokes import Revokes, store_revokes
from workers.settings import Settings
from workers.spool import Spool, default_folder
from workers.stream_writer import StreamWriter
from workers.sweeper import Sweeper
from workers.tasks import GenerateTask
from workers.watchdog import Watchdog, stop_backend

logger = get_logger(__name__)

_LAST_COMMITS_S = 10.0  # after the grace: for releases and commits that are on their way
_BACKEND_STOP_S = 30.0  # once nothing runs in it any more
_HUB_TIMERS_S = 0.25


class EnginePool(BasePool):  # type: ignore[misc]
    """See the module. Everything here runs on the main thread."""

    signal_safe = False
    body_can_be_buffer = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.mailbox = Mailbox()
        self._hub: Any = None
        self._commands: LateCommands | None = None
        self._stopped = False
        self._next_timers = 0.0
        self._foreign = ForeignTasks(self.mailbox.post)
        self._backend: Backend | None = None
        self._engine: Engine | None = None
        self._db: DatabaseThread | None = None
        self._upkeep: UpkeepThread | None = None
        self._table: DeliveryTable | None = None
        self._threads: Threads | None = None
        self._incarnation: Incarnation | None = None
        self._sweeper: Sweeper | None = None
        self._spool: Spool | None = None
        self._channel: Any = None
        self._paused = False
        self._streams: StreamWriter | None = None
        self._watchdog: Watchdog | None = None
        self._stuck = False
        self._planner: Planner | None = None

    @property
    def hung(self) -> bool:
        """Whether the engine's thread hangs, so that the process can only be ended by force."""
        return self._stuck or (self._watchdog is not None and self._watchdog.stalled)

    @property
    def settings(self) -> Settings:
        """The application's settings."""
        settings: Settings = self.app.settings
        return settings

    # --------------------------------------------------------------------------------------------------- start

    def on_start(self) -> None:
        try:
            self._start()
        except (ConfigurationError, DatabaseError) as exc:
            logger.critical("The worker cannot start: %s", redact_text(str(exc)))
            self._tear_down()
            away = isinstance(exc, DatabaseUnavailableError)
            raise WorkerShutdown(EXIT_TRY_AGAIN if away else EXIT_CONFIGURATION) from exc
        except BaseException:
            self._tear_down()
            raise

    def _start(self) -> None:
        # About cancelling jobs when a connection is lost, which workers.app decides against on purpose. Celery
        # turns these warnings on itself, before the pool starts.
        warnings.filterwarnings("ignore", category=CPendingDeprecationWarning)
        settings = self.settings
        # As Celery's other pools: what must be set up where tasks run listens to it, such as OpenTelemetry.
        worker_process_init.send(sender=None)
        # Who freezes within a transaction must not keep others from its jobs for longer than it takes to be missed.
        idle_s = settings.dead_after_s / 2
        # Nor must anybody's locks keep its heartbeats back for so long.
        engine = self._engine = make_engine(
            settings.database_url, idle_in_transaction_s=idle_s, lock_wait_s=idle_s / 2
        )
        check_schema(engine)
        row = new_worker(settings)
        transaction(engine, partial(register_worker, worker=row))
        folder = settings.spool_dir or default_folder()
        replay(engine, folder, settings.worker_name)
        max_bytes = int(settings.spool_max_mb * 1_000_000)
        spool = self._spool = Spool(folder, settings.worker_name, row.id, max_bytes)
        incarnation = self._incarnation = Incarnation(
            settings,
            row,
            on_cancel=self._on_cancel_flags,
            on_dead=self._on_declared_dead,
            on_gone=self._on_gone,
            on_owned=self._on_owned,
            engine_lives=self._engine_lives,
        )
        db = self._db = DatabaseThread(
            engine, row.id, dead_ids=incarnation.dead_ids, on_health=self._on_database_health
        )
        db.start()
        upkeep = self._upkeep = UpkeepThread(engine)
        upkeep.start()
        incarnation.start(db, upkeep)
        view = QueueView(self.app.connection_for_write, queue_for(settings.model))
        sweeper = self._sweeper = Sweeper(db, view, incarnation.id, queue_for(settings.model), looks=upkeep)
        sweeper.start()
        self._planner = Planner(engine)
        self._planner.start()
        backend = self._backend = create_backend(settings.backend, settings.engine_config)
        logger.info("Loading model %s in backend %s", settings.model, settings.backend)
        backend.start()
        # A full collection would look through all that was loaded, a third of a second in which no thread runs.
        gc.collect()
        gc.freeze()
        incarnation.online(backend)
        threads = self._threads = Threads(settings.finaliser_threads)
        threads.start()
        task: GenerateTask = self.app.tasks[TASK_NAME]

        def mark_told(job_id: str) -> Future[None]:
            return db.call(partial(mark_callbacks_sent, ids=[job_id]))

        table = self._table = DeliveryTable(
            settings,
            db,
            backend,
            Finaliser(task, threads, self.mailbox.post, mark_told),
            self.mailbox.post,
            self._on_fatal,
            streams=self._start_streams(),
            announce=sweeper.announce,
            pause=self._pause,
            worker_id=incarnation.id,
            spool=spool,
            silence_s=incarnation.silence_s,
            now=db.now,
        )
        table.start()
        task.deliveries = table
        backend.add_death_callback(table.fail)
        if settings.engine_stall_s:
            self._watchdog = Watchdog(backend.stats, table.fail, settings.engine_stall_s)
            self._watchdog.start()
        logger.info("%s", banner(settings, backend.info(), incarnation.id))

    def _start_streams(self) -> StreamWriter | None:
        settings = self.settings
        try:
            connection = stream_connection(settings.broker_url)
        except ConfigurationError as exc:  # sentinel
            logger.warning("No token streams are written, their readers get answers whole: %s", exc)
            return None
        streams = self._streams = StreamWriter(
            connection,
            interval_s=settings.stream_interval_s,
            expires_s=settings.stream_expires_s,
            max_entries=settings.stream_max_entries,
        )
        streams.start()
        return streams

    def register_with_event_loop(self, hub: Any) -> None:
        self._hub = hub
        self.mailbox.attach(hub)

    def attach_consumer(self, consumer: Any) -> None:
        """Celery's consumer, whose commands are heard here while this drains."""
        self._commands = LateCommands(consumer)

    def attach_channel(self, channel: Any) -> None:
        """The channel that deliveries come from, after each connection to the broker."""
        self._channel = channel
        channel.fetching = True
        self.mailbox.around = channel.qos.gathered
        channel.paused = self._paused
        channel.worker_id = "" if self._incarnation is None else self._incarnation.id
        channel.on_in_hand = self._store_in_hand

    def _store_in_hand(self, raw: bytes) -> None:
        """Accept a job whose message is only here now; see ``workers.in_hand``."""
        if self._db is None:
            return
        now = self._db.now()
        job = job_in_hand(raw, self.settings, now)
        if job is not None:
            self._db.call(partial(accept, job=job, now=now)).add_done_callback(partial(_on_accepted, job.id))

    def _pause(self, paused: bool) -> None:
        self._paused = paused
        if self._channel is not None:
            self._channel.paused = paused

    # --------------------------------------------------------------------------------------------------- apply

    def apply_async(
        self,
        target: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Delivery | ForeignResult:
        """Celery's own one logs the arguments at the level debug, with the prompt in them."""
        return self.on_apply(target, args or (), kwargs, **options)

    def on_apply(
        self,
        target: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        callback: Callable[[Any], None] | None = None,
        error_callback: Callable[[Any], None] | None = None,
        accept_callback: Callable[[int, float], None] | None = None,
        timeout_callback: Callable[[bool, float | None], None] | None = None,
        soft_timeout: float | None = None,
        timeout: float | None = None,
        **_: Any,
    ) -> Delivery | ForeignResult:
        call = Call(target, args, kwargs or {})
        if args[0] != TASK_NAME:
            assert self._threads is not None
            return self._foreign.apply(self._threads, call, callback, error_callback, accept_callback)
        assert self._table is not None
        # Celery hands bound methods of its request over; the request itself is in no argument.
        request = accept_callback.__self__  # type: ignore[union-attr]
        delivery = request.delivery = Delivery(
            request=request,
            call=call,
            accept=accept_callback,
            callback=callback,
            error_callback=error_callback,
            timeout=timeout_callback,
            soft_s=soft_timeout,
            hard_s=timeout,
        )
        self._table.deliver(delivery)
        return delivery

    def cancel_jobs(self, ids: Sequence[str]) -> None:
        """End these jobs early where they run here; for the control command."""
        if self._table is not None:
            self._table.cancel(ids)

    def terminate_revoked(self, revokes: Revokes) -> None:
        """End those of them that run here without a request of Celery's; for Celery's control commands."""
        if self._table is not None:
            self._table.terminate(revokes)

    def store_revokes(self, ids: Collection[str], terminate: bool) -> None:
        """Have SQL know that these are revoked, which outlives this process; for Celery's control commands."""
        if self._db is not None:
            store_revokes(self._db.call, ids, terminate=terminate)

    def terminate_job(self, pid: int, signal: Any = None) -> None:
        """Nothing: all jobs share this process. The job itself is ended through its apply result."""

    # ---------------------------------------------------------------------------------- news from other threads

    def _on_cancel_flags(self, ids: Any) -> None:
        if self._table is not None:
            self._table.cancel(tuple(ids))

    def _on_gone(self, worker_ids: Collection[str]) -> None:
        if self._sweeper is not None:
            self._sweeper.bury(worker_ids)

    def _on_owned(self, attempts: Mapping[str, int]) -> None:
        if self._table is not None:
            self._table.reconcile(attempts)

    def _engine_lives(self) -> bool:
        return self._table is None or not self._table.dead

    def _on_declared_dead(self, error: TokenmillError) -> None:
        if self._table is not None:
            self._table.fail(error)
        else:
            self._on_fatal(error)

    def _on_fatal(self, error: BaseException) -> None:
        code = EXIT_ENGINE_DEAD if isinstance(error, EngineDeadError) else EXIT_TRY_AGAIN
        logger.critical("The worker stops and hands its jobs back: %s: %s", type(error).__name__, error)

        def stop_worker() -> None:
            state.should_stop = code

        self.mailbox.post(stop_worker)

    def _on_database_health(self, healthy: bool, error: BaseException | None) -> None:
        if self._table is not None:
            self._table.on_database(healthy)
        if healthy:
            logger.warning("The database answers again; what waited is committed now")
        else:
            logger.error(
                "The database is away (%s). Running jobs go on and their results wait; nothing new is started",
                "" if error is None else redact_text(summary(error)),
            )

    # ---------------------------------------------------------------------------------------------------- stop

    def on_stop(self) -> None:
        if self._stopped:
            return
        self._stopped = True
        self.mailbox.detach()
        if self._table is not None:
            self._drain(self._table)
        if self._commands is not None:
            self._commands.close()
        self._tear_down()

    def on_close(self) -> None:
        """Before Celery stops to listen to commands, so that none is missed in between."""
        if self._table is not None and self._table.unfinished and not _is_cold():
            self._listen()

    def on_terminate(self) -> None:
        self.on_stop()

    def _drain(self, table: DeliveryTable) -> None:
        """Finish what runs within the grace, hand back the rest, and acknowledge all that is committed."""
        assert self._incarnation is not None
        self._incarnation.draining()
        table.close()
        end_of_grace = time.monotonic() + self.settings.shutdown_grace_s
        if table.unfinished:
            logger.info(
                "Draining %d deliveries and %d jobs for up to %gs",
                table.pending,
                table.running,
                self.settings.shutdown_grace_s,
            )
        end: float | None = None
        while table.unfinished or self._foreign.running:
            self.pump(0.05, listen=end is None and not _is_cold())
            now = time.monotonic()
            if end is None and (_is_cold() or table.dead or now >= end_of_grace):
                logger.info("Handing back %d jobs", table.running)
                table.release()
                end = now + _LAST_COMMITS_S
            if end is not None and now >= end:
                logger.error(
                    "%d deliveries are left unacknowledged and will be delivered again; %d jobs are not handed back "
                    "and will be taken over",
                    table.pending,
                    table.running,
                )
                break
        self.mailbox.run()

    def pump(self, timeout_s: float, *, listen: bool = True) -> None:
        """While the main thread drains: acknowledge, keep leases and broker heartbeats going, and do what is asked."""
        self.mailbox.run(timeout_s)
        now = time.monotonic()
        if self._hub is None or now < self._next_timers:
            return
        self._next_timers = now + _HUB_TIMERS_S
        if listen:
            self._listen()
        try:
            self._hub.fire_timers()
        except Exception as exc:
            logger.warning("A timer failed during the shutdown: %r", exc)

    def _listen(self) -> None:
        if self._commands is not None:
            self._commands.run()

    def _tear_down(self) -> None:
        if self._watchdog is not None:
            self._watchdog.stop()
        if self._table is not None:
            self._table.stop()
        if self._streams is not None:
            self._streams.stop(timeout_s=2.0)
        if self._sweeper is not None:
            self._sweeper.stop()
        if self._threads is not None:
            self._threads.stop(timeout_s=1.0)
        if self._backend is not None and not self.hung and not stop_backend(self._backend, _BACKEND_STOP_S):
            logger.critical("The engine does not stop, as if a step hangs; the process ends without it")
            self._stuck = True
        if self._upkeep is not None:
            self._upkeep.stop(timeout_s=2.0)
        if self._incarnation is not None:
            self._incarnation.stop()
        if self._db is not None:
            self._db.stop(drain=True, timeout_s=5.0)
        if self._spool is not None:
            self._spool.close()
        if self._planner is not None:
            self._planner.stop()
        if self._engine is not None:
            self._engine.dispose()
            worker_process_shutdown.send(sender=None, pid=os.getpid(), exitcode=0)
        if self.app is not None:
            self.app.tasks[TASK_NAME].deliveries = None

    # ---------------------------------------------------------------------------------------------------- info

    @property
    def num_processes(self) -> int:
        return self._backend.info().slots if self._backend is not None else int(self.limit)

    def _get_info(self) -> dict[str, Any]:
        info: dict[str, Any] = super()._get_info()
        if self._backend is None or self._table is None or self._incarnation is None or self._db is None:
            return info
        about, stats = self._backend.info(), self._backend.stats()
        return info | {
            "max-concurrency": about.slots,
            "incarnation": self._incarnation.id,
            "backend": about.backend,
            "model": about.model,
            "device": about.device,
            "running": stats.running,
            "waiting": stats.waiting,
            "requests-finished": stats.requests_finished,
            "deliveries": self._table.pending,
            "duplicates": self._table.duplicates,
            "database-healthy": self._db.healthy,
        }


def _is_cold() -> bool:
    """Whether Celery shuts down without waiting for anything."""
    return state.should_terminate not in (None, False)


def _on_accepted(job_id: str, stored: Future[None]) -> None:
    if error := stored.exception():
        logger.error(
            "The row of job %s, whose message is only here, is not stored: %s", job_id, summary(error)
        )
