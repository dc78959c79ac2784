"""What a callback says, as JSON."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

from models_db.callback_ends import BatchEnd, JobEnd


def event_of(message_id: str, end: JobEnd | BatchEnd, *, include_output: bool = False) -> bytes:
    """The body: ``{"id", "type", "timestamp", "data"}``; the same bytes for each try at telling this end."""
    kind, data = ("job", _job(end, include_output)) if isinstance(end, JobEnd) else ("batch", _batch(end))
    event = {
        "id": message_id,
        "type": f"{kind}.{end.state}",
        "timestamp": _time(end.finished_at),
        "data": data,
    }
    return json.dumps(event, ensure_ascii=False, separators=(",", ":")).encode()


def _job(end: JobEnd, include_output: bool) -> dict[str, Any]:
    data: dict[str, Any] = {
        "id": end.id,
        "state": str(end.state),
        "model": end.model,
        "tenant": end.tenant,
        "custom_id": end.custom_id,
        "batch_id": end.batch_id,
        "attempt": end.attempt,
        "created_at": _time(end.created_at),
        "started_at": _time(end.started_at),
        "finished_at": _time(end.finished_at),
        "finish_reason": end.finish_reason,
        "usage": None,
        "error": None,
    }
    if end.finish_reason is not None:
        data["usage"] = {
            "prompt_tokens": end.prompt_tokens,
            "completion_tokens": end.completion_tokens,
            "cached_tokens": end.cached_tokens,
        }
    if end.error_type is not None:
        data["error"] = {"type": end.error_type, "message": end.error_message}
    if include_output:
        data["text"] = end.text
    return data


def _batch(end: BatchEnd) -> dict[str, Any]:
    return {
        "id": end.id,
        "name": end.name,
        "state": str(end.state),
        "created_at": _time(end.created_at),
        "finished_at": _time(end.finished_at),
        "total": end.total,
        "counts": {
            "succeeded": end.succeeded,
            "failed": end.failed,
            "cancelled": end.cancelled,
            "expired": end.expired,
        },
        "error": end.error,
    }


def _time(value: datetime | None) -> str | None:
    return None if value is None else value.isoformat().replace("+00:00", "Z")
