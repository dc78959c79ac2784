"""``JobHandle``: what ``Client.submit`` gives."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from backend.api import ConfigurationError
from models_db.jobs import JobStatus, StoredResult
from models_db.tables import JobState
from workers.streams import StreamEvent

if TYPE_CHECKING:
    from workers.client.sync import Client


@dataclass(frozen=True, slots=True)
class JobHandle:
    """A job that was accepted. ``id`` is also its Celery task id.

    ``created`` is false when the idempotency key belonged to an earlier job, which this then is.
    ``published`` is false when Redis could not be reached, and the job waits in SQL to be published.
    """

    id: str
    created: bool = True
    published: bool = True
    client: Client | None = field(default=None, repr=False, compare=False)

    def wait(self, timeout_s: float | None = None) -> StoredResult:
        """See ``Client.wait``."""
        return self._owner().wait(self.id, timeout_s)

    def stream(self, *, last_id: str | None = None, timeout_s: float | None = None) -> Iterator[StreamEvent]:
        """See ``Client.stream``."""
        return self._owner().stream(self.id, last_id=last_id, timeout_s=timeout_s)

    def status(self) -> JobStatus:
        """See ``Client.status``."""
        return self._owner().status(self.id)

    def cancel(self) -> JobState:
        """See ``Client.cancel``."""
        return self._owner().cancel(self.id)

    def _owner(self) -> Client:
        if self.client is None:
            raise ConfigurationError(f"this handle of job {self.id} has no client. Use client.wait(job.id)")
        return self.client
