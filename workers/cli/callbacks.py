"""``tokenmill callbacks``."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from backend.api import RequestError
from workers.cli.common import (
    CommandGroup,
    DatabaseOption,
    JsonOption,
    console,
    database,
    group,
    one_of,
    settings_from,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from models_db.callbacks import CallbackRecord

app = group(cls=CommandGroup, help="Tell others over HTTPS when jobs and batches have ended.")


@app.command(name="list")
def list_(
    ids: Annotated[
        list[str] | None,
        typer.Argument(
            help="Ids of jobs, batches or callbacks; the latest when left out.", show_default=False
        ),
    ] = None,
    state: Annotated[
        str | None,
        typer.Option("--state", help="Only these: waiting, due, delivered or failed.", show_default=False),
    ] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, help="So many at most.")] = 20,
    as_json: JsonOption = False,
    database_url: DatabaseOption = None,
) -> None:
    """List callbacks, newest first: waiting for their job, due (to be sent or sent again), delivered, or failed.

    URLs are shown without their query, which may hold a secret.

    [bold]Examples[/bold]

      tokenmill callbacks list --state failed

      tokenmill callbacks list 0199f0c2-… --json
    """
    from models_db.callbacks import CallbackState, list_callbacks
    from models_db.session import reading

    wanted = None if state is None else CallbackState(one_of(state, list(CallbackState), "--state"))
    with database(settings_from(database_url=database_url)) as engine, reading(engine) as connection:
        found = list_callbacks(connection, state=wanted, ids=ids, limit=limit)
    if as_json:
        shown = [asdict(record) | {"url": _without_query(record.url)} for record in found]
        typer.echo(json.dumps(shown, ensure_ascii=False, default=str))
    elif not found:
        typer.echo("There are none. A job asks for one with: tokenmill submit … --callback-url https://…")
    else:
        _print(found)


@app.command()
def retry(
    ids: Annotated[
        list[str] | None,
        typer.Argument(help="Ids of callbacks, or of their jobs or batches.", show_default=False),
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="All that have failed.")] = False,
    host: Annotated[
        str | None, typer.Option("--host", help="Only those to this host.", show_default=False)
    ] = None,
    database_url: DatabaseOption = None,
) -> None:
    """Send callbacks that were given up again, once their receiver has been mended; their ids stay the same.

    [bold]Examples[/bold]

      tokenmill callbacks retry 0199f0c2-…

      tokenmill callbacks retry --all --host hooks.example.com
    """
    if bool(ids) == every:
        raise RequestError(
            "must be given, or --all, and not both", field="IDS", fix="Name what to send again"
        )
    from models_db.callbacks import retry_callbacks
    from models_db.session import transaction

    with database(settings_from(database_url=database_url)) as engine:
        count = transaction(engine, lambda conn: retry_callbacks(conn, None if every else ids, host=host))
    typer.echo(f"{count} are sent again" if count != 1 else "1 is sent again")


@app.command()
def send(database_url: DatabaseOption = None) -> None:
    """Send callbacks until stopped (Ctrl-C or SIGTERM), on a host that need not have a GPU.

    For fleets whose GPU hosts must not reach out: set TOKENMILL_CALLBACK_SENDER=false there. Any number of senders
    may run; they share the work.

    [bold]Example[/bold]

      TOKENMILL_CALLBACK_HOSTS=hooks.example.com tokenmill callbacks send
    """
    settings = settings_from(database_url=database_url)
    from workers.callbacks.service import IDLE_IN_TRANSACTION_S, log_to_terminal, run_sender

    log_to_terminal(settings.log_level)
    with database(settings, idle_in_transaction_s=IDLE_IN_TRANSACTION_S) as engine:
        counts = run_sender(settings, engine).counts
    typer.echo(f"{counts.delivered} delivered, {counts.postponed} tries in vain, {counts.failed} given up")


@app.command()
def secret() -> None:
    """Print a new secret for TOKENMILL_CALLBACK_SECRETS; the receivers need it, too.

    To change it, put the new one before the old one, give it to the receivers, then remove the old one.

    [bold]Example[/bold]

      tokenmill callbacks secret
    """
    from workers.callbacks.signing import new_secret

    typer.echo(new_secret())


def _without_query(url: str) -> str:
    return url.partition("?")[0]


def _print(records: Sequence[CallbackRecord]) -> None:
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in ("state", "of", "tries", "next try", "to", "last error"):
        table.add_column(name, overflow="fold")
    for record in records:
        subject = f"job {record.job_id}" if record.job_id is not None else f"batch {record.batch_id}"
        due = "" if record.due_at is None else record.due_at.strftime("%Y-%m-%d %H:%M:%S UTC")
        cells = (
            record.state,
            subject,
            str(record.tries),
            due,
            _without_query(record.url),
            record.error or "",
        )
        table.add_row(*map(escape, cells))
    console().print(table)
