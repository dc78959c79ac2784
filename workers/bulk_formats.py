"""The shapes that a bulk input may have: our JSONL, OpenAI's batch JSONL, CSV, Parquet.

Each is read as a stream and comes out as the same checked lines. Rows of a table become prompts by a template, or by
columns that are called like fields of the payload.
"""

from __future__ import annotations

import csv
import io
import json
import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any, Literal, get_args

from backend.api import ConfigurationError, RequestError
from workers.bulk_input import (
    BulkLine,
    CarriedLine,
    LineError,
    LineOptions,
    carried_name,
    check_misspelt,
    is_field,
    parse_object,
    raw_lines,
    read_carried,
)
from workers.payload import BULK_PRIORITY, GeneratePayload
from workers.serve.answers import CHAT, COMPLETION
from workers.serve.errors import ApiError
from workers.serve.requests import parse_chat, parse_completion, refuse_in_batch

Format = Literal["jsonl", "openai", "csv", "parquet"]
FORMATS: tuple[str, ...] = get_args(Format)
_ROUTING = frozenset({"tenant", "priority", "deadline_s"})  # fields of ours that no body of OpenAI's has
_ROWS_AT_ONCE = 1000  # of a Parquet file
_LONGEST_CELL = 16 * 1024 * 1024


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
    """By the name's ending; a JSONL file is OpenAI's when its first line has a ``url`` and a ``body``."""
    suffix = Path(path).suffix.lower()
    if suffix == ".csv":
        return "csv"
    if suffix in (".parquet", ".pq"):
        return "parquet"
    first = file.readline(1 << 20)
    file.seek(0)
    try:
        data = json.loads(first.decode("utf-8-sig"))
    except (ValueError, RecursionError):
        return "jsonl"
    return "openai" if isinstance(data, dict) and {"url", "body"} <= data.keys() else "jsonl"


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
    columns = _columns(shape, file)
    wanted = [("--template", name) for name in template_columns(shape.template or "")]
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
    if shape.template is None and not {"prompt", "token_ids", "messages"} & set(columns):
        raise RequestError(
            f"is needed: the file has no column 'prompt' (it has: {', '.join(columns)})",
            field="--template",
            fix="For example --template 'Summarise: {text}'",
        )


def template_columns(template: str) -> list[str]:
    """The columns that a template names.

    Raises:
        RequestError: it is malformed.
    """
    names = []
    try:
        for _, name, spec, conversion in string.Formatter().parse(template):
            if name is None:
                continue
            if not name or spec or conversion:
                raise ValueError("a placeholder is a column's name in braces, and nothing else")
            names.append(name)
    except ValueError as error:
        raise RequestError(
            f"is malformed: {error}", field="--template", value=template, fix="Write {{ and }} for braces"
        ) from None
    return names


def fill_template(template: str, row: Mapping[str, Any]) -> str:
    """The template with the row's values; unlike ``str.format`` it reaches no attribute of a value."""
    pieces = []
    for text, name, _, _ in string.Formatter().parse(template):
        pieces.append(text)
        if name is not None:
            value = row.get(name)
            pieces.append("" if value is None else str(value))
    return "".join(pieces)


def read_rows(
    file: IO[bytes], shape: Shape, options: LineOptions, *, after: int = 0
) -> Iterator[BulkLine | LineError]:
    """Every line or row in order, checked, one at a time; those up to number ``after`` are passed over."""
    if shape.format in ("jsonl", "openai"):
        parse = partial(_parse_openai, endpoint=shape.endpoint) if shape.format == "openai" else parse_object
        yield from raw_lines(file, options, parse, after=after)
        return
    rows = _csv_rows(file) if shape.format == "csv" else _parquet_rows(file)
    for number, row in enumerate(rows, 1):
        if options.limit is not None and number > options.limit:
            return
        if number <= after:
            continue
        if isinstance(row, str):
            yield LineError(number, row, "malformed_row")
        else:
            yield _parse_row(number, row, shape, options)


def read_carried_rows(file: IO[bytes], shape: Shape, options: LineOptions) -> Iterator[CarriedLine]:
    """Ids and other keys of a file that was read before; rows gone bad since are left out."""
    if shape.format == "jsonl":
        yield from read_carried(file)
        return
    for row in read_rows(file, shape, options):
        if isinstance(row, BulkLine):
            yield CarriedLine(row.line, row.custom_id, row.extra)


# ------------------------------------------------------------------------------------------------------- OpenAI's


def _parse_openai(
    number: int, data: Mapping[str, Any], options: LineOptions, *, endpoint: str | None = None
) -> BulkLine | LineError:
    """A line ``{"custom_id", "method", "url", "body"}``."""
    custom_id = data.get("custom_id")
    named = custom_id if isinstance(custom_id, str) else None
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
        payload = GeneratePayload.parse(fields | {"priority": BULK_PRIORITY} | ours | {"custom_id": named})
        if options.check is not None:
            options.check(payload)
    except ApiError as error:
        return LineError(number, f"body: {error.message}", error.code or "invalid_request", named)
    except RequestError as error:
        return LineError(number, str(error), error.code, named)
    return BulkLine(number, payload, {"url": data["url"]})


# --------------------------------------------------------------------------------------------------------- tables


def _parse_row(
    number: int, row: Mapping[str, Any], shape: Shape, options: LineOptions
) -> BulkLine | LineError:
    given = {name: value for name, value in row.items() if value is not None and value != ""}
    custom_id = row.get(shape.id_column or "custom_id")
    if custom_id is None or custom_id == "":
        if shape.id_column is not None:
            return LineError(number, f"{shape.id_column}: is empty. Name every row", "invalid_request")
        custom_id = f"row-{number}"
    if shape.template is None:
        data = {name if is_field(name) else carried_name(name): value for name, value in given.items()}
        prompt = data.get("prompt")
    else:  # the columns are the template's matter, whatever they are called
        data = {carried_name(name): value for name, value in given.items() if name != "custom_id"}
        prompt = fill_template(shape.template, row)
    data["custom_id"] = str(custom_id)
    if isinstance(prompt, str) and shape.system is not None:
        data.pop("prompt", None)
        turns = [{"role": "system", "content": shape.system}, {"role": "user", "content": prompt}]
        return parse_object(number, data | {"messages": turns}, options)
    return parse_object(number, data | ({} if prompt is None else {"prompt": prompt}), options)


def _columns(shape: Shape, file: IO[bytes]) -> Sequence[str]:
    if shape.format == "csv":
        with _text_of(file) as text:
            names = next(csv.reader(text), [])
        file.seek(0)
    else:
        names = list(_parquet(file).schema_arrow.names)
        file.seek(0)
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise RequestError(f"the column {twice[0]!r} comes twice", field="INPUT", fix="Rename one of them")
    for name in names:
        if shape.template is None:
            check_misspelt(name)
    return names


def _csv_rows(file: IO[bytes]) -> Iterator[dict[str, Any] | str]:
    csv.field_size_limit(_LONGEST_CELL)
    with _text_of(file) as text:
        reader = csv.DictReader(text, restkey="", strict=True)
        while True:
            try:
                row = next(reader, None)
            except (csv.Error, UnicodeDecodeError) as error:
                yield f"is not readable as CSV: {error}"
                if isinstance(error, UnicodeDecodeError):
                    return  # what follows cannot be split into rows any more
                continue
            if row is None:
                return
            if "" in row:
                yield "has more cells than there are columns. Quote cells that hold a comma"
            else:
                yield row


@contextmanager
def _text_of(file: IO[bytes]) -> Iterator[io.TextIOWrapper]:
    """The file as text; it stays open when the text is done with, and its position is the caller's matter."""
    text = io.TextIOWrapper(file, encoding="utf-8-sig", newline="")
    try:
        yield text
    finally:
        text.detach()


def _parquet(file: IO[bytes]) -> Any:
    try:
        from pyarrow import ArrowInvalid
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise ConfigurationError(
            "reading Parquet needs pyarrow. Install it: pip install 'tokenmill[parquet]'"
        ) from None
    try:
        return ParquetFile(file)
    except (ArrowInvalid, OSError) as error:
        raise RequestError(
            f"is no readable Parquet file: {error}", field="INPUT", fix="Check the file"
        ) from None


def _parquet_rows(file: IO[bytes]) -> Iterator[dict[str, Any] | str]:
    for batch in _parquet(file).iter_batches(batch_size=_ROWS_AT_ONCE):
        yield from batch.to_pylist()
