"""The input of a bulk run: what is kept of it in the batch's row, and how it is checked and read again."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any, Literal

from backend.api import ConfigurationError, RequestError
from workers.bulk_formats import Shape, check_shape, read_carried_rows, read_rows
from workers.bulk_input import (
    BulkInputError,
    BulkLine,
    CarriedLine,
    LineError,
    LineOptions,
    Validated,
    distinct,
    validate,
)
from workers.payload import GeneratePayload

_STDIN = "-"

Order = Literal["input", "completion"]


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
            ConfigurationError: the batch was not made by ``bulk run``.
        """
        try:
            return cls(**json.loads(text or ""))
        except (ValueError, TypeError):
            raise ConfigurationError("this batch does not say which file it came from") from None

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
            ConfigurationError: it is gone or is not what it was.
        """
        if self.path == _STDIN:
            raise ConfigurationError("the batch was read from standard input, which is gone")
        try:
            with open(self.path, "rb") as file:
                if digest(file) != self.sha256:
                    raise ConfigurationError(f"{self.path} has changed since the batch was made")
                yield file
        except OSError as error:
            raise ConfigurationError(f"{self.path} cannot be read ({error.strerror})") from error


@contextmanager
def open_input(path: str) -> Iterator[IO[bytes]]:
    """The input, seekable; ``-`` is standard input, kept in a temporary file.

    Raises:
        RequestError: it cannot be read.
    """
    if path == _STDIN:
        with tempfile.TemporaryFile() as kept:
            shutil.copyfileobj(sys.stdin.buffer, kept)
            kept.seek(0)
            yield kept
        return
    try:
        with open(path, "rb") as file:
            yield file
    except OSError as error:
        raise RequestError(
            f"{path} cannot be read ({error.strerror})", field="INPUT", fix="Correct the path"
        ) from error


def digest(file: IO[bytes]) -> str:
    """SHA-256 of the whole file, which is then at its beginning again."""
    file.seek(0)
    value = hashlib.sha256()
    while block := file.read(1 << 20):
        value.update(block)
    file.seek(0)
    return value.hexdigest()


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
    """Check every line before anything starts. Bad ones become lines of the errors file.

    Args:
        refuse_bad: nothing is started when a line is bad.

    Raises:
        BulkInputError: names bad lines (the first few of many): all are bad, or ``refuse_bad``.
        RequestError: the file holds no line, or does not fit the options.
    """
    shape = shape or Shape()
    check_shape(shape, file)
    sha256 = digest(file)
    found = validate(distinct(read_rows(file, shape, options)))
    if found.num_errors and (refuse_bad or found.num_errors == found.lines):
        raise BulkInputError(path, found.errors, found.num_errors)
    if not found.lines:
        raise RequestError(f"{path} holds no line", field="INPUT", fix="Give one JSON object a line")
    source = BulkSource(
        path=path if path == _STDIN else str(Path(path).absolute()),
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
