"""``tokenmill stats``: the throughput history."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from workers.cli.common import DatabaseOption, JsonOption, console, database, settings_from

if TYPE_CHECKING:
    from rich.table import Table

    from models_db.queries import ThroughputRow

By = Literal["hour", "model", "worker", "batch"]


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    app.command()(stats)


def stats(
    by: Annotated[By, typer.Option("--by", help="What a row stands for.")] = "hour",
    since: Annotated[
        str | None,
        typer.Option("--since", help="Only jobs that ended after: 24h, 7d or a time.", show_default=False),
    ] = None,
    until: Annotated[
        str | None, typer.Option("--until", help="Only jobs that ended before.", show_default=False)
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", help="Only jobs of this model.", show_default=False)
    ] = None,
    as_json: JsonOption = False,
    database_url: DatabaseOption = None,
) -> None:
    """Show jobs, tokens, tokens per second, latency and device activity out of the database.

    [bold]Examples[/bold]

      tokenmill stats

      tokenmill stats --by worker --since 24h

      tokenmill stats --by model --json | jq '.[] | {key, tokens_per_s}'

      tokenmill stats --database-url sqlite:///demo-run/tokenmill.db
    """
    from models_db.queries import throughput
    from models_db.session import reading
    from workers.cli.db import moment

    after, before = moment(since, "--since"), moment(until, "--until")
    with database(settings_from(database_url=database_url)) as engine, reading(engine) as connection:
        rows = throughput(connection, by, since=after, until=before, model=model)
    if as_json:
        typer.echo(json.dumps([row.to_dict() for row in rows]))
    elif not rows:
        typer.echo("No job has ended in this time.")
    else:
        console().print(stats_table(rows, by))


def stats_table(rows: list[ThroughputRow], by: str) -> Table:
    """The rows as people read them."""
    from rich.box import SIMPLE
    from rich.markup import escape
    from rich.table import Table

    heading = {"hour": "hour (UTC)"}.get(by, by)
    table = Table(heading, box=SIMPLE, pad_edge=False)
    for name in ("jobs", "failed", "prompt tok", "new tok", "tok/s", "p50 s", "p95 s", "ttft p50", "active"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            escape(row.key) or "-",
            f"{row.jobs:,}",
            f"{row.failed + row.expired:,}",
            f"{row.prompt_tokens:,}",
            f"{row.completion_tokens:,}",
            number(row.tokens_per_s, 1),
            number(row.latency_p50_s, 2),
            number(row.latency_p95_s, 2),
            number(row.ttft_p50_s, 2),
            "-" if row.active_fraction is None else f"{row.active_fraction:.0%}",
        )
    return table


def number(value: float | None, digits: int) -> str:
    """``1,234.5``, or ``-`` where there is none."""
    return "-" if value is None else f"{value:,.{digits}f}"
