"""The payload as JSON Schema, for other languages and for editors: what a schema accepts, a worker accepts.

Pydantic writes what the fields' types and bounds say. What validators hold beside that is added here, as far as a
schema can say it; ``docs/payload.md`` names the rest.
"""

from __future__ import annotations

from typing import Any

from backend.api import MAX_STOP_STRINGS
from workers.payload import MAX_STOP_CHARS, GeneratePayload

_NO_NUL = {"pattern": "^[^\\u0000]*$"}
_STOP = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS, **_NO_NUL}
_FORMS = ("prompt", "messages", "token_ids")


def payload_schema() -> dict[str, Any]:
    """The schema (draft 2020-12) of the one argument of the Celery task."""
    schema = GeneratePayload.model_json_schema()
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["description"] = "The one argument of the Celery task tokenmill.generate."
    fields = schema["properties"]
    for name in ("model", "prompt", "tenant", "custom_id"):
        fields[name] |= _NO_NUL
    for name in ("role", "content"):
        schema["$defs"]["ChatMessage"]["properties"][name] |= _NO_NUL
    fields["prompt"] |= {"minLength": 1}
    for name in ("messages", "token_ids"):
        fields[name] |= {"minItems": 1}
    stop = fields["stop"]
    del stop["type"], stop["items"], stop["maxItems"]
    stop["anyOf"] = [_STOP, {"type": "array", "items": _STOP, "maxItems": MAX_STOP_STRINGS}]
    fields["logit_bias"] |= {
        "propertyNames": {"pattern": "^[0-9]{1,9}$"},
        "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
    }
    schema["oneOf"] = [_given(name) for name in _FORMS]
    schema["if"] = {
        "properties": {"callback_include_output": {"const": True}},
        "required": ["callback_include_output"],
    }
    schema["then"] = _given("callback_url")
    return schema


def _given(name: str) -> dict[str, Any]:
    """The field is there, and is not null."""
    return {"required": [name], "properties": {name: {"not": {"type": "null"}}}}
