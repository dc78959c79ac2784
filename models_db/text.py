"""Text that every database can hold."""

from __future__ import annotations

import re

from models_db.errors import InvalidValueError

_UNSTORABLE = re.compile("[\x00\ud800-\udfff]")
REPLACEMENT = "\ufffd"


def clean_text(text: str) -> str:
    """``text`` with NUL and lone surrogates replaced by U+FFFD.

    PostgreSQL refuses NUL and no database takes a lone surrogate. A model may generate either; its answer is
    stored alike everywhere rather than lost on one of them.
    """
    return _UNSTORABLE.sub(REPLACEMENT, text)


def clip(text: str | None, length: int) -> str | None:
    """Cleaned ``text``, cut to ``length`` characters."""
    return None if text is None else clean_text(text)[:length]


def check_name(field: str, value: str | None, length: int) -> None:
    """Refuse an id or name that some database would refuse, cut or confuse with another.

    Raises:
        InvalidValueError: empty, longer than ``length`` characters, or with NUL or a lone surrogate in it.
    """
    if value is None or (0 < len(value) <= length and value.isascii() and value.isprintable()):
        return  # nearly every one
    if not value:
        raise InvalidValueError(field, "must not be empty", fix="Leave it out or give it a value")
    if len(value) > length:
        raise InvalidValueError(
            field,
            f"has {len(value)} characters, more than the {length} that fit",
            value=f"{value[:40]!r}…",
            fix="Shorten it",
        )
    if match := _UNSTORABLE.search(value):
        raise InvalidValueError(
            field,
            f"contains U+{ord(match.group()):04X} at position {match.start()}, which databases cannot store",
            fix="Remove it",
        )
