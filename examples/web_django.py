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
from collections.abc import Callable, Iterator
from dataclasses import asdict

from django.conf import settings
from django.core.management import execute_from_command_line
from django.core.wsgi import get_wsgi_application
from django.http import HttpRequest, HttpResponse, JsonResponse, StreamingHttpResponse
from django.urls import path
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import require_GET, require_POST

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

settings.configure(
    ALLOWED_HOSTS=["localhost", "127.0.0.1"],
    MIDDLEWARE=[f"{__name__}.Refusals"],
    ROOT_URLCONF=__name__,
    SECRET_KEY=os.environ.get("DJANGO_SECRET_KEY", "only for this example"),
)
log = logging.getLogger(__name__)
client = Client()  # safe to share between threads; connects when first used


class Refusals:
    """What the client's errors are answered with."""

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponse]) -> None:
        self._get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponse:
        return self._get_response(request)

    def process_exception(self, request: HttpRequest, error: Exception) -> HttpResponse | None:
        """The answer to an error of a view; none to one that is a fault of ours."""
        if isinstance(error, RequestError):  # the caller's mistake: names the field, the value and the fix
            return JsonResponse(error.to_dict(), status=422)
        if isinstance(error, UnknownJobError):
            return JsonResponse({"message": str(error)}, status=404)
        if not isinstance(error, DatabaseError):
            return None
        log.warning("%s", error)
        # As much is open as may be; room comes as soon as something ends.
        if isinstance(error, TenantLimitError):
            message = "too many questions already. Ask again in a moment"
            return JsonResponse({"message": message}, status=429, headers={"Retry-After": "2"})
        return JsonResponse({"message": UNAVAILABLE}, status=503, headers={"Retry-After": "1"})


@csrf_exempt
@require_POST
def ask(request: HttpRequest) -> HttpResponse:
    """Accept a question; the answer comes later, under the id."""
    try:
        text = json.loads(request.body)["text"]
    except (ValueError, KeyError, TypeError):
        return JsonResponse({"message": 'send {"text": "…"}'}, status=422)
    messages = [{"role": "user", "content": text}]
    job = client.submit(messages=messages, max_tokens=128, priority=0, stream=True, tenant=TENANT)
    return JsonResponse({"id": job.id}, status=202)


@require_GET
def answer(request: HttpRequest, job_id: str) -> HttpResponse:
    """The state, and the answer once there is one."""
    try:
        result = client.result(job_id)
    except JobNotFinishedError as error:
        return JsonResponse({"state": error.status.state})
    except JobFailedError as error:
        return JsonResponse({"state": error.status.state, "error": error.status.error_message})
    return JsonResponse({"state": "succeeded", "text": result.text})


@require_GET
def events(request: HttpRequest, job_id: str) -> HttpResponse:
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
            log.warning("%s", error)
            yield f"retry: 2000\nevent: problem\ndata: {json.dumps(UNAVAILABLE)}\n\n"

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
