"""What every command shares: options, exit codes, and how errors are shown. Imports nothing heavy."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer
import typer.core

from backend.api import ConfigurationError, RequestError, TokenmillError

if TYPE_CHECKING:
    from rich.console import Console
    from sqlalchemy import Engine

    from workers.settings import Settings


class ExitCode(IntEnum):
    """The process's exit status; the same for every command."""

    OK = 0
    FAILED = 1  # the work was done, and some of it failed
    USAGE = 2  # a wrong option, a bad request or a bad input file; nothing was started
    UNAVAILABLE = 3  # settings, Redis, the database, its schema or the model do not allow the work
    TIMEOUT = 4  # the time given with --timeout is over; the job goes on
    CRASHED = 70  # an error of ours, with a traceback; Python's own 1 would pass for failed lines
    INTERRUPTED = 130  # Ctrl-C


EXIT_CODES = (
    "Exit status: 0 done · 1 some of the work failed · 2 wrong option or bad input, nothing started · "
    "3 settings, Redis, database, model or output not usable · 4 timed out · 70 crashed · 130 interrupted."
)

BrokerOption = Annotated[
    str | None,
    typer.Option("--broker-url", help="Redis to use.  \\[TOKENMILL_BROKER_URL]", show_default=False),
]
DatabaseOption = Annotated[
    str | None,
    typer.Option("--database-url", help="Database to use.  \\[TOKENMILL_DATABASE_URL]", show_default=False),
]
ModelOption = Annotated[
    str | None, typer.Option("--model", help="Model to ask.  \\[TOKENMILL_MODEL]", show_default=False)
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
ChatOption = Annotated[
    bool,
    typer.Option(
        "--chat/--no-chat",
        help="Send a prompt as one user message through the model's chat template, or as raw text to continue.",
    ),
]


_NOT_WRITABLE = frozenset(
    {
        errno.ENOSPC,
        errno.EDQUOT,
        errno.EFBIG,
        errno.EROFS,
        errno.EACCES,
        errno.EPERM,
        errno.EIO,
        errno.EPIPE,
    }
)


_SCRATCH_FULL = frozenset({10, 13, 14})  # SQLite's codes: cannot be written or read, full, cannot be opened


class CommandGroup(typer.core.TyperGroup):
    """Shows the errors that are meant for people as one message without a traceback, with their exit status."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command; see the class."""
        import sqlite3

        from models_db.errors import DatabaseError

        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            _say("interrupted")
            raise typer.Exit(ExitCode.INTERRUPTED) from None
        except (TokenmillError, DatabaseError) as error:
            _say(f"error: {error}")
            raise typer.Exit(exit_code_for(error)) from None
        except OSError as error:
            if error.errno not in _NOT_WRITABLE:
                raise
            where = error.filename or "standard output or a temporary file"
            _say(
                f"error: {where} cannot be written ({error.strerror}). Make room or correct its rights, or write "
                "elsewhere"
            )
            if error.errno == errno.EPIPE:
                _fall_silent()
            raise typer.Exit(ExitCode.UNAVAILABLE) from None
        except sqlite3.OperationalError as error:
            # Those of databases come wrapped: this is a scratch file's.
            if error.sqlite_errorcode & 0xFF not in _SCRATCH_FULL:
                raise
            _say(
                f"error: a temporary file cannot be written ({error}). Make room, or set TMPDIR to another folder"
            )
            raise typer.Exit(ExitCode.UNAVAILABLE) from None
        except UnicodeEncodeError as error:
            if "surrogates" not in error.reason:
                raise
            _say("error: an argument holds bytes that are no UTF-8. Write it in UTF-8")
            raise typer.Exit(ExitCode.USAGE) from None


def _say(text: str) -> None:
    """Tell what ended the command; where nobody can be told any more, the exit status does."""
    try:
        typer.echo(text, err=True)
    except OSError:
        _fall_silent()


def _fall_silent() -> None:
    """What is left in the buffers of a broken stream would fail once more at the very end, with a status of its own."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):
        os.dup2(nowhere, descriptor)
    os.close(nowhere)


def complete_streams() -> None:
    """Open what a scheduler may have left closed of standard input, output and error: to nothing.

    Else the next file or socket would take their place, and be written to.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)
    sys.stdin = sys.stdin or os.fdopen(0, closefd=False)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)


def exit_code_for(error: Exception) -> ExitCode:
    """The exit status that an error ends a command with."""
    from models_db.errors import (
        DuplicateCustomIdError,
        IdempotencyConflictError,
        InvalidValueError,
        UnknownBatchError,
        UnknownJobError,
    )

    if isinstance(error, TimeoutError):
        return ExitCode.TIMEOUT
    if getattr(error, "code", "") == "job_failed":
        return ExitCode.FAILED
    bad_input = (
        RequestError,
        DuplicateCustomIdError,
        IdempotencyConflictError,
        InvalidValueError,
        UnknownBatchError,
        UnknownJobError,
    )
    return ExitCode.USAGE if isinstance(error, bad_input) else ExitCode.UNAVAILABLE


def group(**options: Any) -> typer.Typer:
    """A Typer application with the house's manners."""
    return typer.Typer(
        no_args_is_help=True, rich_markup_mode="rich", pretty_exceptions_enable=False, **options
    )


def settings_from(**overrides: Any) -> Settings:
    """The settings, with the options that were given on the command line."""
    from workers.settings import load_settings

    return load_settings(**{name: value for name, value in overrides.items() if value is not None})


@contextmanager
def database(
    settings: Settings, *, check: bool = True, idle_in_transaction_s: float | None = None
) -> Iterator[Engine]:
    """The settings' database, its schema checked unless told otherwise.

    Args:
        idle_in_transaction_s: see ``make_engine``; for commands that run for as long as a worker.
    """
    from models_db.schema import check_schema
    from models_db.session import make_engine

    engine = make_engine(settings.database_url, idle_in_transaction_s=idle_in_transaction_s)
    try:
        if check:
            check_schema(engine)
        yield engine
    finally:
        engine.dispose()


def console() -> Console:
    """Where results go; plain text when it is not a terminal."""
    return _console(sys.stdout.isatty(), stderr=False)


def errors() -> Console:
    """Where progress and notices go, so that standard output can be piped."""
    return _console(sys.stderr.isatty(), stderr=True)


def _console(terminal: bool, *, stderr: bool) -> Console:
    from rich.console import Console

    class Ours(Console):
        """Lets a pipe that nobody reads any more end the command as any other output that cannot be written."""

        def on_broken_pipe(self) -> None:
            raise  # what is being handled; Rich would exit with 1, which means failed lines

    # In a file or a pipe nothing must be cut or wrapped at an imagined width.
    return Ours(stderr=stderr, highlight=False, soft_wrap=not terminal, width=None if terminal else 160)


def one_of(value: str, allowed: Sequence[str], option: str) -> Any:
    """The value, when it is one that the option may have.

    Raises:
        RequestError: it is not.
    """
    if value not in allowed:
        raise RequestError("is not known", field=option, value=value, fix=f"Use {' or '.join(allowed)}")
    return value


def params_from(pairs: list[str]) -> dict[str, Any]:
    """``["top_p=0.9", "stop=END"]`` → ``{"top_p": 0.9, "stop": "END"}``: values are JSON where they can be.

    Raises:
        RequestError: a part without ``=``.
    """
    import json

    made: dict[str, Any] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise RequestError(
                "must be NAME=VALUE", field="--param", value=pair, fix="For example -p top_p=0.9"
            )
        try:
            made[name] = json.loads(value)
        except ValueError:
            made[name] = value
    return made


__all__ = [
    "EXIT_CODES",
    "BrokerOption",
    "ChatOption",
    "CommandGroup",
    "ConfigurationError",
    "DatabaseOption",
    "ExitCode",
    "JsonOption",
    "ModelOption",
    "complete_streams",
    "console",
    "database",
    "errors",
    "exit_code_for",
    "group",
    "params_from",
    "settings_from",
]
