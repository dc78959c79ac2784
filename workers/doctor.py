"""Checks of everything a job passes through, each with what to do when it is not well."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from backend.api import TokenmillError
from models_db.errors import DatabaseError, MissingDatabaseError
from models_db.schema import check_schema, current_revision
from models_db.session import make_engine, reading
from models_db.workers import WorkerRecord, unended_workers
from workers.broker import Broker
from workers.redaction import redact_url
from workers.settings import Settings, misspelt_variables

_OLDEST_REDIS = (6, 2)
_TORCH_PACKAGES = ("torch", "transformers", "numpy")


class Health(StrEnum):
    """How a check came out."""

    OK = "ok"
    WARNING = "warning"  # works, with a risk
    BROKEN = "broken"
    SKIPPED = "skipped"  # something it rests on is broken


@dataclass(frozen=True, slots=True)
class Finding:
    """One check. ``fix`` is empty when nothing needs to be done."""

    check: str
    health: Health
    found: str
    fix: str = ""

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe values."""
        return asdict(self)


def examine(
    settings: Settings, broker: Broker | None = None, environ: Mapping[str, str] = os.environ
) -> Iterator[Finding]:
    """Every finding, in the order of a job's way: settings, Redis, database, schema, workers, model, device."""
    yield Finding("settings", Health.OK, f"backend {settings.backend}, model {settings.model}")
    for variable, meant in misspelt_variables(environ).items():
        yield Finding("settings", Health.WARNING, f"{variable} is no setting", f"Did you mean {meant}?")
    yield from _redis(settings, broker or Broker(settings.broker_url))
    yield from _database(settings)
    yield from _callbacks(settings)
    yield from _model(settings)


def _redis(settings: Settings, broker: Broker) -> Iterator[Finding]:
    try:
        info = broker.info()
    except TokenmillError as error:
        yield Finding("redis", Health.BROKEN, str(error), "redis-server --maxmemory-policy noeviction")
        return
    finally:
        broker.close()
    version = str(info.get("redis_version", "0"))
    where = redact_url(settings.broker_url)
    if tuple(int(part) for part in version.split(".")[:2]) < _OLDEST_REDIS:
        wanted = ".".join(map(str, _OLDEST_REDIS))
        yield Finding(
            "redis", Health.BROKEN, f"version {version} at {where}", f"Install Redis {wanted} or newer"
        )
    else:
        yield Finding("redis", Health.OK, f"version {version} at {where}")
    policy = str(info.get("maxmemory_policy", "unknown"))
    if policy == "noeviction":
        yield Finding("redis eviction", Health.OK, "noeviction: full memory refuses jobs, never drops them")
    else:
        yield Finding(
            "redis eviction",
            Health.BROKEN,
            f"{policy}: Redis may drop queued deliveries when its memory is full",
            "redis-cli CONFIG SET maxmemory-policy noeviction   (and in redis.conf, to keep it)",
        )
    if info.get("aof_enabled"):
        yield Finding("redis persistence", Health.OK, "append-only file is on")
    else:
        yield Finding(
            "redis persistence",
            Health.WARNING,
            "no append-only file: a restart of Redis loses deliveries (the jobs' rows stay)",
            "redis-cli CONFIG SET appendonly yes   (and in redis.conf, to keep it)",
        )


def _database(settings: Settings) -> Iterator[Finding]:
    where = redact_url(settings.database_url)
    try:
        engine = make_engine(settings.database_url)
    except DatabaseError as error:
        yield Finding("database", Health.BROKEN, str(error), "Correct TOKENMILL_DATABASE_URL")
        return
    try:
        try:
            current_revision(engine)  # first, since it makes no file where there is none
            with reading(engine) as connection:
                version = ".".join(str(part) for part in connection.dialect.server_version_info or ())
        except MissingDatabaseError as error:
            yield Finding(
                "database",
                Health.BROKEN,
                str(error),
                "tokenmill db upgrade   (makes it), or correct TOKENMILL_DATABASE_URL",
            )
            yield Finding("schema", Health.SKIPPED, "there is no database")
            return
        except DatabaseError as error:
            yield Finding(
                "database", Health.BROKEN, str(error), "Start it, or correct TOKENMILL_DATABASE_URL"
            )
            yield Finding("schema", Health.SKIPPED, "the database does not answer")
            return
        yield Finding("database", Health.OK, f"{engine.dialect.name} {version} at {where}")
        try:
            check_schema(engine)
        except DatabaseError as error:
            yield Finding("schema", Health.BROKEN, str(error), "tokenmill db upgrade")
            return
        yield Finding("schema", Health.OK, "at the revision that this version needs")
        with reading(engine) as connection:
            unended = unended_workers(connection)
        yield from _workers(
            [worker for worker in unended if worker.model == settings.model],
            settings.model,
            settings.dead_after_s,
        )
    finally:
        engine.dispose()


def _workers(unended: list[WorkerRecord], model: str, dead_after_s: float) -> Iterator[Finding]:
    """Judged by their beats: where all were killed at once, none is left to find the others dead."""
    silent = [worker for worker in unended if worker.silent(dead_after_s)]
    serving = [worker for worker in unended if worker not in silent]
    if serving:
        names = ", ".join(f"{worker.name} ({worker.device or worker.state})" for worker in serving)
        yield Finding("workers", Health.OK, f"{len(serving)} for {model}: {names}")
    elif not silent:
        yield Finding(
            "workers",
            Health.WARNING,
            f"none that serves {model}: jobs wait until one is started",
            "tokenmill worker",
        )
    if silent:
        names = ", ".join(f"{worker.name} on {worker.host} for {worker.silent_s:,.0f} s" for worker in silent)
        if serving:
            health, fix = Health.WARNING, "The others take its jobs over in a few seconds. Look why it ended"
        else:
            health, fix = Health.BROKEN, "tokenmill worker   (it takes over the jobs of those that are gone)"
        yield Finding("workers", health, f"silent, though they never stopped: {names}", fix)


def _callbacks(settings: Settings) -> Iterator[Finding]:
    if not settings.callback_hosts:
        return  # off, as most fleets want it
    yield Finding("callbacks", Health.OK, f"to {', '.join(settings.callback_hosts)}")
    if settings.callback_sender:
        if not settings.callback_secrets:
            yield Finding(
                "callbacks",
                Health.BROKEN,
                "there is no secret to sign them with: a worker does not start with these settings",
                "TOKENMILL_CALLBACK_SECRETS=$(tokenmill callbacks secret), or TOKENMILL_CALLBACK_SENDER=false",
            )
        if importlib.util.find_spec("httpcore2") is None:
            yield Finding(
                "callbacks",
                Health.WARNING,
                "the library that sends them is not installed: this host can submit jobs, but not run a worker",
                "pip install 'tokenmill[callbacks]'",
            )
    risks = {
        "callback_allow_private": "whoever may submit can send requests into this network",
        "callback_allow_http": "callbacks travel unencrypted",
    }
    for name, risk in risks.items():
        if getattr(settings, name):
            variable = f"TOKENMILL_{name.upper()}"
            yield Finding("callbacks", Health.WARNING, f"{variable} is on: {risk}", f"Unset {variable}")


def _model(settings: Settings) -> Iterator[Finding]:
    if settings.backend == "echo":
        yield Finding("model", Health.OK, "the echo backend needs none")
        yield Finding("device", Health.OK, "the echo backend needs none")
        return
    missing = [name for name in _TORCH_PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        yield Finding(
            "model",
            Health.WARNING,
            f"{', '.join(missing)} not installed: this host can submit jobs, but not run a worker",
            "pip install 'tokenmill[worker]'   ('tokenmill[cuda]' on a GPU host)",
        )
        yield Finding("device", Health.SKIPPED, "torch is not installed")
        return
    yield _model_files(settings)
    yield _device(settings)


def _model_files(settings: Settings) -> Finding:
    from backend.model_source import SMOLLM2, packaged_smollm2, resolve_model

    name = settings.engine_config.model
    if name == SMOLLM2 and (packaged := packaged_smollm2()):
        return Finding("model", Health.OK, f"{name}: {packaged.name}, from its package")
    if name.endswith(".gguf") and Path(name).expanduser().is_file():
        return Finding("model", Health.OK, f"{name}: a GGUF file")
    try:
        source = resolve_model(name)
    except TokenmillError as error:
        return Finding("model", Health.BROKEN, str(error), "Correct TOKENMILL_MODEL or install the model")
    if source.local:
        return Finding("model", Health.OK, f"{name}: a folder")
    return Finding(
        "model",
        Health.WARNING,
        f"{name}: a hub name",
        "A worker's first start downloads it, if it is not cached",
    )


def _device(settings: Settings) -> Finding:
    import torch

    wanted = settings.engine_config.device
    available = torch.cuda.is_available()
    if wanted.startswith("cuda") and not available:
        return Finding(
            "device",
            Health.BROKEN,
            f"{wanted} is configured and torch {torch.__version__} sees no CUDA device",
            "Install a CUDA build of torch and the driver, or set TOKENMILL_ENGINE_DEVICE=auto",
        )
    if available and wanted != "cpu":
        name = torch.cuda.get_device_name(wanted if ":" in wanted else 0)
        return Finding("device", Health.OK, f"{name}, torch {torch.__version__}")
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()
    return Finding("device", Health.OK, f"CPU with {cores} cores, torch {torch.__version__}")
