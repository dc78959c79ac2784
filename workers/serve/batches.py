"""``/v1/batches``: a file of requests, run in bulk, answered by a file. A batch belongs to its tenant."""

from __future__ import annotations

import asyncio
from datetime import datetime, timedelta
from functools import partial
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator
from sqlalchemy import Connection
from starlette.responses import JSONResponse, Response

from backend.api import check_text
from models_db import api_batches, batches, files
from models_db.api_batches import ApiBatchRecord
from models_db.batch_cancel import PIECE, mark_cancelling
from models_db.batches import BatchProgress
from models_db.clock import database_time
from models_db.errors import CommitUnknownError
from models_db.ids import uuid7
from models_db.session import certain, transaction
from models_db.tables import BatchState, JobState
from workers.client.errors import CreationUnknownError
from workers.serve.answers import CHAT, COMPLETION
from workers.serve.call import Call, page_size
from workers.serve.errors import from_validation, not_found, refused, unsupported
from workers.serve.files import STAYS, listing

_ENDPOINTS = (CHAT, COMPLETION)
_WINDOW = "24h"
_PREFIX = "batch_"
_NO_FIELD = ("no such field", "Leave it out")
_NOT_HERE = {"output_expires_after": (STAYS, "Leave it out, and delete the files when they have been read")}


class BatchRequest(BaseModel):
    """The body of ``POST /v1/batches``."""

    model_config = ConfigDict(frozen=True, extra="allow")

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[str, str] | None = Field(None, max_length=16)

    @field_validator("input_file_id", "metadata")
    @classmethod
    def _storable(cls, value: Any, info: ValidationInfo) -> Any:
        for text in (value,) if isinstance(value, str) else (*(value or {}), *(value or {}).values()):
            check_text(text, info.field_name or "")
        return value


def batch_object(record: ApiBatchRecord, progress: BatchProgress) -> dict[str, Any]:
    """A batch as the API shows it."""

    def when(moment: datetime | None) -> int | None:
        return None if moment is None else int(moment.timestamp())

    state = progress.state
    written = record.output_file_id is not None
    status = str(state)
    if state.terminal and state is not BatchState.FAILED and not written:
        status = "finalizing"
    counts = progress.counts
    completed = counts[JobState.SUCCEEDED]
    failed = sum(counts[each] for each in (JobState.FAILED, JobState.EXPIRED, JobState.CANCELLED))
    if record.answered is not None and record.unanswered is not None:
        # What the files hold. An answer that a deadline cut off is an error there, though its job has succeeded.
        completed, failed = record.answered, record.unanswered
    ended = when(progress.finished_at) if status != "finalizing" else None
    errors = None
    if progress.error is not None:
        errors = {"object": "list", "data": [{"code": "invalid_input", "message": progress.error}]}
    return {
        "id": f"{_PREFIX}{record.batch_id}",
        "object": "batch",
        "endpoint": record.endpoint,
        "errors": errors,
        "input_file_id": record.input_file_id,
        "completion_window": record.completion_window,
        "status": status,
        "output_file_id": record.output_file_id,
        "error_file_id": record.error_file_id,
        "created_at": when(record.created_at),
        "in_progress_at": when(record.created_at),
        "expires_at": when(progress.deadline_at),
        "completed_at": ended if state is BatchState.COMPLETED else None,
        "failed_at": ended if state is BatchState.FAILED else None,
        "expired_at": ended if state is BatchState.EXPIRED else None,
        "cancelled_at": ended if state is BatchState.CANCELLED else None,
        "request_counts": {
            "total": progress.total or progress.inserted,
            "completed": completed,
            "failed": failed,
        },
        "metadata": dict(record.labels) if record.labels is not None else None,
    }


async def create(call: Call) -> Response:
    """``POST /v1/batches``."""
    try:
        request = BatchRequest.model_validate(await call.json())
    except ValidationError as error:
        raise from_validation(error) from None
    for name, value in (request.model_extra or {}).items():
        if value is not None:
            raise unsupported(name, value, *_NOT_HERE.get(name, _NO_FIELD))
    if request.endpoint not in _ENDPOINTS:
        fix = f"Use {' or '.join(_ENDPOINTS)}"
        raise refused("is not served here", param="endpoint", value=request.endpoint, fix=fix)
    if request.completion_window != _WINDOW:
        wrong = f"must be {_WINDOW}"
        raise refused(wrong, param="completion_window", value=request.completion_window, fix=f"Use {_WINDOW}")
    tenant, batch_id = call.tenant or "", uuid7()

    def make(conn: Connection, replay: bool) -> bool:
        if replay and api_batches.find_api_batch(conn, batch_id, tenant) is not None:
            return True
        record = files.find_file(conn, request.input_file_id, tenant, hold=True)
        if record is None:
            return False
        now = database_time(conn)
        batches.create_batch(
            conn, name=record.filename, deadline_at=now + timedelta(hours=24), batch_id=batch_id, at=now
        )
        api_batches.add_api_batch(
            conn,
            batch_id,
            tenant=tenant,
            endpoint=request.endpoint,
            completion_window=request.completion_window,
            input_file_id=record.id,
            labels=request.metadata,
            at=now,
        )
        return True

    try:
        made = await asyncio.to_thread(lambda: certain(call.client.sync.engine(), make))
    except CommitUnknownError as error:
        name = f"{_PREFIX}{batch_id}"
        look = f"Ask for GET /v1/batches/{name} before you make it again"
        raise CreationUnknownError("batch", name, look, error) from error
    if not made:
        raise not_found("file", request.input_file_id)
    call.feeder.wake()
    return JSONResponse(batch_object(*await _find(call, batch_id)))


async def retrieve(call: Call) -> Response:
    """``GET /v1/batches/{id}``."""
    return JSONResponse(batch_object(*await _find(call, _id_of(call))))


async def list_all(call: Call) -> Response:
    """``GET /v1/batches``, newest first."""
    limit = page_size(call.request, most=100, default=20)
    after = call.request.query_params.get("after")
    look = partial(
        api_batches.list_api_batches,
        tenant=call.tenant or "",
        after=None if after is None else after.removeprefix(_PREFIX),
        limit=limit + 1,
    )
    found = await call.read(look)
    shown = [batch_object(*each) for each in found[:limit]]
    return JSONResponse(listing(shown, more=len(found) > limit))


async def cancel(call: Call) -> Response:
    """``POST /v1/batches/{id}/cancel``. The jobs of a large batch end after the answer, which is ``cancelling``."""
    record, progress = await _find(call, _id_of(call))
    few = progress.inserted <= PIECE
    stop = partial(batches.request_cancel_batch if few else mark_cancelling, batch_id=record.batch_id)
    await asyncio.to_thread(lambda: transaction(call.client.sync.engine(), stop))
    if not few:
        call.feeder.cancel(record.batch_id)
    call.feeder.wake()
    return JSONResponse(batch_object(*await _find(call, record.batch_id)))


def _id_of(call: Call) -> str:
    return str(call.request.path_params["batch_id"]).removeprefix(_PREFIX)


async def _find(call: Call, batch_id: str) -> tuple[ApiBatchRecord, BatchProgress]:
    found = await call.read(partial(api_batches.find_api_batch, batch_id=batch_id, tenant=call.tenant or ""))
    if found is None:
        raise not_found("batch", f"{_PREFIX}{batch_id}")
    return found
