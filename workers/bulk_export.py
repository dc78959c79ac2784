"""A batch out of SQL into files: results and errors, in the order of its input, and a manifest that counts them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any

from sqlalchemy import Connection

from backend.api import FinishReason, RequestError
from models_db.batch_rows import BatchRow, iter_batch_rows
from models_db.scratch import scratch_file
from models_db.tables import JobState
from workers.atomic_files import atomic_write, check_writable
from workers.bulk_input import CarriedLine, free_names
from workers.bulk_tables import json_safe

_OTHER_FORMATS = frozenset({".parquet", ".pq", ".csv", ".tsv", ".xlsx", ".gz", ".zst", ".xz", ".bz2", ".zip"})
_OF_ERRORS = ("line", "state", "error")  # a line of errors has these beside what an answer may have
_ENDED_WITHOUT = {
    JobState.QUEUED: ("not_finished", "the job is still queued"),
    JobState.RUNNING: ("not_finished", "the job is still running"),
    JobState.CANCELLED: ("cancelled", "the job was cancelled"),
    JobState.EXPIRED: ("expired", "the job expired before it finished"),
}


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written.

    ``without_extra`` counts lines whose own keys could not be found again, ``cut_off`` errors that have a part of an
    answer. ``reused`` answers were taken over; their tokens count in ``reused_tokens`` alone.
    """

    results: int
    errors: int
    without_extra: int
    prompt_tokens: int
    completion_tokens: int
    finish_reasons: Mapping[str, int] = field(default_factory=dict)
    cut_off: int = 0
    reused: int = 0
    reused_tokens: int = 0


LineWriter = Callable[[BatchRow, Mapping[str, Any]], dict[str, Any]]


def errors_path_for(output: Path) -> Path:
    """``out.jsonl`` → ``out.errors.jsonl``."""
    return output.with_name(f"{output.stem}.errors{output.suffix}")


def manifest_path_for(output: Path) -> Path:
    """``out.jsonl`` → ``out.manifest.json``."""
    return output.with_name(f"{output.stem}.manifest.json")


def _written(output: Path) -> Sequence[Path]:
    return output, errors_path_for(output), manifest_path_for(output)


def check_output(output: Path, source: Path | None = None) -> None:
    """Find out before the work whether the output can be written.

    Raises:
        RequestError: its folder is missing or not writable, it is no plain file, is called like one of another format,
            or is the input itself.
    """

    refused = partial(_refused, output)
    if str(output) == "-":
        raise refused("would be standard output, and failures go beside the answers", "Name a file")
    folder = output.absolute().parent
    try:
        if not folder.is_dir():
            raise refused(f"needs the folder {folder}, which does not exist", f"Make it: mkdir -p {folder}")
        if output.is_dir():
            raise refused("is a folder", "Name a file in it")
        if output.suffix.lower() in _OTHER_FORMATS:
            raise refused("would hold JSON lines under a name that says otherwise", "Call it NAME.jsonl")
        for target in (path.resolve() for path in _written(output)):
            # The finished file takes the place of what is there, and a device must not be lost to that.
            if target.exists() and not target.is_file():
                raise refused(f"would replace {target}, which is no plain file", "Choose another name")
        check_writable(*_written(output))
    except OSError as error:
        raise refused(f"cannot be written ({error.strerror})", "Choose another place or name") from None
    if source is not None:
        check_not_input(output, source)


def check_not_input(output: Path, source: Path) -> None:
    """Find out before the work whether one of the files would take the place of the input.

    Raises:
        RequestError: one would.
    """
    for path in _written(output):
        if _is_same(path, source):
            by = "" if path == output else f" by {path.name}, which goes beside it"
            raise _refused(output, f"would overwrite the input{by}", "Choose another name")


def _is_same(one: Path, other: Path) -> bool:
    if one.resolve() == other.resolve():
        return True
    try:
        return one.samefile(other)  # where upper and lower case are one
    except OSError:
        return False


def _refused(output: Path, why: str, fix: str) -> RequestError:
    return RequestError(f"{output} {why}", field="--output", fix=fix)


def export_batch(
    connection: Connection,
    batch_id: str,
    output: Path,
    *,
    carried: Iterator[CarriedLine] | None = None,
    line: LineWriter | None = None,
    by_completion: bool = False,
    manifest: Callable[[Exported], Mapping[str, Any]] | None = None,
) -> Exported:
    """Write the batch's results to ``output`` and every other line to ``errors_path_for(output)``.

    The files appear whole or not at all, one after the other, the manifest last of all; one that was there goes before
    the first. So where a manifest is, the other two files are those that it counts. Rows stream, so memory stays
    bounded.

    Args:
        carried: the input's ids and own keys, in its order, to carry them through.
        line: makes the lines, ours unless given.
        by_completion: in the order in which they ended, instead of the input's.
        manifest: makes what ``manifest_path_for(output)`` holds.
    """
    counted = manifest_path_for(output)
    paths = [errors_path_for(output), output, *([] if manifest is None else [counted])]
    with atomic_write(*paths, first=partial(counted.unlink, missing_ok=True)) as (errors, results, *more):
        exported = write_rows(
            connection, batch_id, results, errors, carried=carried, line=line, by_completion=by_completion
        )
        if manifest is not None:
            json.dump(manifest(exported), more[0], ensure_ascii=False, indent=2)
            more[0].write("\n")
    return exported


def write_rows(
    connection: Connection,
    batch_id: str,
    results: IO[str],
    errors: IO[str],
    *,
    carried: Iterator[CarriedLine] | None = None,
    line: LineWriter | None = None,
    by_completion: bool = False,
) -> Exported:
    """As ``export_batch``, into files that are open."""
    make = line or our_line
    counts = {True: 0, False: 0}
    reasons: Counter[str] = Counter()
    without_extra = prompt_tokens = completion_tokens = cut_off = reused = reused_tokens = 0
    with ExitStack() as stack:
        extras: _Carried | _CarriedAnywhere | None = None
        if carried is not None:
            extras = _CarriedAnywhere(carried) if by_completion else _Carried(carried)
            stack.callback(extras.close)
        for row in iter_batch_rows(connection, batch_id, by_completion=by_completion):
            extra = extras.extra_of(row) if extras is not None else None
            without_extra += extras is not None and extra is None and row.custom_id is not None
            answered = is_answered(row)
            if row.result is not None:
                reasons[row.result.finish_reason] += 1
                cut_off += row.state is JobState.SUCCEEDED and not answered
                if row.attempt:
                    prompt_tokens += row.result.prompt_tokens
                    completion_tokens += row.result.completion_tokens
                else:
                    reused += 1
                    reused_tokens += row.result.completion_tokens
            (results if answered else errors).write(_as_line(make(row, extra or {})))
            counts[answered] += 1
    return Exported(
        counts[True],
        counts[False],
        without_extra,
        prompt_tokens,
        completion_tokens,
        dict(reasons),
        cut_off,
        reused,
        reused_tokens,
    )


def _as_line(made: Mapping[str, Any]) -> str:
    try:
        text = json.dumps(made, ensure_ascii=False, allow_nan=False)
    except ValueError:  # a bad line may carry what is not a number, for which JSON has no word
        made = json_safe(made)
        text = json.dumps(made, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # a bad line may carry half a character, which only an escape can name
        text = json.dumps(made)
    return text + "\n"


def is_answered(row: BatchRow) -> bool:
    """Whether the line has its whole answer: a part that a deadline left is none."""
    done = row.result is not None and row.state is JobState.SUCCEEDED
    return done and row.result is not None and row.result.finish_reason != FinishReason.DEADLINE


def our_line(row: BatchRow, extra: Mapping[str, Any]) -> dict[str, Any]:
    """A line of ours, for the results or for the errors."""
    return result_line(row, extra) if is_answered(row) else error_line(row, extra)


def result_line(row: BatchRow, extra: Mapping[str, Any]) -> dict[str, Any]:
    """A line of the output; what was not asked for (token ids, logprobs) or does not apply is left out."""
    result = row.result
    assert result is not None
    optional = {
        "stop_reason": result.stop_reason,
        "seed": result.seed,
        "token_ids": result.token_ids,
        "logprobs": result.logprobs,
    }
    first_token = result.time_to_first_token_s
    return {
        "custom_id": row.custom_id,
        **extra,
        "text": result.text,
        "finish_reason": result.finish_reason,
        "prompt_tokens": result.prompt_tokens,
        "completion_tokens": result.completion_tokens,
        "cached_tokens": result.cached_tokens,
        "queue_time_s": round(result.queue_time_s, 6),
        "time_to_first_token_s": None if first_token is None else round(first_token, 6),
        "latency_s": round(result.latency_s, 6),
        "model": row.model,
        "job_id": row.job_id,
    } | {name: value for name, value in optional.items() if value is not None}


def error_line(row: BatchRow, extra: Mapping[str, Any]) -> dict[str, Any]:
    """A line of the errors file: which line it was, what ended it, and the part of an answer that there may be."""
    part = row.result
    made = {
        "custom_id": row.custom_id,
        **_beside(extra, _OF_ERRORS),
        "line": row.position,
        "state": str(state_of(row)),
        "error": error_of(row),
        "model": row.model,
        "job_id": row.job_id,
    }
    return made if part is None else made | {"text": part.text, "finish_reason": part.finish_reason}


def _beside(extra: Mapping[str, Any], fields: Sequence[str]) -> Mapping[str, Any]:
    """The carried keys, under other names where a line has fields of theirs."""
    called = free_names([*extra], lambda key: key not in fields)
    return {called[key]: value for key, value in extra.items()}


def state_of(row: BatchRow) -> JobState:
    """How the line ended. A job whose answer a deadline cut off has succeeded, and its line has expired."""
    return JobState.EXPIRED if row.state is JobState.SUCCEEDED and row.result is not None else row.state


def error_of(row: BatchRow) -> dict[str, str]:
    """What left the line without its answer."""
    if row.state is JobState.SUCCEEDED and row.result is not None:
        tokens = row.result.completion_tokens
        return {"code": "deadline", "message": f"the deadline cut the answer off after {tokens:,} tokens"}
    code, message = _ENDED_WITHOUT.get(row.state, ("failed", "the job failed"))
    return {"code": row.error_type or code, "message": row.error_message or message}


class _Carried:
    """Walks the input beside the rows: both are in the order of their line numbers."""

    def __init__(self, lines: Iterator[CarriedLine]) -> None:
        self._lines = lines
        self._current = next(lines, None)

    def extra_of(self, row: BatchRow) -> Mapping[str, Any] | None:
        """The keys to carry through, or ``None`` when the input has no such line any more."""
        while self._current is not None and self._current.line < row.position:
            self._current = next(self._lines, None)
        here = self._current
        if here is None or here.line != row.position or here.custom_id != row.custom_id:
            return None
        return here.extra

    def close(self) -> None:
        """Nothing is held."""


class _CarriedAnywhere:
    """The same for rows in any order: a private temporary SQLite file, which spills to disk by itself."""

    def __init__(self, lines: Iterator[CarriedLine]) -> None:
        self._lines = scratch_file()
        self._lines.execute("CREATE TABLE carried (line INTEGER PRIMARY KEY, kept TEXT)")
        with self._lines:
            self._lines.executemany(
                "INSERT INTO carried VALUES (?, ?)",
                # The id as JSON, too: that of a bad line may be text that no database takes.
                ((line.line, json.dumps([line.custom_id, dict(line.extra)])) for line in lines),
            )

    def extra_of(self, row: BatchRow) -> Mapping[str, Any] | None:
        """See ``_Carried``."""
        found = self._lines.execute("SELECT kept FROM carried WHERE line = ?", (row.position,)).fetchone()
        if found is None:
            return None
        custom_id, extra = json.loads(found[0])
        return extra if custom_id == row.custom_id else None

    def close(self) -> None:
        """Remove the temporary file."""
        self._lines.close()
