"""Lines of a batch's output as OpenAI's batch API writes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from models_db.batch_rows import BatchRow
from workers.bulk_export import LineWriter, error_of, is_answered
from workers.serve.answers import CHAT, COMPLETION, Choice, Endpoint, whole


def openai_lines(created: int, endpoint: str = CHAT) -> LineWriter:
    """Makes the lines.

    Args:
        created: the batch's time, in seconds since 1970.
        endpoint: of lines that carry no ``url`` of their own.
    """

    def line(row: BatchRow, extra: Mapping[str, Any]) -> dict[str, Any]:
        kind: Endpoint = COMPLETION if extra.get("url", endpoint) == COMPLETION else CHAT
        made: dict[str, Any] = {
            "id": f"batch_req_{row.job_id}",
            "custom_id": row.custom_id,
            "response": None,
            "error": None,
        }
        if row.result is not None and is_answered(row):
            body = whole(kind, row.job_id, row.model, created, [Choice.of(row.result)])
            return made | {"response": {"status_code": 200, "request_id": row.job_id, "body": body}}
        part = {} if row.result is None else {"text": row.result.text}
        return made | {"line": row.position, "error": error_of(row)} | part

    return line
