"""A FastAPI application that enqueues: POST a question, GET its state and answer.

Needs fastapi and uvicorn beside the base package. Run:

    uvicorn web_fastapi:app --app-dir examples
    curl -s localhost:8000/questions -H 'content-type: application/json' -d '{"text": "Why is the sky blue?"}'
    curl -s localhost:8000/questions/ID
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from pydantic import BaseModel

from backend.api import RequestError
from models_db.errors import DatabaseError, UnknownJobError
from workers.client import AsyncClient, JobFailedError, JobNotFinishedError


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


@app.post("/questions", status_code=202)
async def ask(question: Question, request: Request) -> dict[str, str]:
    """Accept a question; the answer comes later, under the id."""
    client: AsyncClient = request.app.state.tokenmill
    try:
        job = await client.submit(
            messages=[{"role": "user", "content": question.text}],
            max_tokens=question.max_tokens,
            priority=0,
            idempotency_key=request.headers.get("idempotency-key"),
        )
    except RequestError as error:  # the caller's mistake: names the field, the value and the fix
        raise HTTPException(422, error.to_dict()) from error
    except DatabaseError as error:  # nothing was accepted
        raise HTTPException(503, str(error)) from error
    return {"id": job.id}


@app.get("/questions/{job_id}")
async def answer(job_id: str, request: Request) -> dict[str, Any]:
    """The state, and the answer once there is one."""
    client: AsyncClient = request.app.state.tokenmill
    try:
        result = await client.result(job_id)
    except UnknownJobError as error:
        raise HTTPException(404, str(error)) from error
    except JobNotFinishedError as error:
        return {"state": error.status.state}
    except JobFailedError as error:
        return {"state": error.status.state, "error": error.status.error_message}
    return {"state": "succeeded", "text": result.text, "tokens": result.completion_tokens}
