"""A FastAPI application that is told when jobs have ended, instead of asking again and again.

Needs fastapi and uvicorn beside the base package, and the secret that the fleet signs with:

    export CALLBACK_SECRET=whsec_…        # the one that the fleet has in TOKENMILL_CALLBACK_SECRETS
    uvicorn --app-dir examples receive_fastapi:app --port 8200
"""

from __future__ import annotations

import logging
import os
from typing import Any

from fastapi import FastAPI, HTTPException, Request, Response

from workers.client import CallbackSignatureError, verify_callback

SECRET = os.environ["CALLBACK_SECRET"]

app = FastAPI()
log = logging.getLogger("uvicorn.error")
seen: set[str] = set()  # keep ids in your database instead: a unique column, for some days


@app.post("/tokenmill", status_code=204)
async def tokenmill(request: Request) -> Response:
    """Check who sends, answer at once, and take each event one time."""
    body = await request.body()  # as it came: the signature is over these bytes
    try:
        event = verify_callback(SECRET, request.headers, body)
    except CallbackSignatureError as error:
        raise HTTPException(401, str(error)) from error
    if event["id"] not in seen:
        handle(event)
        seen.add(event["id"])  # afterwards: what failed comes again. In SQL, do both in one transaction
    return Response(status_code=204)


def handle(event: dict[str, Any]) -> None:
    """What your application does about it; hand longer work to a queue, the sender waits for ten seconds."""
    data = event["data"]
    log.info("%s: %s %s", event["type"], data["id"], data.get("finish_reason"))
