"""Engines and transactions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from sqlalchemy import Connection, Engine
from sqlalchemy.orm import Session, sessionmaker

T = TypeVar("T")


def make_engine(url: str, *, echo: bool = False, pool_size: int = 5) -> Engine:
    """An engine with the settings that Tokenmill relies on. Nothing is connected yet.

    Raises:
        DatabaseUrlError: the URL is unreadable, its database unsupported or the driver not installed.

    Connecting later raises ``DatabaseUnavailableError`` when the database does not answer.
    """
    raise NotImplementedError


def session_factory(engine: Engine) -> sessionmaker[Session]:
    """Sessions on ``engine`` that keep their objects usable after a commit."""
    raise NotImplementedError


@contextmanager
def reading(engine: Engine) -> Iterator[Connection]:
    """A transaction that only reads: on SQLite it takes no write lock, so it never waits for a writer."""
    raise NotImplementedError
    yield


def transaction(engine: Engine, work: Callable[[Connection], T], *, tries: int = 5) -> T:
    """Run ``work`` in a transaction and commit; again after a deadlock or a lock that timed out."""
    raise NotImplementedError


def redact(url: str) -> str:
    """The URL for people: no password, no query."""
    raise NotImplementedError
