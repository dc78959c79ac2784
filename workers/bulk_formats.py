"""The shapes that a bulk input may have: our JSONL, OpenAI's batch JSONL, CSV, Parquet.

Each is read as a stream and comes out as the same checked lines. Rows of a table become prompts by a template, or by
columns that are called like fields of the payload.
"""

from __future__ import annotations

import json
import math
import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import islice
from pathlib import Path
from typing import IO, Any, Literal, get_args

from backend.api import RequestError
from workers.bulk_input import (
    BulkLine,
    CarriedLine,
    LineError,
    LineOptions,
    check_misspelt,
    free_names,
    has_meaning,
    is_field,
    numbered,
    parse_object,
    payload_of,
    raw_lines,
    read_carried,
)
from workers.bulk_tables import TableRow, as_text, column_names, json_safe, other_separator, table_rows
from workers.payload import BULK_PRIORITY
from workers.serve.answers import CHAT, COMPLETION
from workers.serve.errors import ApiError
from workers.serve.requests import parse_chat, parse_completion, refuse_in_batch

Format = Literal["jsonl", "openai", "csv", "parquet"]
FORMATS: tuple[str, ...] = get_args(Format)
_PROMPTS = frozenset({"prompt", "messages", "token_ids"})
_LOOKED_AT = 100  # lines that need not say which format they are of: broken ones
_ROUTING = frozenset({"tenant", "priority", "deadline_s"})  # fields of ours that no body of OpenAI's has


@dataclass(frozen=True, slots=True)
class Shape:
    """What a file is and how its rows become prompts; JSON-safe, so that a batch can keep it.

    Args:
        template: for tables; ``{column}`` is replaced by the row's value.
        system: a system message before each prompt of a table.
        id_column: which column names the row; ``custom_id`` where there is one, else the row's number.
        endpoint: the only ``url`` that OpenAI's lines may have; each that is served where unset.
    """

    format: Format = "jsonl"
    template: str | None = None
    system: str | None = None
    id_column: str | None = None
    endpoint: str | None = None

    @property
    def is_table(self) -> bool:
        """Whether rows have columns."""
        return self.format in ("csv", "parquet")

    def to_dict(self) -> dict[str, Any]:
        """As it is kept."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


def guess_format(path: str, file: IO[bytes]) -> Format:
    """By the name's ending, else by the first line that tells; the file is at its beginning afterwards."""
    suffix = Path(path.removesuffix(".gz")).suffix.lower()
    if suffix == ".csv":
        return "csv"
    begins = file.read(4)
    file.seek(0)
    if suffix in (".parquet", ".pq") or begins == b"PAR1":
        return "parquet"
    told = map(_format_of, islice(numbered(file), _LOOKED_AT))
    found: Format | None = next(filter(None, told), None)
    file.seek(0)
    return found or "jsonl"


def _format_of(numbered_line: tuple[int, bytes | None]) -> Literal["jsonl", "openai"] | None:
    """What the line shows its file to be: a prompt is of ours, a ``url`` and a ``body`` are of OpenAI's."""
    number, raw = numbered_line
    try:
        data = json.loads((raw or b"").decode("utf-8-sig" if number == 1 else "utf-8"))
    except (ValueError, RecursionError):
        return None
    if not isinstance(data, dict):
        return None
    if _PROMPTS & data.keys():
        return "jsonl"
    return "openai" if {"url", "body"} <= data.keys() else None


def check_shape(shape: Shape, file: IO[bytes]) -> None:
    """Find out before the work whether the options fit the file; it is at its beginning afterwards.

    Raises:
        RequestError: they do not; names the option.
    """
    given = {"--template": shape.template, "--system": shape.system, "--id-column": shape.id_column}
    if not shape.is_table:
        for option, value in given.items():
            if value is not None:
                raise RequestError(
                    f"is for tables, and this file is {shape.format}", field=option, fix="Leave it out"
                )
        return
    columns = column_names(shape.format, file)
    if not columns:
        return  # an empty file: it has no rows either
    if shape.format == "csv" and (sign := other_separator(columns)) is not None:
        raise RequestError(
            f"has one column, {columns[0]!r}: its cells seem to be separated by {sign}",
            field="INPUT",
            fix="Write it with commas; where it is one column, rename it",
        )
    if shape.template is None:
        for name in columns:
            check_misspelt(name)
    wanted = [("--template", name) for name in template_columns(shape.template or "")]
    if shape.template is not None and not wanted:
        raise RequestError(
            f"names no column, so that each row would have the same prompt (the file has: {', '.join(columns)})",
            field="--template",
            value=shape.template,
            fix="Put a column's name in braces, for example 'Summarise: {text}'",
        )
    if shape.id_column is not None:
        wanted.append(("--id-column", shape.id_column))
    for option, name in wanted:
        if name not in columns:
            raise RequestError(
                f"names a column that the file does not have (it has: {', '.join(columns)})",
                field=option,
                value=name,
                fix="Correct the name",
            )
    if shape.template is None and not _PROMPTS & set(columns):
        raise RequestError(
            f"is needed: the file has no column 'prompt' (it has: {', '.join(columns)})",
            field="--template",
            fix="For example --template 'Summarise: {text}'",
        )


@lru_cache(maxsize=16)  # asked for each row of a table
def _parsed(template: str) -> tuple[tuple[str, str | None], ...]:
    """The template's pieces: text, and the column whose value follows it.

    Raises:
        ValueError: it is malformed.
    """
    pieces = []
    for text, name, spec, conversion in string.Formatter().parse(template):
        if name is not None and (not name or spec or conversion):
            raise ValueError("a placeholder is a column's name in braces, and nothing else")
        pieces.append((text, name))
    return tuple(pieces)


def template_columns(template: str) -> list[str]:
    """The columns that a template names.

    Raises:
        RequestError: it is malformed.
    """
    try:
        return [name for _, name in _parsed(template) if name is not None]
    except ValueError as error:
        raise RequestError(
            f"is malformed: {error}", field="--template", value=template, fix="Write {{ and }} for braces"
        ) from None


def fill_template(template: str, row: Mapping[str, Any]) -> str:
    """The template with the row's values; unlike ``str.format`` it reaches no attribute of a value.

    Raises:
        ValueError: a value is binary and no text.
    """
    pieces = []
    for text, name in _parsed(template):
        pieces.append(text)
        if name is not None:
            value = row.get(name)
            pieces.append("" if value is None else as_text(value))
    return "".join(pieces)


def read_rows(
    file: IO[bytes], shape: Shape, options: LineOptions, *, after: int = 0
) -> Iterator[BulkLine | LineError]:
    """Every line or row in order, checked, one at a time; those up to number ``after`` are passed over."""
    if shape.format in ("jsonl", "openai"):
        parse = partial(_parse_openai, endpoint=shape.endpoint) if shape.format == "openai" else parse_object
        yield from raw_lines(file, options, parse, after=after)
        return
    called = _carried_names(column_names(shape.format, file), shape)
    for number, row in enumerate(table_rows(shape.format, file), 1):
        if options.limit is not None and number > options.limit:
            return
        if number > after:
            yield _parse_row(number, row, shape, options, called)


def read_carried_rows(file: IO[bytes], shape: Shape, options: LineOptions) -> Iterator[CarriedLine]:
    """Ids and other keys of a file that was read before, also of its bad lines, which are in the errors file."""
    if shape.format == "jsonl":
        yield from read_carried(file)
        return
    for row in read_rows(file, shape, options):
        yield CarriedLine(row.line, row.custom_id, row.extra)


# ------------------------------------------------------------------------------------------------------- OpenAI's


def _parse_openai(
    number: int, data: Mapping[str, Any], options: LineOptions, *, endpoint: str | None = None
) -> BulkLine | LineError:
    """A line ``{"custom_id", "method", "url", "body"}``."""
    custom_id = data.get("custom_id")
    named = custom_id if isinstance(custom_id, str) else None
    extra = {"url": data["url"]} if isinstance(data.get("url"), str) else {}
    parsers: Mapping[str, Callable[[object], Any]] = {CHAT: parse_chat, COMPLETION: parse_completion}
    try:
        if not named:
            raise RequestError(
                "must be text", field="custom_id", value=custom_id, fix="Add an id unique in the file"
            )
        if data.get("method") != "POST":
            raise RequestError("must be POST", field="method", value=data.get("method"), fix="Write POST")
        parse = parsers.get(str(data.get("url")))
        if parse is None:
            raise RequestError(
                "is not served", field="url", value=data.get("url"), fix=f"Use {CHAT} or {COMPLETION}"
            )
        if endpoint is not None and data["url"] != endpoint:
            raise RequestError(
                "is not the endpoint of the batch", field="url", value=data["url"], fix=f"Use {endpoint}"
            )
        body = data.get("body")
        ours = {name: value for name, value in options.defaults.items() if name in _ROUTING}
        theirs = {name: value for name, value in options.defaults.items() if name not in _ROUTING}
        request = parse({**theirs, **body} if isinstance(body, dict) else body)
        refuse_in_batch(request)
        fields, *more = request.payloads()
        if more:
            raise RequestError(
                "a line gives one answer", field="n", value=len(more) + 1, fix="Send more lines"
            )
        payload = payload_of(fields | {"priority": BULK_PRIORITY} | ours | {"custom_id": named})
        if options.check is not None:
            options.check(payload)
    except ApiError as error:
        return LineError(number, f"body: {error.message}", error.code or "invalid_request", named, extra)
    except RequestError as error:
        return LineError(number, str(error), error.code, named, extra)
    return BulkLine(number, payload, extra)


def fault_of_default(name: str, value: object, model: object) -> str | None:
    """What is wrong with a value for OpenAI's bodies that do not say; ``None`` where some kind of body can have it."""
    faults = []
    turn = {"role": "user", "content": "x"}
    for url, body in ((CHAT, {"messages": [turn]}), (COMPLETION, {"prompt": "x"})):
        line = {"custom_id": "x", "method": "POST", "url": url, "body": {"model": model} | body}
        made = _parse_openai(1, line, LineOptions({name: value}))
        if isinstance(made, BulkLine):
            return None
        faults.append(made.message.removeprefix("body: ").removeprefix(f"{name}: "))
    return faults[0]


# --------------------------------------------------------------------------------------------------------- tables


def _carried_names(columns: Sequence[str], shape: Shape) -> Mapping[str, str]:
    """What the columns that are carried through are called in the output: the same in every row, and all different."""

    def is_used(name: str) -> bool:
        if name == "custom_id":
            return shape.id_column in (None, name)
        # Beside a template, the columns are its matter, whatever they are called.
        return shape.template is None and is_field(name)

    return free_names([name for name in columns if not is_used(name)], lambda name: not has_meaning(name))


def _parse_row(
    number: int, row: TableRow, shape: Shape, options: LineOptions, called: Mapping[str, str]
) -> BulkLine | LineError:
    cells = {name: value for name, value in row.cells.items() if not _is_null(value)}
    given = {name: value for name, value in cells.items() if value != ""}
    extra = {called[name]: json_safe(value) for name, value in given.items() if name in called}
    custom_id = None
    try:
        custom_id = _id_of(number, row, given, shape)
        if row.fault is not None:
            return LineError(number, row.fault, "malformed_row", custom_id, extra)
        if shape.template is None:
            data = {name: _field_of(name, value) for name, value in given.items() if is_field(name)}
            prompt = data.get("prompt")
        else:
            data, prompt = {}, _prompt_of(shape.template, cells)
    except ValueError as error:
        return LineError(number, str(error), "malformed_row", custom_id, extra)
    data["custom_id"] = custom_id
    if isinstance(prompt, str) and shape.system is not None:
        data.pop("prompt", None)
        turns = [{"role": "system", "content": shape.system}, {"role": "user", "content": prompt}]
        data["messages"] = turns
    elif prompt is not None:
        data["prompt"] = prompt
    made = parse_object(number, extra | data, options)
    return replace(made, extra=extra) if isinstance(made, LineError) else made


def _is_null(value: object) -> bool:
    """Whether a cell holds nothing, or what is not a number."""
    return value is None or (isinstance(value, float) and math.isnan(value))


def _id_of(number: int, row: TableRow, given: Mapping[str, Any], shape: Shape) -> str | None:
    """The row's id; none where its cell is the one that cannot be read.

    Raises:
        ValueError: its cell is empty, and not by chance.
    """
    name = shape.id_column or "custom_id"
    if name in given:
        return _text(name, given[name])
    if shape.id_column is None:
        return f"row-{number}"
    if row.fault is not None:
        return None
    raise ValueError(f"{name}: is empty. Name every row")


def _prompt_of(template: str, cells: Mapping[str, Any]) -> str:
    """The row's prompt.

    Raises:
        ValueError: the row has no value for some column that the template names, or empty text for all.
    """
    names = template_columns(template)
    for name in names:
        if name not in cells:
            raise ValueError(
                f"{name}: holds nothing, and the template needs it. Fill it, or leave the row out"
            )
    texts = {name: _text(name, cells[name]) for name in names}
    if names and not any(texts.values()):
        raise ValueError(
            f"{', '.join(names)}: is empty, and the template needs it. Fill it, or leave the row out"
        )
    return fill_template(template, texts)


def _field_of(name: str, value: Any) -> Any:
    """A cell that is a field of the payload. Some writers of Parquet call all text binary."""
    return _text(name, value) if isinstance(value, bytes) else json_safe(value)


def _text(name: str, value: Any) -> str:
    try:
        return as_text(value)
    except ValueError:
        raise ValueError(f"{name}: is binary and no UTF-8 text. Encode it, or leave the column out") from None
