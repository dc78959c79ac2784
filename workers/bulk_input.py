"""Lines of a bulk file: read as a stream, checked one by one, each complaint with its line number.

A line is a JSON object: ``custom_id``, exactly one of ``prompt``, ``messages`` and ``token_ids``, and any
field of the payload. Other keys are carried through to the output, except those like a misspelt field.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import islice
from typing import IO, Any

from backend.api import RequestError, check_text
from models_db.scratch import scratch_file
from workers.chunks import take_chunk
from workers.payload import BULK_PRIORITY, GeneratePayload, NewerPayloadError

OUTPUT_FIELDS = (
    "custom_id",
    "job_id",
    "model",
    "text",
    "finish_reason",
    "stop_reason",
    "prompt_tokens",
    "completion_tokens",
    "cached_tokens",
    "seed",
    "queue_time_s",
    "time_to_first_token_s",
    "latency_s",
    "token_ids",
    "logprobs",
)
_FIELDS = frozenset(GeneratePayload.model_fields)
_MISSPELT = 0.8  # difflib's ratio from which a key counts as a misspelt field
_UNSTORABLE = re.compile("[\x00\ud800-\udfff]")
_LOOKED_UP = 200  # ids a look at those seen before
SHOWN_ERRORS = 20
MAX_LINE_BYTES = 64 * 1024 * 1024  # a file without line breaks must not fill the memory
MAX_DEPTH = 200  # objects and lists within each other; Python gives up far beyond, at no fixed place


class BulkInputError(RequestError):
    """One or more lines of a bulk file cannot be run; nothing has been started."""

    code = "bulk_input"

    def __init__(self, source: str, errors: list[LineError], total: int) -> None:
        self.errors = errors
        shown = [f"  {source}:{error.line}: {error.message}" for error in errors]
        if total > len(errors):
            shown.append(f"  … and {total - len(errors):,} more")
        count = "1 bad line" if total == 1 else f"{total:,} bad lines"
        super().__init__(f"{count}, nothing was started:\n" + "\n".join(shown))


@dataclass(frozen=True, slots=True)
class LineError:
    """What is wrong with one line. ``line`` counts from 1; ``extra`` is carried through to the errors file."""

    line: int
    message: str
    code: str = "invalid_request"
    custom_id: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class BulkLine:
    """One line that can be run. ``line`` counts from 1 and becomes the job's position in its batch."""

    line: int
    payload: GeneratePayload
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def custom_id(self) -> str:
        """The line's own id, unique in its file."""
        assert self.payload.custom_id is not None
        return self.payload.custom_id


@dataclass(frozen=True, slots=True)
class CarriedLine:
    """What an output line takes over from its input line."""

    line: int
    custom_id: str | None
    extra: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class LineOptions:
    """How lines are read. ``defaults`` fill payload fields that a line leaves out.

    ``chat`` turns a ``prompt`` into one user message, so that the model's chat template is applied; without
    it a prompt is text to be continued.
    """

    defaults: Mapping[str, Any] = field(default_factory=dict)
    chat: bool = True
    strict: bool = False
    limit: int | None = None
    check: Callable[[GeneratePayload], None] | None = None  # further limits; raises RequestError


ParseObject = Callable[[int, Mapping[str, Any], LineOptions], "BulkLine | LineError"]


@dataclass(slots=True)
class Validated:
    """What a first pass over the file found."""

    lines: int = 0
    extra_keys: set[str] = field(default_factory=set)
    errors: list[LineError] = field(default_factory=list)
    num_errors: int = 0


def read_lines(file: IO[bytes], options: LineOptions, *, after: int = 0) -> Iterator[BulkLine | LineError]:
    """Every line that is not blank, in order, one at a time; lines up to number ``after`` are passed over."""
    return raw_lines(file, options, parse_object, after=after)


def raw_lines(
    file: IO[bytes], options: LineOptions, parse: ParseObject, *, after: int = 0
) -> Iterator[BulkLine | LineError]:
    """``read_lines`` for any kind of JSON object."""
    for number, raw in islice(numbered(file), options.limit):
        if number <= after:
            continue
        if raw is None:
            yield LineError(
                number, f"is longer than {MAX_LINE_BYTES:,} bytes. One line is one job", "malformed_json"
            )
        else:
            yield parse_line(number, raw, options, parse)


def numbered(file: IO[bytes]) -> Iterator[tuple[int, bytes | None]]:
    """The lines that are not blank, with their numbers; in place of one that is too long, ``None``."""
    number = 0
    while raw := file.readline(MAX_LINE_BYTES):
        number += 1
        if len(raw) == MAX_LINE_BYTES and not raw.endswith(b"\n"):
            while (rest := file.readline(MAX_LINE_BYTES)) and not rest.endswith(b"\n"):
                pass
            yield number, None
        elif raw.strip():
            yield number, raw


def parse_line(
    number: int, raw: bytes, options: LineOptions, parse: ParseObject | None = None
) -> BulkLine | LineError:
    """One line, checked: UTF-8, JSON, keys, and the payload with the defaults filled in."""
    try:
        text = raw.decode("utf-8-sig" if number == 1 else "utf-8")
        data = _STRICT.decode(text)
        if _too_deep(raw, data):
            raise RecursionError
    except RecursionError:
        why = f"is nested too deeply: more than {MAX_DEPTH} levels. Flatten it"
        return LineError(number, why, "malformed_json")
    except UnicodeDecodeError as error:
        return LineError(number, f"is not UTF-8 at byte {error.start}. Re-encode the file", "malformed_json")
    except json.JSONDecodeError as error:  # its own words count lines within this one
        place = "its end" if error.pos >= len(text.rstrip()) else f"character {error.pos + 1}"
        why = f"{error.msg[:1].lower()}{error.msg[1:]} at {place}"
        return LineError(number, f"is not valid JSON: {why}. Write one object a line", "malformed_json")
    except ValueError as error:
        return LineError(number, f"is not valid JSON: {error}", "malformed_json")
    if not isinstance(data, dict):
        why = f"must be a JSON object, not {type(data).__name__}. Write one object a line"
        return LineError(number, why, "malformed_json")
    return (parse or parse_object)(number, data, options)


def parse_object(number: int, data: Mapping[str, Any], options: LineOptions) -> BulkLine | LineError:
    """One line's object, checked: keys, and the payload with the defaults filled in."""
    custom_id = data.get("custom_id")
    named = custom_id if isinstance(custom_id, str) else None
    try:
        if custom_id is None:
            raise RequestError(
                "required field is missing", field="custom_id", fix="Add an id unique in the file"
            )
        extra = {key: value for key, value in data.items() if key not in _FIELDS}
        for key, value in extra.items():
            _check_extra(key, value, strict=options.strict)
        fields = dict(options.defaults) | {key: value for key, value in data.items() if key in _FIELDS}
        payload = payload_of({"priority": BULK_PRIORITY} | (as_chat(fields) if options.chat else fields))
        if options.check is not None:
            options.check(payload)
    except RequestError as error:
        return LineError(number, str(error), error.code, named)
    return BulkLine(number, payload, extra)


def payload_of(fields: Mapping[str, Any]) -> GeneratePayload:
    """The payload with these fields.

    Raises:
        RequestError: one of them cannot be right.
    """
    try:
        return GeneratePayload.parse(fields)
    except NewerPayloadError as error:  # for a worker, which waits for a newer one; a line was written for us
        raise RequestError(
            "is the payload's, and must be 1",
            field="version",
            value=error.version,
            fix="Leave it out; a key of your own that is to be carried through needs another name",
        ) from None


def as_chat(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields with a lone ``prompt`` turned into one user message; anything else is left as it is."""
    changed = dict(fields)
    prompt = changed.get("prompt")
    if isinstance(prompt, str) and prompt and not {"messages", "token_ids"} & changed.keys():
        check_text(prompt, "prompt")  # here, so that the complaint names the field that was given
        del changed["prompt"]
        changed["messages"] = [{"role": "user", "content": prompt}]
    return changed


def distinct(rows: Iterable[BulkLine | LineError]) -> Iterator[BulkLine | LineError]:
    """The rows, those whose ``custom_id`` came before as errors; in bounded memory however many they are."""
    waiting = iter(rows)
    with closing(_SeenIds()) as seen:
        while some := take_chunk(waiting, _LOOKED_UP, size_of):
            yield from seen.checked(some)


def size_of(row: BulkLine | LineError) -> int:
    """Characters of the row's prompt."""
    return row.payload.prompt_chars if isinstance(row, BulkLine) else 0


def validate(rows: Iterable[BulkLine | LineError], *, shown_errors: int = SHOWN_ERRORS) -> Validated:
    """Look at every row once."""
    found = Validated()
    for row in rows:
        found.lines += 1
        if isinstance(row, LineError):
            found.num_errors += 1
            if len(found.errors) < shown_errors:
                found.errors.append(row)
        else:
            found.extra_keys.update(row.extra)
    return found


def read_carried(file: IO[bytes]) -> Iterator[CarriedLine]:
    """The ids and other keys of a file that was validated before; lines gone bad since are left out."""
    for number, raw in numbered(file):
        try:
            data = json.loads((raw or b"").decode("utf-8-sig" if number == 1 else "utf-8"))
        except (ValueError, RecursionError):
            continue
        if isinstance(data, dict) and not _too_deep(raw or b"", data):
            extra = {key: value for key, value in data.items() if key not in _FIELDS}
            custom_id = data.get("custom_id")
            yield CarriedLine(number, custom_id if isinstance(custom_id, str) else None, extra)


def _too_deep(raw: bytes, data: object) -> bool:
    """Whether more than ``MAX_DEPTH`` objects and lists lie within each other."""
    if raw.count(b"{") + raw.count(b"[") <= MAX_DEPTH:
        return False
    level = [data]
    for _ in range(MAX_DEPTH):
        within = [
            each.values() if isinstance(each, dict) else each
            for each in level
            if isinstance(each, dict | list)
        ]
        level = [value for values in within for value in values if isinstance(value, dict | list)]
    return bool(level)


class _SeenIds:
    """Which line had which ``custom_id``: a private temporary SQLite file, which spills to disk by itself."""

    def __init__(self) -> None:
        self._ids = scratch_file()
        self._ids.execute(
            "CREATE TABLE seen (custom_id TEXT PRIMARY KEY, line INTEGER NOT NULL) WITHOUT ROWID"
        )

    def checked(self, rows: Sequence[BulkLine | LineError]) -> Iterator[BulkLine | LineError]:
        """The rows, remembered; in place of some, errors that say which earlier row had the id."""
        # Two statements for many rows, and never executemany: each step lets another thread in, which costs more
        # than the step.
        asked = json.dumps([row.custom_id for row in rows if _storable(row.custom_id)], ensure_ascii=False)
        select = "SELECT custom_id, line FROM seen WHERE custom_id IN (SELECT value FROM json_each(?))"
        seen: dict[str, int] = dict(self._ids.execute(select, (asked,)).fetchall())
        new: list[tuple[str, int]] = []
        checked = []
        for row in rows:
            if row.custom_id is None or not _storable(row.custom_id):
                checked.append(row)
            elif (first := seen.setdefault(row.custom_id, row.line)) == row.line:
                new.append((row.custom_id, row.line))
                checked.append(row)
            else:
                checked.append(_used_before(row, first))
        insert = """
            INSERT INTO seen
            SELECT json_extract(value, '$[0]'), json_extract(value, '$[1]') FROM json_each(?)
        """
        self._ids.execute(insert, (json.dumps(new, ensure_ascii=False),))
        yield from checked

    def close(self) -> None:
        """Remove the temporary file."""
        self._ids.close()


def _storable(custom_id: str | None) -> bool:
    """Whether it can be looked up: the id of a bad line may be text that no database takes."""
    return custom_id is not None and _UNSTORABLE.search(custom_id) is None


def _used_before(row: BulkLine | LineError, first: int) -> LineError:
    if isinstance(row, LineError):
        return replace(row, custom_id=None)  # the id is the earlier row's
    return LineError(
        row.line,
        f"custom_id: was used in line {first} (got {row.custom_id!r}). Make ids unique in the file",
        "duplicate_custom_id",
    )


def is_field(name: str) -> bool:
    """Whether the payload has a field of this name."""
    return name in _FIELDS


def has_meaning(name: str) -> bool:
    """Whether a carried key of this name could be taken for something else in the output."""
    return is_field(name) or name in OUTPUT_FIELDS or _meant(name) is not None


def free_names(names: Sequence[str], keeps: Callable[[str], bool]) -> Mapping[str, str]:
    """What each is called: its own name if it ``keeps`` it, else one with ``input_`` before it, as often as it takes.

    No two are called the same.
    """
    called = {name: name for name in names if keeps(name)}
    taken = set(called)
    for name in names:
        if name not in called:
            free = f"input_{name}"
            while free in taken:
                free = f"input_{free}"
            called[name] = free
            taken.add(free)
    return called


def check_misspelt(key: str) -> None:
    """Refuse a key that is no field but looks like one.

    Raises:
        RequestError: it does.
    """
    if not is_field(key) and (meant := _meant(key)):
        raise RequestError("unknown field", field=key, fix=f"Did you mean {meant}? If not, rename it")


def _check_extra(key: str, value: Any, *, strict: bool) -> None:
    """Refuse a key that is not a field of the payload and must not be carried through."""
    try:
        text = json.dumps([key, value], ensure_ascii=False, allow_nan=False)
    except ValueError:
        raise RequestError(
            "holds a number beyond what a double can hold", field=key, fix="Write it as text"
        ) from None
    check_text(text, key)
    if strict:
        raise RequestError(
            "unknown field", field=key, fix="Remove it, or run without --strict to carry it through"
        )
    if key in OUTPUT_FIELDS:
        raise RequestError(
            "is the name of a field that the output line gets",
            field=key,
            fix=f"Rename it, for example to input_{key}",
        )
    check_misspelt(key)


@lru_cache(maxsize=1024)  # the same few keys come in every line, and comparing is the dearest part of a line
def _meant(key: str) -> str | None:
    """The field that the key looks like, if it looks like one; what we call carried keys is no misspelling."""
    if key.startswith("input_"):
        return None
    lowered = key.lower().replace("-", "_")
    return next(iter(difflib.get_close_matches(lowered, _FIELDS, n=1, cutoff=_MISSPELT)), None)


def _no_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {twice!r} comes twice")
    return made


def _no_constants(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON value")


_STRICT = json.JSONDecoder(object_pairs_hook=_no_doubles, parse_constant=_no_constants)
