"""``tokenmill bulk``: files of prompts."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from backend.api import ConfigurationError
from workers.cli.common import (
    BrokerOption,
    ChatOption,
    CommandGroup,
    DatabaseOption,
    ExitCode,
    JsonOption,
    ModelOption,
    console,
    database,
    errors,
    group,
    params_from,
    settings_from,
)

if TYPE_CHECKING:
    from models_db.batches import BatchProgress
    from workers.bulk import BulkRunner, BulkSource
    from workers.client import Client
    from workers.interrupt import Interruptible
    from workers.progress import Reporter, Snapshot

_PATIENCE_S = 5.0  # before a silent fleet is explained

app = group(cls=CommandGroup, help="Run files of prompts, watch them, and export their answers.")

OutputOption = Annotated[
    Path,
    typer.Option(
        "--output",
        "-o",
        help="File for the answers; failures go beside it to NAME.errors.jsonl.",
        show_default=False,
    ),
]
InFlightOption = Annotated[
    int, typer.Option("--in-flight", min=1, help="Jobs that wait or run at once; the rest stays in the file.")
]
BatchArgument = Annotated[
    str, typer.Argument(help="The batch's id, as bulk run printed it.", show_default=False)
]


@app.command()
def run(
    source: Annotated[
        str, typer.Argument(metavar="INPUT", help="JSONL file; - reads standard input.", show_default=False)
    ],
    output: OutputOption,
    model: ModelOption = None,
    max_tokens: Annotated[
        int | None, typer.Option("--max-tokens", help="For lines that do not say.", show_default=False)
    ] = None,
    temperature: Annotated[
        float | None, typer.Option("--temperature", help="For lines that do not say.", show_default=False)
    ] = None,
    param: Annotated[
        list[str] | None,
        typer.Option("--param", "-p", help="Any other field, NAME=VALUE, for lines that do not say."),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option("--limit", min=1, help="Only so many lines from the top.", show_default=False),
    ] = None,
    chat: ChatOption = True,
    strict: Annotated[
        bool,
        typer.Option("--strict", help="Refuse keys that are no fields instead of carrying them through."),
    ] = False,
    name: Annotated[
        str | None,
        typer.Option("--name", help="The batch's name; the file's when unset.", show_default=False),
    ] = None,
    in_flight: InFlightOption = 1000,
    broker_url: BrokerOption = None,
    database_url: DatabaseOption = None,
) -> None:
    """Run a file of prompts through the fleet and write the answers in the order of the input.

    A line is a JSON object with a custom_id that is unique in the file, one of prompt, messages and token_ids,
    and any field of the payload (max_tokens, temperature, stop, …). Other keys, such as a reference answer, are
    carried through to the output. Every line is checked before anything starts.

    A prompt is sent as one user message through the model's chat template; --no-chat sends it as raw text to
    continue. Exits with 1 when any line failed.

    [bold]Examples[/bold]

      tokenmill bulk run examples/prompts.jsonl -o answers.jsonl

      tokenmill bulk run gsm8k.jsonl -o out.jsonl --limit 200 --max-tokens 256

      tokenmill bulk run books.jsonl -o out.jsonl --no-chat --temperature 0.8 -p top_p=0.95

      cat prompts.jsonl | tokenmill bulk run - -o out.jsonl
    """
    settings = settings_from(broker_url=broker_url, database_url=database_url)
    from workers import bulk
    from workers.bulk_export import check_output
    from workers.bulk_input import LineOptions
    from workers.client import Client
    from workers.interrupt import Interruptible

    check_output(output, None if source == "-" else Path(source))
    given = {"model": model or settings.model, "max_tokens": max_tokens, "temperature": temperature}
    defaults = params_from(param or []) | {key: value for key, value in given.items() if value is not None}
    options = LineOptions(
        defaults=defaults,
        chat=chat,
        strict=strict,
        limit=limit,
        check=lambda payload: payload.check_limits(settings),
    )
    with Client(settings) as client, bulk.open_input(source) as file:
        client.engine()  # before the file is read: a missing database is the quicker error
        made, found = bulk.validate_source(source, file, options)
        if found.extra_keys:
            _notice(f"Carried through to the output unchanged: {', '.join(sorted(found.extra_keys))}.")
        with Interruptible() as signals:
            runner, show = _runner(client, in_flight, signals)
            batch_id = runner.create(name or Path(source).name, made)
            count = "1 line" if made.lines == 1 else f"{made.lines:,} lines"
            _notice(f"Batch {batch_id}: {count} for {defaults['model']}.")
            _work(client, runner, show, batch_id, made, file, output)


@app.command()
def resume(
    batch_id: BatchArgument,
    output: OutputOption,
    in_flight: InFlightOption = 1000,
    broker_url: BrokerOption = None,
    database_url: DatabaseOption = None,
) -> None:
    """Go on with a batch whose bulk run was stopped: feed the lines that are not in yet, watch, and export.

    Jobs that have ended are not run again. The input file must be where it was, unchanged.

    [bold]Example[/bold]

      tokenmill bulk resume 0199f0c2-… -o out.jsonl
    """
    settings = settings_from(broker_url=broker_url, database_url=database_url)
    from models_db.tables import BatchState
    from workers.bulk import BulkSource
    from workers.bulk_export import check_output
    from workers.client import Client
    from workers.interrupt import Interruptible

    check_output(output)
    with Client(settings) as client, Interruptible() as signals:
        runner, show = _runner(client, in_flight, signals)
        progress = runner.progress(batch_id)
        made = BulkSource.from_json(progress.source)
        try:
            with made.reopen() as file:
                _work(client, runner, show, batch_id, made, file, output)
        except ConfigurationError as error:
            if progress.state is BatchState.VALIDATING:
                raise  # not all of its lines are in, and only the file has the rest
            _notice(f"{error}: keys of the input are not carried through.")
            _work(client, runner, show, batch_id, made, None, output)


@app.command()
def status(
    batch_id: Annotated[
        str | None,
        typer.Argument(help="The batch's id; the latest batches when left out.", show_default=False),
    ] = None,
    as_json: JsonOption = False,
    database_url: DatabaseOption = None,
) -> None:
    """Show how far a batch is, or list the latest batches.

    [bold]Examples[/bold]

      tokenmill bulk status

      tokenmill bulk status 0199f0c2-… --json
    """
    from models_db.batches import batch_progress, list_batches
    from models_db.errors import UnknownBatchError
    from models_db.session import reading

    with database(settings_from(database_url=database_url)) as engine, reading(engine) as connection:
        if batch_id is None:
            found = list_batches(connection)
        else:
            one = batch_progress(connection, batch_id)
            if one is None:
                raise UnknownBatchError(batch_id)
            found = [one]
    if as_json:
        shown = [_progress_dict(progress) for progress in found]
        typer.echo(json.dumps(shown if batch_id is None else shown[0], ensure_ascii=False))
    elif not found:
        typer.echo("No batch has been run. Start one: tokenmill bulk run INPUT.jsonl -o OUT.jsonl")
    else:
        _print_batches(found)


@app.command()
def cancel(batch_id: BatchArgument, database_url: DatabaseOption = None) -> None:
    """Cancel a batch: queued jobs end at once, running ones as soon as their workers have seen it.

    [bold]Example[/bold]

      tokenmill bulk cancel 0199f0c2-…
    """
    from models_db.batches import finish_batch_if_done, request_cancel_batch
    from models_db.session import transaction
    from models_db.tables import JobState

    with database(settings_from(database_url=database_url)) as engine:
        counts = transaction(engine, lambda conn: request_cancel_batch(conn, batch_id))
        transaction(engine, lambda conn: finish_batch_if_done(conn, batch_id))
    running = counts.get(JobState.RUNNING, 0)
    typer.echo(
        f"{counts.get(JobState.CANCELLED, 0):,} jobs cancelled, {running:,} still running are told to end"
    )


@app.command()
def export(
    batch_id: BatchArgument,
    output: OutputOption,
    database_url: DatabaseOption = None,
) -> None:
    """Write a batch's answers again, also of one that is not finished; its open jobs are in the errors file.

    [bold]Example[/bold]

      tokenmill bulk export 0199f0c2-… -o out.jsonl
    """
    from models_db.batches import batch_progress
    from models_db.errors import UnknownBatchError
    from models_db.session import reading
    from workers.bulk import BulkSource
    from workers.bulk_export import check_output, export_batch

    check_output(output)
    with database(settings_from(database_url=database_url)) as engine:
        with reading(engine) as connection:
            progress = batch_progress(connection, batch_id)
        if progress is None:
            raise UnknownBatchError(batch_id)
        try:
            with (
                BulkSource.from_json(progress.source).reopen() as file,
                reading(engine) as connection,
            ):
                exported = export_batch(connection, batch_id, output, source=file)
        except ConfigurationError as error:
            _notice(f"{error}: keys of the input are not carried through.")
            with reading(engine) as connection:
                exported = export_batch(connection, batch_id, output)
    _report_files(output, exported.results, exported.errors)
    if exported.errors:
        raise typer.Exit(ExitCode.FAILED)


# -------------------------------------------------------------------------------------------------------- helpers


class _Shown:
    """Passes progress on to what is shown at the moment, and says once when nobody seems to work on it."""

    def __init__(self, client: Client, clock: Callable[[], float] = time.monotonic) -> None:
        self.to: Reporter | None = None
        self._client = client
        self._clock = clock
        self._ask_at = clock() + _PATIENCE_S

    def __call__(self, progress: BatchProgress) -> None:
        if self.to is not None:
            self.to.update(snapshot_of(progress))
        if progress.inserted and self._clock() >= self._ask_at:
            self._ask_at = float("inf")
            if progress.done == 0 and not _workers(self._client):
                _notice("No worker runs: the jobs wait until one is started, with: tokenmill worker")


def _workers(client: Client) -> int:
    from models_db.session import reading
    from models_db.workers import live_workers

    with reading(client.engine()) as connection:
        return len(live_workers(connection))


def _runner(client: Client, in_flight: int, signals: Interruptible) -> tuple[BulkRunner, _Shown]:
    from workers.bulk import BulkRunner

    show = _Shown(client)
    return BulkRunner(client, in_flight=in_flight, report=show, sleep=signals.sleep), show


def _work(
    client: Client,
    runner: BulkRunner,
    show: _Shown,
    batch_id: str,
    made: BulkSource,
    file: Any,
    output: Path,
) -> None:
    """Feed, watch, export; ends with the exit status that the outcome calls for."""
    from models_db.session import reading
    from workers.bulk_export import export_batch
    from workers.progress import duration, reporter

    began = time.monotonic()
    try:
        with reporter(errors(), "bulk") as shown:
            show.to = shown
            progress = runner.run(batch_id, made, file)
    except KeyboardInterrupt:
        _notice(
            f"\nStopped watching; batch {batch_id} is as it was and its jobs go on. What you can do:\n"
            f"  tokenmill bulk resume {batch_id} -o {output}     run the rest and write the answers\n"
            f"  tokenmill bulk status {batch_id}\n"
            f"  tokenmill bulk cancel {batch_id}"
        )
        raise
    elapsed = time.monotonic() - began
    with reading(client.engine()) as connection:
        exported = export_batch(connection, batch_id, output, source=_at_start(file))
    _notice(
        f"{progress.state}: {progress.done:,} jobs, {progress.prompt_tokens:,} prompt and "
        f"{progress.completion_tokens:,} new tokens in {duration(elapsed)} "
        f"({progress.completion_tokens / max(elapsed, 1e-9):,.0f} tok/s)."
    )
    _report_files(output, exported.results, exported.errors)
    if exported.errors or progress.done < made.lines:
        raise typer.Exit(ExitCode.FAILED)


def _at_start(file: Any) -> Any:
    if file is not None:
        file.seek(0)
    return file


def _report_files(output: Path, results: int, failures: int) -> None:
    from workers.bulk_export import errors_path_for

    _notice(f"{results:,} answers in {output}, {failures:,} failures in {errors_path_for(output)}.")


def snapshot_of(progress: BatchProgress) -> Snapshot:
    """The batch's progress as the reporters take it."""
    from models_db.tables import JobState
    from workers.progress import Snapshot

    failed = progress.done - progress.counts.get(JobState.SUCCEEDED, 0)
    total = progress.total if progress.total is not None else progress.inserted
    running = progress.counts.get(JobState.RUNNING, 0)
    return Snapshot(progress.done, total, failed, running, progress.completion_tokens)


def _progress_dict(progress: BatchProgress) -> dict[str, Any]:
    from dataclasses import asdict

    shown = asdict(progress) | {"done": progress.done}
    shown["counts"] = {str(state): count for state, count in progress.counts.items()}
    for name in ("created_at", "finished_at", "deadline_at"):
        shown[name] = None if shown[name] is None else shown[name].isoformat()
    return shown


def _print_batches(found: list[BatchProgress]) -> None:
    from rich.box import SIMPLE
    from rich.markup import escape
    from rich.table import Table

    from models_db.tables import JobState

    table = Table("batch", "name", "state", box=SIMPLE, pad_edge=False)
    for column in ("lines", "done", "failed", "running", "queued", "new tok"):
        table.add_column(column, justify="right")
    table.add_column("created (UTC)")
    for progress in found:
        now = snapshot_of(progress)
        table.add_row(
            progress.id,
            escape(progress.name),
            str(progress.state),
            f"{now.total:,}",
            f"{now.done:,}",
            f"{now.failed:,}",
            f"{now.running:,}",
            f"{progress.counts.get(JobState.QUEUED, 0):,}",
            f"{progress.completion_tokens:,}",
            f"{progress.created_at:%Y-%m-%d %H:%M}",
        )
    console().print(table)


def _notice(text: str) -> None:
    errors().print(text, markup=False)
