"""Celery's control commands that an engine cannot follow: refused with the reason, instead of an error from within."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from celery.worker import control

from workers.payload import QUEUE_PREFIX

Answer = dict[str, Any]
Command = Callable[..., Any]

_SLOTS = (
    "the number of jobs that run at once is fixed when the model is loaded; "
    "set TOKENMILL_ENGINE_MAX_NUM_SEQS and restart the worker"
)
_RESTART = "an engine is loaded once a process; stop the worker, and what supervises it starts a new one"

REFUSED = {"pool_grow": _SLOTS, "pool_shrink": _SLOTS, "autoscale": _SLOTS, "pool_restart": _RESTART}


def refuse_commands(commands: dict[str, Command]) -> None:
    """Put refusals in the place of some of these commands, which are Celery's by name."""
    for name, reason in REFUSED.items():
        commands[name] = _refuse_in_our_pool(commands[name], reason)
    commands["add_consumer"] = add_consumer


def _refuse_in_our_pool(plain: Command, reason: str) -> Command:
    def command(state: Any, *args: Any, **options: Any) -> Any:
        if not hasattr(state.consumer.pool, "cancel_jobs"):
            return plain(state, *args, **options)
        return control.nok(reason)

    return command


def add_consumer(state: Any, queue: str, *args: Any, **options: Any) -> Answer:
    """Celery's own, but for the queues of other models: their jobs would fail here."""
    ours = {known.name for known in state.app.conf.task_queues}
    if queue.startswith(QUEUE_PREFIX) and queue not in ours:
        names = ", ".join(sorted(ours))
        refusal: Answer = control.nok(
            f"{queue} is the queue of another model, whose jobs would fail here; this worker serves {names}. "
            "Start a worker for that model"
        )
        return refusal
    answer: Answer = control.add_consumer(state, queue, *args, **options)
    return answer
