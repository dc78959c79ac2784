"""The command ``tokenmill``: one file per group of commands, nothing heavy imported before it is needed."""

from __future__ import annotations

import sys
import traceback
from contextlib import suppress
from inspect import getdoc
from typing import Annotated

import typer

from workers.cli import bench, bulk, callbacks, db, demo, doctor, job, serve, stats, submit, top, worker
from workers.cli.common import EXIT_CODES, CommandGroup, ExitCode, complete_streams

app = typer.Typer(
    cls=CommandGroup,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=EXIT_CODES,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"tokenmill {version('tokenmill')}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """LLM generation jobs on a Celery fleet: submit prompts, run workers, read results out of SQL.

    [bold]First steps[/bold] (or just: make demo)

      redis-server &                     # deliveries
      tokenmill db upgrade               # results: ./tokenmill.db
      tokenmill worker &                 # the engine with SmolLM2
      tokenmill submit "What is the capital of Portugal?"
      tokenmill bulk run prompts.jsonl -o answers.jsonl
      tokenmill stats --by hour

    Settings come from TOKENMILL_… variables or a TOML file (see docs/configuration.md).
    """


worker.add_to(app)
submit.add_to(app)
app.add_typer(bulk.app, name="bulk")
serve.add_to(app)
job.add_to(app)
app.add_typer(callbacks.app, name="callbacks")
stats.add_to(app)
top.add_to(app)
app.add_typer(db.app, name="db")
demo.add_to(app)
doctor.add_to(app)
app.add_typer(bench.app, name="bench", help=getdoc(bench.bench))


def main() -> None:
    """The console script."""
    complete_streams()
    try:
        app(prog_name="tokenmill")
    except Exception:
        with suppress(OSError):  # whoever is to read it may be gone, and the status still tells
            traceback.print_exc()
        sys.exit(ExitCode.CRASHED)
