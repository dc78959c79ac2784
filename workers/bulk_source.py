"""The input of a bulk run: what is kept of it in the batch's row, and how it is checked and read again."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any, Literal

from backend.api import RequestError
from workers.bulk_files import STDIN, digest, open_input
from workers.bulk_formats import Shape, check_shape, fault_of_default, read_carried_rows, read_rows
from workers.bulk_input import (
    BulkInputError,
    BulkLine,
    CarriedLine,
    LineError,
    LineOptions,
    Validated,
    distinct,
    is_field,
    payload_of,
    validate,
)
from workers.payload import GeneratePayload

Order = Literal["input", "completion"]


class InputGoneError(RequestError):
    """The input of a batch is not what it was, or not there: its lines cannot be read again."""

    code = "input_gone"


@dataclass(frozen=True, slots=True)
class BulkSource:
    """The input of a batch and how it is read, as ``batch.source`` keeps it."""

    path: str
    sha256: str
    lines: int
    defaults: Mapping[str, Any] = field(default_factory=dict)
    chat: bool = True
    strict: bool = False
    limit: int | None = None
    shape: Mapping[str, Any] = field(default_factory=dict)
    order: str = "input"
    reuse_days: float | None = None

    def to_json(self) -> str:
        """For ``batch.source``."""
        return json.dumps(
            {name: getattr(self, name) for name in self.__dataclass_fields__}, ensure_ascii=False
        )

    @classmethod
    def from_json(cls, text: str | None) -> BulkSource:
        """Read it back.

        Raises:
            InputGoneError: the batch was not made by ``bulk run``.
        """
        try:
            return cls(**json.loads(text or ""))
        except (ValueError, TypeError):
            raise InputGoneError("this batch does not say which file it came from") from None

    def options(self) -> LineOptions:
        """How its lines are read."""
        return LineOptions(defaults=self.defaults, chat=self.chat, strict=self.strict, limit=self.limit)

    def made_of(self) -> Shape:
        """What its lines are."""
        return Shape(**self.shape)

    def rows(
        self, file: IO[bytes], check: Callable[[GeneratePayload], None] | None = None
    ) -> Iterator[BulkLine | LineError]:
        """Every line from the beginning, checked, also by ``check``, which raises RequestError."""
        file.seek(0)
        return distinct(read_rows(file, self.made_of(), replace(self.options(), check=check)))

    def carried(self, file: IO[bytes]) -> Iterator[CarriedLine]:
        """What the lines' own keys are, from the beginning."""
        file.seek(0)
        return read_carried_rows(file, self.made_of(), self.options())

    @contextmanager
    def reopen(self) -> Iterator[IO[bytes]]:
        """The unchanged input file.

        Raises:
            InputGoneError: it is gone or is not what it was.
        """
        if self.path == STDIN:
            raise InputGoneError("the batch was read from standard input, which is gone")
        with ExitStack() as stack:
            try:
                file = stack.enter_context(open_input(self.path))
                present = digest(file)
            except RequestError as error:
                raise InputGoneError(str(error).removeprefix("INPUT: ")) from error
            if present != self.sha256:
                raise InputGoneError(f"{self.path} has changed since the batch was made")
            yield file


def check_defaults(options: LineOptions, shape: Shape, names: Mapping[str, str]) -> None:
    """Find out before any line is read whether each value for lines that do not say can be right for a line.

    Args:
        names: which option a field was given by, where it was not ``--param``.

    Raises:
        RequestError: names the option.
    """
    ours = {"model": options.defaults.get("model"), "prompt": "x"}
    for field_name, value in options.defaults.items():
        # One by one: what values mean together depends on what lines say.
        row = {**ours, field_name: value}
        if field_name in ("messages", "token_ids"):
            del row["prompt"]
        if field_name == "min_tokens" and isinstance(value, int):
            row["max_tokens"] = max(value, 1)
        if field_name == "callback_include_output":
            continue  # needs an address, which a line may have
        option = names.get(field_name, f"--param {field_name}")
        if shape.format == "openai" and not is_field(field_name):
            if (fault := fault_of_default(field_name, value, ours["model"])) is not None:
                raise RequestError(fault, field=option)
            continue
        try:
            payload = payload_of(row)
            if options.check is not None:
                options.check(payload)
        except RequestError as error:
            why = str(error).removeprefix(f"{error.field}: ").removesuffix(f". {error.fix}")
            raise RequestError(why, field=option, fix=error.fix) from None


def validate_source(
    path: str,
    file: IO[bytes],
    options: LineOptions,
    shape: Shape | None = None,
    *,
    refuse_bad: bool = False,
    order: Order = "input",
    reuse_days: float | None = None,
) -> tuple[BulkSource, Validated]:
    """Check every line before anything starts. Bad ones become lines of the errors file, also where all are bad.

    Args:
        refuse_bad: nothing is started when a line is bad.

    Raises:
        BulkInputError: names bad lines (the first few of many), with ``refuse_bad``.
        RequestError: the file does not fit the options.
    """
    shape = shape or Shape()
    check_shape(shape, file)
    sha256 = digest(file)
    found = validate(distinct(read_rows(file, shape, options)))
    if found.num_errors and refuse_bad:
        raise BulkInputError(path, found.errors, found.num_errors)
    source = BulkSource(
        path=path if path == STDIN else str(Path(path).absolute()),
        sha256=sha256,
        lines=found.lines,
        defaults=dict(options.defaults),
        chat=options.chat,
        strict=options.strict,
        limit=options.limit,
        shape=shape.to_dict(),
        order=order,
        reuse_days=reuse_days,
    )
    return source, found
