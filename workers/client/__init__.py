"""Submit jobs and read their results, from a web app or a script. Imports neither torch nor Celery.

Example::

    from workers.client import Client

    with Client() as client:  # settings from the environment, see workers.settings
        job = client.submit("Once upon a time", max_tokens=64)
        print(job.wait(timeout_s=60).text)

``submit`` commits the row of a job with its whole message and then publishes it, so an accepted job is never
lost: when Redis is away, the row stays and the id is returned all the same. Where the answer to that commit is
lost, ``submit`` looks the id up rather than leave you in doubt. With ``database_url=None`` a
client has Redis alone: it can submit, and the worker writes the row, but status, result, cancel and
idempotency keys are refused, and what Redis loses before a worker has it is lost.
"""

from backend.api import ConfigurationError, RequestError, TokenmillError, UnknownModelError
from models_db.errors import (
    DatabaseError,
    DatabaseUnavailableError,
    IdempotencyConflictError,
    TenantLimitError,
    UnknownJobError,
)
from models_db.records import JobStatus, StoredResult
from models_db.tables import JobState
from workers.broker import BrokerUnavailableError
from workers.callbacks.signing import CallbackSignatureError, verify_callback
from workers.client.aio import AsyncClient, AsyncJobHandle
from workers.client.errors import (
    JobFailedError,
    JobNotFinishedError,
    NoDatabaseError,
    SubmissionUnknownError,
    WaitTimeoutError,
)
from workers.client.fields import PayloadFields
from workers.client.handle import JobHandle
from workers.client.streaming import StreamTimeoutError
from workers.client.submission import Submission
from workers.client.sync import Client
from workers.streams import StreamEnd, StreamEvent

__all__ = [
    "AsyncClient",
    "AsyncJobHandle",
    "BrokerUnavailableError",
    "CallbackSignatureError",
    "Client",
    "ConfigurationError",
    "DatabaseError",
    "DatabaseUnavailableError",
    "IdempotencyConflictError",
    "JobFailedError",
    "JobHandle",
    "JobNotFinishedError",
    "JobState",
    "JobStatus",
    "NoDatabaseError",
    "PayloadFields",
    "RequestError",
    "StoredResult",
    "StreamEnd",
    "StreamEvent",
    "StreamTimeoutError",
    "Submission",
    "SubmissionUnknownError",
    "TenantLimitError",
    "TokenmillError",
    "UnknownJobError",
    "UnknownModelError",
    "WaitTimeoutError",
    "verify_callback",
]
