"""Ends batches that nobody watches, so that their callbacks become due.

A batch that was started with ``--no-wait`` has nobody else who sees its end.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

from sqlalchemy import Connection, Engine

from models_db.batches import finish_batch_if_done
from models_db.callbacks import batches_to_end, lock_free_batch
from models_db.faults import summary
from models_db.session import reading, transaction
from workers.callbacks.pauses import Pause

log = logging.getLogger("tokenmill.callbacks")

EVERY_S = 2.0
FIRST_PAUSE_S = 10.0  # of a batch that could not be ended …
LONGEST_PAUSE_S = 600.0  # … and so long at most, however often
_AT_ONCE = 100


class BatchEnder:
    """One that cannot be ended, because its jobs take too long to count or lines are missing, keeps nothing else from
    being told: it gets a pause. One that somebody else holds, who may be ending it, is not waited for.

    Args:
        monotonic: seconds, for pauses.
    """

    def __init__(self, engine: Engine, monotonic: Callable[[], float]) -> None:
        self._engine = engine
        self._monotonic = monotonic
        self._pauses: dict[str, Pause] = {}
        self._next = 0.0

    def look(self) -> None:
        """End those whose jobs have all ended, where it is time to look again. Never raises."""
        if self._monotonic() < self._next:
            return
        self._next = self._monotonic() + EVERY_S
        try:
            with reading(self._engine) as conn:
                ready = batches_to_end(conn, _AT_ONCE + len(self._pauses))
        except Exception as exc:  # where the whole database is away, who looks for hosts says so next
            log.error("batches that are to be ended cannot be looked for: %s", summary(exc))
            return
        self._pauses = {each: self._pauses[each] for each in ready if each in self._pauses}
        for batch_id in ready:
            pause = self._pauses.get(batch_id)
            if pause is not None and self._monotonic() < pause.until:
                continue
            try:
                well = transaction(self._engine, partial(_end, batch_id=batch_id), tries=1)
            except Exception as exc:
                pause_s = self._pause(batch_id, LONGEST_PAUSE_S)
                log.error(
                    "batch %s cannot be ended: %s. Tried again in %.0f s; other callbacks go on",
                    batch_id, summary(exc), pause_s,
                )  # fmt: skip
                return
            if well:
                self._pauses.pop(batch_id, None)
            else:  # lines are missing: it is not counted again at each look
                self._pause(batch_id, FIRST_PAUSE_S)

    def _pause(self, batch_id: str, longest_s: float) -> float:
        pause = self._pauses.setdefault(batch_id, Pause())
        return pause.lengthen(self._monotonic(), FIRST_PAUSE_S, longest_s)


def _end(conn: Connection, batch_id: str) -> bool:
    """Whether there is nothing more to do for now."""
    return not lock_free_batch(conn, batch_id) or finish_batch_if_done(conn, batch_id) is not None
