"""Gives PostgreSQL statistics of our tables where its autovacuum is off, or has not come round since a bulk load.

Without them it plans by guesses, and keeps the plan of a prepared statement that it made while a table was empty: the
whole table is read for each claim then. ``ANALYZE`` also has every connection plan anew. SQLite and MariaDB need
nothing of the kind: the one guesses well enough for our statements, the other counts by itself.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from sqlalchemy import Connection, Engine, text

from models_db.base import Base
from models_db.faults import Fault, classify, summary
from models_db.session import reading

logger = logging.getLogger(__name__)

LEAST_CHANGES = 1000
LEAST_SHARE = 0.2  # of a table's rows that must have changed
PAUSE_S = 60.0  # between two looks at the rows of a table, unless it has doubled
PERIOD_S = 10.0
SHARE = 0.02  # of one worker's time that this may take
LOCK_KEY = 0x74_6D_73_74_61_74_73  # PostgreSQL's advisory locks are numbers

_STALE = text(
    """
    SELECT s.relname, pg_has_role(c.relowner, 'USAGE') OR pg_has_role(d.datdba, 'USAGE')
        OR CASE WHEN current_setting('server_version_num')::int >= 170000
           THEN has_table_privilege(c.oid, 'MAINTAIN') ELSE false END AS may
    FROM pg_stat_user_tables s
    JOIN pg_class c ON c.oid = s.relid
    JOIN pg_database d ON d.datname = current_database()
    WHERE s.relid IN (SELECT to_regclass(listed.name) FROM unnest(CAST(:names AS text[])) AS listed(name))
    AND s.n_mod_since_analyze > :changes + :share * greatest(c.reltuples, 0)
    AND (s.n_mod_since_analyze > greatest(c.reltuples, 0)
         OR coalesce(greatest(s.last_analyze, s.last_autoanalyze), '-infinity')
            < clock_timestamp() - :pause_s * interval '1 second')
    ORDER BY s.relname
    """.replace("::", r"\:\:")
)
_TRY_LOCK = text(f"SELECT pg_try_advisory_xact_lock({LOCK_KEY})")


@dataclass(frozen=True, slots=True)
class Analysed:
    """What one look has done, by the names of tables."""

    done: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)  # this role may not


def analyse_changed(engine: Engine) -> Analysed:
    """``ANALYZE`` those of our tables that have changed much since somebody did; nothing but on PostgreSQL.

    Each in a transaction of its own, which keeps nobody from reading or writing. Of several processes one does it, the
    others leave it to that. A table that somebody has locked is left for another time.

    Raises:
        DatabaseUnavailableError: the database does not answer.
    """
    found = Analysed()
    if engine.dialect.name != "postgresql":
        return found
    with reading(engine) as conn:
        stale = _stale(conn, sorted(Base.metadata.tables))
    for name, may in stale.items():
        if not may:
            found.refused.append(name)
            continue
        try:
            with engine.begin() as conn:
                # Of this transaction, since a pooler may give the session to somebody else.
                if not conn.scalar(_TRY_LOCK):
                    break
                if _stale(conn, [name]):
                    conn.exec_driver_sql(f"ANALYZE {engine.dialect.identifier_preparer.quote(name)}")
                    found.done.append(name)
        except Exception as exc:
            if classify(exc) is not Fault.TRANSIENT:
                raise
    return found


def _stale(conn: Connection, names: list[str]) -> dict[str, bool]:
    """Those of these tables that have changed much, with whether this role may analyse them."""
    limits = {"changes": LEAST_CHANGES, "share": LEAST_SHARE, "pause_s": PAUSE_S}
    return {name: may for name, may in conn.execute(_STALE, {"names": names} | limits)}  # noqa: C416 - as elsewhere


class Planner:
    """Looks every few seconds, on a thread and a connection of its own: no claim waits for it.

    Args:
        engine: of the process; none of its connections is kept.
        period_s: between two looks, at least.
        clock: monotonic seconds.
    """

    def __init__(
        self, engine: Engine, *, period_s: float = PERIOD_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._engine = engine
        self._period_s = period_s
        self._clock = clock
        self._warned = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="planner", daemon=True)

    def start(self) -> None:
        """Start the thread, where the database needs it."""
        if self._engine.dialect.name == "postgresql":
            self._thread.start()

    def stop(self, timeout_s: float = 1.0) -> None:
        """Look no more; what is under way is waited for so long."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def look(self) -> None:
        """One look. Never raises: nothing is lost without it, and the next one comes."""
        try:
            found = analyse_changed(self._engine)
        except Exception as exc:
            if classify(exc) is not Fault.AWAY:  # of which others say enough
                logger.warning("the tables' statistics are not brought up to date: %s", summary(exc))
            return
        if found.done:
            logger.info("analysed %s, which had changed much", ", ".join(found.done))
        if found.refused and not self._warned:
            self._warned = True
            logger.warning(
                "PostgreSQL's statistics of %s are old, and this role may not make new ones, so that claims may "
                "become slow. Turn autovacuum on, have the tables' owner run ANALYZE after large batches, or GRANT "
                "the owner's role to this one",
                ", ".join(found.refused),
            )

    def _run(self) -> None:
        while not self._stop.is_set():
            began = self._clock()
            self.look()
            self._stop.wait(max(self._period_s, (self._clock() - began) / SHARE))
