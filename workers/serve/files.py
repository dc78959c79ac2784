"""``/v1/files``: what batches are read from and written to. A file belongs to its tenant."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from typing import IO, Any

from sqlalchemy import Connection, Engine
from starlette.datastructures import UploadFile
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Message

from models_db import files
from models_db.errors import CommitUnknownError
from models_db.files import FileRecord
from models_db.session import certain, transaction
from workers.client.errors import CreationUnknownError
from workers.serve.call import Call, page_size
from workers.serve.errors import ApiError, not_found, refused, unsupported, wrong_kind

PURPOSES = ("batch",)
STAYS = "files stay until they are deleted or pruned"
_FORM_BYTES = 2**16  # of a form beside its file
ORDERS = ("asc", "desc")  # by the moment of creation


def file_object(record: FileRecord) -> dict[str, Any]:
    """A file as the API shows it."""
    return {
        "id": record.id,
        "object": "file",
        "bytes": record.bytes,
        "created_at": int(record.created_at.timestamp()),
        "filename": record.filename,
        "purpose": record.purpose,
        "status": "processed",
    }


async def upload(call: Call) -> Response:
    """``POST /v1/files``, as a form with ``purpose`` and ``file``."""
    most = call.settings.max_file_bytes
    length = call.request.headers.get("content-length", "")
    if length.isascii() and length.isdigit() and int(length[:20]) > most + _FORM_BYTES:
        raise too_large(most)
    kind = call.request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "multipart/form-data":  # other forms hold no file, and are read into memory
        raise wrong_kind(kind, "multipart/form-data, with purpose and file")
    async with _bounded(call.request, most).form(max_files=1, max_fields=10) as form:
        purpose, file = form.get("purpose"), form.get("file")
        if purpose not in PURPOSES:
            wrong, fix = (
                "is missing" if purpose is None else "is not served here",
                f"Use {' or '.join(PURPOSES)}",
            )
            raise refused(wrong, param="purpose", value=purpose, fix=fix)
        for name, value in form.items():
            if name.startswith("expires_after"):
                raise unsupported(
                    name, value, STAYS, "Leave it out, and delete the file when it has been used"
                )
            if name not in ("purpose", "file"):
                raise unsupported(name, value, "no such field", "Leave it out")
        if not isinstance(file, UploadFile):
            raise refused("is missing", param="file", fix="Send it as a file of the form")
        if file.size is not None and file.size > most:
            raise too_large(most)
        record = await asyncio.to_thread(
            store_upload,
            call.client.sync.engine(),
            file.file,
            tenant=call.tenant or "",
            filename=file.filename or "file",
            purpose=str(purpose),
        )
    return JSONResponse(file_object(record))


def _bounded(request: Request, most: int) -> Request:
    """The request, whose body is refused as soon as more has come than a file may have: nothing may say its length."""
    come = 0

    async def receive() -> Message:
        nonlocal come
        message = await request.receive()
        come += len(message.get("body", b""))
        if come > most + _FORM_BYTES:
            raise too_large(most)
        return message

    return Request(request.scope, receive)


def store_upload(engine: Engine, file: IO[bytes], *, tenant: str, filename: str, purpose: str) -> FileRecord:
    """Store the file once, also where the answer to the commit is lost.

    Raises:
        CreationUnknownError: the database did not come back, so that the file of this id is there or not.
        InvalidValueError: as ``models_db.files.store_file``.
    """
    file_id = files.new_file_id()

    def store(conn: Connection, replay: bool) -> FileRecord:
        if replay and (record := files.find_file(conn, file_id, tenant)) is not None:
            return record
        file.seek(0)  # the transaction may run more than once
        return files.store_file(
            conn, file, tenant=tenant, filename=filename, purpose=purpose, file_id=file_id
        )

    try:
        return certain(engine, store)
    except CommitUnknownError as error:
        look = f"Ask for GET /v1/files/{file_id} before you upload it again"
        raise CreationUnknownError("file", file_id, look, error) from error


def too_large(most: int) -> ApiError:
    """A file over the limit."""
    return ApiError(
        413,
        f"file: is larger than max_file_bytes ({most}). Split it, or raise TOKENMILL_MAX_FILE_BYTES",
        kind="invalid_request_error",
        param="file",
    )


async def list_all(call: Call) -> Response:
    """``GET /v1/files``, newest first unless ``order=asc``."""
    limit = page_size(call.request, most=10_000, default=100)
    query = call.request.query_params
    if (order := query.get("order", "desc")) not in ORDERS:
        raise refused("is not known", param="order", value=order, fix=f"Use {' or '.join(ORDERS)}")
    look = partial(
        files.list_files,
        tenant=call.tenant or "",
        purpose=query.get("purpose"),
        after=query.get("after"),
        limit=limit + 1,
        oldest_first=order == "asc",
    )
    found = await call.read(look)
    shown = [file_object(record) for record in found[:limit]]
    return JSONResponse(listing(shown, more=len(found) > limit))


def listing(shown: list[dict[str, Any]], *, more: bool) -> dict[str, Any]:
    """A page of a list."""
    return {
        "object": "list",
        "data": shown,
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
        "has_more": more,
    }


async def retrieve(call: Call) -> Response:
    """``GET /v1/files/{id}``."""
    return JSONResponse(file_object(await _file(call)))


async def content(call: Call) -> Response:
    """``GET /v1/files/{id}/content``: its bytes, a piece at a time."""
    record = await _file(call)

    async def pieces() -> AsyncIterator[bytes]:
        number = 0
        while (
            data := await call.read(partial(files.read_chunk, file_id=record.id, number=number))
        ) is not None:
            yield data
            number += 1

    return StreamingResponse(
        pieces(), media_type="application/octet-stream", headers={"Content-Length": str(record.bytes)}
    )


async def delete(call: Call) -> Response:
    """``DELETE /v1/files/{id}``."""
    record = await _file(call)
    remove = partial(files.delete_file, file_id=record.id, tenant=record.tenant)
    await asyncio.to_thread(lambda: transaction(call.client.sync.engine(), remove))
    return JSONResponse({"id": record.id, "object": "file", "deleted": True})


async def _file(call: Call) -> FileRecord:
    file_id = call.request.path_params["file_id"]
    record = await call.read(partial(files.find_file, file_id=file_id, tenant=call.tenant or ""))
    if record is None:
        raise not_found("file", file_id)
    return record
