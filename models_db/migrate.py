"""Migrations from Python: the same revisions as ``alembic -c alembic.ini``, found by package path."""

from __future__ import annotations

from sqlalchemy import Engine


def upgrade(url: str, revision: str = "head") -> None:
    """Bring the database at ``url`` up to ``revision``."""
    raise NotImplementedError


def downgrade(url: str, revision: str) -> None:
    """Take the database at ``url`` back to ``revision`` (``base`` drops every table)."""
    raise NotImplementedError


def current_revision(engine: Engine) -> str | None:
    """The database's revision, ``None`` when it was never migrated."""
    raise NotImplementedError


def head_revision() -> str:
    """The revision that this version of Tokenmill needs."""
    raise NotImplementedError


def check_schema(engine: Engine) -> None:
    """Return when the database is at the head revision.

    Raises:
        SchemaError: it is not; the message names both revisions and the command to run.
        DatabaseUnavailableError: it does not answer.
    """
    raise NotImplementedError
