"""The present by the database's clock, the one clock that all hosts of a fleet share.

Wall clocks of hosts may be wrong by minutes or hours. A deadline that one host has set and another one judges, or an
age between the times of two of them, would be wrong by as much. So both go by the database's clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import datetime, timedelta

from sqlalchemy import Connection, select

from models_db.base import utcnow
from models_db.timesql import database_now

MAX_AGE_S = 10.0
_PRECISION_S = 0.002  # SQLite gives milliseconds


def database_time(conn: Connection) -> datetime:
    """The present, asked of the database."""
    return conn.scalars(select(database_now())).one()


class DatabaseClock:
    """The database's clock between two looks at it, carried on by this host's monotonic clock. For any thread.

    Until it has been read once it shows this host's wall clock.

    Args:
        max_age_s: after so long it wants to be read again: either clock may have been set.
        wall: this host's wall clock.
        monotonic: seconds that nobody sets.
    """

    def __init__(
        self,
        max_age_s: float = MAX_AGE_S,
        *,
        wall: Callable[[], datetime] = utcnow,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_age_s = max_age_s
        self._wall = wall
        self._monotonic = monotonic
        self._reading: tuple[datetime, float] | None = None
        self._looked_at: float | None = None

    def __call__(self) -> datetime:
        return self._carried(self._monotonic()) or self._wall()

    @property
    def known(self) -> bool:
        """Whether it has been read."""
        return self._reading is not None

    @property
    def due(self) -> bool:
        """Whether it wants to be read."""
        return self._looked_at is None or self._monotonic() - self._looked_at > self._max_age_s

    def read(self, conn: Connection) -> None:
        """Read it: one short statement within the connection's transaction."""
        began = self._monotonic()
        at = database_time(conn)
        ended = self._monotonic()
        self._looked_at = ended
        # It was read somewhere on the way there and back. What that explains is no reason to step.
        middle = (began + ended) / 2
        shown = self._carried(middle)
        if shown is None or abs((at - shown).total_seconds()) > (ended - began) / 2 + _PRECISION_S:
            self._reading = at, middle

    def put_off(self) -> None:
        """It cannot be read now: go by what is known until it is due again."""
        self._looked_at = self._monotonic()

    def _carried(self, moment: float) -> datetime | None:
        reading = self._reading
        return None if reading is None else reading[0] + timedelta(seconds=moment - reading[1])
