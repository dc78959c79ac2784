"""Brings each fault of a plan about and undoes it, whatever happens meanwhile; says so where nothing happened."""

from __future__ import annotations

import base64
import contextlib
import json
import random
import signal
import time
import uuid
from collections.abc import Iterator
from typing import Any

from models_db.jobs import request_cancel
from models_db.session import transaction
from tests.chaos.backends import POISON
from tests.chaos.clocks import NoClockShiftError, shifted
from tests.chaos.disks import SmallDisk
from tests.chaos.jobs import CANCELLABLE, FAILS
from tests.chaos.plan import NotDoneError, Step
from tests.chaos.proxy import Proxy
from tests.chaos.seats import Seat
from tests.chaos.services import drop_clients
from tests.chaos.sweepers import Elected, sweeping
from tests.chaos.world import World
from tests.messages import build_message
from tests.servers import Server
from workers.payload import GeneratePayload

_SOME = 20  # rows that a fault of messages or jobs touches at most
_CUTS = 20


class Faults:
    """One method for each kind, of its name. Each takes as long as its step lasts.

    Args:
        disk: that of the spools, where there is a small one.
    """

    def __init__(self, world: World, disk: SmallDisk | None = None) -> None:
        self._world = world
        self._disk = disk
        self.for_later: set[str] = set()  # jobs of a later version, which nobody here may run

    def do(self, step: Step) -> None:
        """Do it and undo it.

        Raises:
            NotDoneError: it could not happen; nothing is out of order because of it.
        """
        getattr(self, step.kind)(step, random.Random(step.draw))

    # ------------------------------------------------------------------------------------------------ processes

    def kill_one(self, step: Step, rng: random.Random) -> None:
        self._kill(self._seat(rng))

    def kill_all(self, step: Step, rng: random.Random) -> None:
        self._kill(*self._world.seats)

    def freeze_past_death(self, step: Step, rng: random.Random) -> None:
        with self._frozen(self._seat(rng)):
            time.sleep(step.lasts)

    freeze_shortly = freeze_past_death

    def warm_restart(self, step: Step, rng: random.Random) -> None:
        self._replace(self._seat(rng))
        time.sleep(step.lasts)

    def cold_restart(self, step: Step, rng: random.Random) -> None:
        self._replace(self._seat(rng), cold=True)
        time.sleep(step.lasts)

    def wrong_clock(self, step: Step, rng: random.Random) -> None:
        """From now until its next restart a worker's wall clock is an hour ahead or behind."""
        try:
            variables = shifted(rng.choice((3600, -3600)), self._world.folder)
        except NoClockShiftError as exc:
            raise NotDoneError(f"NOT TESTED: WRONG WALL CLOCKS: {exc}") from None
        self._seat(rng).replace(variables)
        time.sleep(step.lasts)

    def sweepers(self, step: Step, rng: random.Random) -> None:
        """Two more that sweep beside the workers' own."""
        world = self._world
        with contextlib.ExitStack() as stack:
            for number in range(2):
                view = Elected(world.app.connection_for_write, world.queue)
                stack.enter_context(sweeping(view, world.database_url, world.queue, f"more-{number}"))
            time.sleep(step.lasts)

    # -------------------------------------------------------------------------------------------------- servers

    def redis_kill(self, step: Step, rng: random.Random) -> None:
        try:
            self._world.redis.kill(keep=step.kind == "redis_kill")
            time.sleep(step.lasts)
        finally:
            if not self._world.redis.running:
                self._world.redis.start()

    redis_wipe = redis_kill

    def redis_held(self, step: Step, rng: random.Random) -> None:
        """A worker stops, frozen or for good, when it has popped a message and is about to note it."""
        seat, kills = self._seat(rng), rng.random() < 0.5
        proxy = self._world.redis_proxy
        try:
            if not proxy.hold(b"HSET").wait(step.lasts / 4):
                raise NotDoneError("no worker took a message meanwhile")
            if kills:
                self._kill(seat)
                proxy.release()
                proxy.cut()
            else:
                with self._frozen(seat):
                    proxy.release()
                    time.sleep(step.lasts * 3 / 4)
        finally:
            proxy.release()

    def redis_cuts(self, step: Step, rng: random.Random) -> None:
        cut = 0
        for _ in range(_CUTS):
            cut += (self._world.redis_proxy.cut if rng.random() < 0.5 else self._world.redis.cut)()
            time.sleep(step.lasts / _CUTS)
        _at_least_one(cut, "nobody was connected to Redis")

    def database_stop(self, step: Step, rng: random.Random) -> None:
        server = self._server()
        try:
            server.stop()
            time.sleep(step.lasts)
        finally:
            if server.process is None:
                server.start()

    def database_disk(self, step: Step, rng: random.Random) -> None:
        """The disk of the spools is full while the database is stopped."""
        if self._disk is None:
            raise NotDoneError("NOT TESTED: A FULL DISK: there is no small one here")
        try:
            self._disk.fill()
            if not self._disk.full:
                raise NotDoneError("the disk took all that was written")
            self.database_stop(step, rng)
        finally:
            self._disk.clear()

    def database_cuts(self, step: Step, rng: random.Random) -> None:
        proxy, cut = self._database_proxy(), 0
        for _ in range(_CUTS):
            cut += proxy.cut() if rng.random() < 0.5 else drop_clients(self._world.engine)
            time.sleep(step.lasts / _CUTS)
        _at_least_one(cut, "nobody was connected to the database")

    def database_hang(self, step: Step, rng: random.Random) -> None:
        proxy = self._database_proxy()
        _at_least_one(proxy.connections, "nobody was connected to the database")
        try:
            proxy.freeze()
            time.sleep(step.lasts)
        finally:
            proxy.forward()

    # -------------------------------------------------------------------------------------------- jobs, messages

    def duplicates(self, step: Step, rng: random.Random) -> None:
        ids = self._some_jobs(rng) * rng.randint(1, 3)
        _at_least_one(self._world.publish_again(ids), "no job had a message")

    def revokes(self, step: Step, rng: random.Random) -> None:
        ids = self._some_jobs(rng)
        self._may_be_cancelled(ids)
        self._world.app.control.revoke(ids, terminate=rng.random() < 0.5)

    def cancels(self, step: Step, rng: random.Random) -> None:
        ids = self._some_jobs(rng)
        self._may_be_cancelled(ids)
        transaction(self._world.engine, lambda conn: request_cancel(conn, ids))

    def garbage(self, step: Step, rng: random.Random) -> None:
        for body in ("%%%", "bm8ganNvbg==", ""):
            self._world.push_message(self._message(rng) | {"body": body})

    def newer(self, step: Step, rng: random.Random) -> None:
        body = json.dumps([[{"version": 2, "model": self._world.model, "novelty": True}], {}, {}])
        message = self._message(rng) | {"body": base64.b64encode(body.encode()).decode()}
        self.for_later.add(message["headers"]["id"])
        self._world.push_message(message)

    def lost_messages(self, step: Step, rng: random.Random) -> None:
        """Some messages vanish from the queue, as an eviction or an operator's mistake would have it."""
        lost = [self._world.redis.client.rpop(self._world.queue) for _ in range(_SOME)]
        _at_least_one(sum(message is not None for message in lost), "the queue was empty")

    def unpublished(self, step: Step, rng: random.Random) -> None:
        requests = [
            {"prompt": f"unseen {rng.random()}", "max_tokens": rng.randint(1, 20)} for _ in range(_SOME)
        ]
        self._world.insert_only(requests)

    def poison(self, step: Step, rng: random.Random) -> None:
        self._world.submit([{"prompt": f"{POISON} {rng.random()}", "max_tokens": 5}], states=FAILS)

    # --------------------------------------------------------------------------------------------------- the parts

    def _seat(self, rng: random.Random) -> Seat:
        return rng.choice(self._world.seats)

    def _kill(self, *seats: Seat) -> None:
        _at_least_one(sum(seat.pid() is not None for seat in seats), "no worker was there at that moment")
        self._world.kill(*seats)

    @contextlib.contextmanager
    def _frozen(self, seat: Seat) -> Iterator[None]:
        """Its worker is stopped within the block, and goes on after it if it is still the same."""
        pid = seat.signal(signal.SIGSTOP)
        if pid is None:
            raise NotDoneError("no worker was there at that moment")
        (harm,) = self._world.harm(pid)
        try:
            yield
        finally:
            if seat.pid() == pid:
                seat.signal(signal.SIGCONT)
                harm.ended = time.time()

    def _replace(self, seat: Seat, *, cold: bool = False) -> None:
        if not seat.replace(cold=cold):
            raise NotDoneError("no worker was there that could be stopped; there is one now")

    def _server(self) -> Server:
        assert self._world.server is not None
        return self._world.server

    def _database_proxy(self) -> Proxy:
        assert self._world.database_proxy is not None
        return self._world.database_proxy

    def _some_jobs(self, rng: random.Random) -> list[str]:
        """Ids of jobs in any state."""
        ids = sorted(self._world.expected.copy())
        _at_least_one(len(ids), "there was no job yet")
        return rng.sample(ids, min(len(ids), _SOME))

    def _may_be_cancelled(self, ids: list[str]) -> None:
        for job_id in ids:
            self._world.expected[job_id].states |= CANCELLABLE

    def _message(self, rng: random.Random) -> dict[str, Any]:
        payload = GeneratePayload.parse({"model": self._world.model, "prompt": "unread", "max_tokens": 2})
        return build_message(str(uuid.UUID(int=rng.getrandbits(128))), payload)


def _at_least_one(count: int, otherwise: str) -> None:
    if count < 1:
        raise NotDoneError(otherwise)
