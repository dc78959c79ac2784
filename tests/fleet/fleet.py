"""A fleet for tests: a private Redis, a database, and workers as real processes."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import redis
from celery.result import AsyncResult
from kombu import pools
from sqlalchemy import Engine, select

from models_db.jobs import insert_jobs, job_result, job_status, mark_published
from models_db.records import JobStatus, NewJob, StoredResult
from models_db.session import make_engine
from models_db.tables import Attempt, Job, JobState, Worker
from tests.messages import build_message, publish
from tests.servers import free_port, migrate
from workers.app import TokenmillApp, make_app
from workers.payload import GeneratePayload, queue_for
from workers.settings import Settings, load_settings

T = TypeVar("T")
MODEL = "echo"
POLL_S = 0.02
PATIENCE_S = 30.0
"""For what comes from another process, which a busy machine may not run for a while. Only a failure takes so long."""


class RedisServer:
    """A redis-server of our own, on a free port, that keeps nothing."""

    def __init__(self, folder: Path) -> None:
        program = shutil.which("redis-server")
        if program is None:
            raise RuntimeError("redis-server is not installed")
        self.port = free_port()
        self.folder = folder
        command = [
            program,
            "--port",
            str(self.port),
            "--bind",
            "127.0.0.1",
            "--save",
            "",
            "--dir",
            str(folder),
        ]
        self._log = (folder / "redis.log").open("wb")
        self._process = subprocess.Popen(command, stdout=self._log, stderr=self._log)
        self.client = redis.Redis(port=self.port)
        wait_until(self._answers, PATIENCE_S, "Redis to answer")

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def _answers(self) -> bool:
        try:
            return bool(self.client.ping())
        except redis.ConnectionError:
            return False

    def unacked(self) -> int:
        """Deliveries that some worker has and has not acknowledged."""
        return int(self.client.hlen("unacked")) + int(self.client.zcard("unacked_index"))

    def stop(self) -> None:
        self.client.close()
        self._process.terminate()
        self._process.wait(PATIENCE_S)
        self._log.close()


def wait_until(true: Callable[[], T], timeout_s: float, what: str) -> T:
    """Poll until ``true()`` is; returns what it returned."""
    end = time.monotonic() + timeout_s
    while not (value := true()):
        if time.monotonic() > end:
            raise AssertionError(f"waited {timeout_s:g}s in vain for {what}")
        time.sleep(POLL_S)
    return value


class WorkerProcess:
    """A worker in a process of its own, whose output is read as it comes."""

    def __init__(
        self,
        command: Sequence[str],
        settings: Settings | None = None,
        environment: dict[str, str] | None = None,
    ) -> None:
        self.lines: list[str] = []
        self._news = threading.Condition()
        self._over = False
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "C_FORCE_ROOT": "1", **(environment or {})},
            start_new_session=True,
        )
        assert self.process.stdin is not None
        with self.process.stdin as pipe:
            if settings is not None:
                pipe.write(settings.model_dump_json(exclude_unset=True).encode())
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def log(self) -> str:
        return "\n".join(self.lines)

    def wait_for(self, text: str, timeout_s: float = PATIENCE_S) -> WorkerProcess:
        """Wait until a line with this text has been printed."""
        with self._news:
            found = self._news.wait_for(
                lambda: self._over or any(text in line for line in self.lines), timeout_s
            )
        assert found, f"no {text!r} within {timeout_s}s in:\n{self.log}"
        assert any(text in line for line in self.lines), f"ended without {text!r}:\n{self.log}"
        return self

    def ready(self) -> WorkerProcess:
        return self.wait_for(" ready.")

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(PATIENCE_S)

    def stop(self, timeout_s: float = PATIENCE_S) -> int:
        """Warm shutdown; the exit code."""
        if self.process.poll() is None:
            self.signal(signal.SIGTERM)
        return self.wait(timeout_s)

    def wait(self, timeout_s: float = PATIENCE_S) -> int:
        """The exit code, once its output has been read to the end."""
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError(f"still there after {timeout_s}s:\n{self.log}") from None
        self._reader.join(PATIENCE_S)
        return code

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._news:
                self.lines.append(line.decode(errors="replace").rstrip())
                self._news.notify_all()
        with self._news:
            self._over = True
            self._news.notify_all()


class Fleet:
    """Everything a test needs; ``close`` kills what is left."""

    def __init__(self, server: RedisServer, database_url: str, **settings: Any) -> None:
        self.redis = server
        server.client.flushall()
        self._settings = {
            "broker_url": server.url,
            "database_url": database_url,
            "backend": "echo",
            "model": MODEL,
            "log_level": "info",
            "spool_dir": str(server.folder / "spool"),
        } | settings
        self.settings = load_settings(**self._settings)
        migrate(database_url)
        self.engine: Engine = make_engine(database_url)
        self.app: TokenmillApp = make_app(self.settings)
        self.queue = queue_for(MODEL)
        self.workers: list[WorkerProcess] = []

    def worker(self, *, wait: bool = True, **settings: Any) -> WorkerProcess:
        """Start a worker process, by default until it is ready."""
        process = WorkerProcess(
            [sys.executable, "-m", "workers.process"], load_settings(**(self._settings | settings))
        )
        return self.add(process, wait=wait)

    def add(self, process: WorkerProcess, *, wait: bool = True) -> WorkerProcess:
        self.workers.append(process)
        return process.ready() if wait else process

    def supervisor(self) -> WorkerProcess:
        """Start ``tokenmill worker``, which keeps a worker process running."""
        command = "import sys; from workers.cli import main; sys.argv = ['tokenmill', 'worker']; main()"
        return self.add(WorkerProcess([sys.executable, "-c", command], environment=self.environment()))

    def start_workers(self, count: int) -> None:
        """Start several at once and wait until all are ready."""
        for worker in [self.worker(wait=False) for _ in range(count)]:
            worker.ready()

    def owner(self, job_id: str) -> WorkerProcess:
        """The process that runs this job."""
        with self.engine.connect() as conn:
            query = select(Worker.pid).join(Job, Job.owner == Worker.id).where(Job.id == job_id)
            pid = conn.scalar(query)
        return next(worker for worker in self.workers if worker.process.pid == pid)

    def environment(self) -> dict[str, str]:
        """The settings as variables, for commands that read those."""
        variables: dict[str, str] = {}
        for name, value in self._settings.items():
            if isinstance(value, dict):
                variables |= {f"TOKENMILL_{name}_{inner}".upper(): str(it) for inner, it in value.items()}
            else:
                variables[f"TOKENMILL_{name}".upper()] = str(value)
        return variables

    def tell(self, command: str, **arguments: Any) -> None:
        """Broadcast until a worker says that it has heard: it is ready just before it listens to such commands."""

        def heard() -> Any:
            return self.app.control.broadcast(command, arguments=arguments, reply=True, timeout=2, limit=1)

        wait_until(heard, PATIENCE_S, f"a worker to hear {command}")

    # ------------------------------------------------------------------------------------------------ jobs in

    def send(self, **payload: Any) -> Any:
        """A plain ``send_task`` without a database, as from any language; Celery's result."""
        return self.send_raw({"model": MODEL, "prompt": "some words to say"} | payload)

    def send_raw(self, *args: Any, **options: Any) -> Any:
        return self.app.send_task("tokenmill.generate", args=list(args), queue=self.queue, **options)

    def submit(self, job_id: str, **payload: Any) -> str:
        """The way of the client: the row with its message first, then the message."""
        parsed = GeneratePayload.parse({"model": MODEL, "prompt": "some words to say"} | payload)
        message = build_message(job_id, parsed)
        job = NewJob(
            id=job_id,
            model=MODEL,
            queue=self.queue,
            params=parsed.params(),
            prompt=parsed.prompt_json(),
            message=message,
            priority=parsed.priority,
        )
        with self.engine.begin() as conn:
            insert_jobs(conn, [job])
        publish(self.redis.client.pipeline(), [message])
        with self.engine.begin() as conn:
            mark_published(conn, [job_id])
        return job_id

    # ----------------------------------------------------------------------------------------------- jobs out

    def status(self, job_id: str) -> JobStatus | None:
        with self.engine.connect() as conn:
            return job_status(conn, job_id)

    def state(self, job_id: str) -> JobState | None:
        status = self.status(job_id)
        return None if status is None else JobState(status.state)

    def result(self, job_id: str) -> StoredResult | None:
        with self.engine.connect() as conn:
            return job_result(conn, job_id)

    def states(self) -> dict[str, JobState]:
        with self.engine.connect() as conn:
            return {job_id: JobState(state) for job_id, state in conn.execute(select(Job.id, Job.state))}

    def attempts(self, job_id: str) -> list[Attempt]:
        query = select(Attempt.outcome).where(Attempt.job_id == job_id).order_by(Attempt.number)
        with self.engine.connect() as conn:
            return list(conn.scalars(query))

    def worker_states(self) -> list[str]:
        with self.engine.connect() as conn:
            return [str(state) for state in conn.scalars(select(Worker.state).order_by(Worker.started_at))]

    def wait_state(self, job_id: str, state: JobState, timeout_s: float = PATIENCE_S) -> None:
        wait_until(lambda: self.state(job_id) is state, timeout_s, f"{job_id} to be {state}")

    def wait_attempt(self, job_id: str, number: int, timeout_s: float = PATIENCE_S) -> None:
        def reached() -> bool:
            status = self.status(job_id)
            return status is not None and status.attempt >= number

        wait_until(reached, timeout_s, f"attempt {number} at {job_id}")

    def wait_all(self, ids: Sequence[str], timeout_s: float = PATIENCE_S) -> dict[str, JobState]:
        """Wait until all these jobs have ended; their states."""

        def ended() -> dict[str, JobState] | None:
            states = self.states()
            over = all(job_id in states and states[job_id].terminal for job_id in ids)
            return {job_id: states[job_id] for job_id in ids} if over else None

        states = wait_until(ended, timeout_s, f"{len(ids)} jobs to end")
        assert states is not None
        return states

    def wait_drained(self, timeout_s: float = PATIENCE_S) -> None:
        """Wait until Redis holds nothing unacknowledged and no message."""
        wait_until(
            lambda: self.redis.unacked() == 0 and self.queued() == 0, timeout_s, "everything acknowledged"
        )

    def queued(self) -> int:
        """Messages in the model's queue, of all priorities."""
        keys = self.redis.client.keys(f"{self.queue}*")
        return sum(int(self.redis.client.llen(key)) for key in keys)

    def close(self) -> None:
        for worker in self.workers:
            if worker.process.poll() is None:
                worker.kill()
        self.engine.dispose()
        # A result that outlives this Redis would try to reach it when it is collected.
        for thing in gc.get_objects():
            if isinstance(thing, AsyncResult) and thing.app is self.app:
                thing.backend = None
        self.app.close()
        pools.reset()  # kombu shares connections by URL, between tests too
