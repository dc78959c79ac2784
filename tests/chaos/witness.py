"""An independent witness: triggers in the database that note every change of a job's, a result's and a worker's state.

What the workers say of themselves cannot tell whether a job has ended twice: they would have to know. The triggers
see each committed change, whoever makes it, and the harness counts those.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, Engine, text

TERMINAL = frozenset({"succeeded", "failed", "cancelled", "expired"})

_TABLE = {
    "postgresql": "seq BIGSERIAL PRIMARY KEY, at DOUBLE PRECISION NOT NULL, ",
    "sqlite": "seq INTEGER PRIMARY KEY AUTOINCREMENT, at DOUBLE PRECISION NOT NULL, ",
    "mysql": "seq BIGINT AUTO_INCREMENT PRIMARY KEY, at DOUBLE PRECISION NOT NULL, ",
}
_COLUMNS = (
    "what VARCHAR(16) NOT NULL, id VARCHAR(155) NOT NULL, before_ VARCHAR(16), after_ VARCHAR(16), "
    "owner VARCHAR(36)"
)
_NOW = {
    "postgresql": "extract(epoch FROM clock_timestamp())",
    "sqlite": "(julianday('now') - 2440587.5) * 86400.0",
    "mysql": "UNIX_TIMESTAMP(NOW(6))",
}
_SAME = {"postgresql": "IS NOT DISTINCT FROM", "sqlite": "IS", "mysql": "<=>"}


@dataclass(frozen=True, slots=True)
class Change:
    """One committed change. ``at`` is in seconds on the database's clock, which is the host's; ``owner`` is the
    job's owner before and after, whichever there is, or the worker itself."""

    seq: int
    at: float
    what: str  # job, result or worker
    id: str
    before: str | None
    after: str | None
    owner: str | None


def install(engine: Engine) -> None:
    """Create the table and the triggers; once a database, after its migration."""
    with engine.begin() as conn:
        for statement in _statements(engine.dialect.name.replace("mariadb", "mysql")):
            conn.exec_driver_sql(statement)


def changes(conn: Connection, what: str, after: int = 0) -> list[Change]:
    """All changes of this kind beyond the sequence number ``after``, in order."""
    query = text(
        "SELECT seq, at, what, id, before_, after_, owner FROM chaos_change "
        "WHERE what = :what AND seq > :after ORDER BY seq"
    )
    return [Change(*row) for row in conn.execute(query, {"what": what, "after": after})]


def twice_ended(jobs: Iterable[Change], results: Iterable[Change]) -> dict[str, list[str]]:
    """Jobs with more than one step into or any step out of a terminal state, or whose result was changed.

    ``retry-failed``, the one permitted way out, is not used in this suite.
    """
    ends: dict[str, int] = {}
    found: dict[str, list[str]] = {}
    for change in jobs:
        if change.after in TERMINAL:
            ends[change.id] = ends.get(change.id, 0) + 1
        if change.before in TERMINAL or ends.get(change.id, 0) > 1:
            found.setdefault(change.id, []).append(f"{change.before} to {change.after}")
    written: set[str] = set()
    for change in results:
        if change.before is not None or change.id in written:
            found.setdefault(change.id, []).append("result written again")
        written.add(change.id)
    return found


def _statements(dialect: str) -> Sequence[str]:
    table = f"CREATE TABLE chaos_change ({_TABLE[dialect]}{_COLUMNS})"
    if dialect == "mysql":
        table += " CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin"
    return [table, *(part for spec in _TRIGGERS for part in _trigger(dialect, *spec))]


# name, table, event, (what, id, before, after, owner), columns that must differ or "" for always
_TRIGGERS = [
    ("job_new", "job", "INSERT", ("'job'", "NEW.id", "NULL", "NEW.state", "NEW.owner"), ""),
    (
        "job_change",
        "job",
        "UPDATE",
        ("'job'", "NEW.id", "OLD.state", "NEW.state", "COALESCE(NEW.owner, OLD.owner)"),
        "state attempt owner",
    ),
    ("job_gone", "job", "DELETE", ("'job'", "OLD.id", "OLD.state", "NULL", "OLD.owner"), ""),
    ("result_new", "result", "INSERT", ("'result'", "NEW.job_id", "NULL", "'written'", "NULL"), ""),
    ("result_change", "result", "UPDATE", ("'result'", "NEW.job_id", "'written'", "'written'", "NULL"), ""),
    ("result_gone", "result", "DELETE", ("'result'", "OLD.job_id", "'written'", "NULL", "NULL"), ""),
    ("worker_new", "worker", "INSERT", ("'worker'", "NEW.id", "NULL", "NEW.state", "NEW.id"), ""),
    (
        "worker_change",
        "worker",
        "UPDATE",
        ("'worker'", "NEW.id", "OLD.state", "NEW.state", "NEW.id"),
        "state",
    ),
]


def _trigger(
    dialect: str, name: str, table: str, event: str, values: Sequence[str], differ: str
) -> list[str]:
    columns = "at, what, id, before_, after_, owner"
    insert = f"INSERT INTO chaos_change ({columns}) VALUES ({', '.join([_NOW[dialect], *values])})"
    same = " AND ".join(f"NEW.{column} {_SAME[dialect]} OLD.{column}" for column in differ.split())
    head = f"CREATE TRIGGER chaos_{name} AFTER {event} ON {table} FOR EACH ROW"
    if dialect == "postgresql":
        guard = f"IF NOT ({same}) THEN {insert}; END IF" if same else insert
        row = "OLD" if event == "DELETE" else "NEW"
        return [
            f"CREATE FUNCTION chaos_{name}() RETURNS trigger LANGUAGE plpgsql AS "
            f"$$ BEGIN {guard}; RETURN {row}; END $$",
            f"{head} EXECUTE FUNCTION chaos_{name}()",
        ]
    if dialect == "sqlite":
        when = f" WHEN NOT ({same})" if same else ""
        return [f"{head}{when} BEGIN {insert}; END"]
    guard = f"IF NOT ({same}) THEN {insert}; END IF" if same else insert
    return [f"{head} BEGIN {guard}; END"]
