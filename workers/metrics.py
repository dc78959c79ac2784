"""A worker's numbers for Prometheus, read from its engine when asked. Needs the extra ``metrics``.

Labels are bounded: the worker's name, its model and its device are constants of the process. Nothing is labelled
with what a request brings, such as a tenant or an id.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from backend.api import BackendInfo, BackendStats, ConfigurationError

COUNTERS = {
    "steps": ("steps", "steps of the engine"),
    "prompt_tokens": ("prompt_tokens", "prompt tokens of admitted requests, cache hits included"),
    "cached_tokens": ("cached_tokens", "of these, served from the prefix cache"),
    "generated_tokens": ("generated_tokens", "new tokens"),
    "requests_finished": ("requests_finished", "requests that ended well"),
    "requests_failed": ("requests_failed", "requests that failed"),
    "preemptions": ("preemptions", "requests that lost their place for a while"),
    "device_busy_seconds": ("busy_s", "time in which the device computed"),
    "prepare_seconds": ("prepare_s", "CPU time that prepared steps"),
}
GAUGES = {
    "running_requests": ("running", "requests in the running batch"),
    "waiting_requests": ("waiting", "requests that the engine holds and that wait for a slot"),
    "kv_blocks_total": ("kv_blocks_total", "blocks of the key/value cache"),
    "kv_blocks_free": ("kv_blocks_free", "of these, free or reusable"),
}


class MetricsServer:
    """Answers ``GET /metrics`` until closed.

    Args:
        healthy: whether the database answers, and how many operations wait for it.
        callbacks: how many callbacks of the whole fleet are due and have failed, or ``None`` when that is not known
            now.

    Raises:
        ConfigurationError: prometheus-client is not installed, or the address cannot be listened on.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        worker: str,
        info: BackendInfo,
        stats: Callable[[], BackendStats],
        database: Callable[[], tuple[bool, int]],
        callbacks: Callable[[], Mapping[str, int] | None] = lambda: None,
    ) -> None:
        try:
            from prometheus_client import CollectorRegistry, start_http_server
        except ImportError as exc:
            raise ConfigurationError(
                "metrics_port (TOKENMILL_METRICS_PORT): prometheus-client is not installed. "
                "Run: pip install 'tokenmill[metrics]'"
            ) from exc
        registry = CollectorRegistry()
        labels = {"worker": worker, "model": info.model, "device": info.device}
        registry.register(_Collector(labels, info.slots, stats, database, callbacks))
        try:
            self._server, self._thread = start_http_server(port, host, registry)
        except OSError as exc:
            raise ConfigurationError(
                f"metrics_port (TOKENMILL_METRICS_PORT): cannot listen on {host}:{port} ({exc.strerror}). "
                "Name a free port and an address of this host"
            ) from exc

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self._server.server_port)

    def close(self) -> None:
        """Stop answering."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Collector:
    """Makes the metrics anew for each question."""

    def __init__(
        self,
        labels: dict[str, str],
        slots: int,
        stats: Callable[[], BackendStats],
        database: Callable[[], tuple[bool, int]],
        callbacks: Callable[[], Mapping[str, int] | None],
    ) -> None:
        self._labels = labels
        self._slots = slots
        self._stats = stats
        self._database = database
        self._callbacks = callbacks

    def collect(self) -> Iterator[Any]:
        """See ``prometheus_client.registry.Collector``."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        stats = self._stats()
        healthy, pending = self._database()
        names, values = list(self._labels), list(self._labels.values())

        def metric(kind: Any, name: str, about: str, value: float) -> Any:
            family = kind(f"tokenmill_{name}", about, labels=names)
            family.add_metric(values, value)
            return family

        for name, (attribute, about) in COUNTERS.items():
            yield metric(CounterMetricFamily, name, about, getattr(stats, attribute))
        for name, (attribute, about) in GAUGES.items():
            yield metric(GaugeMetricFamily, name, about, getattr(stats, attribute))
        yield metric(GaugeMetricFamily, "slots", "requests that can run at once", self._slots)
        yield metric(
            GaugeMetricFamily, "database_up", "whether the database answered last time", int(healthy)
        )
        yield metric(GaugeMetricFamily, "database_pending", "operations that wait for the database", pending)
        counts = self._callbacks() or {}
        for state, about in (("due", "to be sent, now or again later"), ("failed", "given up")):
            if state in counts:
                about = f"callbacks of the fleet that are {about}; the same from every worker"
                yield metric(GaugeMetricFamily, f"callbacks_{state}", about, counts[state])
