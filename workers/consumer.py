"""Celery's consumer, which neither dies of a message nor drops one, and shows no message in a log."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

from celery import signals
from celery.bootsteps import RUN
from celery.exceptions import NotRegistered
from celery.utils.log import get_logger
from celery.worker import state
from celery.worker.consumer import Consumer
from kombu.utils.json import dumps

from workers.payload import TASK_NAME
from workers.request import GenerateRequest, UnfitTaskError
from workers.tracing import build_tracer

logger = get_logger(__name__)

# Between two tries to reach Redis, in seconds: growing, but never so long that its return goes unnoticed.
_RETRY = {"interval_start": 0.2, "interval_step": 0.4, "interval_max": 2.0}


class TokenmillConsumer(Consumer):  # type: ignore[misc]
    """See the module. Everything here runs on the main thread."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if attach := getattr(self.pool, "attach_consumer", None):
            attach(self)

    def ensure_connected(self, conn: Any) -> Any:
        """Wait for Redis."""
        conn.ensure_connection = partial(conn.ensure_connection, **_RETRY)
        return super().ensure_connected(conn)

    def cancel_active_requests(self) -> None:
        """Nothing: the pool, which is stopped next, hands back what runs and acknowledges what has ended."""

    def create_task_handler(self, *args: Any, **kwargs: Any) -> Callable[[Any], None]:
        """What is called with each message. Whatever goes wrong with one is its own affair."""
        handle = super().create_task_handler(*args, **kwargs)
        ours = (*self.connection_errors, *self.channel_errors)

        def on_task_received(message: Any) -> None:
            try:
                handle(message)
            except ours:
                raise
            except Exception as exc:
                self._put_aside(message, f"{type(exc).__name__} while it was read")

        return on_task_received

    def update_strategies(self) -> None:
        """As Celery's, with our own tracer for generation jobs, which may be traced in other threads meanwhile."""
        super().update_strategies()
        task = self.app.tasks[TASK_NAME]
        task.tracer = build_tracer(task, self.hostname)

    def reset_rate_limits(self) -> None:
        """As Celery's; what waits for its turn under an old limit follows the new one, or starts without one."""
        before = [(name, bucket) for name, bucket in self.task_buckets.items() if bucket is not None]
        super().reset_rate_limits()
        for name, old in before:
            waiting = list(old.contents)
            old.clear_pending()
            for request, tokens in waiting:
                if bucket := self.task_buckets[name]:
                    self._limit_task(request, bucket, tokens)
                else:
                    self._limit_move_to_pool(request)

    def end_revoked(self) -> None:
        """End generation jobs that are revoked and wait here for their time, or for their turn under a rate limit.

        Celery ends them when they are due, and has forgotten it if the worker is started anew before. In one that
        shuts down they are on their way back to their queues, and end where they are taken next.
        """
        if self.blueprint.state != RUN:
            return
        for bucket in filter(None, self.task_buckets.values()):
            for waiting in [entry for entry in bucket.contents if _is_revoked(entry[0])]:
                bucket.contents.remove(waiting)
                waiting[0].revoked()
        for request in filter(_is_revoked, tuple(state.scheduled_requests)):
            self.timer.cancel(request._eta_timer_entry)
            self.qos.decrement_eventually()
            request.revoked()

    def on_decode_error(self, message: Any, exc: Exception) -> None:
        """Its body is not what its content type says."""
        self._put_aside(message, f"its body cannot be decoded ({type(exc).__name__})")

    def on_invalid_task(self, body: Any, message: Any, exc: Exception) -> None:
        """Its body is no task."""
        why = str(exc) if isinstance(exc, UnfitTaskError) else type(exc).__name__
        self._put_aside(message, f"it is no valid task ({why})")
        signals.task_rejected.send(sender=self, message=message, exc=exc)

    def on_unknown_message(self, body: Any, message: Any) -> None:
        """It names no task."""
        self._put_aside(message, "it names no task")
        signals.task_rejected.send(sender=self, message=message, exc=None)

    def on_unknown_task(self, body: Any, message: Any, exc: Exception) -> None:
        """No task of this name is known here: Celery's result says so, too."""
        name = str(message.headers.get("task"))[:200]
        job_id = message.headers.get("id")
        if isinstance(job_id, str):
            try:
                self.app.backend.mark_as_failure(job_id, NotRegistered(name))
            except Exception as error:
                logger.warning("The failure of task %s is not stored: %r", job_id, error)
        self._put_aside(message, f"no task {name!r} is known here")
        if self.event_dispatcher:
            self.event_dispatcher.send("task-failed", uuid=job_id, exception=f"NotRegistered({name!r})")
        signals.task_unknown.send(sender=self, message=message, exc=exc, name=name, id=job_id)

    def _put_aside(self, message: Any, reason: str) -> None:
        headers = message.headers if isinstance(message.headers, dict) else {}
        job_id = headers.get("id") if isinstance(headers.get("id"), str) else None
        queue = str(message.delivery_info.get("routing_key") or "")
        message.channel.put_aside(queue, reason, _text_of(getattr(message, "_raw", None), headers), job_id)
        message.ack_log_error(logger, self.connection_errors)


def _text_of(raw: Any, headers: dict[str, Any]) -> str:
    """A message as JSON, as far as it can be written; what cannot even be kept must not come again for ever."""
    try:
        return str(dumps(raw) if raw is not None else json.dumps(headers))
    except Exception as exc:  # nested too deeply
        return f"(a message that cannot be written as JSON: {type(exc).__name__})"


def _is_revoked(request: Any) -> bool:
    return isinstance(request, GenerateRequest) and request.looks_revoked()
