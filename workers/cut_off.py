"""Notices that the database takes no heartbeat of this worker any more, for so long that others hold it for dead.

It may be the only one that is cut off. Then the others can run what it has taken and cannot claim, so it must hold no
message that it does not run: it takes none, and hands back what waits here, until the database answers again. If the
database is away for everybody, everybody does so, and the messages wait in Redis.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from celery.utils.log import get_logger

from workers.actor import Actor

logger = get_logger(__name__)

_CALM_S = 120.0  # after which a further time counts as the first one
_LONGEST_WAIT_S = 30.0


class Host(Protocol):
    """The delivery table, as far as this needs it."""

    def cut_off(self, away: bool) -> None:
        """Take no deliveries and hold none that is not claimed; or take them again. Told at each look while away."""


class CutOff:
    """See the module. Owned by the delivery table's thread.

    The first time it ends with the first heartbeat. A database that goes away again and again must answer for longer
    each time before deliveries are taken, so that they do not move to and fro with it.

    Args:
        silence_s: seconds since the database took a heartbeat of this worker.
        limit_s: how long that may be.
        period_s: between two looks.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        actor: Actor,
        host: Host,
        silence_s: Callable[[], float],
        *,
        limit_s: float,
        period_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._actor = actor
        self._host = host
        self._silence_s = silence_s
        self._limit = limit_s
        self._period = period_s
        self._clock = clock
        self._away = False
        self._wait = 0.0  # how long the database must answer before this ends
        self._answers_since: float | None = None
        self._ended_at: float | None = None

    @property
    def away(self) -> bool:
        """Whether the worker holds itself for cut off."""
        return self._away

    def start(self) -> None:
        """Look from now on; the first time after a period, since a model that loads may have held heartbeats up."""
        self._actor.send(self._later)

    def _later(self) -> None:
        self._actor.after(self._period, self._look)

    def _look(self) -> None:
        self._later()
        silence, now = self._silence_s(), self._clock()
        if silence > self._limit:
            self._answers_since = None
            if not self._away:
                self._begin(silence, now)
            self._host.cut_off(True)
        elif self._away:
            if self._answers_since is None:
                self._answers_since = now
            if now - self._answers_since >= self._wait:
                self._away, self._ended_at = False, now
                logger.warning(
                    "The database takes heartbeats again; messages are taken from the queues again"
                )
                self._host.cut_off(False)

    def _begin(self, silence: float, now: float) -> None:
        self._away = True
        again = self._ended_at is not None and now - self._ended_at < _CALM_S
        self._wait = min(max(self._limit, 2 * self._wait), _LONGEST_WAIT_S) if again else 0.0
        logger.error(
            "The database has taken no heartbeat for %.1fs, so that others may hold this worker for dead: it takes no "
            "messages, and those that it cannot claim go back to their queues",
            silence,
        )
