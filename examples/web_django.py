"""A Django application in one file that enqueues: POST a question, GET its answer, or watch it come.

Needs django beside the base package. Run:

    python examples/web_django.py runserver 8000
    curl -s localhost:8000/questions -H 'content-type: application/json' -d '{"text": "Why is the sky blue?"}'
    curl -s localhost:8000/questions/ID
    curl -sN localhost:8000/questions/ID/events
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict

from django.conf import settings
from django.core.management import execute_from_command_line
from django.core.wsgi import get_wsgi_application
from django.http import HttpRequest, HttpResponse, JsonResponse, StreamingHttpResponse
from django.urls import path
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import require_GET, require_POST

from backend.api import RequestError
from models_db.errors import DatabaseError, UnknownJobError
from workers.client import Client, JobFailedError, JobNotFinishedError

settings.configure(
    ALLOWED_HOSTS=["localhost", "127.0.0.1"],
    ROOT_URLCONF=__name__,
    SECRET_KEY=os.environ.get("DJANGO_SECRET_KEY", "only for this example"),
)
log = logging.getLogger(__name__)
client = Client()  # safe to share between threads; connects when first used


@csrf_exempt
@require_POST
def ask(request: HttpRequest) -> HttpResponse:
    """Accept a question; the answer comes later, under the id."""
    try:
        text = json.loads(request.body)["text"]
        job = client.submit(
            messages=[{"role": "user", "content": text}], max_tokens=128, priority=0, stream=True
        )
    except (ValueError, KeyError, TypeError):
        return JsonResponse({"message": 'send {"text": "…"}'}, status=422)
    except RequestError as error:
        return JsonResponse(error.to_dict(), status=422)
    except DatabaseError as error:  # nothing was accepted; the error's text names hosts, so it is for the log
        log.warning("%s", error)
        return JsonResponse({"message": "the service cannot be reached now. Ask again"}, status=503)
    return JsonResponse({"id": job.id}, status=202)


@require_GET
def answer(request: HttpRequest, job_id: str) -> HttpResponse:
    """The state, and the answer once there is one."""
    try:
        result = client.result(job_id)
    except UnknownJobError as error:
        return JsonResponse({"error": str(error)}, status=404)
    except JobNotFinishedError as error:
        return JsonResponse({"state": error.status.state})
    except JobFailedError as error:
        return JsonResponse({"state": error.status.state, "error": error.status.error_message})
    return JsonResponse({"state": "succeeded", "text": result.text})


@require_GET
def events(request: HttpRequest, job_id: str) -> HttpResponse:
    """The answer as it comes, as server-sent events."""
    try:
        client.status(job_id)
    except UnknownJobError as error:
        return JsonResponse({"error": str(error)}, status=404)

    def body() -> Iterator[str]:
        for event in client.stream(job_id, last_id=request.headers.get("last-event-id")):
            data = event.text if event.end is None else asdict(event.end)
            yield f"id: {event.id}\nevent: {event.kind}\ndata: {json.dumps(data)}\n\n"

    headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # or a proxy may hold the tokens back
    return StreamingHttpResponse(body(), content_type="text/event-stream", headers=headers)


urlpatterns = [
    path("questions", ask),
    path("questions/<job_id>", answer),
    path("questions/<job_id>/events", events),
]
application = get_wsgi_application()

if __name__ == "__main__":
    execute_from_command_line(sys.argv)
