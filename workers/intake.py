"""One delivery and one run, and what is read from a message before it may claim its job."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timedelta
from enum import Enum
from typing import Any

from celery.utils.log import get_logger

from backend.api import GenerationHandle, GenerationResult, RequestError, TokenmillError, UnknownModelError
from models_db.errors import InvalidValueError
from models_db.records import NewJob, StoredResult
from models_db.tables import JobState
from workers.callbacks.wanted import wanted_callback
from workers.payload import GeneratePayload, queue_for
from workers.request import GenerateRequest
from workers.settings import Settings
from workers.stored import StoredRequest

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Call:
    """Celery's tracer, as the pool was asked to call it."""

    target: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]


@dataclass(eq=False, kw_only=True)
class Delivery:
    """One delivery of a message. Also the pool's apply result: Celery keeps a weak reference to it.

    ``number`` is its identity here. A delivery tag survives redelivery and a job id can be delivered twice, so
    neither of them would do.
    """

    request: GenerateRequest
    call: Call | None = None  # none when Celery revoked it before the pool saw it
    accept: Callable[[int, float], None] | None = None
    callback: Callable[[Any], None] | None = None
    error_callback: Callable[[Any], None] | None = None
    timeout: Callable[[bool, float | None], None] | None = None
    soft_s: float | None = None
    hard_s: float | None = None
    number: int = 0  # given by the table

    payload: GeneratePayload | None = None
    error: TokenmillError | None = None  # why the payload is refused
    job: NewJob | None = None
    run: Run | None = None
    accepted: bool = False
    ending: JobState | None = None  # revoked or expired: commit this, acknowledge without the tracer
    abandoned: bool = False  # neither callback nor acknowledgement any more
    returned: bool = False  # it has ended here before the database has answered
    terminated: Callable[[], None] | None = None

    @property
    def job_id(self) -> str:
        return str(self.request.id)

    @property
    def model(self) -> str:
        return self.job.model if self.job is not None else ""

    def terminate(self, signal: Any = None) -> None:
        """Celery's way to end it: a revoke, or a cancellation without acknowledgement."""
        if self.terminated is not None:
            self.terminated()


class Limit(Enum):
    """Celery's time limits of a job."""

    SOFT = "soft"
    HARD = "hard"


@dataclass(eq=False)
class Run:
    """One attempt at a job, owned by this worker, with every delivery that waits for its end."""

    job_id: str
    attempt: int
    model: str
    payload: GeneratePayload | None
    deadline_at: datetime | None = None
    deliveries: list[Delivery] = field(default_factory=list)
    soft_s: float | None = None
    hard_s: float | None = None
    asked: StoredRequest | None = None  # of a suspect, which has no delivery
    on_ended: Callable[[], None] | None = None  # of a suspect
    handle: GenerationHandle | None = None
    started_at: float | None = None  # when it got a slot of the backend
    runtime_s: float | None = None
    limit_hit: Limit | None = None  # which of them ended it; the first counts
    cancel_wanted: bool = False
    ending: JobState | None = None
    finishing: bool = False  # its end is being committed
    releasing: bool = False  # it is being handed back
    refusals: int = 0  # of its ends, by the database
    # Every end was refused: it has no deliveries, and its commit is tried again now and then.
    held: bool = False


def read_delivery(delivery: Delivery, settings: Settings, now: datetime) -> None:
    """Fill in ``payload`` or ``error``, and ``job`` where a row can be written for it.

    Raises nothing, whatever the message holds: it would be delivered again, and end one worker after the other.
    """
    request = delivery.request
    try:
        delivery.payload = _payload(request, settings)
    except RequestError as exc:
        delivery.error = _without_text(exc)
    except TokenmillError as exc:
        delivery.error = exc
    except Exception as exc:
        delivery.error = _unreadable(delivery, exc)
    try:
        delivery.job = _job(request, delivery.payload, settings, now)
    except Exception as exc:
        invalid = isinstance(exc, InvalidValueError)
        delivery.error = RequestError(str(exc)) if invalid else _unreadable(delivery, exc)
        delivery.job = _bare_job(request, settings, now)
        delivery.payload = None


def _unreadable(delivery: Delivery, error: Exception) -> RequestError:
    """Why the job fails, by the kind of error alone: its text may quote the prompt."""
    kind = type(error).__name__
    logger.error("The payload of job %s cannot be read: %s", delivery.job_id, kind)
    return RequestError(
        f"cannot be read ({kind})", field="payload", fix="Compare it with payload.schema.json"
    )


def _bare_job(request: GenerateRequest, settings: Settings, now: datetime) -> NewJob | None:
    """A row that says that the job has failed; none where not even its id can be stored."""
    try:
        return _job(request, None, settings, now)
    except Exception:
        return None


def _without_text(error: RequestError) -> RequestError:
    """The error without the text it complains about: Celery logs it, and a misplaced prompt must not be there."""
    if error.field in ("model", "payload") or not error.value.startswith(("'", '"', "[", "{", "(")):
        return error
    return type(error)(str(error).replace(f" (got {error.value})", "", 1))


def _payload(request: GenerateRequest, settings: Settings) -> GeneratePayload:
    args, kwargs = request.args, request.kwargs
    if kwargs or not isinstance(args, list | tuple) or len(args) != 1:
        raise RequestError(
            "takes exactly one positional argument", field="payload", fix="Send args=[payload]"
        )
    payload = GeneratePayload.parse(args[0])
    payload.check_limits(settings, at_submission=False)
    if payload.model != settings.model:
        raise UnknownModelError(
            "is not served from this queue",
            field="model",
            value=payload.model,
            fix=f"Send it to the queue {queue_for(payload.model)}",
        )
    return payload


def _job(
    request: GenerateRequest, payload: GeneratePayload | None, settings: Settings, now: datetime
) -> NewJob:
    """The row to insert if there is none yet; with a refused payload only what is safe to store."""
    message = getattr(request.message, "_raw", None) if payload is not None else None
    return new_job(request.id, request.delivery_info, message, payload, settings, now)


def new_job(
    job_id: str,
    delivery_info: Mapping[str, Any],
    message: Mapping[str, Any] | None,
    payload: GeneratePayload | None,
    settings: Settings,
    now: datetime,
) -> NewJob:
    """The row of a message's job.

    Raises:
        InvalidValueError: its id cannot be stored.
        RequestError: the settings do not allow its callback.
    """
    queue = str(delivery_info.get("routing_key") or queue_for(settings.model))[:255]
    if payload is None:
        return NewJob(
            id=job_id,
            model=settings.model,
            queue=queue,
            params={},
            prompt={},
            message=message,
            created_at=now,
            published_at=now,
        )
    deadline_s = payload.deadline_s
    return NewJob(
        id=job_id,
        model=payload.model,
        queue=queue,
        params=payload.params(),
        prompt=payload.prompt_json(),
        message=message,
        custom_id=payload.custom_id,
        tenant=payload.tenant,
        priority=payload.priority,
        created_at=now,
        published_at=now,
        deadline_at=None if deadline_s is None else now + timedelta(seconds=deadline_s),
        callback=wanted_callback(payload, settings),
    )


def stored_result(result: GenerationResult, payload: GeneratePayload | None) -> StoredResult:
    """The result as the database keeps it."""
    with_ids = payload is not None and payload.return_token_ids
    return StoredResult(
        text=result.text,
        finish_reason=str(result.finish_reason),
        prompt_tokens=result.prompt_tokens,
        completion_tokens=result.completion_tokens,
        cached_tokens=result.cached_tokens,
        token_ids=list(result.token_ids) if with_ids else None,
        logprobs=None if result.logprobs is None else [asdict(entry) for entry in result.logprobs],
        stop_reason=result.stop_reason,
        seed=result.seed,
        queue_time_s=result.queue_time_s,
        time_to_first_token_s=result.time_to_first_token_s,
        latency_s=result.latency_s,
    )
