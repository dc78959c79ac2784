"""``tokenmill job show`` and ``tokenmill cancel``."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated, Any

import typer

from workers.cli.common import (
    BrokerOption,
    CommandGroup,
    DatabaseOption,
    ExitCode,
    JsonOption,
    console,
    group,
    settings_from,
)

app = group(cls=CommandGroup, help="Look at single jobs.")


def add_to(root: typer.Typer) -> None:
    """Register the commands."""
    root.add_typer(app, name="job")
    root.command()(cancel)


@app.command()
def show(
    job_id: Annotated[str, typer.Argument(help="The id that submit gave.", show_default=False)],
    as_json: JsonOption = False,
    broker_url: BrokerOption = None,
    database_url: DatabaseOption = None,
) -> None:
    """Show a job's state, its attempts with their workers, and its answer.

    [bold]Examples[/bold]

      tokenmill job show 0199f0c2-…

      tokenmill job show 0199f0c2-… --json | jq -r .result.text
    """
    from models_db.tables import JobState
    from workers.client import Client

    with Client(settings_from(broker_url=broker_url, database_url=database_url)) as client:
        status = client.status(job_id)
        attempts = client.attempts(job_id)
        result = client.result(job_id) if status.state is JobState.SUCCEEDED else None
    if as_json:
        shown: dict[str, Any] = asdict(status) | {
            "attempts": [asdict(attempt) for attempt in attempts],
            "result": None if result is None else asdict(result),
        }
        typer.echo(json.dumps(shown, ensure_ascii=False, default=str))
        return
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    for name, value in asdict(status).items():
        if value is not None and value is not False:
            table.add_row(name, _text(value))
    for attempt in attempts:
        outcome = attempt.outcome or "open"
        error = f": {attempt.error}" if attempt.error else ""
        table.add_row(f"attempt {attempt.number}", f"{outcome} on {attempt.worker_name}{error}")
    if result is not None:
        for name, value in asdict(result).items():
            if value is not None and name not in ("text", "token_ids", "logprobs", "choice"):
                table.add_row(name, _text(value))
    out = console()
    out.print(table)
    if result is not None:
        out.print()
        out.print(result.text, markup=False)


def cancel(
    job_ids: Annotated[list[str], typer.Argument(help="Ids of jobs.", show_default=False)],
    broker_url: BrokerOption = None,
    database_url: DatabaseOption = None,
) -> None:
    """Cancel jobs: a queued one ends at once, a running one as soon as its worker has seen it.

    A job that has ended stays as it is. Batches are cancelled with: tokenmill bulk cancel.

    [bold]Example[/bold]

      tokenmill cancel 0199f0c2-… 0199f0c3-…
    """
    from models_db.errors import UnknownJobError
    from models_db.tables import JobState
    from workers.client import Client

    unknown = False
    with Client(settings_from(broker_url=broker_url, database_url=database_url)) as client:
        for job_id in job_ids:
            try:
                state = client.cancel(job_id)
            except UnknownJobError as error:
                unknown = True
                typer.echo(f"error: {error}", err=True)
                continue
            note = "its worker has been asked to end it" if state is JobState.RUNNING else state
            typer.echo(f"{job_id}: {note}")
    if unknown:
        raise typer.Exit(ExitCode.USAGE)


def _text(value: Any) -> str:
    from datetime import datetime

    from rich.markup import escape

    if isinstance(value, datetime):
        return value.strftime("%Y-%m-%d %H:%M:%S UTC")
    return f"{value:.3f}" if isinstance(value, float) else escape(str(value))
