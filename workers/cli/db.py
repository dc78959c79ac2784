"""``tokenmill db``: the schema and old rows."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Annotated

import typer

from backend.api import RequestError
from workers.cli.common import CommandGroup, DatabaseOption, database, group, settings_from

app = group(cls=CommandGroup, help="Create, migrate, check and prune the database.")


@app.command()
def upgrade(
    revision: Annotated[str, typer.Argument(help="Where to; head is the newest.")] = "head",
    database_url: DatabaseOption = None,
) -> None:
    """Create the tables or bring them up to date. Running it again changes nothing.

    [bold]Examples[/bold]

      tokenmill db upgrade

      tokenmill db upgrade --database-url postgresql+psycopg://user@host/tokenmill
    """
    from models_db import migrate

    settings = settings_from(database_url=database_url)
    migrate.upgrade(settings.database_url, revision)
    with database(settings, check=False) as engine:
        typer.echo(f"at revision {migrate.current_revision(engine)}")


@app.command()
def downgrade(
    revision: Annotated[str, typer.Argument(help="Where to; base drops every table.", show_default=False)],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    database_url: DatabaseOption = None,
) -> None:
    """Take the tables back to an older revision. What only the newer one holds is lost.

    [bold]Example[/bold]

      tokenmill db downgrade base --yes
    """
    from models_db import migrate
    from workers.settings import redact_url

    settings = settings_from(database_url=database_url)
    if not yes:
        typer.confirm(f"Take {redact_url(settings.database_url)} back to {revision}?", abort=True)
    migrate.downgrade(settings.database_url, revision)
    with database(settings, check=False) as engine:
        typer.echo(f"at revision {migrate.current_revision(engine)}")


@app.command()
def current(database_url: DatabaseOption = None) -> None:
    """Print the revision of the database and the one that this version needs.

    [bold]Example[/bold]

      tokenmill db current
    """
    from models_db import migrate

    with database(settings_from(database_url=database_url), check=False) as engine:
        found = migrate.current_revision(engine)
    typer.echo(f"database: {found or 'never migrated'}\nneeded:   {migrate.head_revision()}")


@app.command()
def check(database_url: DatabaseOption = None) -> None:
    """Exit with 0 when the database can be used as it is, else say how to mend it; for deployment scripts.

    [bold]Example[/bold]

      tokenmill db check || tokenmill db upgrade
    """
    with database(settings_from(database_url=database_url)):
        typer.echo("the database is up to date")


@app.command()
def prune(
    older_than: Annotated[str, typer.Option("--older-than", help="Age: 90d, 12h or 2w.", show_default=False)],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Count what would go, change nothing.")] = False,
    database_url: DatabaseOption = None,
) -> None:
    """Delete jobs that ended long ago, with their results, and old samples and workers.

    [bold]Examples[/bold]

      tokenmill db prune --older-than 90d --dry-run

      tokenmill db prune --older-than 90d
    """
    from dataclasses import asdict

    from models_db.retention import prune as prune_rows

    before = datetime.now(UTC) - age(older_than)
    with database(settings_from(database_url=database_url)) as engine:
        report = prune_rows(engine, before, dry_run=dry_run)
    counts = {name: count for name, count in asdict(report).items() if name != "dry_run"}
    verb = "would delete" if report.dry_run else "deleted"
    typer.echo(f"{verb} " + ", ".join(f"{count:,} {name}" for name, count in counts.items()))


def age(text: str) -> timedelta:
    """``"90d"``, ``"12h"``, ``"2w"`` as a span of time.

    Raises:
        RequestError: anything else.
    """
    match = re.fullmatch(r"(\d+)\s*([hdw])", text.strip())
    if not match or not int(match[1]):
        raise RequestError(
            "must be an age", field="--older-than", value=text, fix="For example 90d, 12h or 2w"
        )
    return timedelta(hours=int(match[1]) * {"h": 1, "d": 24, "w": 24 * 7}[match[2]])


def moment(text: str | None, option: str, *, now: datetime | None = None) -> datetime | None:
    """A point in time: an age (``24h`` ago) or an ISO date or time (UTC unless it says otherwise).

    Raises:
        RequestError: neither.
    """
    if text is None:
        return None
    if re.fullmatch(r"\d+\s*[hdw]", text.strip()):
        return (now or datetime.now(UTC)) - age(text)
    try:
        parsed = datetime.fromisoformat(text)
    except ValueError:
        raise RequestError(
            "must be a time", field=option, value=text, fix="For example 24h, 7d or 2026-11-29T08:00"
        ) from None
    return parsed if parsed.tzinfo else parsed.replace(tzinfo=UTC)
