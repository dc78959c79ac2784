"""The combined run: two workers, thousands of jobs, and every fault at random moments of one seed."""

from __future__ import annotations

import base64
import contextlib
import json
import random
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import redis

from models_db.errors import DatabaseError
from models_db.jobs import request_cancel
from models_db.session import transaction
from tests.chaos.backends import POISON
from tests.chaos.clocks import NoClockShiftError, shifted
from tests.chaos.disks import NoFullDiskError, SmallDisk, small_disk
from tests.chaos.jobs import CANCELLABLE, FAILS, Expected
from tests.chaos.plan import FAULTS, Plan, Step, make_plan
from tests.chaos.seats import Seat
from tests.chaos.services import drop_clients
from tests.chaos.sweepers import Elected, sweeping
from tests.chaos.verdict import Verdict
from tests.chaos.world import MODEL, World, world
from tests.servers import Kind
from workers.payload import GeneratePayload, build_message

JOBS_A_MINUTE = 400  # of 2 workers: 2 x 2,000 in ten minutes
TOKENS_PER_S = 20
GRACE_S = 5.0
STALL_S = 120.0  # a prompt that kills costs some minutes of one worker after the other
_DISK_KIB = 4096
_SOME = 20  # rows that a fault of messages or jobs touches at most


def run_combined(
    folder: Path,
    *,
    seed: int,
    seconds: float,
    jobs: int | None = None,
    database: Kind = "postgresql",
    kinds: Iterable[str] = FAULTS,
    say: Callable[[str], None] = lambda text: None,
) -> Verdict:
    """Make the plan of ``seed``, carry it out on a new world, and judge. SQLite has no server that could fail."""
    kinds = [kind for kind in kinds if database != "sqlite" or not kind.startswith("database")]
    plan = make_plan(seed, seconds, jobs or int(JOBS_A_MINUTE * seconds / 60), kinds)
    engine = {"echo_tokens_per_s": TOKENS_PER_S, "max_num_seqs": 32}
    options: dict[str, Any] = {
        "engine": engine,
        "backend": "tests.chaos.backends:aborts",
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
            world(folder, database, persistent=True, spool_dir=str(spool), **options),
        )
        made.workers(2, supervised=True)
        return Run(made, plan, say, disk).carry_out()


class Run:
    """Carries out a plan: arrivals on one thread, each fault on one of its own, so that faults may overlap."""

    def __init__(
        self, world: World, plan: Plan, say: Callable[[str], None], disk: SmallDisk | None = None
    ) -> None:
        self._world = world
        self._disk = disk  # of the spools
        self._for_later = 0  # messages of a later version, which nobody here may take
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
        for job_id in self._unknown():  # a worker may store what it could not read, as failed
            self._world.expected[job_id] = Expected(None, FAILS | CANCELLABLE)
        return self._world.finish(STALL_S, left_in_queue=self._for_later)

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
        """Do it and undo it. What asks a server that another fault has taken away is left out."""
        rng = random.Random(step.draw)
        act = getattr(self, f"_{step.kind}")
        with contextlib.ExitStack() as stack:
            if lock := self._locks.get(step.kind.partition("_")[0]):
                stack.enter_context(lock)
            if step.lasts:
                stack.enter_context(self._world.fault(step.kind))
            try:
                act(step, rng)
            except (redis.RedisError, DatabaseError, OSError) as exc:
                self._say(f"        {step.kind} was not possible: {exc!r:.100}")

    def _seat(self, rng: random.Random) -> Seat:
        return rng.choice(self._world.seats)

    def _some_jobs(self, rng: random.Random) -> list[str]:
        """Ids of jobs in any state."""
        ids = sorted(self._world.expected.copy())
        return rng.sample(ids, min(len(ids), _SOME))

    def _kill_one(self, step: Step, rng: random.Random) -> None:
        self._world.kill(self._seat(rng))

    def _kill_all(self, step: Step, rng: random.Random) -> None:
        self._world.kill(*self._world.seats)

    def _freeze_past_death(self, step: Step, rng: random.Random) -> None:
        seat = self._seat(rng)
        pid = seat.signal(signal.SIGSTOP)
        if pid is not None:
            self._world.harmed.add(pid)
        time.sleep(step.lasts)
        if pid is not None and seat.pid() == pid:
            seat.signal(signal.SIGCONT)

    _freeze_shortly = _freeze_past_death

    def _redis_kill(self, step: Step, rng: random.Random) -> None:
        self._world.redis.kill(keep=step.kind == "redis_kill")
        time.sleep(step.lasts)
        self._world.redis.start()

    _redis_wipe = _redis_kill

    def _redis_held(self, step: Step, rng: random.Random) -> None:
        """A worker stops, frozen or for good, when it has popped a message and is about to note it."""
        seat = self._seat(rng)
        held = self._world.redis_proxy.hold(b"HSET")
        held.wait(step.lasts / 4)
        if rng.random() < 0.5:
            self._world.kill(seat)
            self._world.redis_proxy.release()
            self._world.redis_proxy.cut()
        else:
            pid = seat.signal(signal.SIGSTOP)
            if pid is not None:
                self._world.harmed.add(pid)
            self._world.redis_proxy.release()
            time.sleep(step.lasts * 3 / 4)
            if pid is not None and seat.pid() == pid:
                seat.signal(signal.SIGCONT)

    def _redis_cuts(self, step: Step, rng: random.Random) -> None:
        for _ in range(20):
            (self._world.redis_proxy.cut if rng.random() < 0.5 else self._world.redis.cut)()
            time.sleep(step.lasts / 20)

    def _database_stop(self, step: Step, rng: random.Random) -> None:
        server = self._world.server
        assert server is not None
        server.stop()
        time.sleep(step.lasts)
        server.start()

    def _database_disk(self, step: Step, rng: random.Random) -> None:
        """The disk of the spools is full while the database is stopped."""
        if self._disk is not None:
            self._disk.fill()
        self._database_stop(step, rng)
        if self._disk is not None:
            self._disk.clear()

    def _database_cuts(self, step: Step, rng: random.Random) -> None:
        proxy = self._world.database_proxy
        assert proxy is not None
        for _ in range(20):
            if rng.random() < 0.5:
                proxy.cut()
            else:
                drop_clients(self._world.engine)
            time.sleep(step.lasts / 20)

    def _database_hang(self, step: Step, rng: random.Random) -> None:
        proxy = self._world.database_proxy
        assert proxy is not None
        proxy.freeze()
        time.sleep(step.lasts)
        proxy.forward()

    def _warm_restart(self, step: Step, rng: random.Random) -> None:
        self._seat(rng).replace()
        time.sleep(step.lasts)

    def _cold_restart(self, step: Step, rng: random.Random) -> None:
        self._seat(rng).replace(cold=True)
        time.sleep(step.lasts)

    def _wrong_clock(self, step: Step, rng: random.Random) -> None:
        """From now until its next restart a worker's wall clock is an hour ahead or behind."""
        try:
            variables = shifted(rng.choice((3600, -3600)), self._world.folder)
        except NoClockShiftError as exc:
            self._say(f"        NOT TESTED: WRONG WALL CLOCKS: {exc}")
            return
        self._seat(rng).replace(variables)
        time.sleep(step.lasts)

    def _sweepers(self, step: Step, rng: random.Random) -> None:
        """Two more that sweep beside the workers' own."""
        world = self._world
        with contextlib.ExitStack() as stack:
            for number in range(2):
                view = Elected(world.app.connection_for_write, world.queue)
                stack.enter_context(sweeping(view, world.database_url, world.queue, f"more-{number}"))
            time.sleep(step.lasts)

    def _duplicates(self, step: Step, rng: random.Random) -> None:
        self._world.publish_again(self._some_jobs(rng) * rng.randint(1, 3))

    def _revokes(self, step: Step, rng: random.Random) -> None:
        ids = self._some_jobs(rng)
        self._may_be_cancelled(ids)
        with contextlib.suppress(OSError):
            self._world.app.control.revoke(ids, terminate=rng.random() < 0.5)

    def _cancels(self, step: Step, rng: random.Random) -> None:
        ids = self._some_jobs(rng)
        self._may_be_cancelled(ids)
        transaction(self._world.engine, lambda conn: request_cancel(conn, ids))

    def _may_be_cancelled(self, ids: list[str]) -> None:
        for job_id in ids:
            self._world.expected[job_id].states |= CANCELLABLE

    def _garbage(self, step: Step, rng: random.Random) -> None:
        settings = self._world.client.settings
        payload = GeneratePayload.parse({"model": MODEL, "prompt": "unread", "max_tokens": 2})
        for body in ("%%%", "bm8ganNvbg==", ""):
            job_id = str(uuid.UUID(int=rng.getrandbits(128)))
            self._world.push_message(build_message(job_id, payload, settings) | {"body": body})

    def _newer_version(self, rng: random.Random) -> dict[str, Any]:
        settings = self._world.client.settings
        payload = GeneratePayload.parse({"model": MODEL, "prompt": "unread", "max_tokens": 2})
        body = json.dumps([[{"version": 2, "model": MODEL, "novelty": True}], {}, {}])
        message = build_message(str(uuid.UUID(int=rng.getrandbits(128))), payload, settings)
        return message | {"body": base64.b64encode(body.encode()).decode()}

    def _newer(self, step: Step, rng: random.Random) -> None:
        self._for_later += 1
        self._world.push_message(self._newer_version(rng))

    def _lost_messages(self, step: Step, rng: random.Random) -> None:
        """Some messages vanish from the queue, as an eviction or an operator's mistake would have it."""
        for _ in range(_SOME):
            self._world.redis.client.rpop(self._world.queue)

    def _unpublished(self, step: Step, rng: random.Random) -> None:
        requests = [
            {"prompt": f"unseen {rng.random()}", "max_tokens": rng.randint(1, 20)} for _ in range(_SOME)
        ]
        self._world.insert_only(requests)

    def _poison(self, step: Step, rng: random.Random) -> None:
        self._world.submit([{"prompt": f"{POISON} {rng.random()}", "max_tokens": 5}], states=FAILS)
