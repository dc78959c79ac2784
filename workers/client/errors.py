"""What a client's calls raise, beside ``RequestError`` and the errors of the database."""

from __future__ import annotations

from collections.abc import Sequence

from backend.api import ConfigurationError, TokenmillError
from models_db.errors import CommitUnknownError
from models_db.jobs import JobStatus
from models_db.tables import JobState

_ENDINGS = {
    JobState.FAILED: "failed",
    JobState.CANCELLED: "was cancelled",
    JobState.EXPIRED: "expired before it finished",
}


class NoDatabaseError(ConfigurationError):
    """The client was made without a database and was asked for something that only SQL knows."""

    code = "no_database"

    def __init__(self, what: str) -> None:
        super().__init__(
            f"{what} needs the database, and this client was made with database_url=None. "
            "Give it database_url, or read Celery's own result with AsyncResult(job.id)"
        )


class SubmissionUnknownError(CommitUnknownError):
    """The database went away while it stored jobs, so that they are accepted or not: all of ``job_ids``, or none."""

    code = "submission_unknown"

    def __init__(self, job_ids: Sequence[str], cause: CommitUnknownError) -> None:
        self.job_ids = list(job_ids)
        more = f" and {len(job_ids) - 1} more" if len(job_ids) > 1 else ""
        super().__init__(
            f"job {job_ids[0]}{more} may have been stored, and then runs: {cause}. With an idempotency key, submit "
            "again; without one, ask for its status first, or it may run twice"
        )


class CreationUnknownError(CommitUnknownError):
    """The database went away while it stored something else than jobs, so that it is there or not: look for ``id``."""

    code = "creation_unknown"

    def __init__(self, what: str, name: str, look: str, cause: CommitUnknownError) -> None:
        self.id = name
        self.what = what
        self.look = look
        super().__init__(f"{what} {name} may have been stored: {cause}. {look}")


class JobFailedError(TokenmillError):
    """The job ended without a result: it failed, was cancelled, or expired. ``status`` has the details."""

    code = "job_failed"

    def __init__(self, status: JobStatus) -> None:
        self.status = status
        cause = f": {status.error_type}: {status.error_message}" if status.error_type else ""
        super().__init__(f"job {status.id} {_ENDINGS.get(status.state, status.state)}{cause}")


class JobNotFinishedError(TokenmillError):
    """The job is still queued or running, so it has no result yet."""

    code = "job_not_finished"

    def __init__(self, status: JobStatus) -> None:
        self.status = status
        super().__init__(f"job {status.id} is {status.state}. Use wait, or ask again later")


class WaitTimeoutError(TokenmillError, TimeoutError):
    """The time given to ``wait`` is over. The job goes on; wait again or cancel it."""

    code = "wait_timeout"

    def __init__(self, status: JobStatus, timeout_s: float) -> None:
        self.status = status
        super().__init__(
            f"job {status.id} is still {status.state} after {timeout_s:g} s. "
            "It goes on: wait again or cancel it"
        )
