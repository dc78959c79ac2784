"""The task ``tokenmill.generate``, and how the outcome of a job looks to Celery.

The job itself runs in the pool. Celery's tracer is called once the outcome is committed, and the task's body
only hands that outcome over, so that the result backend, links, chords and signals work as for any task.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from celery import Task, signals
from celery.exceptions import Ignore

from backend import api
from backend.api import ConfigurationError, TokenmillError
from models_db.records import StoredResult
from models_db.tables import JobState
from workers.payload import TASK_NAME
from workers.tracing import TracerClock

if TYPE_CHECKING:
    from workers.delivery import DeliveryTable


class JobFailedError(TokenmillError):
    """The job failed for a reason that has no error of its own."""

    code = "job_failed"


class JobExpiredError(TokenmillError):
    """The job's deadline or time limit passed before there was anything to return."""

    code = "job_expired"


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a job ended, as the database has it."""

    job_id: str
    model: str
    state: JobState
    result: StoredResult | None = None
    error_type: str | None = None
    error_message: str | None = None


class ReturnValue(Mapping[str, Any]):
    """What ``.get()`` returns: plain JSON on the wire, and a representation that shows neither text nor tokens."""

    def __init__(self, outcome: Outcome) -> None:
        fields = {} if outcome.result is None else asdict(outcome.result)
        fields.pop("choice", None)
        for optional in ("token_ids", "logprobs"):
            if fields.get(optional) is None:
                fields.pop(optional, None)
        self._fields = {"job_id": outcome.job_id, "model": outcome.model} | fields

    def __getitem__(self, key: str) -> Any:
        return self._fields[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)

    def __json__(self) -> dict[str, Any]:
        return self._fields

    def __repr__(self) -> str:
        reason, count = self._fields.get("finish_reason"), self._fields.get("completion_tokens")
        return f"<{count} tokens, {reason}>"


def error_of(outcome: Outcome) -> TokenmillError:
    """The exception that stands for a failed or expired job, of its own class where this version knows it."""
    message = outcome.error_message or f"the job ended as {outcome.state}"
    if outcome.state is JobState.EXPIRED:
        return JobExpiredError(message)
    known = getattr(api, outcome.error_type or "", None)
    if isinstance(known, type) and issubclass(known, TokenmillError):
        return known(message)
    return JobFailedError(f"{outcome.error_type}: {message}" if outcome.error_type else message)


class QuietTask(Task):  # type: ignore[misc]
    """The base of other tasks in the application, the users' own: neither arguments nor results are shown.

    ``@app.task(Request="celery.worker.request:Request", resultrepr_maxsize=1024)`` is Celery's way.
    """

    abstract = True
    Request = "workers.request:QuietRequest"
    resultrepr_maxsize = 0


class GenerateTask(Task):  # type: ignore[misc]
    """Celery's view of a generation job."""

    name = TASK_NAME
    Request = "workers.request:GenerateRequest"
    acks_late = True
    reject_on_worker_lost = True
    throws = (TokenmillError,)
    typing = False  # a wrong call is recorded as a failed job, like any other bad payload
    track_started = False  # the tracer would say so at the job's end, see ``stores_started``

    def __init__(self) -> None:
        self.deliveries: DeliveryTable | None = None  # set by the pool that runs in this process
        self.tracer: Callable[..., Any] | None = None  # set by the consumer, see ``workers.tracing``
        self._celery_tracer: Callable[..., Any] | None = None
        self.clock = TracerClock()
        self._current = threading.local()

    @property
    def __trace__(self) -> Callable[..., Any] | None:
        """What Celery traces the task with. Its own, which it sets at each connection, is only for other pools."""
        return self.tracer or self._celery_tracer

    @__trace__.setter
    def __trace__(self, tracer: Callable[..., Any] | None) -> None:
        self._celery_tracer = tracer

    @property
    def stores_started(self) -> bool:
        """Whether Celery's result says STARTED once the backend has begun a job."""
        return bool(self.app.conf.task_track_started)

    @contextmanager
    def outcome(
        self, outcome: Outcome, runtime_s: float | None = None, *, begun: bool = True
    ) -> Iterator[None]:
        """Within this block, in this thread, the task's body hands over ``outcome`` of a job that ran so long.

        Without ``begun`` it never began, and neither its beginning nor its end is signalled.
        """
        self._current.outcome = outcome
        self._current.begun = begun
        self.clock.ran(runtime_s)
        try:
            yield
        finally:
            self.clock.ran(None)
            del self._current.outcome, self._current.begun

    @property
    def outcome_begun(self) -> bool:
        """Of the outcome that is handed over in this thread; true where there is none."""
        return getattr(self._current, "begun", True)

    def run(self, *args: Any, **kwargs: Any) -> ReturnValue:
        """Hand over the committed outcome; called by Celery's tracer."""
        outcome: Outcome | None = getattr(self._current, "outcome", None)
        if outcome is None:
            raise ConfigurationError(
                f"{TASK_NAME} runs only in Tokenmill's own pool. Start the worker with `tokenmill worker`"
            )
        if outcome.state is JobState.SUCCEEDED:
            return ReturnValue(outcome)
        if outcome.state is JobState.CANCELLED:
            self.backend.mark_as_revoked(
                outcome.job_id, "cancelled", request=self.request, store_result=not self.request.ignore_result
            )
            signals.task_revoked.send(
                sender=self, request=self.request, terminated=False, signum=None, expired=False
            )
            raise Ignore
        raise error_of(outcome)
