"""Our own remote control command, and what Celery's must do beyond Celery."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from celery.worker import control
from celery.worker.control import Panel
from kombu.utils.functional import maybe_list

from workers.refusals import refuse_commands
from workers.revokes import Revokes

CANCEL_COMMAND = "tokenmill_cancel"
ENDING_COMMANDS = frozenset({CANCEL_COMMAND, "revoke", "revoke_by_stamped_headers", "terminate"})
"""Those that end jobs."""


def register_commands() -> None:
    """Make workers of this process understand ``tokenmill_cancel``, and have ``revoke`` reach suspects and SQL.

    Calling it again is harmless.
    """
    if CANCEL_COMMAND in Panel.data:
        return
    Panel.register(
        name=CANCEL_COMMAND,
        type="control",
        args=[("ids", list)],
        signature="[id1 [id2 [... [idN]]]]",
        variadic="ids",
    )(tokenmill_cancel)
    refuse_commands(Panel.data)
    Panel.data["revoke"] = revoke
    Panel.data["terminate"] = terminate
    Panel.data["revoke_by_stamped_headers"] = revoke_by_stamped_headers


def tokenmill_cancel(state: Any, ids: Sequence[str] | str, **_: Any) -> dict[str, int]:
    """End these jobs early where they run here; the flag in the database says so to everyone else."""
    wanted = [ids] if isinstance(ids, str) else list(ids)
    cancel = getattr(state.consumer.pool, "cancel_jobs", None)
    if cancel is None:
        return {"asked": 0}
    cancel(wanted)
    return {"asked": len(wanted)}


def revoke(state: Any, task_id: Any, terminate: bool = False, **options: Any) -> Any:
    """Celery's own, which keeps ids in memory until the process ends, and looks for tasks to terminate among its
    requests; suspects have none. What has a row is cancelled there, too, so that it stays revoked."""
    answer = control.revoke(state, task_id, terminate=terminate, **options)
    ids = frozenset(maybe_list(task_id) or ())
    _end_waiting(state)
    store = getattr(state.consumer.pool, "store_revokes", None)
    if store is not None:
        store(ids, terminate)
    if terminate:
        _terminate(state, Revokes(ids=ids))
    return answer


def terminate(state: Any, signal: Any, task_id: Any, **_: Any) -> Any:
    """As ``revoke`` that terminates."""
    return revoke(state, task_id, terminate=True, signal=signal)


def revoke_by_stamped_headers(state: Any, headers: Any, terminate: bool = False, **options: Any) -> Any:
    """As ``revoke``; ``headers`` are stamps with the values to revoke, or a list of ``name=value``."""
    answer = control.revoke_by_stamped_headers(state, headers, terminate=terminate, **options)
    _end_waiting(state)
    if terminate:
        stamps = headers if isinstance(headers, Mapping) else dict(part.split("=")[:2] for part in headers)
        _terminate(state, Revokes(stamps=stamps))
    return answer


def _end_waiting(state: Any) -> None:
    end = getattr(state.consumer, "end_revoked", None)
    if end is not None:
        end()


def _terminate(state: Any, revokes: Revokes) -> None:
    end = getattr(state.consumer.pool, "terminate_revoked", None)
    if end is not None:
        end(revokes)
