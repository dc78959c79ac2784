"""The thread of a worker for long questions and roll-ups, which must keep no claim waiting.

The database thread (``models_db.writer``) commits what starts and ends jobs, one transaction after the other. What
takes the longer, the more jobs there are, runs here instead, on a connection of its own.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

from sqlalchemy import Connection, Engine

from models_db.errors import WriterStoppedError
from models_db.session import reading

T = TypeVar("T")


class UpkeepThread:
    """Does one thing after the other, in order.

    Nothing here is tried again for ever, as in the database thread: what fails, fails with its error, and whoever asked
    asks again when its time comes. Callbacks of the futures run on this thread.

    Args:
        engine: from ``models_db.session.make_engine``; one of its connections is used while something is done.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="tokenmill-upkeep", daemon=True)

    def start(self) -> None:
        """Start the thread. What was asked before is done then."""
        self._thread.start()

    def call(self, work: Callable[[Connection], T]) -> Future[T]:
        """Ask the database something: ``work`` must not write, so that it keeps no writer waiting on SQLite either.

        Raises:
            WriterStoppedError: it has stopped.
        """
        return self.submit(partial(_read, work))

    def submit(self, work: Callable[[Engine], T]) -> Future[T]:
        """Run ``work``, which makes its own transactions.

        Raises:
            WriterStoppedError: it has stopped.
        """
        future: Future[T] = Future()
        with self._lock:
            if self._stopped:
                raise _stopped()
            self._work.put(partial(self._do, work, future))
        return future

    def stop(self, timeout_s: float) -> bool:
        """Take nothing more, and wait so long for what is being done; what waits fails with ``WriterStoppedError``.

        Returns whether the thread has ended.
        """
        with self._lock:
            self._stopped = True
            self._work.put(None)
        if self._thread.ident is None:
            self._run()
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (do := self._work.get()) is not None:
            do()

    def _do(self, work: Callable[[Engine], T], future: Future[T]) -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            if self._stopped:
                raise _stopped()
            value = work(self._engine)
        except Exception as exc:
            future.set_exception(exc)
        else:
            future.set_result(value)


def _read(work: Callable[[Connection], T], engine: Engine) -> T:
    with reading(engine) as conn:
        return work(conn)


def _stopped() -> WriterStoppedError:
    return WriterStoppedError("the upkeep thread has stopped and takes nothing more")
