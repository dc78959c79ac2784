"""How long a client waits, and how often it looks meanwhile."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator
from numbers import Real
from typing import Any

from backend.api import RequestError
from backend.errors import short_repr

_FIRST_POLL_S = 0.01
_LONGEST_POLL_S = 1.0


def check_timeout(timeout_s: float | None) -> float | None:
    """The time to wait, as it was given.

    Raises:
        RequestError: it is no number of seconds.
    """
    given: Any = timeout_s
    if given is None:
        return None
    if isinstance(given, bool) or not isinstance(given, Real) or not _is_a_time(given):
        raise RequestError(
            "is not a number of seconds",
            field="timeout_s",
            value=timeout_s,
            fix="Give a number, or None to wait without an end",
        )
    return timeout_s


def _is_a_time(given: Real) -> bool:
    try:
        return not math.isnan(given)
    except OverflowError:  # more than any clock can count
        return False


def pauses(timeout_s: float | None, job_id: str) -> Iterator[float | None]:
    """Seconds to sleep between looks, growing to one with some spread; ``None`` when the time is over.

    Raises:
        RequestError: ``timeout_s`` is no number of seconds.
    """
    check_timeout(timeout_s)
    spread = random.Random(short_repr(job_id))  # many waiters must not ask in step
    give_up = None if timeout_s is None else time.monotonic() + timeout_s
    pause_s = _FIRST_POLL_S
    while True:
        left = None if give_up is None else give_up - time.monotonic()
        if left is not None and left <= 0:
            yield None
            return
        chosen = pause_s * spread.uniform(0.75, 1.0)
        yield chosen if left is None else min(chosen, left)
        pause_s = min(pause_s * 1.3, _LONGEST_POLL_S)
