"""The course of a number over time: every hour between the first and the last, as a line of bars."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from models_db.queries import ThroughputRow

_BARS = "▁▂▃▄▅▆▇█"
_STEPS = {
    "hour": (timedelta(hours=1), "%Y-%m-%d %H:%M"),
    "day": (timedelta(days=1), "%Y-%m-%d"),
    "night": (timedelta(days=1), "%Y-%m-%d"),
}
TIMES = tuple(_STEPS)


def over_time(rows: Sequence[ThroughputRow], by: str) -> list[tuple[str, ThroughputRow | None]]:
    """Every hour, day or night from the first row's to the last one's, with its row where a job ended in it."""
    if not rows:
        return []
    step, form = _STEPS[by]
    known = {row.key: row for row in rows}
    first, last = (datetime.strptime(row.key, form) for row in (rows[0], rows[-1]))
    keys = [(first + number * step).strftime(form) for number in range((last - first) // step + 1)]
    return [(key, known.get(key)) for key in keys]


def panels(rows: Sequence[ThroughputRow | None]) -> dict[str, dict[str, list[float | None]]]:
    """What there is to draw: titles, and under each of them named series. Where no job ended, no token was made."""
    return {
        "new tokens a second": {"tok/s": [0.0 if row is None else row.tokens_per_s for row in rows]},
        "latency, seconds": {
            "p50": [None if row is None else row.latency_p50_s for row in rows],
            "p95": [None if row is None else row.latency_p95_s for row in rows],
        },
        "share of the time that devices computed": {
            "active": [None if row is None else row.active_fraction for row in rows]
        },
    }


def sparkline(values: Sequence[float | None], width: int | None = None) -> str:
    """A bar for each value, from zero to the largest, which is named; a gap where there is none.

    Args:
        width: columns for it all, where there is no more room: a bar then stands for the highest of several values.
    """
    top = max((value for value in values if value is not None), default=0.0)
    end = f"  up to {top:,.0f}" if top >= 1000 else f"  up to {top:.4g}"
    if width is not None and len(values) + len(end) > width:
        end = f", the highest of {{}} a bar{end}"
        room = max(1, width - len(end) - 3)
        fold = -(-len(values) // room)
        values = [_highest(values[start : start + fold]) for start in range(0, len(values), fold)]
        end = end.format(fold)
    return "".join(_bar(value, top) for value in values) + end


def _highest(values: Sequence[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


def _bar(value: float | None, top: float) -> str:
    if value is None:
        return " "
    return _BARS[min(len(_BARS) - 1, int(value / top * len(_BARS))) if top else 0]
