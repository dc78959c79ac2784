"""Commits, as a worker starts, the results that its dead forerunners could not.

What the database refuses for its own sake must not keep the worker from starting, or no worker of this name would ever
start again: its job fails, as it does where a worker that lives meets such a result, and the result is put aside.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from sqlalchemy import Engine, select

from models_db.claims import FinishItem, finish, refused_end
from models_db.dialects import chunked
from models_db.faults import Fault, classify, summary
from models_db.session import transaction
from workers.spool import leftovers, put_aside

logger = logging.getLogger(__name__)

_AT_ONCE = 50
_BREAKS = 3  # times that a large result may break a connection that works before it is held to be the cause
_LARGE = 500_000


def replay(engine: Engine, folder: Path, worker_name: str) -> None:
    """Commit what is left; what the database refuses is put aside, see ``workers.spool.put_aside``.

    Raises:
        DatabaseUnavailableError: the database is away, or holds a lock; the results stay for the next try.
    """
    with leftovers(folder, worker_name) as found:
        for leftover in found:
            work = _Replay(engine, leftover.worker_id, folder, worker_name)
            counted = sum(work.commit(some) for some in chunked(leftover.items, _AT_ONCE))
            logger.warning(
                "%d of %d results that waited for the database are committed; "
                "the others came too late, or were refused",
                counted,
                len(leftover.items),
            )


class _Replay:
    def __init__(self, engine: Engine, worker_id: str, folder: Path, worker_name: str) -> None:
        self._engine = engine
        self._worker_id = worker_id
        self._folder = folder
        self._worker_name = worker_name

    def commit(self, items: Sequence[FinishItem]) -> int:
        """Commit these ends, or at least those of them that the database takes; how many counted."""
        for _ in range(_BREAKS):
            try:
                return sum(self._finish(items))
            except Exception as exc:
                error = exc
                if classify(exc) is Fault.OTHER:
                    break
                if not self._may_break(items, exc):
                    raise
        if len(items) == 1:
            self._refuse(items[0], error)
            return 0
        half = len(items) // 2
        return self.commit(items[:half]) + self.commit(items[half:])

    def _may_break(self, items: Sequence[FinishItem], error: Exception) -> bool:
        """Whether these break a connection that works otherwise, as what is larger than a packet may be does."""
        locked = error.__cause__ is not None and classify(error.__cause__) is Fault.TRANSIENT
        large = any(item.result is not None and len(item.result.text) >= _LARGE for item in items)
        return large and not locked and self._answers()

    def _finish(self, items: Sequence[FinishItem]) -> list[bool]:
        return transaction(self._engine, partial(finish, items=items, worker_id=self._worker_id))

    def _answers(self) -> bool:
        """Whether the database works for others than this result."""
        try:
            with self._engine.connect() as conn:
                return conn.scalar(select(1)) == 1
        except Exception:
            return False

    def _refuse(self, item: FinishItem, error: Exception) -> None:
        logger.error("The result of job %s cannot be stored: %s", item.job_id, summary(error))
        put_aside(self._folder, self._worker_name, self._worker_id, item)
        try:
            self._finish([refused_end(item, error)])
        except Exception as exc:
            if not self._answers():
                raise
            logger.error("Nor can its failure, so that the job runs again: %s", summary(exc))
