"""What Tokenmill raises on purpose. Every message names the field, the value and the fix; callers find all of it in
``backend.api``."""

from __future__ import annotations

from pydantic import ValidationError

from backend.complaints import complaint


class TokenmillError(Exception):
    """Root of every error that Tokenmill raises on purpose. ``code`` is stable and machine-readable."""

    code = "error"


class RequestError(TokenmillError):
    """One bad request; it fails alone and nothing else in flight is disturbed.

    ``field`` names the offending part, ``value`` is a short rendering of what was given (never a whole prompt; empty
    where there is none to show) and ``fix`` says what to do about it.
    """

    code = "invalid_request"

    def __init__(self, message: str, *, field: str = "", value: object = None, fix: str = "") -> None:
        self.field = field
        self.value = "" if value is None else short_repr(value)
        self.fix = fix
        parts = [f"{field}: {message}" if field else message]
        if value is not None:
            parts.append(f"(got {self.value})")
        text = " ".join(parts)
        super().__init__(f"{text}. {fix}" if fix else text)

    def to_dict(self) -> dict[str, str]:
        """The error as JSON-safe fields: code, message, field, value, fix."""
        return {
            "code": self.code,
            "message": str(self),
            "field": self.field,
            "value": self.value,
            "fix": self.fix,
        }


class PromptTooLongError(RequestError):
    """The prompt leaves no room for a single new token within the model's context."""

    code = "prompt_too_long"


class KVCapacityError(RequestError):
    """The request could never fit the key/value cache, even alone."""

    code = "kv_capacity"


class UnknownModelError(RequestError):
    """The named model is not one that is configured here."""

    code = "unknown_model"


class QueueFullError(RequestError):
    """The backend's waiting queue is at its configured limit."""

    code = "queue_full"


class ConfigurationError(TokenmillError):
    """A setting is wrong or something the configuration asks for is missing."""

    code = "configuration"


class UnsupportedModelError(ConfigurationError):
    """The model's architecture, weights or attention layout cannot be run correctly by this engine."""

    code = "unsupported_model"


class EngineDeadError(TokenmillError):
    """The engine met a fault that it cannot continue from; every request in flight is told so."""

    code = "engine_dead"


def short_repr(value: object, limit: int = 80) -> str:
    """A value for people: what Python writes for it, cut short, or its type where Python can write nothing."""
    try:
        text = repr(value)
    except Exception:  # nested too deeply, or a number with more digits than Python writes
        text = f"<{type(value).__name__}>"
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def request_error_from(exc: ValidationError, *, prefix: str = "") -> RequestError:
    """Turn pydantic's first complaint into a ``RequestError`` that names the field, the value and the fix."""
    first = exc.errors(include_url=False)[0]
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, RequestError):
        return cause
    path = ".".join(str(part) for part in first["loc"] if part != "[key]")
    wrong, fix = complaint(first)
    value = None if first["type"] == "missing" else first["input"]
    return RequestError(wrong, field=f"{prefix}{path}", value=value, fix=fix)
