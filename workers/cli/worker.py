"""``tokenmill worker``."""

from __future__ import annotations

from typing import Annotated

import typer

from workers.cli.common import BrokerOption, DatabaseOption, settings_from


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    app.command()(worker)


def worker(
    broker_url: BrokerOption = None,
    database_url: DatabaseOption = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            help="Name that jobs ask for; also what is loaded, unless TOKENMILL_ENGINE_MODEL says.  "
            "\\[TOKENMILL_MODEL]",
            show_default=False,
        ),
    ] = None,
    backend: Annotated[
        str | None,
        typer.Option(
            "--backend",
            help="async (the engine), transformers (its continuous batching) or echo (no model).  "
            "\\[TOKENMILL_BACKEND]",
            show_default=False,
        ),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(
            "--name", help="The worker's name in the database; the host's when unset.", show_default=False
        ),
    ] = None,
    once: Annotated[
        bool, typer.Option("--once", help="End when the worker ends instead of starting it again.")
    ] = False,
) -> None:
    """Load the model and work on jobs until stopped (Ctrl-C or SIGTERM: running jobs may finish first).

    One process serves one model on one device; there is one for each visible GPU.

    [bold]Examples[/bold]

      tokenmill worker

      tokenmill worker --backend echo                # answers at once, without a model

      CUDA_VISIBLE_DEVICES=1 tokenmill worker --name gpu1

      TOKENMILL_ENGINE_MODEL=./my-model.gguf tokenmill worker --model my-model
    """
    settings = settings_from(
        broker_url=broker_url, database_url=database_url, model=model, backend=backend, worker_name=name
    )
    from workers.supervisor import run_worker

    raise typer.Exit(run_worker(settings, once=once))
