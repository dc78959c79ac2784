"""``tokenmill stats``: the throughput history."""

from __future__ import annotations

import csv
import json
import sys
from dataclasses import asdict, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from backend.api import RequestError
from workers.cli.common import (
    DatabaseOption,
    JsonOption,
    console,
    database,
    errors,
    settings_from,
)
from workers.cli.course import TIMES, over_time, panels, sparkline
from workers.cli.names import shown
from workers.cli.tables import Column, fitted, width_of

if TYPE_CHECKING:
    from rich.table import Table
    from sqlalchemy import Connection

    from models_db.queries import ThroughputRow

By = Literal["hour", "day", "night", "model", "worker", "batch", "tenant", "queue"]
Source = Literal["auto", "jobs", "rollups"]

MANY_JOBS = 200_000
_ONLY_JOBS = ("worker", "batch")
_ONLY_ROLLUPS = ("day", "night", "tenant", "queue")


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    app.command()(stats)


def stats(
    by: Annotated[
        By, typer.Option("--by", help="What a row stands for; a night goes from noon to noon.")
    ] = "hour",
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
    source: Annotated[
        Source,
        typer.Option(
            "--source",
            help="For hours and models: read every job, exact to the last one, or the roll-ups of whole hours, quick "
            f"over years; auto takes the jobs where there are at most {MANY_JOBS:,}, none of them pruned. Days, "
            "nights, tenants and queues are always from roll-ups, workers and batches from jobs.",
        ),
    ] = "auto",
    plot: Annotated[
        Path | None,
        typer.Option("--plot", help="Draw it into this .png or .svg file, too.", show_default=False),
    ] = None,
    as_json: JsonOption = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV for spreadsheets.")] = False,
    database_url: DatabaseOption = None,
) -> None:
    """Show jobs, tokens, tokens per second, latency and device activity out of the database.

    A job counts each time it ends. "tok/s" is new tokens over whole hours, from the first in which a job ended to the
    end of the last; "in span" over the time from the first start to the last end, known from jobs only.

    [bold]Examples[/bold]

      tokenmill stats

      tokenmill stats --by night --since 30d --plot nights.svg

      tokenmill stats --by worker --since 24h

      tokenmill stats --by tenant --since 7d --csv > tenants.csv

      tokenmill stats --by model --json | jq '.[] | {key, tokens_per_s}'

      tokenmill stats --database-url sqlite:///demo-run/tokenmill.db
    """
    from models_db.session import reading
    from workers.cli.durations import moment

    if as_json and as_csv:
        raise RequestError("cannot be both", field="--json, --csv", fix="Leave one of them out")
    if plot is not None:
        from workers.cli.plot import check_plot

        check_plot(plot)
    after, before = moment(since, "--since"), moment(until, "--until")
    with database(settings_from(database_url=database_url)) as engine, reading(engine) as connection:
        chosen = choose_source(connection, by, source, after, before)
        rows = read(connection, by, chosen, after, before, model)
        note = "" if chosen == "jobs" else rollup_note(connection)
    if plot is not None:
        from workers.cli.plot import draw

        draw(plot, rows, by)
        errors().print(f"drawn into {plot}")
    if as_json:
        typer.echo(json.dumps([row.to_dict() for row in rows]))
    elif as_csv:
        print_csv(rows)
    elif not rows:
        typer.echo("No job has ended in this time.")
    else:
        out = console()
        width = width_of(out)
        out.print(stats_table(rows, by, width))
        for line in sparklines(rows, by, width):
            out.print(line)
    if note and not as_json and not as_csv:
        errors().print(note)


def choose_source(
    connection: Connection, by: By, source: Source, since: datetime | None, until: datetime | None
) -> Source:
    """Where to read from.

    Raises:
        RequestError: what was asked for is only in the other place.
    """
    from models_db.history import more_than
    from models_db.rollups import complete_from

    if (source == "rollups" and by in _ONLY_JOBS) or (source == "jobs" and by in _ONLY_ROLLUPS):
        other = "jobs" if source == "rollups" else "rollups"
        raise RequestError(f"is only in the {other}", field="--by", value=by, fix=f"Use --source {other}")
    if source != "auto":
        return source
    if by in _ONLY_JOBS or by in _ONLY_ROLLUPS:
        return "jobs" if by in _ONLY_JOBS else "rollups"
    pruned = complete_from(connection)
    if pruned is not None and (since is None or since < pruned):
        return "rollups"
    return "rollups" if more_than(connection, MANY_JOBS, since, until) else "jobs"


def read(
    connection: Connection,
    by: Any,
    source: Source,
    since: datetime | None,
    until: datetime | None,
    model: str | None,
) -> list[ThroughputRow]:
    """The rows from the chosen place."""
    from models_db.history import history
    from models_db.queries import throughput

    ask = throughput if source == "jobs" else history
    return ask(connection, by, since=since, until=until, model=model)


def rollup_note(connection: Connection) -> str:
    """What to know about numbers from the roll-ups."""
    from models_db.rollups import rolled_until

    mark = rolled_until(connection)
    if mark is None:
        return "There are no roll-ups yet. A worker makes them within two minutes, `tokenmill db rollup` at once."
    behind = (datetime.now(UTC) - mark).total_seconds()
    late = "" if behind < 300 else ". `tokenmill db rollup` brings them up to date"
    return (
        f"From roll-ups of whole hours, complete until {mark:%Y-%m-%d %H:%M} UTC{late}. Percentiles are at most a "
        "quarter too high."
    )


def print_csv(rows: list[ThroughputRow]) -> None:
    """A header, then a line for each row; what is missing is empty."""
    from models_db.queries import ThroughputRow

    writer = csv.DictWriter(sys.stdout, [spec.name for spec in fields(ThroughputRow)], lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(row) for row in rows)


def stats_table(rows: list[ThroughputRow], by: str, width: int | None = None) -> Table:
    """The rows as people read them, in a terminal of this width."""
    time = by in TIMES
    spans = any(row.span_s is not None for row in rows)
    columns = [
        Column(f"{by} (UTC)" if time else by, "word" if time else "name"),
        Column("jobs"),
        Column("failed", keep=7),
        Column("prompt tok", keep=5),
        Column("new tok"),
        Column("tok/s"),
        *([Column("in span", keep=3)] if spans else []),
        Column("p50 s", keep=6),
        Column("p95 s", keep=8),
        Column("ttft p50", keep=4),
        Column("active", keep=8),
    ]
    cells = [
        [
            shown(row.key),
            f"{row.jobs:,}",
            f"{row.failed + row.expired:,}",
            f"{row.prompt_tokens:,}",
            f"{row.completion_tokens:,}",
            number(row.tokens_per_s, 1),
            *([number(row.span_tokens_per_s, 1)] if spans else []),
            number(row.latency_p50_s, 2),
            number(row.latency_p95_s, 2),
            number(row.ttft_p50_s, 2),
            "-" if row.active_fraction is None else f"{row.active_fraction:.0%}",
        ]
        for row in rows
    ]
    return fitted(columns, cells, width)


def sparklines(rows: list[ThroughputRow], by: str, width: int | None = None) -> list[str]:
    """The course of the main numbers over time, a line each; none where rows are no times."""
    if by not in TIMES or len(rows) < 2:
        return []
    courses = panels([row for _, row in over_time(rows, by)])
    tokens, latency, active = courses.values()
    lines = {"tok/s": tokens["tok/s"], "p95 s": latency["p95"], "active": active["active"]}
    return [f"{name:>7} {sparkline(values, width and width - 8)}" for name, values in lines.items()]


def number(value: float | None, digits: int) -> str:
    """``1,234.5``, or ``-`` where there is none."""
    return "-" if value is None else f"{value:,.{digits}f}"
