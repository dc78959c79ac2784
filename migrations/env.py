"""How Alembic reaches the database. Online only: a script of SQL could not adapt to what it finds there."""

from __future__ import annotations

import logging.config
import os
from typing import Any

from alembic import context
from alembic.util import CommandError
from sqlalchemy import Connection

from models_db.base import Base
from models_db.callbacks import Callback
from models_db.door_tables import ApiKey
from models_db.migrate import URL_ATTRIBUTE
from models_db.reuse import KnownAnswer
from models_db.rollup_tables import JobClass
from models_db.session import make_engine
from models_db.tables import Job
from models_db.tenants import TenantJob

LOCK_NAME = "tokenmill-migrations"
LOCK_KEY = 0x746F6B656E  # PostgreSQL's advisory locks are numbers
LOCK_WAIT_S = 120

# Importing the tables is what fills the metadata.
target_metadata = Job.metadata
if not all(
    table.metadata is Base.metadata for table in (Job, JobClass, ApiKey, KnownAnswer, Callback, TenantJob)
):  # pragma: no cover - another would escape the check
    raise CommandError("the tables do not all use models_db.base.Base")


def database_url() -> str:
    """The URL that the caller passed, else the environment's."""
    url = context.config.attributes.get(URL_ATTRIBUTE) or os.environ.get("TOKENMILL_DATABASE_URL")
    if not url:
        raise CommandError(
            "no database is named. Set TOKENMILL_DATABASE_URL, for example to sqlite:///tokenmill.db"
        )
    return str(url)


def own_tables_only(_object: Any, name: str | None, kind: str, reflected: bool, _to: Any) -> bool:
    """A database may hold other applications' tables; autogenerate must not propose to drop them."""
    return not (kind == "table" and reflected and name not in target_metadata.tables)


def lock(conn: Connection) -> None:
    """Let one migration run at a time. SQLite's write lock does that by itself."""
    if conn.dialect.name == "postgresql":
        conn.exec_driver_sql(f"SELECT pg_advisory_xact_lock({LOCK_KEY})")
    elif conn.dialect.name in ("mysql", "mariadb"):
        got = conn.exec_driver_sql(f"SELECT GET_LOCK('{LOCK_NAME}', {LOCK_WAIT_S})").scalar()
        if got != 1:
            raise CommandError(f"another migration has been running for {LOCK_WAIT_S} s. Try again later")


def run() -> None:
    """Run the revisions that the command asks for, in one transaction where the database can."""
    engine = make_engine(database_url())
    try:
        with engine.connect() as conn:
            if conn.dialect.name == "sqlite":
                # Batch mode copies a table and drops the old one, which must not cascade to others.
                cursor = conn.connection.cursor()
                cursor.execute("PRAGMA foreign_keys = OFF")
                cursor.close()
            with conn.begin():
                lock(conn)
                context.configure(
                    connection=conn,
                    target_metadata=target_metadata,
                    render_as_batch=True,
                    compare_type=True,
                    include_object=own_tables_only,
                    transactional_ddl=conn.dialect.name != "mysql",
                )
                with context.begin_transaction():
                    context.run_migrations()
                if conn.dialect.name == "sqlite":
                    broken = conn.exec_driver_sql("PRAGMA foreign_key_check").fetchall()
                    if broken:
                        raise CommandError(
                            f"the migration would leave rows without their parents: {broken[:3]}"
                        )
    finally:
        engine.dispose()


if context.is_offline_mode():
    raise CommandError("migrations run online only. Leave out --sql")
if context.config.config_file_name is not None:
    logging.config.fileConfig(context.config.config_file_name, disable_existing_loggers=False)
run()
