"""What a worker says about itself when it is ready."""

from __future__ import annotations

from backend.api import BackendInfo
from workers.payload import queue_for
from workers.redaction import redact_url
from workers.settings import Settings


def banner(settings: Settings, info: BackendInfo, incarnation_id: str) -> str:
    """One line a subject, without passwords."""
    slots = info.slots
    lines = [
        f"worker    {settings.worker_name}, incarnation {incarnation_id}",
        f"backend   {info.backend}, model {info.model}, device {info.device}, {info.dtype}",
        f"slots     {slots}, context {info.max_model_len} tokens",
        f"prefetch  {slots + settings.headroom(slots)}, and {settings.reserve(slots)} that are not bulk",
        f"queues    {queue_for(settings.model)}",
        f"broker    {redact_url(settings.broker_url)}",
        f"database  {redact_url(settings.database_url)}",
        f"leases    {settings.visibility_timeout_s:g}s, dead after {settings.dead_after_s:g}s",
    ]
    return "Tokenmill worker\n" + "\n".join(f"  {line}" for line in lines)
