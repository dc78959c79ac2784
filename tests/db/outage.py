"""Faults of a database at a chosen moment: above all one that goes away between a commit and its answer."""

from __future__ import annotations

from sqlalchemy import event

from models_db.errors import DatabaseUnavailableError
from models_db.session import _READ_ONLY


class PostgresError(Exception):
    """What psycopg raises: an error with the server's code."""

    def __init__(self, sqlstate):
        self.sqlstate = sqlstate


class Outage:
    """Makes an engine fail as if its server were gone: so many times at connecting, so many at committing.

    With ``commit_goes_through`` it is only the answer to the commit that is lost. After each such loss it refuses
    ``away_after`` connections.
    """

    def __init__(self, engine, *, connects=0):
        self.engine = engine
        self.connects = connects
        self.commits = 0
        self.commit_goes_through = False
        self.away_after = 0
        self.delays = []
        self.health = []

    def on_health(self, healthy, error):
        self.health.append((healthy, type(error).__name__ if error else None))

    def __enter__(self):
        event.listen(self.engine, "engine_connect", self._connect)
        event.listen(self.engine, "commit", self._commit)
        return self

    def __exit__(self, *_exc):
        event.remove(self.engine, "engine_connect", self._connect)
        event.remove(self.engine, "commit", self._commit)

    def _connect(self, _conn):
        if self.connects > 0:
            self.connects -= 1
            raise DatabaseUnavailableError("gone")

    def _commit(self, conn):
        if self.commits > 0 and not conn.get_execution_options().get(_READ_ONLY):
            self.commits -= 1
            self.connects += self.away_after
            if self.commit_goes_through:
                conn.connection.dbapi_connection.commit()
            conn.invalidate()
            raise DatabaseUnavailableError("gone at COMMIT")
