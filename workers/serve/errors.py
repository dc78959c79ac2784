"""Errors as the OpenAI API writes them."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from backend.api import (
    ConfigurationError,
    PromptTooLongError,
    RequestError,
    TokenmillError,
    UnknownModelError,
)
from backend.complaints import complaint
from models_db.errors import (
    CommitUnknownError,
    DatabaseError,
    IdempotencyConflictError,
    InvalidValueError,
    TenantLimitError,
    UnknownJobError,
)
from workers.broker import BrokerUnavailableError
from workers.client.errors import CreationUnknownError
from workers.streams import StreamEnd


class ApiError(Exception):
    """One refused or failed call. ``param`` names the field of the request.

    What is not ``repeatable`` may have been done all the same: clients that repeat calls by themselves are told not to.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str,
        code: str | None = None,
        param: str | None = None,
        repeatable: bool = True,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.code = code
        self.param = param
        self.repeatable = repeatable

    def body(self) -> dict[str, Any]:
        """The JSON of the answer."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def headers(self) -> dict[str, str]:
        """The answer's headers, beside those of any JSON."""
        if not self.repeatable:
            return {"x-should-retry": "false"}
        return {
            401: {"WWW-Authenticate": "Bearer"},
            429: {"Retry-After": "2"},
            503: {"Retry-After": "1"},
        }.get(self.status, {})


def invalid(message: str, *, param: str | None = None, code: str | None = None) -> ApiError:
    """A request that is wrong."""
    return ApiError(400, message, kind="invalid_request_error", code=code, param=param)


def refused(wrong: str, *, param: str, value: object = None, fix: str) -> ApiError:
    """A field of a request that is wrong: named, with what it has and what to do."""
    return invalid(str(RequestError(wrong, field=param, value=value, fix=fix)), param=param)


def unsupported(name: str, value: object, why: str, fix: str) -> ApiError:
    """A field of a request that asks for what this service cannot do, or that does not exist."""
    error = RequestError(why, field=name, value=value, fix=fix)
    return invalid(str(error), param=name, code="unsupported_parameter")


def from_validation(error: ValidationError) -> ApiError:
    """Pydantic's first complaint about a body."""
    first = _furthest(error.errors(include_url=False))
    path = ".".join(str(part) for part in first["loc"] if not _is_branch(part))
    if first["type"] == "value_error":  # ours, which may name a field within
        message = first["msg"].removeprefix("Value error, ")
        name, colon, _ = message.partition(": ")
        inner = name if colon and name.isidentifier() else ""
        between = "." if inner else ": "
        return invalid(
            f"{path}{between}{message}" if path else message,
            param=".".join(filter(None, (path, inner))) or None,
        )
    wrong, fix = complaint(first)
    value = None if first["type"] == "missing" else first["input"]
    return invalid(
        str(RequestError(wrong, field=path or "the body", value=value, fix=fix)), param=path or None
    )


def _furthest(found: list[ErrorDetails]) -> ErrorDetails:
    """The first complaint. Where a value may be of several types, the one whose type it came closest to."""
    loc = found[0]["loc"]
    place = loc[: next((index for index, part in enumerate(loc) if _is_branch(part)), len(loc))]
    return max(
        (each for each in found if each["loc"][: len(place)] == place), key=lambda each: len(each["loc"])
    )


def _is_branch(part: int | str) -> bool:
    """Whether a part of pydantic's path is one of several types that were tried, and no field."""
    return part == "str" or (isinstance(part, str) and "[" in part)


def wrong_kind(kind: str, wanted: str) -> ApiError:
    """A body of another ``Content-Type``."""
    message = f"the body is sent as {kind[:80] or 'nothing'}. Send it as {wanted}"
    return ApiError(415, message, kind="invalid_request_error")


def not_found(what: str, name: str) -> ApiError:
    """Something that does not exist, or belongs to somebody else: one cannot tell which."""
    return ApiError(
        404, f"there is no {what} {name!r} here", kind="invalid_request_error", code=f"{what}_not_found"
    )


def from_exception(error: Exception) -> ApiError:
    """What a caller is told about an error of the client's; anything unknown says nothing of its inside."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, UnknownModelError):
        return ApiError(404, str(error), kind="invalid_request_error", code="model_not_found", param="model")
    if isinstance(error, RequestError):
        return invalid(str(error), param=error.field or None, code=error.code)
    if isinstance(error, InvalidValueError):
        return invalid(str(error))
    if isinstance(error, IdempotencyConflictError):
        return ApiError(409, str(error), kind="invalid_request_error", code="idempotency_conflict")
    if isinstance(error, UnknownJobError):
        return ApiError(404, str(error), kind="invalid_request_error", code="job_not_found")
    if isinstance(error, TenantLimitError):
        if not error.waiting_helps:
            return invalid(str(error), code=error.code)
        return ApiError(429, str(error), kind=error.what, code="rate_limit_exceeded")
    if isinstance(error, CreationUnknownError):
        return ApiError(
            503,
            f"the service went away while it stored {error.what} {error.id}, which may be there all the same. "
            f"{error.look}",
            kind="server_error",
            code="outcome_unknown",
            repeatable=False,
        )
    if isinstance(error, CommitUnknownError):
        return ApiError(
            503,
            "the service went away while it accepted the request, which may run all the same. Ask again with the "
            "same Idempotency-Key, if it had one",
            kind="server_error",
            code="outcome_unknown",
            repeatable=False,
        )
    if isinstance(error, BrokerUnavailableError | DatabaseError):
        # The message names hosts, which are nobody's business outside.
        return ApiError(
            503, "the service cannot take requests now. Try again", kind="server_error", code="unavailable"
        )
    if isinstance(error, TokenmillError) and not isinstance(error, ConfigurationError):
        return ApiError(500, str(error), kind="server_error", code=error.code)
    return ApiError(500, "an error of ours; it is in the log", kind="server_error", code="internal_error")


def from_end(job_id: str, end: StreamEnd) -> ApiError:
    """Why a job has no answer."""
    message = f"job {job_id}: {end.error_message or end.state}"
    if end.state == "failed" and end.error_type and end.error_type.endswith(_CALLERS_FAULT):
        # The code that OpenAI's callers look for.
        too_long = end.error_type.endswith(PromptTooLongError.__name__)
        return invalid(message, code="context_length_exceeded" if too_long else "request_failed")
    if end.state == "expired":
        return ApiError(408, message, kind="server_error", code="expired")
    if end.state == "cancelled":
        return ApiError(409, message, kind="invalid_request_error", code="cancelled")
    return ApiError(500, message, kind="server_error", code="job_failed")


_CALLERS_FAULT = ("RequestError", "PromptTooLongError", "UnknownModelError", "KVCapacityError")
