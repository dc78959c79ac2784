"""What can go wrong between Tokenmill and its database. Every message says what to do, none shows a password."""

from __future__ import annotations


class DatabaseError(Exception):
    """Root of the errors that this package raises on purpose. ``code`` is stable and machine-readable."""

    code = "database"


class DatabaseUrlError(DatabaseError):
    """The database URL cannot be read, names an unsupported database, or its driver is not installed."""

    code = "database_url"


class DatabaseUnavailableError(DatabaseError):
    """The database does not answer, or the connection to it was lost."""

    code = "database_unavailable"


class CommitUnknownError(DatabaseUnavailableError):
    """The connection was lost while a transaction was being committed: all of it may be stored, or nothing."""

    code = "commit_unknown"


class SchemaError(DatabaseError):
    """The tables are missing or belong to another version of Tokenmill."""

    code = "schema"


class MissingDatabaseError(SchemaError):
    """The file of an SQLite database does not exist."""

    code = "missing_database"


class InvalidValueError(DatabaseError):
    """A value that no column can hold, refused before it reaches any database."""

    code = "invalid_value"

    def __init__(self, field: str, message: str, *, value: str = "", fix: str = "") -> None:
        self.field = field
        self.message = message
        self.value = value
        self.fix = fix
        given = f" (got {value})" if value else ""
        super().__init__(f"{field}: {message}{given}" + (f". {fix}" if fix else ""))


class IdempotencyConflictError(DatabaseError):
    """The same idempotency key was used before for a different payload."""

    code = "idempotency_conflict"

    def __init__(self, key: str, job_id: str) -> None:
        self.key = key
        self.job_id = job_id
        super().__init__(
            f"idempotency_key: {key!r} already belongs to job {job_id}, which has a different payload. "
            "Send the same payload again or choose a new key"
        )


class DuplicateCustomIdError(DatabaseError):
    """Two lines of one batch carry the same custom id."""

    code = "duplicate_custom_id"

    def __init__(self, custom_id: str, batch_id: str | None = None) -> None:
        self.custom_id = custom_id
        self.batch_id = batch_id
        where = f" in batch {batch_id}" if batch_id else ""
        super().__init__(f"custom_id: {custom_id!r} occurs twice{where}. Give each line of a batch its own")


class DuplicateJobIdError(DatabaseError):
    """A job with this id exists already."""

    code = "duplicate_job_id"

    def __init__(self, job_ids: list[str]) -> None:
        self.job_ids = job_ids
        super().__init__(f"id: job {', '.join(job_ids[:5])} exists already. Let Tokenmill choose the id")


class UnknownJobError(DatabaseError):
    """There is no job with this id."""

    code = "unknown_job"

    def __init__(self, job_id: str) -> None:
        self.job_id = job_id
        super().__init__(f"id: there is no job {job_id}. Check the id and the database URL")


class UnknownBatchError(DatabaseError):
    """There is no batch with this id."""

    code = "unknown_batch"

    def __init__(self, batch_id: str) -> None:
        self.batch_id = batch_id
        super().__init__(f"id: there is no batch {batch_id}. Check the id and the database URL")


class BatchClosedError(DatabaseError):
    """A batch takes no more lines: somebody has cancelled it, or it has ended."""

    code = "batch_closed"

    def __init__(self, batch_id: str, state: str) -> None:
        self.batch_id = batch_id
        super().__init__(
            f"batch_id: batch {batch_id} is {state} and takes no more lines. Make a new batch for them"
        )


class TenantLimitError(DatabaseError):
    """A tenant would have more open than it may; nothing of the submission was stored."""

    code = "tenant_limit"

    def __init__(self, tenant: str, what: str, limit: int, present: int, wanted: int) -> None:
        self.tenant = tenant
        self.what = what  # "jobs" or "tokens"
        self.limit = limit
        self.present = present
        self.wanted = wanted
        setting = f"tenant_max_open_{what}"
        variable = f"TOKENMILL_{setting.upper()}"
        fix = (
            "Wait until some have ended, or raise" if self.waiting_helps else "Submit less at once, or raise"
        )
        super().__init__(
            f"tenant: {tenant!r} has {present:,} {what} open and asks for {wanted:,} more, beyond its limit of "
            f"{limit:,} ({setting}). {fix} {variable} or its entry in TOKENMILL_TENANT_LIMITS"
        )

    @property
    def waiting_helps(self) -> bool:
        """Whether the same submission may fit later."""
        return self.wanted <= self.limit


class WriterStoppedError(DatabaseError):
    """The database thread has stopped; what was handed to it and not committed is reported with this error."""

    code = "writer_stopped"
