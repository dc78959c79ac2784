"""The combined run: two workers, thousands of jobs, and every fault at random moments of one seed."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import redis
from kombu.exceptions import OperationalError
from sqlalchemy.exc import DBAPIError

from models_db.errors import DatabaseError
from tests.chaos.disks import NoFullDiskError, SmallDisk, small_disk
from tests.chaos.faults import Faults
from tests.chaos.jobs import CANCELLABLE, FAILS, Expected
from tests.chaos.plan import FAULTS, NotDoneError, Plan, Step, make_plan
from tests.chaos.verdict import Tally, Verdict
from tests.chaos.world import World, world
from tests.servers import Kind

JOBS_A_MINUTE = 400  # of 2 workers: 2 x 2,000 in ten minutes
TOKENS_PER_S = 20
GRACE_S = 5.0
STALL_S = 120.0  # a prompt that kills costs some minutes of one worker after the other
_DISK_KIB = 4096
# What a fault of one server meets while another fault has taken that away.
_AWAY = (redis.RedisError, OperationalError, DatabaseError, DBAPIError, OSError)


def run_combined(
    folder: Path,
    *,
    seed: int,
    seconds: float,
    jobs: int | None = None,
    database: Kind = "postgresql",
    kinds: Iterable[str] = FAULTS,
    real: bool = False,
    say: Callable[[str], None] = lambda text: None,
) -> Verdict:
    """Make the plan of ``seed``, carry it out on a new world, and judge. SQLite has no server that could fail.

    ``real`` puts the asynchronous engine with a tiny model in the place of the echo.
    """
    kinds = [kind for kind in kinds if database != "sqlite" or not kind.startswith("database")]
    plan = make_plan(seed, seconds, jobs or int(JOBS_A_MINUTE * seconds / 60), kinds)
    engine = {"echo_tokens_per_s": TOKENS_PER_S, "max_num_seqs": 8 if real else 32}
    options: dict[str, Any] = {
        "engine": engine,
        "backend": "tests.chaos.backends:paced_engine" if real else "tests.chaos.backends:aborts",
        "shutdown_grace_s": GRACE_S,
        "restart_backoff_max_s": 2.0,  # for a worker that is killed every few seconds on purpose
    }
    with contextlib.ExitStack() as stack:
        disk = None
        try:
            disk = stack.enter_context(small_disk(folder / "disk", _DISK_KIB))
        except NoFullDiskError as exc:
            say(f"NOT TESTED: A FULL DISK: {exc}")
        spool = folder / "spool" if disk is None else disk.folder / "spool"
        made = stack.enter_context(
            world(folder, database, persistent=True, real=real, spool_dir=str(spool), **options),
        )
        made.workers(2, supervised=True)
        return Run(made, plan, say, disk).carry_out()


class Run:
    """Carries out a plan: arrivals on one thread, each fault on one of its own, so that faults may overlap."""

    def __init__(
        self, world: World, plan: Plan, say: Callable[[str], None], disk: SmallDisk | None = None
    ) -> None:
        self._world = world
        self._faults = Faults(world, disk)
        self._tally = Tally()
        self._plan = plan
        self._say = say
        self._threads: list[threading.Thread] = []
        self._failures: list[BaseException] = []
        # What one fault has stopped another one must not start.
        self._locks = {"redis": threading.Lock(), "database": threading.Lock()}

    def carry_out(self) -> Verdict:
        """All of it; the verdict."""
        begun = time.monotonic()
        self._spawn(self._arrive, begun)
        for step in self._plan.steps:
            time.sleep(max(0.0, begun + step.at - time.monotonic()))
            self._say(str(step))
            self._spawn(self._do, step)
        for thread in self._threads:
            thread.join()
        if self._failures:
            raise self._failures[0]
        # A worker may store what it could not read, as failed.
        for job_id in self._unknown() - self._faults.for_later:
            self._world.expected[job_id] = Expected(None, FAILS | CANCELLABLE)
        verdict = self._world.finish(STALL_S, for_later=self._faults.for_later)
        verdict.tally = self._tally
        return verdict

    def _spawn(self, work: Callable[..., None], *args: Any) -> None:
        def run() -> None:
            try:
                work(*args)
            except BaseException as exc:
                self._failures.append(exc)

        thread = threading.Thread(target=run, name=work.__name__)
        self._threads.append(thread)
        thread.start()

    def _arrive(self, begun: float) -> None:
        for arrival in self._plan.arrivals:
            time.sleep(max(0.0, begun + arrival.at - time.monotonic()))
            self._world.submit(arrival.requests)

    def _unknown(self) -> set[str]:
        return self._world.states().keys() - self._world.expected.keys()

    # -------------------------------------------------------------------------------------------------- faults

    def _do(self, step: Step) -> None:
        """Do it and undo it, and note whether it happened. What another fault has taken away it cannot ask."""
        try:
            with contextlib.ExitStack() as stack:
                if lock := self._locks.get(step.kind.partition("_")[0]):
                    stack.enter_context(lock)
                if step.lasts:
                    stack.enter_context(self._world.fault(step.kind))
                self._faults.do(step)
        except (NotDoneError, *_AWAY) as exc:
            why = str(exc) if isinstance(exc, NotDoneError) else f"{exc!r:.100}"
            self._say(f"        {step.kind} did not happen: {why}")
            self._tally.missed(step.kind, why)
        else:
            self._tally.happened(step.kind)
