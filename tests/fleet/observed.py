"""A user's own module in a worker: tasks, and handlers of every signal that a worker sends.

Named by the setting ``worker_imports``. What the handlers see goes line by line, as JSON, into the file that
``OBSERVED_FILE`` names. With ``OBSERVED_SPANS`` Celery is instrumented by OpenTelemetry, whose spans go into that file.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from pathlib import Path
from typing import Any

from celery import shared_task, signals
from celery.exceptions import Reject

FILE = "OBSERVED_FILE"
SPANS = "OBSERVED_SPANS"


@shared_task(name="tests.collect")  # type: ignore[untyped-decorator]
def collect(results: Any) -> Any:
    """What a caller might do with one answer or with many."""
    many = results if isinstance(results, list) else [results]
    return {"collected": sorted(result["text"] for result in many)}


@shared_task(name="tests.prompt")  # type: ignore[untyped-decorator]
def prompt(result: Any) -> dict[str, Any]:
    """The payload of a next job out of the answer to the last."""
    return {"model": "echo", "prompt": f"next {result['text']}", "max_tokens": 2}


@shared_task(name="tests.console")  # type: ignore[untyped-decorator]
def console(request: Any, error: BaseException, traceback: Any) -> None:
    """For ``link_error``; Celery calls it within the worker, without a message of its own."""
    logging.getLogger("tests.console").warning("told of %s: %s", request.id, type(error).__name__)


@shared_task(name="tests.flaky", bind=True, max_retries=2)  # type: ignore[untyped-decorator]
def flaky(self: Any, succeed_at: int) -> int:
    """Succeeds at a later try."""
    if self.request.retries < succeed_at:
        raise self.retry(countdown=0)
    return int(self.request.retries)


@shared_task(name="tests.rejected")  # type: ignore[untyped-decorator]
def rejected() -> None:
    """Is not wanted."""
    raise Reject("not wanted", requeue=False)


class Observer:
    """Writes down what it is told, in order."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", buffering=1)
        self._lock = threading.Lock()

    def note(self, what: str, task_id: str | None = None, **fields: Any) -> None:
        line = {"what": what, "id": task_id, "at": time.monotonic(), **fields}
        with self._lock:
            self._file.write(json.dumps(line, default=repr) + "\n")

    def connect(self) -> None:
        """Listen to every signal that a worker sends."""
        for name in (
            "worker_init",
            "worker_process_init",
            "worker_ready",
            "worker_shutting_down",
            "worker_process_shutdown",
            "worker_shutdown",
        ):
            getattr(signals, name).connect(self._lifetime(name), weak=False)
        signals.task_received.connect(self._received, weak=False)
        for name in ("task_prerun", "task_postrun", "task_failure", "task_retry", "task_unknown"):
            getattr(signals, name).connect(self._of_task(name), weak=False)
        for name in ("task_success", "task_revoked", "task_rejected", "task_internal_error"):
            getattr(signals, name).connect(self._of_task(name), weak=False)

    def _lifetime(self, name: str) -> Any:
        def note(sender: Any = None, **_: Any) -> None:
            self.note(name, sender=str(sender))

        return note

    def _received(self, sender: Any, request: Any, **_: Any) -> None:
        self.note("task_received", request.id, sender=type(sender).__name__, info=request.info())

    def _of_task(self, name: str) -> Any:
        def note(sender: Any, signal: Any, **fields: Any) -> None:
            task_id = fields.pop("task_id", None) or fields.pop("id", None)
            request = fields.pop("request", None)
            current = getattr(sender, "request", None)
            if request is not None:
                task_id = request.id
            elif task_id is None and current is not None:
                task_id = current.id
            if name == "task_prerun":
                current.mark = "left at the beginning"
            shown = {
                key: value for key, value in fields.items() if key not in ("message", "einfo", "traceback")
            }
            shown.pop("task", None)
            self.note(
                name,
                task_id,
                sender=getattr(sender, "name", type(sender).__name__),
                thread=threading.current_thread().name,
                current=getattr(current, "id", None),
                mark=getattr(current, "mark", None),
                **shown,
            )

        return note


def trace_spans(path: Path) -> None:
    """Instrument Celery as OpenTelemetry's guide says; spans go into a file."""
    from opentelemetry import trace
    from opentelemetry.instrumentation.celery import CeleryInstrumentor
    from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult

    class FileExporter(SpanExporter):
        def export(self, spans: Any) -> SpanExportResult:
            with path.open("a") as file:
                for span in spans:
                    file.write(_one_line(span) + "\n")
            return SpanExportResult.SUCCESS

    def _one_line(span: ReadableSpan) -> str:
        return str(span.to_json(indent=None)).replace("\n", " ")

    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(FileExporter()))
    trace.set_tracer_provider(provider)
    CeleryInstrumentor().instrument()


if name := os.environ.get(FILE):
    Observer(Path(name)).connect()
if spans := os.environ.get(SPANS):
    signals.worker_process_init.connect(lambda **_: trace_spans(Path(spans)), weak=False)
