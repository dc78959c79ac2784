"""``tokenmill bench``: measurements against peers. They live beside the packages in the repository."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from backend.api import ConfigurationError

app = typer.Typer(
    invoke_without_command=True,
    rich_markup_mode="rich",
    help="Measure this machine against peers. Without a command: [bold]engine[/bold].",
)

Repetitions = Annotated[int, typer.Option("--repetitions", "-n", min=1, help="Turns of each system.")]


@app.callback()
def bench(context: typer.Context) -> None:
    """Measure this machine against peers. Without a command: engine.

    [bold]Examples[/bold]

      tokenmill bench

      tokenmill bench engine --limit 16 --repetitions 1

      tokenmill bench steps

      tokenmill bench fleet
    """
    if context.invoked_subcommand is None:
        _run("compare", [])


@app.command()
def engine(
    model: Annotated[str, typer.Option("--model", help="Alias, hub name or path.")] = "smollm2",
    systems: Annotated[
        str, typer.Option("--systems", help="Any of async, sync, generate, cb.")
    ] = "async,sync,generate,cb",
    works: Annotated[str, typer.Option("--works", help="Any of mixed, uniform.")] = "mixed,uniform",
    repetitions: Repetitions = 3,
    limit: Annotated[int, typer.Option("--limit", min=1, max=64, help="How many of the 64 prompts.")] = 64,
    slots: Annotated[
        int, typer.Option("--slots", min=1, help="Requests at once; size of a static batch.")
    ] = 32,
    gpu: Annotated[
        bool, typer.Option("--gpu", help="Instead: Llama-3.1-8B's shape on a GPU against the memory floor.")
    ] = False,
) -> None:
    """Compare the engine with transformers' generate and continuous batching, in turns, on 64 prompts.

    [bold]Examples[/bold]

      tokenmill bench engine

      tokenmill bench engine --limit 16 --repetitions 1          # a quick look

      tokenmill bench engine --systems async,generate --works mixed

      tokenmill bench engine --gpu
    """
    if gpu:
        _run("gpu", [])
        return
    arguments = {
        "model": model,
        "systems": systems,
        "works": works,
        "repetitions": repetitions,
        "limit": limit,
        "slots": slots,
    }
    _run("compare", [f"--{name}={value}" for name, value in arguments.items()])


@app.command()
def steps(
    requests: Annotated[int, typer.Option("--requests", min=2560, help="Requests to run through.")] = 10_000,
) -> None:
    """Measure the CPU time that preparing a step takes, without a model, at 32 and 256 rows.

    [bold]Examples[/bold]

      tokenmill bench steps

      tokenmill bench steps --requests 3000
    """
    _run("step_cpu", [f"--requests={requests}"])


@app.command()
def fleet(
    jobs: Annotated[int, typer.Option("--jobs", min=100, help="Jobs for each system.")] = 3000,
    repetitions: Repetitions = 1,
) -> None:
    """Measure jobs per second through Redis and SQL without a model, beside plain Celery with threads.

    [bold]Examples[/bold]

      tokenmill bench fleet

      tokenmill bench fleet --jobs 1000 --repetitions 3
    """
    _run("fleet", [f"--jobs={jobs}", f"--repetitions={repetitions}"])


def _run(module: str, arguments: list[str]) -> None:
    """Run a measurement in a process of its own, which nothing of this one slows down."""
    root = Path(__file__).resolve().parents[2]
    if not (root / "benchmarks" / f"{module}.py").is_file():
        raise ConfigurationError(
            "the benchmarks are part of the repository and not of the installed package. "
            "Clone the repository and run 'make bench' in it"
        )
    done = subprocess.run([sys.executable, "-m", f"benchmarks.{module}", *arguments], cwd=root, check=False)
    if done.returncode:
        raise typer.Exit(done.returncode)
