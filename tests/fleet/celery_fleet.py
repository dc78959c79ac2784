"""A fleet behind a password, whose worker runs ``tests.fleet.observed``; for the tests of Celery's own tools."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import redis

from tests.fleet import observed
from tests.fleet.conftest import FAST
from tests.fleet.fleet import PATIENCE_S, Fleet, RedisServer, WorkerProcess, wait_until
from workers.settings import load_settings

PASSWORD = "hunter2-of-redis"
PROMPT = "a-private-prompt"  # one word, which echo says again and again
TOKENS_PER_S = 40
SLOTS = 2


class LockedRedis(RedisServer):
    """A Redis that wants a password."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.client.config_set("requirepass", PASSWORD)
        self.client.close()
        self.client = redis.Redis(port=self.port, password=PASSWORD)

    @property
    def url(self) -> str:
        return f"redis://:{PASSWORD}@127.0.0.1:{self.port}/0"


class CeleryFleet(Fleet):
    """Two slots, little prefetch, and a word each 25 ms."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        own = {
            "engine": {"echo_tokens_per_s": TOKENS_PER_S, "max_num_seqs": SLOTS},
            "prefetch_headroom": 1,
            "prefetch_reserve": 1,
            "worker_imports": observed.__name__,
            "track_started": True,
        }
        self.folder = folder
        self.file, self.spans_file = folder / "observed", folder / "spans"
        super().__init__(LockedRedis(folder), f"sqlite:///{folder / 'fleet.db'}", **(FAST | own | settings))

    def observed_worker(self, *, traced: bool = False) -> WorkerProcess:
        """Start a worker that writes down what its signal handlers see, and its spans."""
        variables = {observed.FILE: str(self.file)} | (
            {observed.SPANS: str(self.spans_file)} if traced else {}
        )
        process = WorkerProcess(
            [sys.executable, "-m", "workers.process"], load_settings(**self._settings), variables
        )
        return self.add(process)

    def signature(self, tokens: int = 2, prompt: str = PROMPT, **options: Any) -> Any:
        """A generation job of ``tokens`` words, each of which takes 25 ms."""
        payload = {"model": "echo", "prompt": prompt, "max_tokens": tokens}
        return self.app.signature("tokenmill.generate", args=[payload], queue=self.queue, **options)

    def task(self, name: str, *args: Any, **options: Any) -> Any:
        """Another task of ``tests.fleet.observed``."""
        return self.app.signature(f"tests.{name}", args=args, queue=self.queue, **options)

    def seen(self, task_id: str | None = None) -> list[dict[str, Any]]:
        """What the handlers of the worker have seen, of one task or of all."""
        lines = self.file.read_text().splitlines() if self.file.exists() else []
        notes = [json.loads(line) for line in lines]
        return [note for note in notes if task_id is None or note["id"] == task_id]

    def wait_seen(
        self, task_id: str | None, what: str, timeout_s: float = PATIENCE_S
    ) -> list[dict[str, Any]]:
        """The same, once this signal is among it."""

        def there() -> list[dict[str, Any]] | None:
            notes = self.seen(task_id)
            return notes if any(note["what"] == what for note in notes) else None

        return wait_until(there, timeout_s, f"{what} of {task_id}")

    def celery(self, *arguments: str) -> subprocess.Popen[str]:
        """Start a command of Celery's own program on this fleet."""
        return subprocess.Popen(
            [sys.executable, "-m", "celery", "-A", "workers.celery_app", *arguments],
            env={**os.environ, **self.environment()},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def close(self) -> None:
        super().close()
        self.redis.stop()


@contextmanager
def celery_fleet(folder: Path, **settings: Any) -> Iterator[CeleryFleet]:
    """A fleet without workers yet."""
    fleet = CeleryFleet(folder, **settings)
    try:
        yield fleet
    finally:
        fleet.close()


def assert_nothing_private(texts: Sequence[str]) -> None:
    """No prompt, no answer and no password in any of these."""
    for text in texts:
        assert PROMPT not in text
        assert PASSWORD not in text
