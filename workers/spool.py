"""Results that wait for a database that is away, in a file, so that they outlive the process.

One file an incarnation, made when it is first needed, readable by nobody else, and locked while its process lives. A
process that starts under the same worker name commits what dead ones left, under *their* incarnation and attempt:
where another worker has taken a job over meanwhile, the fence refuses the old result as it always does.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from models_db.claims import FinishItem
from models_db.records import StoredResult
from models_db.tables import JobState

logger = logging.getLogger(__name__)

_SUFFIX = ".spool"
_REFUSED = ".refused"
_PRIVATE = 0o600
_NOT_NAME = re.compile(r"[^A-Za-z0-9._-]+")


class Spool:
    """The file of this incarnation. Used by one thread.

    A disk that is full or broken costs only the file: the results also wait in memory, and there are never more of
    them than jobs in flight.
    """

    def __init__(self, folder: Path, worker_name: str, worker_id: str, max_bytes: int) -> None:
        self._folder = folder
        self._path = folder / f"{_slug(worker_name)}.{worker_id}{_SUFFIX}"
        self._worker_id = worker_id
        self._max_bytes = max_bytes
        self._file: IO[bytes] | None = None
        self._size = 0
        self._broken = False

    def add(self, item: FinishItem) -> bool:
        """Write one result and see it onto the disk; whether that worked. Warns once an outage if not."""
        line = _line(item)
        try:
            if self._size + len(line) > self._max_bytes:
                raise OSError(f"it would be larger than spool_max_mb allows ({self._max_bytes} bytes)")
            file = self._open()
            start = self._size
            try:
                file.write(line)
                file.flush()
                os.fsync(file.fileno())
            except OSError:
                with suppress(OSError):
                    file.truncate(start)  # no half line
                    file.seek(start)
                raise
        except OSError as exc:
            if not self._broken:
                self._broken = True
                logger.error(
                    "Results wait in memory only: the spool %s cannot be written (%s)", self._path, exc
                )
            return False
        self._size += len(line)
        return True

    def put_aside(self, item: FinishItem) -> None:
        """Keep a result that the database refuses, see ``put_aside``."""
        _put_aside(self._path.with_suffix(_REFUSED), item)

    def clear(self) -> None:
        """Everything in it has been committed."""
        self._broken = False
        if self._file is None or not self._size:
            return
        self._size = 0
        with suppress(OSError):
            self._file.truncate(0)
            self._file.seek(0)

    def close(self) -> None:
        """End it; what is still in it stays for the next process."""
        file, self._file = self._file, None
        if file is not None:
            if not self._size:
                with suppress(OSError):
                    self._path.unlink()
            with suppress(OSError):
                file.close()

    def _open(self) -> IO[bytes]:
        if self._file is None:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            fresh = self._path.with_suffix(".new")
            # Unbuffered, so that a failed write leaves nothing behind that a later flush would repeat.
            number = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_TRUNC, _PRIVATE)
            file = os.fdopen(number, "r+b", buffering=0)
            fcntl.flock(file, fcntl.LOCK_EX)
            fresh.rename(self._path)  # nobody finds it before it is locked
            self._file = file
        return self._file


@dataclass(frozen=True, slots=True)
class Leftover:
    """What a dead incarnation left."""

    worker_id: str
    items: list[FinishItem]


@contextmanager
def leftovers(folder: Path, worker_name: str) -> Iterator[list[Leftover]]:
    """What dead incarnations of this name left. Their files are deleted when the block ends without an error."""
    prefix = f"{_slug(worker_name)}."
    with _closing() as opened:
        found = []
        paths = []
        for path in sorted(folder.glob(f"{prefix}*{_SUFFIX}")):
            worker_id = path.name[len(prefix) : -len(_SUFFIX)]
            if "." in worker_id:
                continue  # another worker, whose name begins with ours
            try:
                file = path.open("rb")
                opened.append(file)
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                found.append(Leftover(worker_id, list(_read(path, file))))
            except BlockingIOError:
                continue  # it lives
            except OSError as exc:
                logger.error("The spool %s cannot be read (%s); its jobs run again", path, exc)
                continue
            paths.append(path)
        yield found
        for path in paths:
            with suppress(OSError):
                path.unlink()


def put_aside(folder: Path, worker_name: str, worker_id: str, item: FinishItem) -> None:
    """Keep a result that the database refuses, for a person to look at: nothing here reads it again.

    In the spool's folder, in a file that ends in ``.refused``, one line of JSON a result, readable by nobody else.
    """
    _put_aside(folder / f"{_slug(worker_name)}.{worker_id}{_REFUSED}", item)


def _put_aside(path: Path, item: FinishItem) -> None:
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        number = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, _PRIVATE)
        with os.fdopen(number, "ab", buffering=0) as file:
            file.write(_line(item))
            os.fsync(file.fileno())
    except OSError as exc:
        logger.error("The result of job %s cannot be put aside in %s (%s)", item.job_id, path, exc)
    else:
        logger.error("The result of job %s is put aside in %s", item.job_id, path)


@contextmanager
def _closing() -> Iterator[list[IO[bytes]]]:
    files: list[IO[bytes]] = []
    try:
        yield files
    finally:
        for file in files:
            file.close()


def _read(path: Path, file: IO[bytes]) -> Iterator[FinishItem]:
    for line in file:
        try:
            yield _from_json(json.loads(line))
        except Exception:  # whatever is in it, the worker starts
            logger.warning("The spool %s has a line that cannot be read; its job runs again", path)


def _line(item: FinishItem) -> bytes:
    return json.dumps(asdict(item), separators=(",", ":")).encode() + b"\n"


def _from_json(data: dict[str, Any]) -> FinishItem:
    result = data.pop("result")
    state = JobState(data.pop("state"))
    return FinishItem(state=state, result=None if result is None else StoredResult(**result), **data)


def _slug(name: str) -> str:
    return _NOT_NAME.sub("-", name).replace(".", "-")[:100]


class OutageBook:
    """Which ends of jobs are not committed yet, and in the spool while the database is away."""

    def __init__(self, spool: Spool | None) -> None:
        self._spool = spool
        self._away = False
        self._waiting: dict[tuple[str, int], FinishItem] = {}
        self._written: set[tuple[str, int]] = set()  # those of them that are in the spool
        self._used = False

    def waits(self, item: FinishItem) -> None:
        """This end is on its way to the database."""
        self._waiting[item.job_id, item.attempt] = item
        if self._away:
            self._write(item)

    def settled(self, item: FinishItem) -> None:
        """The database has answered, or nobody waits for that any more.

        Others may be on their way at any time, so the spool is cleared once what is in it has been settled.
        """
        key = item.job_id, item.attempt
        self._waiting.pop(key, None)
        self._written.discard(key)
        if self._used and not self._away and not self._written:
            self._used = False
            if self._spool is not None:
                self._spool.clear()

    def refused(self, item: FinishItem) -> None:
        """The database takes anything but this end; its result is kept for a person to look at."""
        if self._spool is not None and item.result is not None:
            self._spool.put_aside(item)

    def database(self, healthy: bool) -> None:
        """The database is away, or back."""
        if self._away == (not healthy):
            return
        self._away = not healthy
        if self._away:
            for key, item in self._waiting.items():
                if key not in self._written:
                    self._write(item)

    def _write(self, item: FinishItem) -> None:
        if self._spool is not None:
            self._used = True
            if self._spool.add(item):
                self._written.add((item.job_id, item.attempt))


def default_folder(environ: Callable[[str], str | None] = os.environ.get) -> Path:
    """Where state that should survive a restart belongs on this system."""
    try:
        base = Path(environ("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    except RuntimeError:  # nobody's home, as in some containers
        base = Path(tempfile.gettempdir()) / f"state-{os.getuid()}"
    return base / "tokenmill" / "spool"
