"""Every setting of a worker, a client and the command line: where it comes from, what it may be.

A setting is read, first match wins, from a keyword override, from the environment (``TOKENMILL_…``), or
from a TOML file named by ``TOKENMILL_CONFIG`` (else ``./tokenmill.toml`` where that exists). Nothing in here
imports torch or Celery.
"""

from __future__ import annotations

import difflib
import os
import re
import socket
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import SplitResult, urlsplit

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    field_serializer,
    field_validator,
    model_validator,
)
from pydantic_settings import BaseSettings, NoDecode, PydanticBaseSettingsSource, SettingsConfigDict
from pydantic_settings.exceptions import SettingsError

from backend.api import MAX_DEADLINE_S, ConfigurationError
from backend.complaints import complaint
from backend.config import EngineConfig
from workers.callbacks.secret_book import SecretBook
from workers.callbacks.urls import HostRule
from workers.redaction import redact_url
from workers.settings_sources import CONFIG_VARIABLE, ENV_PREFIX, FlatEngineEnv, TomlFile

# Read elsewhere: workers.private_redis, backend.model_source.
_OTHER_VARIABLES = frozenset({CONFIG_VARIABLE, "TOKENMILL_REDIS_SERVER", "TOKENMILL_CACHE_DIR"})


def _is_redis_address(parts: SplitResult) -> bool:
    """Whether port and database are numbers: redis-py would take database 0 for any other path."""
    return parts.port != 0 and re.fullmatch(r"/?\d*", parts.path) is not None


class TenantLimit(BaseModel):
    """The most a tenant may have open; 0 is no limit."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    jobs: int = Field(0, ge=0)
    tokens: int = Field(0, ge=0)


class Settings(BaseSettings):
    """The validated settings. Frozen: make another one with ``load_settings(**overrides)``."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX,
        env_nested_delimiter="__",
        env_ignore_empty=True,
        frozen=True,
        extra="forbid",
        protected_namespaces=(),
        hide_input_in_errors=True,
    )

    broker_url: str = Field("redis://127.0.0.1:6379/0", description="Redis that carries the deliveries")
    result_backend_url: str | None = Field(
        None, description="Redis for Celery's own results (.get(), link, chord); the broker when unset"
    )
    database_url: str = Field(
        "sqlite:///tokenmill.db", description="SQL database that holds jobs and results"
    )

    backend: str = Field(
        "async", min_length=1, description="how to generate: async, transformers, echo or a plug-in"
    )
    model: str = Field("smollm2", min_length=1, description="name of the model served here, and of its queue")
    models: Annotated[tuple[str, ...], NoDecode] = Field(
        (), description="further model names that this fleet accepts"
    )

    worker_name: str = Field(
        default_factory=socket.gethostname,
        min_length=1,
        max_length=200,
        description="the worker's name; the host's",
    )
    heartbeat_interval_s: float = Field(1.0, gt=0, le=60, description="between two beats of the worker's row")
    dead_after_s: float = Field(
        6.0, gt=0, le=3600, description="a worker whose heartbeat has not moved for so long counts as dead"
    )
    engine_stall_s: float = Field(
        300.0,
        ge=0,
        le=MAX_DEADLINE_S,
        description="an engine that has work and takes no step for so long hangs: the worker hands its jobs back and "
        "ends, to be started again. Keep it above the longest compilation in the midst of work; 0: never",
    )
    sample_interval_s: float = Field(5.0, gt=0, le=3600, description="between two rows of engine statistics")
    worker_imports: Annotated[tuple[str, ...], NoDecode] = Field(
        (),
        description="modules that a worker imports when it starts, separated by commas: signal handlers and tasks of "
        "your own, see celery.md",
    )
    task_events: bool = Field(
        False, description="send Celery's task events from the start; Flower turns them on by itself"
    )
    track_started: bool = Field(
        False, description="store Celery's state STARTED when a job starts, one more write to Redis for each"
    )
    metrics_port: int | None = Field(
        None,
        ge=1,
        le=65_535,
        description="port for Prometheus, off when unset; with several GPUs the second worker takes the next port",
    )
    metrics_host: str = Field(
        "127.0.0.1",
        min_length=1,
        description="address that the metrics are served on; anybody there may read them",
    )

    prefetch_headroom: int | None = Field(
        None,
        ge=0,
        description="deliveries held beyond the slots; the larger of 8 and a quarter of the slots when unset",
    )
    prefetch_reserve: int | None = Field(
        None,
        ge=1,
        description="deliveries held beyond that which are never bulk (priority 6 to 9), so that urgent jobs "
        "reach the engine while bulk fills it; the larger of 4 and an eighth of the slots when unset",
    )
    bulk_min_share: float = Field(
        0.1,
        ge=0,
        le=1,
        description="share of the slots for which bulk is taken first, from the queue and by the engine, however much "
        "is urgent",
    )
    max_queue_age_s: float | None = Field(
        None,
        gt=0,
        le=MAX_DEADLINE_S,
        description="a job that waited longer than this for a worker expires; no limit when unset",
    )
    tenant_max_open_jobs: int = Field(
        0,
        ge=0,
        description="queued and running jobs that each tenant may have; more are refused at submission. 0 is no limit",
    )
    tenant_max_open_tokens: int = Field(
        0,
        ge=0,
        description="tokens that a tenant's queued and running jobs may come to: of each, a quarter of its prompt's "
        "characters (or its token ids) and its max_tokens. 0 is no limit",
    )
    tenant_limits: dict[str, TenantLimit] = Field(
        default_factory=dict,
        description='limits of single tenants instead of those two, as JSON: `{"acme": {"jobs": 500, "tokens": 0}}`',
    )
    max_prompt_chars: int = Field(1_000_000, ge=1, description="longest prompt text accepted, in characters")
    max_payload_bytes: int = Field(
        4 * 2**20,
        ge=1024,
        description="largest request accepted, all of its fields as JSON in UTF-8; SQL holds about 2.4 times as much "
        "in one row, which MariaDB's `max_allowed_packet` must let through",
    )
    max_file_bytes: int = Field(
        200 * 2**20, ge=1, description="largest file that tokenmill serve accepts for a batch"
    )
    finaliser_threads: int = Field(
        2, ge=1, le=4, description="threads that run Celery's tracer on finished jobs"
    )

    visibility_timeout_s: float = Field(
        8.0,
        ge=2,
        le=MAX_DEADLINE_S,
        description="a delivery whose lease was not renewed for so long is delivered again. The leases of "
        "all that is in flight are renewed each second, so this bounds recovery after a kill, not the length of "
        "a job; keep it above dead_after_s, or the new delivery waits until the death is certain",
    )
    lease_interval_s: float = Field(
        1.0, gt=0, le=MAX_DEADLINE_S, description="between two renewals of the leases in flight"
    )
    result_expires_s: float = Field(
        86_400.0,
        ge=0,
        le=MAX_DEADLINE_S,
        description="lifetime of Celery's own results in Redis; 0 keeps them",
    )
    stream_interval_s: float = Field(
        0.02, ge=0, le=1, description="text of a token stream is gathered for so long before it is written"
    )
    stream_expires_s: float = Field(
        3600.0,
        gt=0,
        le=MAX_DEADLINE_S,
        description="lifetime of a token stream in Redis after its last entry",
    )
    stream_max_entries: int = Field(
        10_000, ge=100, description="about how many entries a token stream keeps; older ones are trimmed"
    )
    shutdown_grace_s: float = Field(
        30.0,
        ge=0,
        le=MAX_DEADLINE_S,
        description="a warm shutdown lets running jobs finish for so long and hands the rest back",
    )
    soft_shutdown_s: float = Field(
        0.0,
        ge=0,
        le=MAX_DEADLINE_S,
        description="SIGQUIT lets running jobs finish for so long before it hands them back",
    )
    newer_payload_delay_s: float = Field(
        5.0,
        ge=0,
        le=MAX_DEADLINE_S,
        description="how long a job with a newer payload version is held before it is handed back",
    )
    spool_dir: Path | None = Field(
        None,
        description="folder for results that wait while the database is away; "
        "`$XDG_STATE_HOME/tokenmill/spool` (`~/.local/state/…`) when unset",
    )
    spool_max_mb: float = Field(
        256.0, ge=0, description="largest file there; what is beyond waits in memory only"
    )
    restart_backoff_s: float = Field(
        1.0, gt=0, le=MAX_DEADLINE_S, description="first pause before a dead worker process is restarted"
    )
    restart_backoff_max_s: float = Field(60.0, gt=0, le=MAX_DEADLINE_S, description="longest such pause")
    callback_hosts: Annotated[tuple[str, ...], NoDecode] = Field(
        (),
        description="hosts that callbacks may be sent to: `hooks.example.com`, `.example.com` for all below it, "
        "with `:port` where it is not 443. None: callbacks are refused",
    )
    callback_secrets: Annotated[tuple[SecretStr, ...], NoDecode] = Field(
        (),
        description="sign callbacks, each of them; `host=whsec_…` signs for that host alone, without the others. "
        "Needed where callbacks are sent; `tokenmill callbacks secret` makes one",
    )
    callback_sender: bool = Field(
        True,
        description="`tokenmill worker` sends callbacks, too; off where only `tokenmill callbacks send` may",
    )
    callback_timeout_s: float = Field(
        10.0, gt=0, le=120, description="for one callback, from looking its host up to the answer"
    )
    callback_max_age_s: float = Field(
        86_400.0,
        gt=0,
        le=MAX_DEADLINE_S,
        description="how long after the end it tells of a callback is tried again",
    )
    callback_host_connections: int = Field(
        8, ge=1, le=64, description="callbacks that one sender has under way to one host at once"
    )
    callback_ca_file: Path | None = Field(
        None, description="PEM certificates that receivers are trusted by; the system's when unset"
    )
    callback_allow_http: bool = Field(
        False, description="for development: callbacks without TLS are accepted"
    )
    callback_allow_private: bool = Field(
        False, description="for development: callbacks to loopback and private addresses are sent"
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="verbosity of the worker's log"
    )

    engine: EngineConfig = Field(default_factory=EngineConfig, description="the engine's own settings")

    @field_validator("broker_url", "result_backend_url")
    @classmethod
    def _redis_url(cls, value: str | None) -> str | None:
        schemes = ("redis", "rediss", "redis+socket", "sentinel")
        if value is None:
            return value
        try:
            parts = urlsplit(value)
            plain = parts.scheme in ("redis", "rediss")  # the others may name several hosts, or a file
            usable = parts.scheme in schemes and (not plain or _is_redis_address(parts))
        except ValueError:  # a port that is no number, or out of range
            usable = False
        if not usable:
            raise ValueError("must be a Redis URL such as redis://127.0.0.1:6379/0")
        return value

    @field_validator("database_url")
    @classmethod
    def _database_url(cls, value: str) -> str:
        if "://" not in value:
            raise ValueError(
                "must be a database URL such as sqlite:///tokenmill.db or postgresql+psycopg://user@host/db"
            )
        return value

    @field_validator("callback_hosts")
    @classmethod
    def _host_rules(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for entry in value:
            HostRule.parse(entry)
        return value

    @field_validator("callback_secrets")
    @classmethod
    def _keys(cls, value: tuple[SecretStr, ...]) -> tuple[SecretStr, ...]:
        SecretBook.parse(secret.get_secret_value() for secret in value)
        return value

    @field_serializer("callback_secrets", when_used="json")
    def _plain_secrets(self, value: tuple[SecretStr, ...]) -> list[str]:
        # The supervisor hands settings to its processes as JSON, through a pipe.
        return [secret.get_secret_value() for secret in value]

    @field_validator("models", "worker_imports", "callback_hosts", "callback_secrets", mode="before")
    @classmethod
    def _comma_list(cls, value: Any) -> Any:
        return (
            tuple(name.strip() for name in value.split(",") if name.strip())
            if isinstance(value, str)
            else value
        )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.dead_after_s < 3 * self.heartbeat_interval_s:
            raise ValueError(
                f"dead_after_s ({self.dead_after_s:g}) must be at least three times heartbeat_interval_s "
                f"({self.heartbeat_interval_s:g}), or a live worker looks dead"
            )
        if self.visibility_timeout_s < 2 * self.lease_interval_s:
            raise ValueError(
                f"visibility_timeout_s ({self.visibility_timeout_s:g}) must be at least twice "
                f"lease_interval_s ({self.lease_interval_s:g}), or live jobs are delivered again"
            )
        return self

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return (
            init_settings,
            env_settings,
            FlatEngineEnv(settings_cls, os.environ),
            TomlFile(settings_cls, os.environ),
        )

    def __repr_args__(self) -> Iterable[tuple[str | None, Any]]:
        for name, value in super().__repr_args__():
            yield name, redact_url(value) if name and name.endswith("_url") and value else value

    @property
    def celery_result_backend_url(self) -> str:
        """Where Celery's own results go."""
        return self.result_backend_url or self.broker_url

    @property
    def limits_tenants(self) -> bool:
        """Whether any tenant may have a limit."""
        return bool(self.tenant_max_open_jobs or self.tenant_max_open_tokens or self.tenant_limits)

    def tenant_limit(self, tenant: str | None) -> TenantLimit | None:
        """What a tenant may have open; nothing where that is not limited."""
        if tenant is None:
            return None
        given = TenantLimit(jobs=self.tenant_max_open_jobs, tokens=self.tenant_max_open_tokens)
        limit = self.tenant_limits.get(tenant, given)
        return limit if limit.jobs or limit.tokens else None

    @property
    def accepted_models(self) -> tuple[str, ...]:
        """Names a payload may ask for, the served one first."""
        return (self.model, *(name for name in self.models if name != self.model))

    @property
    def engine_config(self) -> EngineConfig:
        """The engine's configuration; what is not set there follows the worker's model and share of bulk."""
        ours = {"model": self.model, "bulk_min_share": self.bulk_min_share}
        unset = ours.keys() - self.engine.model_fields_set
        return self.engine.model_copy(update={name: ours[name] for name in unset})

    def headroom(self, slots: int) -> int:
        """Deliveries to hold beyond ``slots`` running ones, so that a slot never waits for a commit."""
        return max(8, slots // 4) if self.prefetch_headroom is None else self.prefetch_headroom

    def reserve(self, slots: int) -> int:
        """Deliveries to hold beyond that which are not bulk."""
        return max(4, slots // 8) if self.prefetch_reserve is None else self.prefetch_reserve


def misspelt_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Variables that are no settings but look like one, with the one that may be meant.

    They are no errors: a cluster's own services and plug-in backends may put names with our prefix there.
    """
    known = {name.upper() for name in Settings.model_fields}
    found = {}
    for variable in sorted(environ):
        name = variable.removeprefix(ENV_PREFIX)
        if name == variable or name in known or variable in _OTHER_VARIABLES or name.startswith("ENGINE_"):
            continue  # a wrong name of the engine's is refused when the settings are read
        if meant := difflib.get_close_matches(name, known, n=1):
            found[variable] = ENV_PREFIX + meant[0]
    return found


def load_settings(**overrides: Any) -> Settings:
    """Read and validate the settings; ``overrides`` win over the environment and the file.

    Raises:
        ConfigurationError: names the setting, how it is spelt in the environment, and the fix.
    """
    try:
        return Settings(**overrides)
    except ValidationError as exc:
        raise _configuration_error(exc) from None
    except SettingsError as exc:
        raise ConfigurationError(f"bad settings: {exc}. Correct the environment variable") from None


def _configuration_error(exc: ValidationError) -> ConfigurationError:
    problems = []
    for error in exc.errors(include_url=False):
        path = [str(part) for part in error["loc"]]
        if error["type"] == "value_error":
            message = error["msg"].removeprefix("Value error, ")
        elif error["type"] == "extra_forbidden":
            message = "is not a setting; correct its spelling or remove it"
        else:
            wrong, fix = complaint(error)
            # What should be a number or one of some words is no secret; what should be a URL may be.
            open_kind = error["type"].startswith(("int_", "float_", "bool_", "greater_", "less_", "literal_"))
            message = f"{wrong} (got {str(error['input'])[:80]!r}). {fix}" if open_kind else f"{wrong}. {fix}"
        if not path:
            problems.append(message)
            continue
        variable = ENV_PREFIX + "_".join(path).upper()
        problems.append(f"{'.'.join(path)} ({variable}): {message}")
    return ConfigurationError("bad settings: " + "; ".join(problems))
