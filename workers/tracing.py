"""When Celery says that a generation job began, how long it took, and that it ended.

Celery's tracer runs once the outcome of a job is committed (``workers.finaliser``). Left alone it would announce
each job's beginning at its end, and measure microseconds. So the beginning is announced when the backend begins the
job, and the tracer, built by Celery as for any task, announces none and is given a clock that knows when that was.
A job that is cancelled or expires before it begins has neither a beginning nor an end.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextvars import Context
from typing import TYPE_CHECKING, Any, TypeVar

from celery import signals, states
from celery._state import _task_stack
from celery.app import trace
from celery.app.task import Context as TaskContext
from celery.utils.log import get_logger

if TYPE_CHECKING:
    from workers.request import GenerateRequest
    from workers.tasks import GenerateTask

logger = get_logger(__name__)
T = TypeVar("T")


class TracerClock(threading.local):
    """Monotonic seconds, but that the first look in a thread after ``ran`` shows when the job began there."""

    began: float | None = None

    def ran(self, seconds: float | None) -> None:
        """The job that is traced next in this thread has taken so long, and ends now; ``None``: not known."""
        self.began = None if seconds is None else time.monotonic() - seconds

    def __call__(self) -> float:
        began, self.began = self.began, None
        return time.monotonic() if began is None else began


def build_tracer(task: GenerateTask, hostname: str) -> Callable[..., Any]:
    """Celery's tracer of the task, for ``task.__trace__``; see the module."""
    begun = _build_without(("task_prerun",), task, hostname)
    never_begun = _build_without(("task_prerun", "task_postrun"), task, hostname)

    def trace_job(*args: Any, **kwargs: Any) -> Any:
        return (begun if task.outcome_begun else never_begun)(*args, **kwargs)

    return trace_job


class _Unheard:
    """In the place of a signal: nobody listens to it, now or later."""

    receivers: Sequence[Any] = ()


class _SignalsWithout:
    """The module ``celery.signals``, but that some signals have no receivers for the thread that made this."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._thread = threading.get_ident()

    def __getattr__(self, name: str) -> Any:
        if name in self._names and threading.get_ident() == self._thread:
            return _Unheard
        return getattr(signals, name)


_building = threading.Lock()


def _build_without(names: Sequence[str], task: GenerateTask, hostname: str) -> Callable[..., Any]:
    """Celery's tracer without these signals.

    It keeps the list of receivers that it finds when it is built, and leaves a signal out while that is empty. The
    signals themselves stay as they are: other threads send and connect them at any time, also when this is called
    because the connection to Redis is new.
    """
    app = task.app
    with _building:
        trace.signals = _SignalsWithout(names)
        try:
            tracer: Callable[..., Any] = trace.build_tracer(
                task.name, task, app.loader, hostname, app=app, monotonic=task.clock
            )
        finally:
            trace.signals = signals
    return tracer


class Beginning:
    """One job as receivers of ``task_prerun`` and ``task_postrun`` see it: both once, or neither.

    The signals come in whatever thread is free, but all in one context (``contextvars``): what a receiver attaches
    to it at the beginning, such as a span, is there for the tracer and can be detached at the end.
    """

    def __init__(self, task: GenerateTask, request: GenerateRequest) -> None:
        self._task = task
        self._request = request
        self._context = Context()
        self._lock = threading.Lock()
        self._begun = False
        self._claim = threading.Lock()
        self._claimed = False

    def begin(self) -> None:
        """Announce the beginning, and store STARTED if asked for. Waits for another thread that is at it."""
        with self._lock:
            if self._begun:
                return
            self._begun = True
            if signals.task_prerun.receivers:
                self._context.run(self._send_prerun)
            if self._task.stores_started and not self._request.ignore_result:
                self._store_started()

    def claim_end(self) -> bool:
        """Whether it is the caller's to announce the end, by ``run`` or ``end``; never waits."""
        with self._claim:
            claimed, self._claimed = self._claimed, True
        return not claimed

    def run(self, tracer: Callable[[], T]) -> T:
        """Call the tracer, which announces the end."""
        self.begin()
        return self._context.run(tracer)

    def end(self, state: str, value: BaseException | None = None) -> None:
        """Announce an end without the tracer, if a beginning has been announced; else neither is."""
        with self._lock:
            begun, self._begun = self._begun, True
            if begun and signals.task_postrun.receivers:
                self._context.run(self._send_postrun, state, value)

    def _send_prerun(self) -> None:
        shown = self._shown()
        known = set(vars(shown))
        self._send(signals.task_prerun, shown)
        # What receivers put on ``task.request`` is there for the later ones, too.
        request = self._request.request_dict
        request.update({name: value for name, value in vars(shown).items() if name not in known})

    def _send_postrun(self, state: str, value: BaseException | None) -> None:
        self._send(signals.task_postrun, self._shown(), retval=value, state=state)

    def _send(self, signal: Any, shown: TaskContext, **fields: Any) -> None:
        task, request = self._task, self._request
        _task_stack.push(task)
        task.request_stack.push(shown)
        try:
            signal.send(
                sender=task, task_id=request.id, task=task, args=request.args, kwargs=request.kwargs, **fields
            )
        finally:
            task.request_stack.pop()
            _task_stack.pop()

    def _shown(self) -> TaskContext:
        """``task.request`` as the tracer makes it."""
        request = self._request
        return TaskContext(
            request.request_dict
            | {"args": request.args, "kwargs": request.kwargs, "called_directly": False, "is_eager": False}
            | dict(request.embedded)
        )

    def _store_started(self) -> None:
        request = self._request
        try:
            self._task.backend.store_result(
                request.id,
                {"pid": request.worker_pid, "hostname": request.hostname},
                states.STARTED,
                request=TaskContext(request.request_dict),
            )
        except Exception as exc:
            logger.warning("STARTED of job %s is not stored: %r", request.id, exc)


def is_watched(task: GenerateTask) -> bool:
    """Whether anyone wants to know when jobs begin: a receiver of the signals, or readers of STARTED."""
    return bool(signals.task_prerun.receivers or signals.task_postrun.receivers or task.stores_started)
