"""Further sweepers beside those of the workers, each of which believes that it is the only one.

So it is for some seconds when the one that sweeps was frozen, or when Redis has lost who it is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from kombu import Connection

from models_db.session import make_engine
from models_db.writer import DatabaseThread
from workers.queues import QueueView
from workers.sweeper import Sweeper


class Elected(QueueView):
    """A view whose sweeper is always elected.

    Args:
        on_scan: called with the number of each look through the queue, from 1, before it begins.
    """

    def __init__(
        self, connect: Callable[[], Connection], queue: str, on_scan: Callable[[int], object] = lambda _: None
    ) -> None:
        super().__init__(connect, queue)
        self._on_scan = on_scan
        self.scans = 0
        self.counts = 0

    def elect(self, candidate: str, lease_s: float) -> bool:
        """Always."""
        return True

    def length(self) -> int:
        """Counts that it was asked."""
        self.counts += 1
        return super().length()

    def held_ids(self) -> set[str]:
        """Says that it was asked."""
        self.scans += 1
        self._on_scan(self.scans)
        return super().held_ids()


@contextlib.contextmanager
def sweeping(view: Elected, database_url: str, queue: str, name: str) -> Iterator[None]:
    """Sweep with this view for as long as the block lasts."""
    engine = make_engine(database_url)
    store = DatabaseThread(engine, name)
    sweeper = Sweeper(store, view, name, queue)
    store.start()
    sweeper.start()
    try:
        yield
    finally:
        sweeper.stop()
        store.stop(drain=False, timeout_s=5)
        engine.dispose()
