"""Celery's request of a generation job: never acknowledged before its end is committed, never showing a prompt."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from time import monotonic
from typing import TYPE_CHECKING, Any

from celery.utils.log import get_logger
from celery.worker import state
from celery.worker.request import Request

from models_db.tables import JobState
from workers.leases import give_back
from workers.payload import describe
from workers.stored import names_links

if TYPE_CHECKING:
    from workers.intake import Delivery

logger = get_logger(__name__)


class GenerateRequest(Request):  # type: ignore[misc]
    """Everything here runs on the main thread, but for ``looks_revoked``, which only reads.

    Celery acknowledges a request from several places. Where the job's end is not committed yet (``settled``), as
    when it is revoked or expires, the acknowledgement becomes a wish: the delivery table commits the terminal
    row first and then acknowledges.
    """

    acknowledged: bool = False
    settled = False
    abandoned = False
    delivery: Delivery | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        payload = self._args[0] if isinstance(self._args, list) and self._args else None
        model = payload.get("model") if isinstance(payload, Mapping) else None
        self._argsrepr = self._request_dict["argsrepr"] = describe(model)
        self._kwargsrepr = self._request_dict["kwargsrepr"] = "{}"

    def info(self, safe: bool = False) -> dict[str, Any]:
        """For ``inspect active``: never with arguments."""
        shown: dict[str, Any] = super().info(safe=True)
        return shown

    @property
    def has_callbacks(self) -> bool:
        """Whether links, chains or chords follow, which must not run twice."""
        parts = self._payload
        return isinstance(parts, list | tuple) and len(parts) > 2 and names_links(parts[2])

    @property
    def past_expiry(self) -> bool:
        """Whether the message's own ``expires`` has passed."""
        if not self.expires:
            return False
        return bool(datetime.now(UTC if self.expires.tzinfo else None) > self.expires)

    def looks_revoked(self) -> bool:
        """Whether ``revoked()`` would say so; has no effect, so that any thread may ask."""
        if self._already_revoked or self.id in state.revoked or self.past_expiry:
            return True
        stamps = self.stamps
        return any(header in stamps for header in tuple(state.revoked_stamps))

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

    def end(self, accept: Callable[[int, float], None] | None) -> None:
        """Acknowledge a revoked or expired request, whose terminal row is committed."""
        self.settled = True
        if self._terminate_on_ack is not None and self.time_start is None and accept is not None:
            accept(os.getpid(), monotonic())  # Celery announces such a termination only now
        self.drop()

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
            give_back(self._message, logger, self._connection_errors, front=front)
