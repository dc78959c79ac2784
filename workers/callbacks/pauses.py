"""A pause that doubles with each failure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Pause:
    """Of a host that does not answer well, as a whole, beside the pauses of its callbacks; or of a batch."""

    failures: int = 0
    until: float = 0.0

    def lengthen(self, now: float, first_s: float, longest_s: float, asked_s: float = 0.0) -> float:
        """One more failure: pause from now on, twice as long as before; for how long."""
        self.failures += 1
        pause_s = min(max(first_s * 2.0 ** min(self.failures - 1, 10), asked_s), longest_s)
        self.until = now + pause_s
        return pause_s
