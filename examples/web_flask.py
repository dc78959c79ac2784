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

from backend.api import RequestError
from models_db.errors import DatabaseError, UnknownJobError
from workers.client import Client, JobFailedError, JobNotFinishedError

app = Flask(__name__)
client = Client()  # safe to share between threads; connects when first used


@app.post("/questions")
def ask() -> tuple[dict[str, Any], int]:
    """Accept a question; the answer comes later, under the id."""
    sent = request.get_json(silent=True)
    text = sent.get("text") if isinstance(sent, dict) else None
    if not isinstance(text, str):
        return {"message": 'send {"text": "…"}'}, 422
    try:
        job = client.submit(
            messages=[{"role": "user", "content": text}], max_tokens=128, priority=0, stream=True
        )
    except RequestError as error:
        return error.to_dict(), 422
    except DatabaseError as error:  # nothing was accepted; the error's text names hosts, so it is for the log
        app.logger.warning("%s", error)
        return {"message": "the service cannot be reached now. Ask again"}, 503
    return {"id": job.id}, 202


@app.get("/questions/<job_id>")
def answer(job_id: str) -> tuple[dict[str, Any], int]:
    """The state, and the answer once there is one."""
    try:
        result = client.result(job_id)
    except UnknownJobError as error:
        return {"error": str(error)}, 404
    except JobNotFinishedError as error:
        return {"state": error.status.state}, 200
    except JobFailedError as error:
        return {"state": error.status.state, "error": error.status.error_message}, 200
    return {"state": "succeeded", "text": result.text}, 200


@app.get("/questions/<job_id>/events")
def events(job_id: str) -> Response | tuple[dict[str, Any], int]:
    """The answer as it comes, as server-sent events."""
    try:
        client.status(job_id)
    except UnknownJobError as error:
        return {"error": str(error)}, 404
    last_id = request.headers.get("last-event-id")

    def body() -> Iterator[str]:
        for event in client.stream(job_id, last_id=last_id):
            data = event.text if event.end is None else asdict(event.end)
            yield f"id: {event.id}\nevent: {event.kind}\ndata: {json.dumps(data)}\n\n"

    headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # or a proxy may hold the tokens back
    return Response(body(), mimetype="text/event-stream", headers=headers)
