"""``tokenmill db``: the schema, roll-ups and old rows."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from workers.cli.common import CommandGroup, DatabaseOption, database, group, settings_from
from workers.cli.durations import age, moment

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
    from models_db import migrate, schema

    settings = settings_from(database_url=database_url)
    migrate.upgrade(settings.database_url, revision)
    with database(settings, check=False) as engine:
        typer.echo(f"at revision {schema.current_revision(engine)}")


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
    from models_db import migrate, schema
    from workers.redaction import redact_url

    settings = settings_from(database_url=database_url)
    migrate.check_downgrade(settings.database_url, revision)
    if not yes:
        typer.confirm(f"Take {redact_url(settings.database_url)} back to {revision}?", abort=True)
    migrate.downgrade(settings.database_url, revision)
    with database(settings, check=False) as engine:
        typer.echo(f"at revision {schema.current_revision(engine)}")


@app.command()
def current(database_url: DatabaseOption = None) -> None:
    """Print the revision of the database and the one that this version needs.

    [bold]Example[/bold]

      tokenmill db current
    """
    from models_db import schema

    with database(settings_from(database_url=database_url), check=False) as engine:
        found = schema.current_revision(engine)
    typer.echo(f"database: {found or 'never migrated'}\nneeded:   {schema.head_revision()}")


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
    archive: Annotated[
        Path | None,
        typer.Option(
            "--archive",
            help="New .jsonl or .jsonl.gz file, or .parquet folder, for the rows; written first.",
            show_default=False,
        ),
    ] = None,
    minutes_older_than: Annotated[
        str | None,
        typer.Option(
            "--minutes-older-than", help="Delete roll-ups per minute of this age, too.", show_default=False
        ),
    ] = None,
    files_older_than: Annotated[
        str | None,
        typer.Option(
            "--files-older-than",
            help="Another age for files of /v1/files; that of the jobs unless given.",
            show_default=False,
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Count what would go, change nothing.")] = False,
    database_url: DatabaseOption = None,
) -> None:
    """Delete jobs that ended long ago, with their results, and what else is old: samples, workers, dead letters, files.

    The fleet may run meanwhile.

    Roll-ups are brought up to date first and stay, so that the throughput history goes on. So do jobs and batches
    whose callbacks are still to be sent or whose answers are still to be written into their file, and files that a
    batch needs.

    [bold]Examples[/bold]

      tokenmill db prune --older-than 90d --dry-run

      tokenmill db prune --older-than 90d --archive until-march.jsonl.gz

      tokenmill db prune --older-than 90d --minutes-older-than 365d --files-older-than 30d
    """
    from dataclasses import asdict

    from models_db.clock import database_time
    from models_db.retention import prune as prune_rows
    from models_db.session import reading

    jobs_age = age(older_than, "--older-than")
    minutes_age = None if minutes_older_than is None else age(minutes_older_than, "--minutes-older-than")
    files_age = None if files_older_than is None else age(files_older_than, "--files-older-than")
    with database(settings_from(database_url=database_url)) as engine:
        with reading(engine) as conn:
            now = database_time(conn)  # whose clock all stored times have
        report = prune_rows(
            engine,
            now - jobs_age,
            minutes_older_than=None if minutes_age is None else now - minutes_age,
            files_older_than=None if files_age is None else now - files_age,
            archive=archive,
            dry_run=dry_run,
            now=now,
        )
    others = ("dry_run", "kept")
    counts = {name.replace("_", " "): count for name, count in asdict(report).items() if name not in others}
    if minutes_age is None:
        del counts["minutes"]
    verb = "would delete" if report.dry_run else "deleted"
    typer.echo(f"{verb} " + ", ".join(f"{count:,} {name}" for name, count in counts.items()))
    if report.kept:
        verb = "would keep" if report.dry_run else "kept"
        typer.echo(
            f"{verb} {report.kept:,} jobs and batches of that age, whose callbacks are still to be sent "
            "(tokenmill callbacks list --state due) or whose files tokenmill serve has still to write"
        )


@app.command()
def rollup(
    since: Annotated[
        str | None,
        typer.Option("--since", help="Compute again from here on: 24h, 7d or a time.", show_default=False),
    ] = None,
    database_url: DatabaseOption = None,
) -> None:
    """Bring the roll-ups up to the second, as the workers do each minute. Several at once do no harm.

    [bold]Examples[/bold]

      tokenmill db rollup

      tokenmill db rollup --since 7d
    """
    from models_db.rollups import catch_up, reopen, rolled_until
    from models_db.session import reading, transaction

    start = moment(since, "--since")
    with database(settings_from(database_url=database_url)) as engine:
        if start is not None:
            transaction(engine, lambda conn: reopen(conn, start))
        catch_up(engine, with_present=True)
        with reading(engine) as conn:
            mark = rolled_until(conn)
    typer.echo(f"every minute is there until {mark:%Y-%m-%d %H:%M} UTC, and what there is of the present")


@app.command("sample-history")
def sample_history(database_url: DatabaseOption = None) -> None:
    """Fill an empty database with three invented nights, to try the queries of docs/queries.md on.

    [bold]Example[/bold]

      tokenmill db upgrade --database-url sqlite:///sample.db

      tokenmill db sample-history --database-url sqlite:///sample.db
    """
    from models_db import sample_history as history
    from models_db.session import transaction

    with database(settings_from(database_url=database_url)) as engine:
        jobs = transaction(engine, history.load)
    typer.echo(f"{jobs:,} jobs between {history.START:%Y-%m-%d %H:%M} and {history.END:%Y-%m-%d %H:%M} UTC")
