"""Which PostgreSQL a benchmark runs on."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from tests.servers import ServerUnavailableError, server


def add_server_option(parser: argparse.ArgumentParser) -> None:
    """The option ``--server``."""
    parser.add_argument(
        "--server",
        metavar="URL",
        help="PostgreSQL whose login may create databases, such as postgresql://USER@HOST/DATABASE; when unset, the "
        "one of TEST_POSTGRES_URL, one that runs here, or a private one",
    )


@contextmanager
def postgresql(named: str | None) -> Iterator[str]:
    """The URL of the server: the one named, or the one that the tests would take.

    Raises:
        SystemExit: there is none.
    """
    if named is not None:
        yield named
        return
    with ExitStack() as stack:
        try:
            found = stack.enter_context(server("postgresql"))
        except ServerUnavailableError as exc:
            sys.exit(
                f"--server: no PostgreSQL was found: {exc}. Give --server postgresql://USER@HOST/DATABASE"
            )
        yield found.url
