"""A running request as its caller holds it; callers find it in ``backend.api``."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, InvalidStateError
from typing import TYPE_CHECKING, Any

from backend.errors import RequestError, TokenmillError

if TYPE_CHECKING:
    from backend.api import GenerationRequest, GenerationResult, TokenChunk

logger = logging.getLogger(__name__)

_END = object()


class GenerationHandle:
    """A running request: a future for its result, a stream of its tokens, and a way to cancel it.

    Cancelling the future cancels the request, too. Safe to use from any thread. The backend side calls ``push``,
    ``finish`` and ``fail``; each caller-visible outcome is delivered once.
    """

    def __init__(self, request: GenerationRequest, on_cancel: Callable[[], None]) -> None:
        self.request = request
        self.future: Future[GenerationResult] = Future()
        self._starting = threading.Lock()
        self._started = False
        self._on_start: list[Callable[[], None]] = []
        self._on_cancel = on_cancel
        self.future.add_done_callback(self._after_future)
        self._chunks: queue.SimpleQueue[Any] | None = queue.SimpleQueue() if request.stream else None
        self._forwarding = threading.Lock()
        self._receiver: Callable[[TokenChunk], None] | None = None

    @property
    def started(self) -> bool:
        """Whether it has left the backend's queue; set by the backend."""
        return self._started

    @started.setter
    def started(self, started: bool) -> None:
        with self._starting:
            self._started = started
            calls, self._on_start = self._on_start, []
        for call in calls:
            try:
                call()
            except BaseException:
                # The backend's thread works for everybody; one caller's fault must not end it.
                logger.exception(
                    "what was to be called at the start of request %s failed", self.request.request_id
                )

    def when_started(self, call: Callable[[], None]) -> None:
        """Call this once when it leaves the backend's queue; at once if it has left.

        That is on the backend's thread, so ``call`` must not block; what it raises is logged. A request that ends in
        the queue never starts.
        """
        with self._starting:
            if not self._started:
                self._on_start.append(call)
                return
        call()

    def result(self, timeout: float | None = None) -> GenerationResult:
        """Wait for the result; raises the request's error, or ``TimeoutError`` after ``timeout`` seconds."""
        return self.future.result(timeout)

    def cancel(self) -> None:
        """Ask for an early end. The result then has ``FinishReason.CANCELLED`` and what was generated."""
        self._on_cancel()

    def done(self) -> bool:
        """Whether the outcome is known."""
        return self.future.done()

    def stream(self) -> Iterator[TokenChunk]:
        """Yield chunks until the request ends; raises its error. Only for requests with ``stream=True``."""
        if self._chunks is None:
            raise RequestError("was not set on this request", field="stream", fix="Submit with stream=True")
        while True:
            item = self._chunks.get()
            if item is _END:
                self._chunks.put(_END)  # so that a second iteration ends, too
                self.future.result()
                return
            yield item

    def forward(self, receive: Callable[[TokenChunk], None]) -> None:
        """Give every chunk to ``receive`` instead of ``stream``, those that are there already at once.

        Later ones come on the backend's thread, so ``receive`` must not block; if it raises, the request fails and is
        given up. All of them come before the future is done. Only for requests with ``stream=True``.
        """
        if self._chunks is None:
            raise RequestError("was not set on this request", field="stream", fix="Submit with stream=True")
        with self._forwarding:  # no later chunk may overtake the ones that waited
            while not self._chunks.empty():
                item = self._chunks.get()
                if item is _END:
                    self._chunks.put(_END)
                    break
                receive(item)
            self._receiver = receive

    # ------------------------------------------------------------------------------------- the backend's side

    def push(self, chunk: TokenChunk) -> None:
        """Hand a chunk to the stream; ignored when the request does not stream, or has failed."""
        if self._chunks is None or self.future.done():
            return
        with self._forwarding:
            if self._receiver is None:
                self._chunks.put(chunk)
                return
            try:
                self._receiver(chunk)
                return
            except BaseException as exc:  # one caller's fault, on the thread that works for everybody
                error = TokenmillError(f"the receiver of the stream failed: {exc!r}")
                error.__cause__ = exc
        self.fail(error)
        self._on_cancel()

    def finish(self, result: GenerationResult) -> None:
        """Deliver the result; a second outcome is ignored."""
        self._settle(lambda: self.future.set_result(result))

    def fail(self, error: BaseException) -> None:
        """Deliver an error; a second outcome is ignored."""
        self._settle(lambda: self.future.set_exception(error))

    def _after_future(self, future: Future[GenerationResult]) -> None:
        if future.cancelled():  # by its holder, as asyncio does with a wrapped one: nobody waits for the rest
            self._on_cancel()

    def _settle(self, deliver: Callable[[], None]) -> None:
        try:
            deliver()
        except InvalidStateError:
            pass  # settled before, or the future was cancelled by its holder
        except BaseException:
            # A callback of the future's that means to exit; other errors the future logs itself.
            logger.exception("what was to be called at the end of request %s failed", self.request.request_id)
        if self._chunks is not None:
            self._chunks.put(_END)
