"""The whole of it on one machine: a private Redis, a SQLite file, a worker, real prompts, answers, statistics.

Everything lives in one folder, and everything that was started is stopped again, however the demo ends.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import Connection, func, select

from backend.api import ConfigurationError, RequestError, TokenmillError
from models_db import migrate
from models_db.batches import BatchProgress
from models_db.session import make_engine, reading
from models_db.tables import EngineSample, Job, JobState, Result, Worker, WorkerState
from workers.bulk import BulkRunner
from workers.bulk_export import Exported, export_batch
from workers.bulk_input import LineOptions
from workers.bulk_source import BulkSource, validate_source
from workers.client import Client
from workers.interrupt import Undisturbed
from workers.private_redis import PrivateRedis
from workers.progress import Reporter, Snapshot
from workers.settings import Settings, load_settings

PROMPTS = Path(__file__).resolve().parent.parent / "examples" / "prompts.jsonl"
_LOAD_TIMEOUT_S = 300.0
_STOP_TIMEOUT_S = 20.0


class WorkerDiedError(TokenmillError):
    """The demo's worker ended before the work did."""

    code = "worker_died"


@dataclass(frozen=True, slots=True)
class Summary:
    """What the demo measured. Times in seconds; ``active`` is the share of busy time while there was work."""

    jobs: int
    failed: int
    prompt_tokens: int
    completion_tokens: int
    load_s: float
    elapsed_s: float
    tokens_per_s: float
    ttft_p50_s: float | None
    ttft_max_s: float | None
    active: float | None


@dataclass(frozen=True, slots=True)
class Outcome:
    """A finished demo: where its answers are, and what was measured."""

    results: Path
    database: Path
    exported: Exported
    summary: Summary


class Demo:
    """Runs inside a ``with`` block, whose end stops the worker and Redis.

    Args:
        folder: where database, logs and results go; a database from an earlier demo is replaced.
        backend: ``async`` for the engine, ``echo`` for no model at all.
        model: what the worker loads.
        sleep: between two looks; may raise ``KeyboardInterrupt`` (see ``workers.interrupt``).
    """

    def __init__(
        self,
        folder: Path,
        *,
        prompts: Path = PROMPTS,
        backend: str = "async",
        model: str = "smollm2",
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        if not prompts.is_file():
            raise RequestError(f"{prompts} does not exist", field="--prompts", fix="Give a JSONL file")
        self.folder = folder.absolute()
        self.prompts = prompts
        self.backend = backend
        self.model = model
        self.database = self.folder / "tokenmill.db"
        self.results = self.folder / "results.jsonl"
        self.worker_log = self.folder / "worker.log"
        self._sleep = sleep
        self._cleanup = ExitStack()
        self._worker: subprocess.Popen[bytes] | None = None
        self._settings: Settings | None = None
        self._load_s = 0.0

    def __enter__(self) -> Demo:
        return self

    def __exit__(self, *exc: object) -> None:
        with Undisturbed():
            self._cleanup.close()

    @property
    def settings(self) -> Settings:
        """How to reach what was started."""
        if self._settings is None:
            raise ConfigurationError("the demo has not been started. Call start_services first")
        return self._settings

    def start_services(self) -> str:
        """Start Redis and make the tables; returns the broker's URL.

        Raises:
            RequestError: the folder cannot be made or written to.
            ConfigurationError: there is no Redis server to start.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for suffix in ("", "-wal", "-shm"):
                Path(f"{self.database}{suffix}").unlink(missing_ok=True)
        except OSError as error:
            raise RequestError(
                f"{self.folder} cannot be used ({error.strerror})",
                field="--folder",
                fix="Name a folder that can be made and written to",
            ) from error
        server = self._cleanup.enter_context(PrivateRedis(self.folder))
        self._settings = load_settings(
            broker_url=server.url,
            result_backend_url=None,
            database_url=f"sqlite:///{self.database}",
            backend=self.backend,
            model=self.model,
            sample_interval_s=1.0,
        )
        migrate.upgrade(self._settings.database_url)
        return server.url

    def start_worker(self) -> None:
        """Start the worker process; its output goes to ``worker.log``."""
        settings = self.settings
        variables = {
            "BROKER_URL": settings.broker_url,
            "RESULT_BACKEND_URL": settings.broker_url,
            "DATABASE_URL": settings.database_url,
            "BACKEND": settings.backend,
            "MODEL": settings.model,
            "SAMPLE_INTERVAL_S": str(settings.sample_interval_s),
        }
        environment = os.environ | {f"TOKENMILL_{name}": value for name, value in variables.items()}
        with self.worker_log.open("wb") as log:
            self._worker = subprocess.Popen(
                [sys.executable, "-m", "workers.cli", "worker", "--once"],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches us alone; the whole group is stopped from here
            )
        self._cleanup.callback(stop_group, self._worker)

    def wait_for_worker(self) -> str:
        """Wait until the model is loaded; returns what the worker runs on.

        Raises:
            WorkerDiedError: it ended instead; the message has the end of its log.
        """
        began = time.monotonic()
        engine = make_engine(self.settings.database_url)
        try:
            while time.monotonic() - began < _LOAD_TIMEOUT_S:
                self.check_worker()
                with reading(engine) as connection:
                    online = select(Worker.device).where(Worker.state == WorkerState.ONLINE)
                    device = connection.scalar(online)
                if device is not None:
                    self._load_s = time.monotonic() - began
                    return str(device)
                self._sleep(0.05)
        finally:
            engine.dispose()
        raise WorkerDiedError(f"the worker was not ready after {_LOAD_TIMEOUT_S:g} s. See {self.worker_log}")

    def check_worker(self) -> None:
        """Raise ``WorkerDiedError`` when the worker has ended."""
        if self._worker is not None and self._worker.poll() is not None:
            lines = self.worker_log.read_text(errors="replace").strip().splitlines()
            tail = "\n  ".join(lines[-8:])
            status = self._worker.returncode
            raise WorkerDiedError(f"the worker ended with status {status}. Its log ends with:\n  {tail}")

    def run(self, progress: Reporter) -> Outcome:
        """Send the prompts through, wait for all answers, and write ``results.jsonl``."""
        options = LineOptions(defaults={"model": self.model})
        with Client(self.settings) as client, self.prompts.open("rb") as file:
            source, _ = validate_source(str(self.prompts), file, options)

            def report(now: BatchProgress) -> None:
                self.check_worker()
                done, running = now.done, now.counts.get(JobState.RUNNING, 0)
                failed = done - now.counts.get(JobState.SUCCEEDED, 0)
                progress.update(Snapshot(done, source.lines, failed, running, now.completion_tokens))

            runner = BulkRunner(client, report=report, sleep=self._sleep)
            batch_id = runner.create("demo", source)
            began = time.monotonic()
            ended = runner.run(batch_id, source, file)
            elapsed_s = time.monotonic() - began
            self._wait_for_samples(client, ended.completion_tokens)
            return self._outcome(client, batch_id, source, ended, elapsed_s)

    def _wait_for_samples(self, client: Client, tokens: int) -> None:
        """The worker writes what it did at intervals: wait for the last one, or there would be a gap."""
        give_up = time.monotonic() + 3 * self.settings.sample_interval_s
        while time.monotonic() < give_up:
            with reading(client.engine()) as connection:
                sampled = connection.scalar(select(func.sum(EngineSample.generated_tokens)))
            if sampled is not None and sampled >= tokens:
                return
            self._sleep(0.05)

    def _outcome(
        self, client: Client, batch_id: str, source: BulkSource, ended: BatchProgress, elapsed_s: float
    ) -> Outcome:
        with reading(client.engine()) as connection, self.prompts.open("rb") as file:
            exported = export_batch(connection, batch_id, self.results, carried=source.carried(file))
            first_tokens = sorted(_first_token_times(connection, batch_id))
            active = _active_share(connection)
        summary = Summary(
            jobs=source.lines,
            failed=exported.errors,
            prompt_tokens=ended.prompt_tokens,
            completion_tokens=ended.completion_tokens,
            load_s=self._load_s,
            elapsed_s=elapsed_s,
            tokens_per_s=ended.completion_tokens / elapsed_s,
            ttft_p50_s=first_tokens[len(first_tokens) // 2] if first_tokens else None,
            ttft_max_s=first_tokens[-1] if first_tokens else None,
            active=active,
        )
        return Outcome(self.results, self.database, exported, summary)


def _first_token_times(connection: Connection, batch_id: str) -> Iterator[float]:
    times = select(Result.time_to_first_token_s).join(Job, Job.id == Result.job_id)
    for value in connection.scalars(times.where(Job.batch_id == batch_id)):
        if value is not None:
            yield value


def _active_share(connection: Connection) -> float | None:
    """Busy seconds over sampled seconds, from the samples that saw work."""
    worked = EngineSample.generated_tokens > 0
    sums = select(func.sum(EngineSample.busy_s), func.sum(EngineSample.interval_s)).where(worked)
    busy, sampled = connection.execute(sums).one()
    return min(busy / sampled, 1.0) if sampled else None


def stop_group(process: subprocess.Popen[bytes], timeout_s: float = _STOP_TIMEOUT_S) -> None:
    """End a process started in a session of its own, with all its children: first asked, then forced."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout_s)
    with suppress(ProcessLookupError):  # the group is gone with its last process
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
