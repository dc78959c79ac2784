"""``tokenmill demo``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from workers.cli.common import ExitCode, console, errors

if TYPE_CHECKING:
    from rich.console import Console

    from workers.demo import Outcome, Summary
    from workers.demo_queries import Answer

_SHOWN_ANSWERS = 6


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    app.command()(demo)


def demo(
    folder: Annotated[Path, typer.Option("--folder", help="Where database, logs and answers go.")] = Path(
        "demo-run"
    ),
    backend: Annotated[
        str, typer.Option("--backend", help="async (the engine), transformers, or echo (no model).")
    ] = "async",
    model: Annotated[str, typer.Option("--model", help="What the worker loads.")] = "smollm2",
    prompts: Annotated[
        Path | None,
        typer.Option("--prompts", help="JSONL file; examples/prompts.jsonl when unset.", show_default=False),
    ] = None,
) -> None:
    """Run real prompts through Redis, Celery, the engine and SQL on this machine, and report.

    Starts a private Redis on a free port, a SQLite database and a worker, all in one folder, and stops them at
    the end, also after Ctrl-C. Leaves results.jsonl, tokenmill.db and worker.log there.

    [bold]Examples[/bold]

      tokenmill demo

      tokenmill demo --backend echo                  # no model, a second or two

      tokenmill demo --prompts my-prompts.jsonl --folder my-run
    """
    from models_db.session import make_engine, reading
    from workers.demo import PROMPTS, Demo
    from workers.demo_queries import QUESTIONS, ask
    from workers.interrupt import Interruptible
    from workers.progress import reporter

    out, notes = console(), errors()
    with (
        Interruptible() as signals,
        Demo(folder, prompts=prompts or PROMPTS, backend=backend, model=model, sleep=signals.sleep) as run,
    ):
        broker_url = run.start_services()
        out.print(f"Redis at {broker_url}, database {folder / 'tokenmill.db'}")
        run.start_worker()
        out.print(f"Worker starting: backend {backend}, model {model}; its log is {folder / 'worker.log'}")
        with notes.status("loading the model"):
            device = run.wait_for_worker()
        out.print(f"Worker ready on {device or 'this machine'}")
        with reporter(notes, "prompts") as progress:
            outcome = run.run(progress)
        _show_answers(out, outcome)
        _show_summary(out, outcome.summary)
        engine = make_engine(run.settings.database_url)
        try:
            with reading(engine) as connection:
                for question in QUESTIONS:
                    out.print(f"\n[bold]{question.ask}[/bold]\n")
                    out.print("\n".join(f"  {line}" for line in question.sql.splitlines()), markup=False)
                    _show_table(out, ask(connection, question))
        finally:
            engine.dispose()
    out.print(f"\nAnswers: {folder / 'results.jsonl'}   Database: {folder / 'tokenmill.db'}")
    out.print(f"More:    tokenmill stats --database-url sqlite:///{folder / 'tokenmill.db'}")
    if outcome.exported.errors:
        raise typer.Exit(ExitCode.FAILED)


def _show_answers(out: Console, outcome: Outcome) -> None:
    """The first answer of each kind of prompt."""
    out.print(f"\n[bold]Some of {outcome.exported.results} answers[/bold]\n")
    seen: set[Any] = set()
    with outcome.results.open(encoding="utf-8") as file:
        for line in file:
            answer = json.loads(line)
            kind = answer.get("category", answer["custom_id"])
            if kind in seen or len(seen) == _SHOWN_ANSWERS:
                continue
            seen.add(kind)
            text = " ".join(answer["text"].split())
            out.print(f"  [cyan]{answer['custom_id']:22}[/cyan]", end=" ")
            out.print(text if len(text) <= 160 else text[:159] + "…", markup=False)


def _show_summary(out: Console, summary: Summary) -> None:
    from rich.table import Table

    def seconds(value: float | None) -> str:
        return "-" if value is None else f"{value:.3f} s"

    active = "-" if summary.active is None else f"{summary.active:.1%}"
    table = Table.grid(padding=(0, 2))
    table.add_row("jobs", f"{summary.jobs} ({summary.failed} failed)")
    table.add_row("tokens", f"{summary.prompt_tokens:,} prompt, {summary.completion_tokens:,} new")
    table.add_row(
        "time", f"{seconds(summary.elapsed_s)} (loading the model before that: {seconds(summary.load_s)})"
    )
    table.add_row("speed", f"{summary.tokens_per_s:,.1f} new tokens/s")
    table.add_row(
        "time to first token", f"{seconds(summary.ttft_p50_s)} median, {seconds(summary.ttft_max_s)} worst"
    )
    table.add_row("device active", f"{active} of the time with work")
    out.print("\n[bold]Summary[/bold]\n")
    out.print(table)


def _show_table(out: Console, answer: Answer) -> None:
    from rich.box import SIMPLE
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=SIMPLE, pad_edge=False)
    for name in answer.columns:
        left = name in ("worker", "device", "custom_id", "sampled_at")
        table.add_column(name, justify="left" if left else "right", overflow="fold")
    for row in answer.rows:
        table.add_row(*(escape(f"{value:.3f}" if isinstance(value, float) else str(value)) for value in row))
    out.print(table)
