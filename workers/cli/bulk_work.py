"""What the commands of ``tokenmill bulk`` share: feed, watch, export, and what is said about it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import typer

from backend.api import TokenmillError
from workers.cli.common import ExitCode, console, errors

if TYPE_CHECKING:
    from sqlalchemy import Engine

    from models_db.batches import BatchProgress
    from models_db.errors import TenantLimitError
    from workers.bulk import BulkRunner
    from workers.bulk_export import Exported
    from workers.bulk_source import BulkSource
    from workers.client import Client
    from workers.interrupt import Interruptible
    from workers.progress import Reporter, Snapshot

_PATIENCE_S = 5.0  # before a silent fleet is explained


@contextmanager
def _to_be_resumed(batch_id: str, options: str) -> Iterator[None]:
    """Say how to go on where the database goes away in the middle."""
    from models_db.errors import DatabaseUnavailableError

    try:
        yield
    except DatabaseUnavailableError:
        notice(
            f"Batch {batch_id} stays as it is. Once the database is back: tokenmill bulk resume {batch_id} {options}"
        )
        raise


class FedElsewhereError(TokenmillError):
    """Two commands feed one batch; this one stops."""

    code = "fed_elsewhere"

    def __init__(self, batch_id: str) -> None:
        super().__init__(
            f"another command feeds batch {batch_id} at this moment, and nothing is lost. Leave the rest to it, and "
            f"resume once it has ended: tokenmill bulk resume {batch_id}"
        )


class Shown:
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
                notice("No worker runs: the jobs wait until one is started, with: tokenmill worker")


def _workers(client: Client) -> int:
    from models_db.session import reading
    from models_db.workers import unended_workers

    dead_after_s = client.settings.dead_after_s
    with reading(client.engine()) as connection:
        return sum(not worker.silent(dead_after_s) for worker in unended_workers(connection))


def runner_for(client: Client, in_flight: int, signals: Interruptible) -> tuple[BulkRunner, Shown]:
    from workers.bulk import BulkRunner

    show = Shown(client)
    runner = BulkRunner(client, in_flight=in_flight, report=show, sleep=signals.sleep, waiting=_say_waiting)
    return runner, show


def _say_waiting(error: TenantLimitError) -> None:
    notice(f"The rest of the file waits: {error}")


@contextmanager
def reopened(
    progress: BatchProgress, *, needed: bool = True
) -> Iterator[tuple[BulkSource | None, IO[bytes] | None]]:
    """What a batch was made of, and its input, which may be gone once all of its lines are in, or if not ``needed``.

    Raises:
        RequestError: it is gone, and some lines are not in.
    """
    from backend.api import RequestError
    from models_db.tables import BatchState
    from workers.bulk_source import BulkSource, InputGoneError

    made: BulkSource | None = None
    file: IO[bytes] | None = None
    with ExitStack() as stack:
        try:
            made = BulkSource.from_json(progress.source)
            file = stack.enter_context(made.reopen())
        except InputGoneError as error:
            if needed and progress.state is BatchState.VALIDATING:
                raise RequestError(
                    f"{error}, and not all of its lines are in",
                    field="INPUT",
                    fix=f"Put back what it was, or give it up: tokenmill bulk cancel {progress.id}",
                ) from None
            notice(f"{error}: keys of the input are not carried through.")
        yield made, file


def check_keeps_input(progress: BatchProgress, output: Path) -> None:
    """Find out before the work whether the output would take the place of what the batch was made of.

    Raises:
        RequestError: it would.
    """
    from workers.bulk_export import check_not_input

    made = _made_of(progress)
    if made is not None and not _is_lost(made):
        check_not_input(output, Path(made.path))


@contextmanager
def fed_by_us_alone(batch_id: str) -> Iterator[None]:
    """Say so when somebody else turns out to feed the same batch: ids that occur twice in a file never come so far.

    Raises:
        FedElsewhereError: somebody does.
    """
    from models_db.errors import DuplicateCustomIdError

    try:
        yield
    except DuplicateCustomIdError:
        raise FedElsewhereError(batch_id) from None


def check_not_api(engine: Engine, batch_id: str) -> None:
    """Refuse a batch of ``/v1/batches``, whose files are written once, when it ends.

    Raises:
        RequestError: it is one.
    """
    from sqlalchemy import select

    from backend.api import RequestError
    from models_db.door_tables import ApiBatch
    from models_db.session import reading

    with reading(engine) as connection:
        found = connection.scalar(select(ApiBatch.batch_id).where(ApiBatch.batch_id == batch_id))
    if found is not None:
        raise RequestError(
            "came over HTTP, and new answers would never be in the files that its client fetches",
            field="BATCH_ID",
            value=batch_id,
            fix="Send the lines of its error file as a new batch to /v1/batches",
        )


def submit_only(runner: BulkRunner, batch_id: str, made: BulkSource | None, file: IO[bytes] | None) -> None:
    """Make jobs of all lines and leave; the id alone goes to standard output, for scripts."""
    if made is not None and file is not None:
        began, already = time.monotonic(), runner.progress(batch_id).inserted
        try:
            with fed_by_us_alone(batch_id), _to_be_resumed(batch_id, "--no-wait"):
                runner.feed(batch_id, made, file, bounded=False)
        except KeyboardInterrupt:
            fix = f"Submit the rest: tokenmill bulk resume {batch_id} --no-wait"
            if _is_lost(made):
                fix = (
                    f"Standard input cannot be read again. Give up the rest: tokenmill bulk cancel {batch_id}"
                )
            notice(f"\nStopped half-way. {fix}")
            raise
        notice(f"Submitted {speed(made.lines - already, time.monotonic() - began)}.")
    notice(f"Wait and write the answers: tokenmill bulk resume {batch_id} -o OUT.jsonl")
    typer.echo(batch_id)


def _is_lost(made: BulkSource | None) -> bool:
    """Whether the input cannot be read again."""
    from workers.bulk_files import STDIN

    return made is not None and made.path == STDIN


def work(
    client: Client,
    runner: BulkRunner,
    show: Shown,
    batch_id: str,
    made: BulkSource | None,
    file: IO[bytes] | None,
    output: Path,
) -> None:
    """Feed, watch, export; ends with the exit status that the outcome calls for."""
    from workers.progress import duration, reporter

    began, before = time.monotonic(), runner.progress(batch_id)
    try:
        with _to_be_resumed(batch_id, f"-o {output}"), reporter(errors(), "bulk") as shown:
            show.to = shown
            if made is not None and file is not None:
                with fed_by_us_alone(batch_id):
                    runner.feed(batch_id, made, file)
            progress = runner.watch(batch_id)
    except KeyboardInterrupt:
        notice(
            f"\nStopped watching; batch {batch_id} is as it was and its jobs go on. What you can do:\n"
            f"  tokenmill bulk resume {batch_id} -o {output}     run the rest and write the answers\n"
            f"  tokenmill bulk status {batch_id}\n"
            f"  tokenmill bulk cancel {batch_id}"
        )
        if _is_lost(made):
            notice("Standard input cannot be read again: of what is not in yet, nothing will run.")
        raise
    elapsed = time.monotonic() - began
    with _to_be_resumed(batch_id, f"-o {output}"):
        exported = export_files(client.engine(), progress, made, file, output)
    # A rate is of what was watched from its beginning.
    rate = "" if before.done else f" ({exported.completion_tokens / max(elapsed, 1e-9):,.0f} tok/s)"
    notice(
        f"{progress.state}: {progress.done:,} jobs, {exported.prompt_tokens:,} prompt and "
        f"{exported.completion_tokens:,} new tokens in {duration(elapsed)}{rate}."
    )
    if exported.reused:
        notice(f"Taken over from earlier runs: {_answers(exported.reused)}, whose tokens are not counted.")
    if exported.cut_off:
        are = "which is" if exported.cut_off == 1 else "which are"
        notice(f"Cut off by a deadline: {_answers(exported.cut_off)}, {are} in the errors file.")
    report_files(output, exported.results, exported.errors)
    if exported.errors or (progress.total is not None and progress.done < progress.total):
        raise typer.Exit(ExitCode.FAILED)


def _answers(count: int) -> str:
    return "1 answer" if count == 1 else f"{count:,} answers"


def cancel_shown(
    engine: Engine, batch_id: str, signals: Interruptible
) -> tuple[BatchProgress, BatchProgress]:
    """Cancel a batch, showing how far it is where that takes long; the batch before and afterwards."""
    from models_db.batch_cancel import PIECE, cancel_batch
    from workers.progress import Snapshot, reporter

    before = _counted(engine, batch_id)
    try:
        with ExitStack() as stack:
            shown: list[Reporter] = []

            def report(done: int, lines: int) -> None:
                if lines > PIECE and not shown:
                    shown.append(stack.enter_context(reporter(errors(), "cancel")))
                for each in shown:
                    each.update(Snapshot(done, lines))

            cancel_batch(engine, batch_id, report=report, pause=signals.sleep)
    except KeyboardInterrupt:
        notice(
            f"\nStopped half-way: what is left of the batch runs on. Repeat: tokenmill bulk cancel {batch_id}"
        )
        raise
    return before, _counted(engine, batch_id)


def _counted(engine: Engine, batch_id: str) -> BatchProgress:
    from models_db.batches import batches_progress
    from models_db.errors import UnknownBatchError
    from models_db.session import reading

    with reading(engine) as connection:
        found = batches_progress(connection, [batch_id], tokens=False)
    if not found:
        raise UnknownBatchError(batch_id)
    return found[0]


def export_files(
    engine: Engine, progress: BatchProgress, made: BulkSource | None, file: IO[bytes] | None, output: Path
) -> Exported:
    """Write answers, errors and manifest."""
    from models_db.session import reading
    from workers.bulk_export import export_batch
    from workers.openai_lines import openai_lines

    began = time.monotonic()
    openai = made is not None and made.made_of().format == "openai"
    try:
        with reading(engine) as connection:
            exported = export_batch(
                connection,
                progress.id,
                output,
                carried=made.carried(file) if made is not None and file is not None else None,
                line=openai_lines(int(progress.created_at.timestamp())) if openai else None,
                by_completion=made is not None and made.order == "completion",
                manifest=lambda exported: _manifest(progress, made, exported),
            )
    except OSError:
        notice(
            f"The answers are in the database. To write them later: tokenmill bulk export {progress.id} -o OUT"
        )
        raise
    if made is not None and exported.without_extra:
        notice(
            f"{exported.without_extra:,} lines are without the keys of their own, which were not found in "
            f"{made.path} again."
        )
    notice(f"Wrote {speed(exported.results + exported.errors, time.monotonic() - began)}.")
    return exported


def speed(lines: int, seconds: float) -> str:
    """How much in what time, and how fast that is."""
    count = "1 line" if lines == 1 else f"{lines:,} lines"
    return f"{count} in {seconds:,.1f} s ({lines / max(seconds, 1e-9):,.0f} lines/s)"


def _manifest(progress: BatchProgress, made: BulkSource | None, exported: Exported) -> dict[str, Any]:
    from importlib.metadata import version

    ended = progress.finished_at
    return {
        "batch": progress.id,
        "name": progress.name,
        "state": str(progress.state),
        "lines": progress.total,
        "counts": {str(state): count for state, count in progress.counts.items()},
        "results": exported.results,
        "errors": exported.errors,
        "finish_reasons": exported.finish_reasons,
        "cut_off": exported.cut_off,
        "reused": exported.reused,
        "reused_tokens": exported.reused_tokens,
        "without_extra": exported.without_extra if made is not None else None,
        "prompt_tokens": exported.prompt_tokens,
        "completion_tokens": exported.completion_tokens,
        "created_at": progress.created_at.isoformat(),
        "finished_at": None if ended is None else ended.isoformat(),
        "elapsed_s": None if ended is None else round((ended - progress.created_at).total_seconds(), 3),
        "input": None if made is None else json.loads(made.to_json()),
        "version": version("tokenmill"),
    }


def report_files(output: Path, results: int, failures: int) -> None:
    from workers.bulk_export import errors_path_for

    notice(f"{results:,} answers in {output}, {failures:,} failures in {errors_path_for(output)}.")


def snapshot_of(progress: BatchProgress) -> Snapshot:
    """The batch's progress as the reporters take it."""
    from models_db.tables import JobState
    from workers.progress import Snapshot

    failed = progress.done - progress.counts.get(JobState.SUCCEEDED, 0)
    total = progress.total if progress.total is not None else progress.inserted
    running = progress.counts.get(JobState.RUNNING, 0)
    return Snapshot(progress.done, total, failed, running, progress.completion_tokens)


def tenant_of(progress: BatchProgress) -> str | None:
    """For whom the lines are that do not say."""
    made = _made_of(progress)
    tenant = None if made is None else made.defaults.get("tenant")
    return tenant if isinstance(tenant, str) else None


def _made_of(progress: BatchProgress) -> BulkSource | None:
    from workers.bulk_source import BulkSource, InputGoneError

    try:
        return BulkSource.from_json(progress.source)
    except InputGoneError:  # another way of making batches
        return None


def progress_dict(progress: BatchProgress) -> dict[str, Any]:
    from dataclasses import asdict

    shown = asdict(progress) | {"done": progress.done, "tenant": tenant_of(progress)}
    shown["source"] = _as_object(progress.source)
    shown["counts"] = {str(state): count for state, count in progress.counts.items()}
    for name in ("created_at", "finished_at", "deadline_at"):
        shown[name] = None if shown[name] is None else shown[name].isoformat()
    return shown


def _as_object(source: str | None) -> Any:
    """What the batch was made of, as JSON where it is."""
    try:
        return json.loads(source or "null")
    except ValueError:
        return source


def print_batches(found: list[BatchProgress]) -> None:
    from rich.box import SIMPLE
    from rich.markup import escape
    from rich.table import Table

    from models_db.tables import JobState

    tenants = [tenant_of(progress) for progress in found]
    table = Table("batch", "name", *(["tenant"] if any(tenants) else []), "state", box=SIMPLE, pad_edge=False)
    for column in ("lines", "done", "failed", "running", "queued", "new tok"):
        table.add_column(column, justify="right")
    table.add_column("created (UTC)")
    for progress, tenant in zip(found, tenants, strict=True):
        now = snapshot_of(progress)
        table.add_row(
            progress.id,
            escape(progress.name),
            *([escape(tenant or "–")] if any(tenants) else []),
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


def notice(text: str) -> None:
    errors().print(text, markup=False)
