"""The works as Celery jobs of token ids: what queue, pool and database cost beside the bare engine.

A private Redis, a SQLite file and one ``tokenmill worker`` with random weights; jobs go in through ``Client``. A
work's time is that from the first start to the last end in the database.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from sqlalchemy import Engine, func, select

from backend.config import EngineConfig
from benchmarks.gpu_works import Work
from models_db import migrate
from models_db.session import make_engine, reading
from models_db.tables import EngineSample, Job, JobState, Result
from workers.client import Client
from workers.demo import stop_group
from workers.private_redis import PrivateRedis
from workers.settings import load_settings

_MODEL = "shape"
_POLL_S = 0.1
_SAMPLE_S = 1.0
_ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class FleetFigures:
    """One work through the fleet."""

    name: str
    whole_s: float  # first start to last end
    filling_s: float  # first start until as many jobs had started as there are slots
    tokens: int
    tokens_per_s: float
    worker_cpu_s: float  # of the worker's processes, while the work was under way
    active: float  # GPU-busy seconds of the samples that saw work, as a share of whole_s

    def to_dict(self) -> dict[str, Any]:
        """As JSON-safe values."""
        return asdict(self)


def measure(
    folder: Path,
    config: EngineConfig,
    works: list[Work],
    *,
    timeout_s: float,
    environment: Mapping[str, str] | None = None,
) -> Iterator[FleetFigures]:
    """Start the fleet, and give each work's figures as it ends. ``environment`` is added to the worker's.

    Raises:
        RuntimeError: the worker ended, jobs failed, or ``timeout_s`` passed; the message has the end of its log.
    """
    with ExitStack() as stack:
        server = stack.enter_context(PrivateRedis(folder))
        url = f"sqlite:///{folder / 'fleet.db'}"
        migrate.upgrade(url)
        database = make_engine(url)
        stack.callback(database.dispose)
        settings = load_settings(
            broker_url=server.url,
            database_url=url,
            model=_MODEL,
            engine=config.model_dump(exclude_unset=True),
        )
        client = stack.enter_context(Client(settings))
        log = folder / "worker.log"
        variables = {
            "TOKENMILL_BROKER_URL": server.url,
            "TOKENMILL_DATABASE_URL": url,
            "TOKENMILL_MODEL": _MODEL,
            "TOKENMILL_SAMPLE_INTERVAL_S": str(_SAMPLE_S),
            **{
                f"TOKENMILL_ENGINE_{name.upper()}": str(value)
                for name, value in config.model_dump(mode="json", exclude_unset=True).items()
            },
        }
        worker: subprocess.Popen[bytes] | None = None
        for work in works:
            # The first work is queued before the worker starts, the others come while it is idle.
            ids = [handle.id for handle in client.submit_each(_requests(work, config))]
            if worker is None:
                worker = _start(variables | dict(environment or {}), log)
                stack.callback(stop_group, worker)
            cpu_s = _wait(database, worker, log, ids, time.monotonic() + timeout_s)
            yield _figures(database, work, ids, config.max_num_seqs, cpu_s)


def _requests(work: Work, config: EngineConfig) -> Iterator[dict[str, Any]]:
    vocabulary = _vocabulary(Path(config.model))
    for prompt, (_, new) in zip(work.prompts(vocabulary), work.requests, strict=True):
        yield {"token_ids": list(prompt), "max_tokens": new, "ignore_eos": True}


def _vocabulary(folder: Path) -> int:
    import json

    return int(json.loads((folder / "config.json").read_text(encoding="utf-8"))["vocab_size"])


def _start(variables: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("wb") as file:
        return subprocess.Popen(
            [sys.executable, "-m", "workers.cli", "worker", "--once"],
            env=os.environ | variables,
            cwd=_ROOT,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _wait(
    database: Engine, worker: subprocess.Popen[bytes], log: Path, ids: list[str], give_up: float
) -> float:
    """Wait until all jobs of the work have ended; the worker's CPU seconds since one had started."""
    states = select(Job.state, func.count()).where(Job.id >= min(ids)).group_by(Job.state)
    before: float | None = None
    while True:
        with reading(database) as connection:
            counts = {row[0]: int(row[1]) for row in connection.execute(states)}
        if before is None and counts.get(JobState.QUEUED, 0) < len(ids):
            before = _cpu_s(worker)
        ended = sum(count for state, count in counts.items() if state.terminal)
        failed = ended - counts.get(JobState.SUCCEEDED, 0)
        if failed or worker.poll() is not None or time.monotonic() > give_up:
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-12:])
            raise RuntimeError(
                f"{ended} of {len(ids)} jobs ended, {failed} failed. The worker's log:\n{tail}"
            )
        if ended == len(ids) and before is not None:
            return _cpu_s(worker) - before
        time.sleep(_POLL_S)


def _figures(database: Engine, work: Work, ids: list[str], slots: int, cpu_s: float) -> FleetFigures:
    since = Job.id >= min(ids)  # ids grow with time
    with reading(database) as connection:
        starts = sorted(_known(moment) for moment in connection.scalars(select(Job.started_at).where(since)))
        last = _known(connection.scalar(select(func.max(Job.finished_at)).where(since)))
        made = select(func.sum(Result.completion_tokens)).join(Job, Job.id == Result.job_id).where(since)
        tokens = connection.scalar(made)
    if tokens != work.new_tokens:
        raise RuntimeError(f"{work.name}: {tokens} tokens are stored instead of {work.new_tokens}")
    whole = (last - starts[0]).total_seconds()
    return FleetFigures(
        name=work.name,
        whole_s=whole,
        filling_s=(starts[min(slots, len(starts)) - 1] - starts[0]).total_seconds(),
        tokens=work.new_tokens,
        tokens_per_s=work.new_tokens / whole,
        worker_cpu_s=cpu_s,
        active=_busy_s(database, starts[0], work.new_tokens) / whole,
    )


def _busy_s(database: Engine, since: datetime, tokens: int) -> float:
    """GPU-busy seconds of the samples since then; waits for the last one, which comes at its interval."""
    sums = select(func.sum(EngineSample.generated_tokens), func.sum(EngineSample.busy_s))
    give_up = time.monotonic() + 3 * _SAMPLE_S
    while True:
        with reading(database) as connection:
            sampled, busy = connection.execute(sums.where(EngineSample.sampled_at >= since)).one()
        if (sampled or 0) >= tokens or time.monotonic() > give_up:
            return float(busy or 0.0)
        time.sleep(_POLL_S)


def _known(moment: datetime | None) -> datetime:
    if moment is None:
        raise RuntimeError("a job that has ended has no times")
    return moment


def _cpu_s(worker: subprocess.Popen[bytes]) -> float:
    """CPU time of the worker's supervisor and of the process that it keeps."""
    import psutil

    parent = psutil.Process(worker.pid)
    times = [process.cpu_times() for process in (parent, *parent.children(recursive=True))]
    return float(sum(each.user + each.system for each in times))
