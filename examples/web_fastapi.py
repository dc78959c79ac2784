"""A FastAPI application that enqueues: POST a question, GET its answer, or watch it come.

Needs fastapi and uvicorn beside the base package. Run it and open http://localhost:8000:

    uvicorn web_fastapi:app --app-dir examples

or without a browser:

    curl -s localhost:8000/questions -H 'content-type: application/json' -d '{"text": "Why is the sky blue?"}'
    curl -s localhost:8000/questions/ID
    curl -sN localhost:8000/questions/ID/events
    curl -s -X POST localhost:8000/questions/ID/cancel
"""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import FileResponse, JSONResponse, StreamingResponse
from pydantic import BaseModel

from workers.client import (
    AsyncClient,
    BrokerUnavailableError,
    DatabaseError,
    IdempotencyConflictError,
    JobFailedError,
    JobNotFinishedError,
    RequestError,
    TenantLimitError,
    UnknownJobError,
)

log = logging.getLogger(__name__)
NO_BUFFER = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # or a proxy may hold the tokens back
UNAVAILABLE = "The service cannot be reached now"  # the error's own text names hosts: it is for the log
TENANT = "web"  # whose limits hold; in an application with users, who is signed in


class Question(BaseModel):
    """What the browser sends."""

    text: str
    max_tokens: int = 128


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """One client for the life of the process."""
    async with AsyncClient() as client:
        app.state.tokenmill = client
        yield


app = FastAPI(lifespan=lifespan)


@app.exception_handler(RequestError)
async def wrong(request: Request, error: RequestError) -> JSONResponse:
    """The caller's mistake: names the field, the value and the fix."""
    return JSONResponse({"detail": error.to_dict()}, 422)


@app.exception_handler(UnknownJobError)
async def unknown(request: Request, error: UnknownJobError) -> JSONResponse:
    """Nobody asked this question."""
    return JSONResponse({"detail": str(error)}, 404)


@app.exception_handler(IdempotencyConflictError)
async def conflict(request: Request, error: IdempotencyConflictError) -> JSONResponse:
    """The key belongs to another question."""
    return JSONResponse({"detail": str(error)}, 409)


@app.exception_handler(TenantLimitError)
async def too_much(request: Request, error: TenantLimitError) -> JSONResponse:
    """As much is open as may be; room comes as soon as something ends."""
    log.warning("%s", error)
    detail = "There are too many questions already. Ask again in a moment."
    return JSONResponse({"detail": detail}, 429, headers={"Retry-After": "2"})


@app.exception_handler(DatabaseError)
async def unavailable(request: Request, error: DatabaseError) -> JSONResponse:
    """Nothing was accepted or changed."""
    log.warning("%s", error)
    detail = f"{UNAVAILABLE}. Nothing was accepted; ask again."
    return JSONResponse({"detail": detail}, 503, headers={"Retry-After": "1"})


@app.post("/questions", status_code=202)
async def ask(question: Question, request: Request) -> dict[str, str]:
    """Accept a question; the answer comes later, under the id."""
    client: AsyncClient = request.app.state.tokenmill
    job = await client.submit(
        messages=[{"role": "user", "content": question.text}],
        max_tokens=question.max_tokens,
        priority=0,
        stream=True,
        tenant=TENANT,
        idempotency_key=request.headers.get("idempotency-key"),
    )
    return {"id": job.id}


@app.get("/questions/{job_id}")
async def answer(job_id: str, request: Request) -> dict[str, Any]:
    """The state, and the answer once there is one."""
    client: AsyncClient = request.app.state.tokenmill
    try:
        result = await client.result(job_id)
    except JobNotFinishedError as error:
        return {"state": error.status.state}
    except JobFailedError as error:
        return {"state": error.status.state, "error": error.status.error_message}
    return {"state": "succeeded", "text": result.text, "tokens": result.completion_tokens}


@app.post("/questions/{job_id}/cancel")
async def cancel(job_id: str, request: Request) -> dict[str, str]:
    """Stop it; an answer that is coming ends within a second or so."""
    client: AsyncClient = request.app.state.tokenmill
    return {"state": await client.cancel(job_id)}


@app.get("/questions/{job_id}/events")
async def events(job_id: str, request: Request, last_id: str = "") -> StreamingResponse:
    """The answer as it comes, as server-sent events; a browser that lost its connection goes on where it was."""
    client: AsyncClient = request.app.state.tokenmill
    await client.status(job_id)
    # What is wrong with the request must be known before the answer begins, or a browser asks again for ever.
    stream = client.stream(job_id, last_id=request.headers.get("last-event-id") or last_id or None)

    async def body() -> AsyncIterator[str]:
        try:
            async for event in stream:
                data = event.text if event.end is None else asdict(event.end)
                yield f"id: {event.id}\nevent: {event.kind}\ndata: {json.dumps(data)}\n\n"
        except (BrokerUnavailableError, DatabaseError) as error:
            # The connection ends here, and the browser asks again, behind the last event.
            log.warning("%s", error)
            yield f"retry: 2000\nevent: problem\ndata: {json.dumps(f'{UNAVAILABLE}. Trying again.')}\n\n"

    return StreamingResponse(body(), media_type="text/event-stream", headers=NO_BUFFER)


@app.get("/")
async def page() -> FileResponse:
    """A page to ask from."""
    return FileResponse(Path(__file__).with_name("page.html"))
