"""Lengths of time and moments on the command line: read in one place, with bounds that no date falls out of."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

from backend.api import MAX_DEADLINE_S, RequestError

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0, "w": 604_800.0}
_LENGTH = re.compile(r"(\d{1,15}(?:\.\d{1,9})?)\s*([smhdw]?)", re.ASCII)
_DAY_S = 86_400
_OLDEST_S = 36_500 * _DAY_S  # a hundred years
_YEARS = range(1970, 9000)  # a moment in one of these can be counted on from in either direction


def seconds_of(text: str, option: str) -> float:
    """``90``, ``30s``, ``15m``, ``6h``, ``2d`` or ``1w`` in seconds.

    Raises:
        RequestError: it is none of these, not positive, or more than ten years.
    """
    fix = "Write 90s, 15m, 6h, 2d or 1w"
    return _length(text, option, "smhdw", "is no length of time", fix, MAX_DEADLINE_S)


def age(text: str, option: str) -> timedelta:
    """``12h``, ``90d`` or ``2w`` as a span of time. Not minutes: who deletes by age may mean months by an ``m``.

    Raises:
        RequestError: anything else, or more than a hundred years.
    """
    return timedelta(seconds=_length(text, option, "hdw", "is no age", "Write 12h, 90d or 2w", _OLDEST_S))


def moment(text: str | None, option: str, *, now: datetime | None = None) -> datetime | None:
    """A point in time: an age (``24h`` ago) or an ISO date or time (UTC unless it says otherwise).

    Raises:
        RequestError: neither, or out of the years that can be reckoned with.
    """
    if text is None:
        return None
    if _LENGTH.fullmatch(text.strip()) and text.strip()[-1] in "hdw":
        return (now or datetime.now(UTC)) - age(text, option)
    try:
        parsed = datetime.fromisoformat(text.strip())
    except ValueError:
        fix = "Write an age, 24h or 7d, or a time, 2026-11-29T08:00"
        raise RequestError("is no time", field=option, value=text, fix=fix) from None
    if parsed.year not in _YEARS:
        fix = f"Choose a year from {_YEARS[0]} to {_YEARS[-1]}"
        raise RequestError("is too far away", field=option, value=text, fix=fix)
    return parsed if parsed.tzinfo else parsed.replace(tzinfo=UTC)


def bounded(value: float, option: str, least: float, most: float, unit: str) -> float:
    """The value of an option that is a number already.

    Raises:
        RequestError: it is no number, or beyond its bounds.
    """
    if not least <= value <= most:
        fix = f"Use {least:g} to {most:g} {unit}"
        raise RequestError("is out of range", field=option, value=value, fix=fix)
    return value


def waiting_s(value: float, option: str) -> float:
    """Seconds to wait.

    Raises:
        RequestError: see ``bounded``.
    """
    return bounded(value, option, 0, MAX_DEADLINE_S, "seconds")


def days_of(value: float, option: str) -> float:
    """A number of days into the past, at least a minute or so.

    Raises:
        RequestError: see ``bounded``.
    """
    return bounded(value, option, 0.001, _OLDEST_S / _DAY_S, "days")


def _length(text: str, option: str, units: str, wrong: str, fix: str, most_s: float) -> float:
    match = _LENGTH.fullmatch(text.strip())
    unit = "" if match is None else match[2] or ("s" if "s" in units else "")
    if match is None or unit not in units or not unit or not float(match[1]):
        raise RequestError(wrong, field=option, value=text, fix=fix)
    seconds = float(match[1]) * _UNITS[unit]
    if seconds > most_s:
        most = f"{most_s / _DAY_S:g}d"
        raise RequestError(f"is longer than {most}", field=option, value=text, fix=f"Use at most {most}")
    return seconds
