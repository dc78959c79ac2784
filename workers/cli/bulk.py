"""``tokenmill bulk``: files of prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from backend.api import RequestError
from workers.cli.bulk_work import (
    cancel_shown,
    check_keeps_input,
    check_not_api,
    export_files,
    notice,
    print_batches,
    progress_dict,
    reopened,
    report_files,
    runner_for,
    submit_only,
    work,
)
from workers.cli.common import (
    BrokerOption,
    ChatOption,
    CommandGroup,
    DatabaseOption,
    ExitCode,
    JsonOption,
    ModelOption,
    database,
    group,
    one_of,
    params_from,
    settings_from,
)
from workers.cli.durations import days_of, seconds_of

if TYPE_CHECKING:
    from sqlalchemy import Connection

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
LaterOutput = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        help="Wait for it and write the answers here; without it, only start it.",
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
        str,
        typer.Argument(
            metavar="INPUT",
            help="JSONL, CSV or Parquet file, plain or gzip; - reads standard input, which cannot be resumed.",
            show_default=False,
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="File for the answers; failures go beside it to NAME.errors.jsonl, what was run to "
            "NAME.manifest.json.",
            show_default=False,
        ),
    ] = None,
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
    input_format: Annotated[
        str | None,
        typer.Option(
            "--format",
            help="jsonl, openai, csv or parquet; told from the file when unset.",
            show_default=False,
        ),
    ] = None,
    template: Annotated[
        str | None,
        typer.Option("--template", help="Prompt of a table's row: 'Summarise: {text}'.", show_default=False),
    ] = None,
    system: Annotated[
        str | None,
        typer.Option("--system", help="System message before a table's prompts.", show_default=False),
    ] = None,
    id_column: Annotated[
        str | None,
        typer.Option("--id-column", help="Column that names a table's rows.", show_default=False),
    ] = None,
    chat: ChatOption = True,
    strict: Annotated[
        bool,
        typer.Option("--strict", help="Refuse keys that are no fields instead of carrying them through."),
    ] = False,
    refuse_bad: Annotated[
        bool,
        typer.Option("--refuse-bad", help="Start nothing when a line is bad; else it is one line of errors."),
    ] = False,
    name: Annotated[
        str | None,
        typer.Option("--name", help="The batch's name; the file's when unset.", show_default=False),
    ] = None,
    tenant: Annotated[
        str | None,
        typer.Option(
            "--tenant",
            help="For whom: in statistics and limits, of lines that do not say.",
            show_default=False,
        ),
    ] = None,
    deadline: Annotated[
        str | None,
        typer.Option(
            "--deadline",
            help="What has not ended by then expires, and answers that it cuts off are errors: 6h, 90m, 30s.",
            show_default=False,
        ),
    ] = None,
    order: Annotated[
        str, typer.Option("--order", help="Order of the answers: input or completion.")
    ] = "input",
    reuse_days: Annotated[
        float | None,
        typer.Option(
            "--reuse-days",
            help="Take over answers to unchanged lines that came within so many days, of runs with this option.",
            show_default=False,
        ),
    ] = None,
    callback_url: Annotated[
        str | None,
        typer.Option(
            "--callback-url",
            help="Told by one signed request when the whole batch has ended; its host must be in "
            "TOKENMILL_CALLBACK_HOSTS.",
            show_default=False,
        ),
    ] = None,
    wait: Annotated[
        bool,
        typer.Option("--wait/--no-wait", help="Wait and write the answers, or only submit and print the id."),
    ] = True,
    in_flight: InFlightOption = 1000,
    broker_url: BrokerOption = None,
    database_url: DatabaseOption = None,
) -> None:
    """Run a file of prompts through the fleet and write the answers in the order of the input.

    A JSONL line is an object with a custom_id that is unique in the file, one of prompt, messages and token_ids,
    and any field of the payload (max_tokens, temperature, stop, …). Other keys, such as a reference answer, are
    carried through to the output. OpenAI's batch lines are taken as they are and answered in their own form. The
    rows of a CSV or Parquet file become prompts by --template.

    Every line is checked before anything starts. A bad line becomes one line of the errors file, also where all are
    bad; a file without a line gives empty files. A prompt is sent as one user message through the model's chat
    template; --no-chat sends it as raw text to continue.
    Exits with 1 when any line failed.

    [bold]Examples[/bold]

      tokenmill bulk run examples/prompts.jsonl -o answers.jsonl

      tokenmill bulk run gsm8k.jsonl -o out.jsonl --limit 200 --max-tokens 256

      tokenmill bulk run reviews.csv -o out.jsonl --template 'Sentiment of: {text}' --id-column id

      tokenmill bulk run books.jsonl --no-wait --deadline 6h --reuse-days 30

      cat prompts.jsonl | tokenmill bulk run - -o out.jsonl
    """
    settings = settings_from(broker_url=broker_url, database_url=database_url)
    from workers import bulk_source
    from workers.bulk_export import check_output
    from workers.bulk_files import open_input
    from workers.bulk_formats import FORMATS, Shape, guess_format
    from workers.bulk_input import LineOptions
    from workers.callbacks.wanted import new_callback
    from workers.client import Client
    from workers.interrupt import Interruptible

    if wait:
        if output is None:
            raise RequestError("is needed", field="--output", fix="Name a file, or give --no-wait")
        check_output(output, None if source == "-" else Path(source))
    deadline_s = None if deadline is None else seconds_of(deadline, "--deadline")
    if reuse_days is not None:
        days_of(reuse_days, "--reuse-days")
    callback = None if callback_url is None else new_callback(callback_url, settings, field="--callback-url")
    given = {"model": model, "max_tokens": max_tokens, "temperature": temperature, "tenant": tenant}
    defaults = {"model": settings.model, **params_from(param or [])}
    defaults |= {key: value for key, value in given.items() if value is not None}
    options = LineOptions(
        defaults=defaults,
        chat=chat,
        strict=strict,
        limit=limit,
        check=lambda payload: payload.check_limits(settings),
    )
    named = {key: f"--{key.replace('_', '-')}" for key, value in given.items() if value is not None}
    with Client(settings) as client, open_input(source) as file:
        client.engine()  # before the file is read: a missing database is the quicker error
        kind = input_format or guess_format(source, file)
        shape = Shape(
            format=one_of(kind, FORMATS, "--format"),
            template=template,
            system=system,
            id_column=id_column,
        )
        bulk_source.check_defaults(options, shape, named)
        made, found = bulk_source.validate_source(
            source,
            file,
            options,
            shape,
            refuse_bad=refuse_bad,
            order=one_of(order, ("input", "completion"), "--order"),
            reuse_days=reuse_days,
        )
        if found.extra_keys and shape.format != "openai":
            notice(f"Carried through to the output unchanged: {', '.join(sorted(found.extra_keys))}.")
        if not found.lines:
            nothing = "no row below its header" if shape.is_table else "no line"
            notice(f"{source} holds {nothing}: there is nothing to run.")
        if found.num_errors:
            first = found.errors[0]
            notice(
                f"{found.num_errors:,} bad {'line goes' if found.num_errors == 1 else 'lines go'} to the errors file, "
                f"the first: {'row' if shape.is_table else 'line'} {first.line}: {first.message}"
            )
        with Interruptible() as signals:
            runner, show = runner_for(client, in_flight, signals)
            batch_id = runner.create(
                name or Path(source).name, made, deadline_s=deadline_s, callback=callback
            )
            count = "1 line" if made.lines == 1 else f"{made.lines:,} lines"
            notice(f"Batch {batch_id}: {count} for {defaults['model']}.")
            if wait:
                assert output is not None
                work(client, runner, show, batch_id, made, file, output)
            else:
                submit_only(runner, batch_id, made, file)


@app.command()
def resume(
    batch_id: BatchArgument,
    output: LaterOutput = None,
    wait: Annotated[
        bool, typer.Option("--wait/--no-wait", help="Wait and write the answers, or only submit the rest.")
    ] = True,
    in_flight: InFlightOption = 1000,
    broker_url: BrokerOption = None,
    database_url: DatabaseOption = None,
) -> None:
    """Go on with a batch whose bulk run was stopped: feed the lines that are not in yet, watch, and export.

    Jobs that have ended are not run again, and the files come out as those of an undisturbed run. The input file
    must be where it was, unchanged; once all of its lines are in, a changed one only costs the keys carried through.

    [bold]Examples[/bold]

      tokenmill bulk resume 0199f0c2-… -o out.jsonl

      tokenmill bulk resume 0199f0c2-… --no-wait
    """
    settings = settings_from(broker_url=broker_url, database_url=database_url)
    from workers.bulk_export import check_output
    from workers.client import Client
    from workers.interrupt import Interruptible

    if wait:
        if output is None:
            raise RequestError("is needed", field="--output", fix="Name a file, or give --no-wait")
        check_output(output)
    with Client(settings) as client, Interruptible() as signals:
        runner, show = runner_for(client, in_flight, signals)
        progress = runner.progress(batch_id)
        if wait and output is not None:
            check_keeps_input(progress, output)
        with reopened(progress) as (made, file):
            if not wait:
                submit_only(runner, batch_id, made, file)
                return
            assert output is not None
            work(client, runner, show, batch_id, made, file, output)


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
        shown = [progress_dict(progress) for progress in found]
        typer.echo(json.dumps(shown if batch_id is None else shown[0], ensure_ascii=False))
    elif not found:
        typer.echo("No batch has been run. Start one: tokenmill bulk run INPUT.jsonl -o OUT.jsonl")
    else:
        print_batches(found)


@app.command()
def cancel(batch_id: BatchArgument, database_url: DatabaseOption = None) -> None:
    """Cancel a batch: queued jobs end at once, running ones as soon as their workers have seen it.

    A large batch is cancelled a thousand lines at a time. Stopped half-way, it is [i]cancelling[/i] and what is left
    runs on: repeat the command.

    [bold]Example[/bold]

      tokenmill bulk cancel 0199f0c2-…
    """
    from models_db.tables import JobState
    from workers.interrupt import Interruptible

    with database(settings_from(database_url=database_url)) as engine, Interruptible() as signals:
        before, after = cancel_shown(engine, batch_id, signals)
    if before.state.terminal:
        typer.echo(f"Nothing to cancel: the batch has ended, as {before.state}")
        return
    cancelled = max(0, after.counts[JobState.CANCELLED] - before.counts[JobState.CANCELLED])
    running = after.counts[JobState.RUNNING]
    typer.echo(f"{cancelled:,} jobs cancelled, {running:,} still running are told to end")


@app.command("retry-failed")
def retry_failed(
    batch_id: BatchArgument,
    output: LaterOutput = None,
    also: Annotated[
        list[str] | None,
        typer.Option(
            "--also", help="Other ends to run again, too: cancelled, or expired with what a deadline cut off."
        ),
    ] = None,
    in_flight: InFlightOption = 1000,
    broker_url: BrokerOption = None,
    database_url: DatabaseOption = None,
) -> None:
    """Run the failed jobs of a batch again, under their own ids; those that succeeded are left alone.

    Lines that were bad from the beginning stay as they are: correct the file for them. A batch of the HTTP API is
    refused: its files are written once.

    [bold]Example[/bold]

      tokenmill bulk retry-failed 0199f0c2-… -o out.jsonl
    """
    settings = settings_from(broker_url=broker_url, database_url=database_url)
    from models_db import batch_rows, jobs
    from models_db.session import transaction
    from models_db.tables import JobState
    from workers.bulk_export import check_output
    from workers.client import Client
    from workers.interrupt import Interruptible

    if output is not None:
        check_output(output)
    states = [JobState.FAILED]
    states += [JobState(one_of(each, ("cancelled", "expired"), "--also")) for each in also or []]
    with Client(settings) as client, Interruptible() as signals:
        runner, show = runner_for(client, in_flight, signals)
        progress = runner.progress(batch_id)
        check_not_api(client.engine(), batch_id)
        if output is not None:
            check_keeps_input(progress, output)

        def queue_again(conn: Connection) -> list[str]:
            again = jobs.retry_failed(conn, batch_id=batch_id, states=states)
            if JobState.EXPIRED in states:
                again += jobs.retry_failed(
                    conn, ids=batch_rows.cut_off(conn, batch_id), states=[JobState.SUCCEEDED]
                )
            return again

        again = transaction(client.engine(), queue_again)
        notice(f"{len(again):,} jobs of batch {batch_id} are queued again.")
        runner.republish(batch_id)
        if output is None:
            return
        with reopened(runner.progress(batch_id)) as (made, file):
            work(client, runner, show, batch_id, made, file, output)


@app.command()
def export(
    batch_id: BatchArgument,
    output: OutputOption,
    database_url: DatabaseOption = None,
) -> None:
    """Write a batch's answers again, also of one that is not finished; its open jobs are in the errors file.

    Exits with 1 when a line has no answer, also when no job was made of it yet.

    [bold]Example[/bold]

      tokenmill bulk export 0199f0c2-… -o out.jsonl
    """
    from models_db.batches import batch_progress
    from models_db.errors import UnknownBatchError
    from models_db.session import reading
    from workers.bulk_export import check_output

    check_output(output)
    with database(settings_from(database_url=database_url)) as engine:
        with reading(engine) as connection:
            progress = batch_progress(connection, batch_id)
        if progress is None:
            raise UnknownBatchError(batch_id)
        check_keeps_input(progress, output)
        with reopened(progress, needed=False) as (made, file):
            exported = export_files(engine, progress, made, file, output)
    report_files(output, exported.results, exported.errors)
    not_in = 0 if progress.total is None else progress.total - progress.inserted
    if not_in > 0:
        lines = "1 line of the input is" if not_in == 1 else f"{not_in:,} lines of the input are"
        why = f"not in yet. Run the rest: tokenmill bulk resume {batch_id} -o {output}"
        if progress.state.terminal:
            why = f"the batch has ended, as {progress.state}, before they were in"
        notice(f"{lines} in neither file: {why}")
    if exported.errors or not_in > 0:
        raise typer.Exit(ExitCode.FAILED)
