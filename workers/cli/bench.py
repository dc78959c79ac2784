"""``tokenmill bench``: measurements against peers. They live beside the packages in the repository."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
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
Gpu = Annotated[
    bool,
    typer.Option("--gpu", help="Instead: Llama-3.1-8B's shape with random weights on this machine's GPU."),
]
JsonFile = Annotated[
    Path | None, typer.Option("--json", help="With --gpu: keep every figure here.", show_default=False)
]
OutFile = Annotated[
    Path | None, typer.Option("--out", help="With --gpu: write the tables here, too.", show_default=False)
]


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
    context: typer.Context,
    model: Annotated[str, typer.Option("--model", help="Alias, hub name or path.")] = "smollm2",
    systems: Annotated[
        str, typer.Option("--systems", help="Any of async, sync, generate, cb.")
    ] = "async,sync,generate,cb",
    works: Annotated[
        str, typer.Option("--works", help="Any of mixed, uniform; with --gpu of 32x256, mixed and the like.")
    ] = "mixed,uniform",
    repetitions: Repetitions = 3,
    limit: Annotated[int, typer.Option("--limit", min=1, max=64, help="How many of the 64 prompts.")] = 64,
    slots: Annotated[
        int, typer.Option("--slots", min=1, help="Requests at once; size of a static batch.")
    ] = 32,
    gpu: Gpu = False,
    quick: Annotated[bool, typer.Option("--quick", help="With --gpu: leave out 8192 new tokens.")] = False,
    parts: Annotated[
        str | None,
        typer.Option(
            "--parts",
            help="With --gpu: any of works, sync, peer, fleet, overlap, kernels.",
            show_default="works,sync,peer",
        ),
    ] = None,
    json_file: JsonFile = None,
    out: OutFile = None,
) -> None:
    """Compare the engine with transformers' generate and continuous batching, in turns, on 64 prompts.

    With --gpu: the engine on one GPU against the memory floor, its asynchronous loop against its synchronous one, and
    transformers' continuous batching in the same run.

    [bold]Examples[/bold]

      tokenmill bench engine

      tokenmill bench engine --limit 16 --repetitions 1          # a quick look

      tokenmill bench engine --systems async,generate --works mixed

      tokenmill bench engine --gpu

      tokenmill bench engine --gpu --quick --out gpu.txt --json gpu.json
    """
    only_gpu = {"quick": quick, "parts": parts, "json_file": json_file, "out": out}
    arguments: dict[str, object] = {
        "model": model,
        "systems": systems,
        "works": works,
        "repetitions": repetitions,
        "limit": limit,
        "slots": slots,
    }
    if not gpu:
        _refuse_given(context, only_gpu, "belongs to --gpu")
        _run("compare", [f"--{name}={value}" for name, value in arguments.items()])
        return
    given = works if _is_given(context, "works") else None
    _refuse_given(context, set(arguments) - {"works"}, "has no meaning with --gpu")
    _run("gpu", _gpu_arguments(parts, json_file, out, works=given, quick=quick))


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
    context: typer.Context,
    jobs: Annotated[int, typer.Option("--jobs", min=100, help="Jobs for each system.")] = 3000,
    repetitions: Repetitions = 1,
    gpu: Gpu = False,
    json_file: JsonFile = None,
    out: OutFile = None,
) -> None:
    """Measure jobs per second through Redis and SQL without a model, beside plain Celery with threads.

    With --gpu: tokens per second of a worker on one GPU, beside the bare engine on the same work.

    [bold]Examples[/bold]

      tokenmill bench fleet

      tokenmill bench fleet --jobs 1000 --repetitions 3

      tokenmill bench fleet --gpu
    """
    if gpu:
        _refuse_given(context, ("jobs", "repetitions"), "has no meaning with --gpu")
        _run("gpu", _gpu_arguments("fleet", json_file, out))
        return
    _refuse_given(context, ("json_file", "out"), "belongs to --gpu")
    _run("fleet", [f"--jobs={jobs}", f"--repetitions={repetitions}"])


def _gpu_arguments(
    parts: str | None,
    json_file: Path | None,
    out: Path | None,
    *,
    works: str | None = None,
    quick: bool = False,
) -> list[str]:
    # The measurement runs in the repository's folder, and a path means the one that it was typed in.
    values = {"parts": parts, "works": works, "json": json_file and json_file.absolute()}
    values["out"] = out and out.absolute()
    flags = ["--quick"] if quick else []
    return [*flags, *(f"--{name}={value}" for name, value in values.items() if value is not None)]


def _is_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _refuse_given(context: typer.Context, names: Iterable[str], why: str) -> None:
    """Refuse options that would be ignored."""
    for name in names:
        if _is_given(context, name):
            raise typer.BadParameter(why, param_hint="--" + name.removesuffix("_file"))


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
