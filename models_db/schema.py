"""At which revision a database is, and whether that is ours. Without Alembic, which takes a while to import."""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import Engine, String, column, inspect, select, table

import migrations
from models_db.errors import MissingDatabaseError, SchemaError
from models_db.session import reading, redact

_VERSIONS = "alembic_version"


def known_revisions() -> list[str]:
    """All revisions of this version, oldest first: what the files of ``migrations/versions`` are called."""
    files = Path(migrations.__file__).with_name("versions").glob("[0-9]*_*.py")
    return sorted(file.name.partition("_")[0] for file in files)


def head_revision() -> str:
    """The revision that this version of Tokenmill needs.

    Raises:
        SchemaError: none is installed.
    """
    if known := known_revisions():
        return known[-1]
    raise SchemaError("no migrations are installed. Reinstall tokenmill")


def current_revision(engine: Engine) -> str | None:
    """The database's revision, ``None`` when it was never migrated.

    Raises:
        MissingDatabaseError: it is an SQLite file that is not there. None is made.
        DatabaseUnavailableError: it does not answer.
    """
    check_file(engine)
    with reading(engine) as conn:
        # Alembic's own way to this says three lines to whoever listens to the root logger.
        if not inspect(conn).has_table(_VERSIONS):
            return None
        return conn.scalar(select(column("version_num", String)).select_from(table(_VERSIONS)))


def check_file(engine: Engine) -> None:
    """Return unless it is an SQLite file that is not there: opening it would make an empty one.

    Raises:
        MissingDatabaseError: it is.
    """
    name = engine.url.database
    if engine.dialect.name != "sqlite" or not name or name.startswith("file:") or Path(name).exists():
        return
    raise MissingDatabaseError(
        f"database {redact(engine.url)} is missing: there is no file {Path(name).absolute()}. Correct "
        "TOKENMILL_DATABASE_URL, or make it with `tokenmill db upgrade`"
    )


def check_schema(engine: Engine) -> None:
    """Return when the database is at the head revision.

    Raises:
        SchemaError: it is not; the message names both revisions and the command to run.
        MissingDatabaseError: it is an SQLite file that is not there.
        DatabaseUnavailableError: it does not answer.
    """
    current, head = current_revision(engine), head_revision()
    if current == head:
        return
    where = redact(engine.url)
    if current is None:
        raise SchemaError(
            f"database {where} is not migrated: it has no revision, and {head} is needed. "
            "Run `tokenmill db upgrade`"
        )
    if current not in known_revisions():
        raise SchemaError(
            f"database {where} is at revision {current}, which this version does not know (its own is {head}). "
            "Upgrade tokenmill on this host: pip install --upgrade tokenmill"
        )
    raise SchemaError(
        f"database {where} is at revision {current}, and {head} is needed. Run `tokenmill db upgrade`"
    )
