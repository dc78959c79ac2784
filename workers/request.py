"""Celery's request of a generation job: never acknowledged before its end is committed, never showing a prompt."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from celery import signals
from celery.exceptions import Ignore, InvalidTaskError
from celery.utils.log import get_logger
from celery.worker import state
from celery.worker.request import Request

from models_db.tables import JobState
from workers.payload import STORED_HEADER, describe
from workers.results import BACKEND_AWAY
from workers.revokes import revoked_here
from workers.stored import names_links, stamps_of, time_limits

if TYPE_CHECKING:
    from workers.intake import Delivery
    from workers.tracing import Beginning

logger = get_logger(__name__)


class UnfitTaskError(InvalidTaskError):  # type: ignore[misc]
    """Celery's headers of a task are not what they must be; the text quotes none of them."""


class QuietRequest(Request):  # type: ignore[misc]
    """Of any task in a worker: those of callbacks have answers as arguments, which belong into no log or event."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._argsrepr = self._request_dict["argsrepr"] = self._shown_args()
        self._kwargsrepr = self._request_dict["kwargsrepr"] = "{}" if not self._kwargs else "{...}"

    def _shown_args(self) -> str:
        return "()" if not self._args else "(...)"

    def info(self, safe: bool = False) -> dict[str, Any]:
        """For ``inspect active``: never with arguments."""
        shown: dict[str, Any] = super().info(safe=True)
        return shown


class GenerateRequest(QuietRequest):
    """Everything here runs on the main thread, but for ``looks_revoked``, which only reads.

    Celery acknowledges a request from several places. Where the job's end is not committed yet (``settled``), as
    when it is revoked or expires, the acknowledgement becomes a wish: the delivery table commits the terminal
    row first and then acknowledges.
    """

    acknowledged: bool = False
    settled = False
    abandoned = False
    untold = False  # Celery's result backend was away and does not know of its end
    delivery: Delivery | None = None
    beginning: Beginning | None = None  # once the backend has begun its job

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        try:
            hard_s, soft_s = time_limits(self._request_dict)
            stamps_of(self._request_dict)  # the delivery table asks for them, which no message may break
        except ValueError as exc:
            raise UnfitTaskError(str(exc)) from None
        if not isinstance(self.id, str):
            raise UnfitTaskError(f"its id must be text, not {type(self.id).__name__}")
        # Celery keeps the task's own limits as they were when the worker started, whatever ``control time_limit`` says.
        self.time_limits = (hard_s or self.task.time_limit, soft_s or self.task.soft_time_limit)

    def _shown_args(self) -> str:
        payload = self._args[0] if isinstance(self._args, list) and self._args else None
        return describe(payload.get("model") if isinstance(payload, Mapping) else None)

    @property
    def embedded(self) -> Mapping[str, Any]:
        """Links, chain and chord, as the message has them."""
        parts = self._payload
        embed = parts[2] if isinstance(parts, list | tuple) and len(parts) > 2 else None
        return embed if isinstance(embed, Mapping) else {}

    @property
    def has_callbacks(self) -> bool:
        """Whether links, chains or chords follow, which must not run twice."""
        return names_links(self.embedded)

    @property
    def stored(self) -> bool:
        """Whether the job's row was committed before this message was published."""
        return self._request_dict.get(STORED_HEADER) is True

    @property
    def past_expiry(self) -> bool:
        """Whether the message's own ``expires`` has passed."""
        if not self.expires:
            return False
        return bool(datetime.now(UTC if self.expires.tzinfo else None) > self.expires)

    def looks_revoked(self) -> bool:
        """Whether ``revoked()`` would say so; has no effect, so that any thread may ask."""
        # Stamps count by their values, not by their names alone: who is wrongly taken for revoked is dropped unended.
        return self._already_revoked or self.past_expiry or revoked_here().names(self.id, self.stamps)

    def acknowledge(self) -> None:
        """Acknowledge a settled request; for another one, ask for its end to be committed first."""
        if self.acknowledged or self.abandoned:
            return
        table = self.task.deliveries
        if self.settled or table is None:
            self.acknowledged = True
            # Not through the hub's ready list as Celery does it: that is not run while a warm shutdown drains.
            self._message.ack_log_error(logger, self._connection_errors)
        else:
            table.revoke(self, JobState.EXPIRED if self.past_expiry else JobState.CANCELLED)

    def reject(self, requeue: bool = False) -> None:
        """Refuse the message. Dropping it for good needs a committed end, like an acknowledgement."""
        if self.acknowledged or self.abandoned:
            return
        if not requeue:
            self.acknowledge()
            return
        self.hand_back(front=False)
        self.send_event("task-rejected", requeue=True)

    def cancel(self, pool: Any, signal: Any = None, emit_retry: bool = True) -> None:
        """Stop without an acknowledgement: the message will be delivered again."""
        self.abandoned = True
        super().cancel(pool, signal, emit_retry=emit_retry)

    def settle(self) -> None:
        """The job's end is committed: from now on the message may be acknowledged."""
        self.settled = True

    def _announce_revoked(self, reason: str, terminated: bool, signum: Any, expired: bool) -> None:
        """As Celery's. Where its result backend is away the job ends all the same, and a further delivery tells it."""
        try:
            super()._announce_revoked(reason, terminated, signum, expired)
        except BACKEND_AWAY as exc:
            logger.warning("Celery's result backend does not take job %s (%r); again later", self.id, exc)
            self.untold = True
            if not self.settled:
                self.acknowledge()
            self._already_revoked = True
            signals.task_revoked.send(
                self.task, request=self._context, terminated=terminated, signum=signum, expired=expired
            )

    def on_timeout(self, soft: bool, timeout: float | None) -> None:
        """As Celery's, with the same exception."""
        try:
            super().on_timeout(soft, timeout)
        except BACKEND_AWAY as exc:
            logger.warning("Celery's result backend does not take job %s (%r); again later", self.id, exc)
            self.hand_back(front=False)

    def end(self) -> None:
        """Acknowledge a revoked or expired request, whose terminal row is committed."""
        self.settled = True
        if self._terminate_on_ack is not None and self.time_start is None and not self._already_revoked:
            # Celery announces a termination only of what has started, and this never will.
            _, signum = self._terminate_on_ack
            self._announce_revoked("terminated", True, signum, False)
        if self.untold:
            self.hand_back(front=False)
        else:
            self.drop()

    def on_failure(self, exc_info: Any, send_failed_event: bool = True, return_ok: bool = False) -> None:
        """As Celery's. A job that was cancelled by other means than Celery's is revoked to those who watch events."""
        super().on_failure(exc_info, send_failed_event, return_ok)
        error = exc_info.exception
        if isinstance(getattr(error, "exc", error), Ignore):
            self.send_event("task-revoked", terminated=False, signum=None, expired=False)

    def drop(self) -> None:
        """Acknowledge without the tracer: the outcome has been delivered, or is by another delivery."""
        state.task_ready(self)
        self.settled = True
        self.acknowledge()

    def hand_back(self, *, front: bool = True) -> None:
        """Put the message back into its queue, where the next worker finds it first (or last)."""
        state.task_ready(self)
        if not self.acknowledged and not self.abandoned:
            self.acknowledged = True
            self._message.channel.qos.give_back(self._message.delivery_tag, front=front)
