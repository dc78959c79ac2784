"""The intervals in which the roll-ups count times: twelve to a decade, from a millisecond to eleven days.

A percentile read from the counts is the upper end of its interval: from 10 ms on at most a quarter above the true
value.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Any

from sqlalchemy import FunctionElement, Integer
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.compiler import SQLCompiler

_STEPS = (
    1.0,
    1.2,
    1.5,
    1.8,
    2.2,
    2.7,
    3.3,
    3.9,
    4.7,
    5.6,
    6.8,
    8.2,
)  # the E12 series: ratios of at most 1.25

BOUNDS_MS: tuple[int, ...] = (
    *dict.fromkeys(round(step * 10**decade) for decade in range(9) for step in _STEPS),
    10**9,
)
"""Upper ends in milliseconds, ascending."""

BEYOND_MS = 2 * 10**9
"""Stands for everything above the last bound."""


class Metric(StrEnum):
    """Which time of a job: all of them begin when it is handed to the engine."""

    LATENCY = "latency"  # to its end
    FIRST_TOKEN = "first_token"
    QUEUE = "queue"  # to its first step


class upper_ms(FunctionElement[int]):  # noqa: N801 - reads as a SQL function
    """The upper end of the interval that a time in seconds falls into, as SQL: a search by halves."""

    type = Integer()
    inherit_cache = True


@compiles(upper_ms)
def _upper_ms(element: upper_ms, compiler: SQLCompiler, **kw: Any) -> str:
    # Written as text: as an expression of hundreds of parts it would cost more to build than the roll-up to run.
    seconds = ", ".join(compiler.process(clause, **kw) for clause in element.clauses)

    def search(bounds: Sequence[int]) -> str:
        if len(bounds) == 1:
            return str(bounds[0])
        middle = len(bounds) // 2
        lower, upper = search(bounds[:middle]), search(bounds[middle:])
        return f"CASE WHEN {seconds} <= {bounds[middle - 1] / 1000!r} THEN {lower} ELSE {upper} END"

    return search((*BOUNDS_MS, BEYOND_MS))
