"""A Flask application that enqueues: POST a question, GET its answer, or watch it come.

Needs flask beside the base package. Run:

    flask --app examples/web_flask.py run
    curl -s localhost:5000/questions -H 'content-type: application/json' -d '{"text": "Why is the sky blue?"}'
    curl -s localhost:5000/questions/ID
    curl -sN localhost:5000/questions/ID/events
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from flask import Flask, Response, request

from workers.client import (
    BrokerUnavailableError,
    Client,
    DatabaseError,
    JobFailedError,
    JobNotFinishedError,
    RequestError,
    TenantLimitError,
    UnknownJobError,
)

TENANT = "web"  # whose limits hold; in an application with users, who is signed in
# The error's own text names hosts: it is for the log.
UNAVAILABLE = "the service cannot be reached now. Ask again"

app = Flask(__name__)
client = Client()  # safe to share between threads; connects when first used


@app.errorhandler(RequestError)
def wrong(error: RequestError) -> tuple[dict[str, Any], int]:
    """The caller's mistake: names the field, the value and the fix."""
    return error.to_dict(), 422


@app.errorhandler(UnknownJobError)
def unknown(error: UnknownJobError) -> tuple[dict[str, Any], int]:
    """Nobody asked this question."""
    return {"message": str(error)}, 404


@app.errorhandler(TenantLimitError)
def too_much(error: TenantLimitError) -> tuple[dict[str, Any], int, dict[str, str]]:
    """As much is open as may be; room comes as soon as something ends."""
    app.logger.warning("%s", error)
    return {"message": "too many questions already. Ask again in a moment"}, 429, {"Retry-After": "2"}


@app.errorhandler(DatabaseError)
def unavailable(error: DatabaseError) -> tuple[dict[str, Any], int, dict[str, str]]:
    """Nothing was accepted."""
    app.logger.warning("%s", error)
    return {"message": UNAVAILABLE}, 503, {"Retry-After": "1"}


@app.post("/questions")
def ask() -> tuple[dict[str, Any], int]:
    """Accept a question; the answer comes later, under the id."""
    sent = request.get_json(silent=True)
    text = sent.get("text") if isinstance(sent, dict) else None
    if not isinstance(text, str):
        return {"message": 'send {"text": "…"}'}, 422
    messages = [{"role": "user", "content": text}]
    job = client.submit(messages=messages, max_tokens=128, priority=0, stream=True, tenant=TENANT)
    return {"id": job.id}, 202


@app.get("/questions/<job_id>")
def answer(job_id: str) -> tuple[dict[str, Any], int]:
    """The state, and the answer once there is one."""
    try:
        result = client.result(job_id)
    except JobNotFinishedError as error:
        return {"state": error.status.state}, 200
    except JobFailedError as error:
        return {"state": error.status.state, "error": error.status.error_message}, 200
    return {"state": "succeeded", "text": result.text}, 200


@app.get("/questions/<job_id>/events")
def events(job_id: str) -> Response:
    """The answer as it comes, as server-sent events."""
    # What is wrong with the request must be known before the answer begins, or a browser asks again for ever.
    stream = client.stream(job_id, last_id=request.headers.get("last-event-id") or None)

    def body() -> Iterator[str]:
        try:
            for event in stream:
                data = event.text if event.end is None else asdict(event.end)
                yield f"id: {event.id}\nevent: {event.kind}\ndata: {json.dumps(data)}\n\n"
        except (BrokerUnavailableError, DatabaseError) as error:
            # The reader comes again, behind the last event.
            app.logger.warning("%s", error)
            yield f"retry: 2000\nevent: problem\ndata: {json.dumps(UNAVAILABLE)}\n\n"

    headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # or a proxy may hold the tokens back
    return Response(body(), mimetype="text/event-stream", headers=headers)
