"""A Flask application that enqueues: POST a question, GET its answer, or watch it come.

Needs flask beside the base package. Run:  flask --app examples/web_flask.py run
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from flask import Flask, Response, request

from backend.api import RequestError
from models_db.errors import UnknownJobError
from workers.client import Client, JobFailedError, JobNotFinishedError

app = Flask(__name__)
client = Client()  # safe to share between threads; connects when first used


@app.post("/questions")
def ask() -> tuple[dict[str, Any], int]:
    """Accept a question; the answer comes later, under the id."""
    text = (request.get_json(silent=True) or {}).get("text", "")
    try:
        job = client.submit(
            messages=[{"role": "user", "content": text}], max_tokens=128, priority=0, stream=True
        )
    except RequestError as error:
        return error.to_dict(), 422
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
def events(job_id: str) -> Response:
    """The answer as it comes, as server-sent events."""
    last_id = request.headers.get("last-event-id")

    def body() -> Iterator[str]:
        for event in client.stream(job_id, last_id=last_id):
            data = event.text if event.end is None else event.end.state
            yield f"id: {event.id}\nevent: {event.kind}\ndata: {json.dumps(data)}\n\n"

    return Response(body(), mimetype="text/event-stream")
