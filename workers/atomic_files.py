"""Files that appear whole or not at all, and the drafts that killed writers left of them."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import secrets
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

_BOOT = Path("/proc/sys/kernel/random/boot_id")


@contextmanager
def atomic_write(*paths: Path, first: Callable[[], object] | None = None) -> Iterator[Sequence[IO[str]]]:
    """Text files that replace ``paths``, in this order, when the block ends well, and otherwise leave no trace.

    Drafts of the same files whose writers were killed are removed; those of living writers stay, and of two that end
    at once, one puts all of its files in place before the other.

    Args:
        paths: of one folder.
        first: called when all of them are on the disk, before the first one is replaced.
    """
    names: dict[str | None, Path] = {None: paths[0]}  # a full disk does not say what was to be written
    try:
        with ExitStack() as stack:
            drafts = []
            for path in paths:
                remove_leftovers(path)
                drafts.append(stack.enter_context(_draft_of(path, names)))
            yield [draft.file for draft in drafts]
            for path, draft in zip(paths, drafts, strict=True):
                names[None] = path
                draft.file.flush()
                os.fsync(draft.file.fileno())
            with _alone_in(paths[0].absolute().parent):
                if first is not None:
                    first()
                for path, draft in zip(paths, drafts, strict=True):
                    os.replace(draft.path, path)
    except OSError as error:
        # What has no number is none of the system's.
        if error.errno is not None and error.filename in names:
            error.filename = str(names[error.filename])
        raise


def check_writable(*paths: Path) -> None:
    """Make drafts of the files and remove them again.

    Raises:
        OSError: as the work would raise it at its end.
    """
    with ExitStack() as stack:
        for path in paths:
            stack.enter_context(_draft_of(path, {}))


def remove_leftovers(path: Path) -> None:
    """Remove the drafts of ``path`` whose writers are gone, where that is certain.

    A living writer holds a lock on its draft. Locks are sure among the processes of one system that runs, and whoever
    wrote on this host before it was started last is gone, too; over a network file system, others may not see locks.
    """
    host, boot = _marks()
    pattern = re.compile(rf"\.{re.escape(path.name)}\.([0-9a-f]{{6}})([0-9a-f]{{6}})[0-9a-f]{{6}}\.part")
    with os.scandir(path.absolute().parent) as entries:
        found = [(entry.path, match) for entry in entries if (match := pattern.fullmatch(entry.name))]
    for draft, match in found:
        if match[1] != host and match[2] != boot:
            continue
        with suppress(OSError):  # gone meanwhile, locked by its writer, or another user's: it stays
            _remove_if_left(draft)


def _remove_if_left(draft: str) -> None:
    descriptor = os.open(draft, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.unlink(draft)
    finally:
        os.close(descriptor)


@dataclass(frozen=True, slots=True)
class _Draft:
    """A file that is written, locked as long as it is open."""

    path: Path
    file: IO[str]


@contextmanager
def _draft_of(path: Path, names: dict[str | None, Path]) -> Iterator[_Draft]:
    """A draft beside ``path``, in the end removed unless it was put in place; ``names`` says whose it is."""
    host, boot = _marks()
    while True:
        draft = path.with_name(f".{path.name}.{host}{boot}{secrets.token_hex(3)}.part")
        names[str(draft)] = path
        try:
            file = draft.open("x", encoding="utf-8", newline="\n")
        except FileExistsError:
            continue
        try:
            with file:
                with suppress(OSError):  # where files cannot be locked, nobody removes them either
                    fcntl.flock(file, fcntl.LOCK_EX)
                if not draft.exists():
                    continue  # taken for a leftover in the moment before it was locked
                yield _Draft(draft, file)
                return
        finally:
            draft.unlink(missing_ok=True)


def _marks() -> tuple[str, str]:
    """This host, and this start of its system."""
    boot = _BOOT.read_text() if _BOOT.exists() else socket.gethostname()
    host, started = (hashlib.sha256(text.encode()).hexdigest()[:6] for text in (socket.gethostname(), boot))
    return host, started


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Wait until no other writer puts files in place there."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with suppress(OSError):  # some network file systems lock no folder
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
