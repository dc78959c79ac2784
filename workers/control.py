"""Our own remote control command, beside Celery's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from celery.worker.control import Panel

CANCEL_COMMAND = "tokenmill_cancel"


def register_commands() -> None:
    """Make workers of this process understand ``tokenmill_cancel``. Calling it again is harmless."""
    if CANCEL_COMMAND not in Panel.data:
        Panel.register(
            name=CANCEL_COMMAND,
            type="control",
            args=[("ids", list)],
            signature="[id1 [id2 [... [idN]]]]",
            variadic="ids",
        )(tokenmill_cancel)


def tokenmill_cancel(state: Any, ids: Sequence[str] | str, **_: Any) -> dict[str, int]:
    """End these jobs early where they run here; the flag in the database says so to everyone else."""
    wanted = [ids] if isinstance(ids, str) else list(ids)
    cancel = getattr(state.consumer.pool, "cancel_jobs", None)
    if cancel is None:
        return {"asked": 0}
    cancel(wanted)
    return {"asked": len(wanted)}
