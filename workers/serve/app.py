"""The ASGI application: routes, the caller, the body, and how errors leave."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from backend.api import RequestError, TokenmillError
from models_db.errors import DatabaseError
from workers.client import AsyncClient, Client
from workers.serve import batches, files
from workers.serve.answers import CHAT, COMPLETION, DONE, Chunks, Endpoint, sse, whole
from workers.serve.auth import Gate
from workers.serve.call import Call
from workers.serve.errors import ApiError, from_end, from_exception, invalid, not_found, refused
from workers.serve.feeder import BatchFeeder
from workers.serve.generation import Continuous, Generation, choice_of
from workers.serve.requests import ChatRequest, CompletionRequest, parse_chat, parse_completion
from workers.settings import Settings

log = logging.getLogger(__name__)

Handler = Callable[[Call], Awaitable[Response]]
_MOST_KEY = 200  # characters of an idempotency key


def make_app(
    settings: Settings,
    *,
    open_to_all: bool,
    timeout_s: float = 600.0,
    clock: Callable[[], float] = time.time,
) -> Starlette:
    """The application.

    Args:
        open_to_all: nobody has to show a key, see ``workers.serve.auth.Gate``.
        timeout_s: longest wait for one answer; its job is cancelled then.
    """

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with AsyncClient(settings, threads=16) as client:
            app.state.client = client
            app.state.gate = Gate(client.sync, open_to_all=open_to_all)
            with Client(settings) as feeding:
                app.state.feeder = BatchFeeder(feeding)
                app.state.feeder.start()
                try:
                    yield
                finally:
                    await asyncio.to_thread(app.state.feeder.stop)

    def route(path: str, handler: Handler, *methods: str) -> Route:
        async def endpoint(request: Request) -> Response:
            state = request.app.state
            try:
                tenant = await state.gate.tenant(request)
                call = Call(request, state.client, state.feeder, tenant, timeout_s)
                call.check_names()
                return await handler(call)
            except HTTPException as error:  # of a form that cannot be read
                known = invalid(f"the body cannot be read: {error.detail}")
                return JSONResponse(known.body(), known.status)
            except Exception as error:
                known = from_exception(error)
                if known.status >= 500 and not isinstance(error, ApiError):
                    log.log(
                        logging.WARNING
                        if isinstance(error, TokenmillError | DatabaseError)
                        else logging.ERROR,
                        "%s %s failed: %s",
                        request.method,
                        path,
                        error,
                        exc_info=known.code == "internal_error",
                    )
                return JSONResponse(known.body(), known.status, headers=known.headers())

        return Route(path, endpoint, methods=list(methods))

    async def chat(call: Call) -> Response:
        return await _generate(call, CHAT, parse_chat(await call.json()), clock)

    async def completion(call: Call) -> Response:
        return await _generate(call, COMPLETION, parse_completion(await call.json()), clock)

    async def models(call: Call) -> Response:
        return JSONResponse({"object": "list", "data": [_model(n) for n in settings.accepted_models]})

    async def model(call: Call) -> Response:
        name = call.request.path_params["name"]
        if name not in settings.accepted_models:
            raise not_found("model", name)
        return JSONResponse(_model(name))

    async def health(request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    return Starlette(
        routes=[
            route(CHAT, chat, "POST"),
            route(COMPLETION, completion, "POST"),
            route("/v1/models", models, "GET"),
            route("/v1/models/{name:path}", model, "GET"),
            route("/v1/files", files.upload, "POST"),
            route("/v1/files", files.list_all, "GET"),
            route("/v1/files/{file_id}", files.retrieve, "GET"),
            route("/v1/files/{file_id}", files.delete, "DELETE"),
            route("/v1/files/{file_id}/content", files.content, "GET"),
            route("/v1/batches", batches.create, "POST"),
            route("/v1/batches", batches.list_all, "GET"),
            route("/v1/batches/{batch_id}", batches.retrieve, "GET"),
            route("/v1/batches/{batch_id}/cancel", batches.cancel, "POST"),
            Route("/health", health, methods=["GET"]),
        ],
        lifespan=lifespan,
        exception_handlers={404: _no_such_path, 405: _wrong_method},
    )


async def _no_such_path(request: Request, error: Exception) -> Response:
    known = ApiError(
        404,
        f"{request.url.path[:200]}: there is no such path here. See openai-api.md for those there are",
        kind="invalid_request_error",
        code="unknown_url",
    )
    return JSONResponse(known.body(), known.status)


async def _wrong_method(request: Request, error: Exception) -> Response:
    allowed = getattr(error, "headers", None) or {}
    known = ApiError(
        405,
        f"{request.url.path[:200]} takes no {request.method}. Use {allowed.get('Allow', 'another method')}",
        kind="invalid_request_error",
        code="method_not_allowed",
    )
    return JSONResponse(known.body(), known.status, headers=dict(allowed))


def _model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "tokenmill"}


async def _generate(
    call: Call, endpoint: Endpoint, request: ChatRequest | CompletionRequest, clock: Callable[[], float]
) -> Response:
    payloads = request.payloads()
    prompts = len(payloads) // request.choices
    key = call.request.headers.get("idempotency-key")
    if key is not None and not 0 < len(key) <= _MOST_KEY:
        wrong, fix = f"has {len(key)} characters", f"Use 1 to {_MOST_KEY}"
        raise refused(wrong, param="Idempotency-Key", fix=fix)
    try:
        generation = await Generation.submit(
            call.client, payloads, tenant=call.tenant, key=key, timeout_s=call.timeout_s
        )
    except RequestError as error:
        raise request.own(error) from None
    created = int(clock())
    job_id = generation.jobs[0].id
    if request.stream:
        return await _stream(call, endpoint, request, generation, prompts, created)
    async with generation:
        choices = await _unless_gone(call.request, generation.choices())
    return JSONResponse(whole(endpoint, job_id, request.model, created, choices, prompts))


async def _unless_gone(request: Request, work: Awaitable[Any]) -> Any:
    """Wait for the work, or stop it when the caller closes the connection."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ApiError(499, "the caller has gone", kind="invalid_request_error")
        return task.result()
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _stream(
    call: Call,
    endpoint: Endpoint,
    request: ChatRequest | CompletionRequest,
    generation: Generation,
    prompts: int,
    created: int,
) -> Response:
    """Begin to answer once the first token is there: until then a failure can still be an HTTP status."""
    stack = AsyncExitStack()
    await stack.enter_async_context(generation)
    try:
        events = await stack.enter_async_context(aclosing(generation.events()))
        first = await _unless_gone(call.request, anext(events))
        if first[1].end is not None and first[1].end.state != "succeeded":
            raise from_end(generation.jobs[first[0]].id, first[1].end)
    except BaseException:
        await stack.aclose()
        raise
    chunks = Chunks(endpoint, generation.jobs[0].id, request.model, created)

    async def body() -> AsyncGenerator[str, None]:
        texts = [Continuous() for _ in generation.jobs]
        done: list[Any] = [None] * len(texts)
        try:
            for index in range(len(texts)):
                if opening := chunks.first(index):
                    yield opening
            pending = [first]
            while pending or None in done:
                index, event = pending.pop() if pending else await anext(events)
                if fresh := texts[index].feed(event):
                    yield chunks.text(index, fresh)
                if event.end is None:
                    continue
                if event.end.state != "succeeded":
                    raise from_end(generation.jobs[index].id, event.end)
                done[index] = choice_of(texts[index].sent, event.end)
                entries = None
                if request.alternatives is not None:  # a stream carries text alone; SQL has them by now
                    entries = (await generation.stored(index)).logprobs
                yield chunks.finish(index, event.end.finish_reason, entries)
            if request.wants_usage:
                yield chunks.usage(done, prompts)
            yield DONE
        except (ApiError, TokenmillError, DatabaseError) as error:
            log.warning("a stream of job %s ended early: %s", generation.jobs[0].id, error)
            yield sse(from_exception(error).body())

    return EventStream(body(), stack)


class EventStream(StreamingResponse):
    """Server-sent events, which end what they read from also where the caller has gone before the first was sent."""

    def __init__(self, events: AsyncGenerator[str, None], source: AsyncExitStack) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self._events, self._source = events, source

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._source, aclosing(self._events):
            await super().__call__(scope, receive, send)
