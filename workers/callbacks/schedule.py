"""What an answer to a callback means: it is done, it is tried again then, or it is given up."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from enum import StrEnum

FIRST_PAUSE_S = 5.0
LONGEST_PAUSE_S = 3600.0
FEW_TRIES = 5  # so many times a receiver may say that the request itself is not wanted


class Verdict(StrEnum):
    """What becomes of a callback after a try."""

    DELIVERED = "delivered"
    RETRY = "retry"
    GIVE_UP = "give up"


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of one try: a status, or the reason why there is none.

    Args:
        retry_after_s: as the receiver asked for.
        refused: our own rules forbid it. Another answer of the DNS, or a sender with other settings, may fare better.
    """

    status: int | None = None
    error: str = ""
    retry_after_s: float | None = None
    refused: bool = False

    @property
    def text(self) -> str:
        """For people."""
        if self.status is None:
            return self.error
        redirect = ": redirects are not followed" if 300 <= self.status < 400 else ""
        return f"HTTP {self.status}{redirect}"

    @property
    def unwanted(self) -> bool:
        """Whether the receiver says no, so that the same request will hardly fare better: 3xx, and most of 4xx."""
        return self.status is not None and 300 <= self.status < 500 and self.status not in (408, 425, 429)


@dataclass(frozen=True, slots=True)
class Decision:
    """A verdict; ``pause_s`` until the next try."""

    verdict: Verdict
    pause_s: float = 0.0


def decide(
    answer: Answer,
    tries: int,
    age_s: float,
    max_age_s: float,
    uniform: Callable[[float, float], float] = random.uniform,
    *,
    unwanted: int = 0,
) -> Decision:
    """What to do after try number ``tries``, ``age_s`` after the end that is to be told.

    ``unwanted`` tries before were answered with a no. Only those count towards ``FEW_TRIES``: a receiver that was down
    for long, or tries of senders that died, must not use them up.

    Pauses double from five seconds up to an hour, each shortened at random by up to a half, so that what failed
    together does not come back together. ``Retry-After`` lengthens them, up to an hour.
    """
    if answer.status is not None and 200 <= answer.status < 300:
        return Decision(Verdict.DELIVERED)
    if answer.status == 410 or (answer.unwanted and unwanted + 1 >= FEW_TRIES):
        return Decision(Verdict.GIVE_UP)
    longest = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(tries - 1, 20))
    pause_s = uniform(longest / 2, longest)
    if answer.retry_after_s is not None:
        pause_s = max(pause_s, min(answer.retry_after_s, LONGEST_PAUSE_S))
    if age_s + pause_s > max_age_s:
        return Decision(Verdict.GIVE_UP)
    return Decision(Verdict.RETRY, pause_s)


def retry_after(value: str | None, now: datetime) -> float | None:
    """Seconds that the header ``Retry-After`` asks for, as a number or a date; ``None`` where it says neither."""
    if value is None:
        return None
    text = value.strip()
    if text.isascii() and text.isdigit():
        return float(text[:9])
    try:
        then = parsedate_to_datetime(text)
        then = then.replace(tzinfo=UTC) if then.tzinfo is None else then
        return max(0.0, (then - now).total_seconds())
    except (ValueError, TypeError, IndexError, OverflowError):  # all that its parser lets through
        return None
