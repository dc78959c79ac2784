"""What pydantic finds wrong with a value, in words for people: what it must be, and what to do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pydantic_core import PydanticKnownError

_Words = tuple[str, str]

_WHOLE: _Words = ("must be a whole number", "Use a whole number")
_NUMBER: _Words = ("must be a number", "Use a number")
_TEXT: _Words = ("must be text", "Give a string")
_LIST: _Words = ("must be a list", "Give a list")
_OBJECT: _Words = ("must be an object", "Give an object with named fields")
_BOOL: _Words = ("must be true or false", "Use true or false")

_TYPES: dict[str, _Words] = {
    "string_type": _TEXT,
    "string_unicode": ("holds what is no character", "Decode the text as UTF-8 before"),
    "int_type": _WHOLE,
    "int_parsing": _WHOLE,
    "int_parsing_size": _WHOLE,
    "int_from_float": _WHOLE,
    "float_type": _NUMBER,
    "float_parsing": _NUMBER,
    "finite_number": ("must be a finite number", "Use a finite number"),
    "bool_type": _BOOL,
    "bool_parsing": _BOOL,
    "tuple_type": _LIST,
    "list_type": _LIST,
    "dict_type": _OBJECT,
    "mapping_type": _OBJECT,
    "model_type": _OBJECT,
    "model_attributes_type": _OBJECT,
    "missing": ("required field is missing", "Add it"),
    "extra_forbidden": ("unknown field", "Remove it or correct its spelling"),
    "invalid_key": ("holds a key that is no text", "Use text for keys"),
}
_BOUNDS: dict[str, Callable[[Mapping[str, Any]], _Words]] = {
    "greater_than_equal": lambda ctx: (
        f"must be at least {_plain(ctx['ge'])}",
        f"Use {_plain(ctx['ge'])} or more",
    ),
    "less_than_equal": lambda ctx: (
        f"must be at most {_plain(ctx['le'])}",
        f"Use {_plain(ctx['le'])} or less",
    ),
    "greater_than": lambda ctx: (f"must be above {_plain(ctx['gt'])}", f"Use more than {_plain(ctx['gt'])}"),
    "less_than": lambda ctx: (f"must be below {_plain(ctx['lt'])}", f"Use less than {_plain(ctx['lt'])}"),
    "literal_error": lambda ctx: (f"must be {ctx['expected']}", f"Use {ctx['expected']}"),
    "string_too_short": lambda ctx: _least(ctx["min_length"], "character"),
    "string_too_long": lambda ctx: _most(ctx["max_length"], "character"),
    "too_short": lambda ctx: _least(ctx["min_length"], "item"),
    "too_long": lambda ctx: _most(ctx["max_length"], "item"),
}


def complaint(error: Mapping[str, Any]) -> _Words:
    """What is wrong with the value that pydantic's ``error`` is about, and what to do."""
    kind, ctx = error["type"], error.get("ctx", {})
    if kind in _TYPES:
        wrong, fix = _TYPES[kind]
        return (f"{wrong}, not null" if error.get("input", "") is None else wrong), fix
    if kind in _BOUNDS:
        return _BOUNDS[kind](ctx)
    message = error["msg"].removeprefix("Value error, ")
    if message.startswith("Input should "):
        return message.replace("Input should ", "must ", 1), "Correct it"
    return f"{message[:1].lower()}{message[1:]}", "Correct it"


def refuse_truth(value: object) -> object:
    """A number as it came, or a mapping to numbers; pydantic alone would take JSON's ``true`` for 1.

    Raises:
        PydanticKnownError: it is, or holds, true or false.
    """
    if any(isinstance(each, bool) for each in (value.values() if isinstance(value, Mapping) else (value,))):
        raise PydanticKnownError("float_type")
    return value


def _least(count: int, unit: str) -> _Words:
    if count == 1:
        return "must not be empty", f"Give at least one {unit}"
    return f"must have at least {count} {unit}s", f"Give {count} or more"


def _most(count: int, unit: str) -> _Words:
    return f"has more than {count:,} {unit}s", f"Use at most {count:,}"


def _plain(bound: float) -> str:
    return str(int(bound)) if float(bound).is_integer() else str(bound)
