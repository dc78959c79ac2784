"""What the jobs of a chaos run ask for, and the one right answer to each: the echo is a function of the prompt."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

ENDED_WELL = frozenset({"succeeded"})
CANCELLABLE = frozenset({"succeeded", "cancelled"})
FAILS = frozenset({"failed"})


def echo(prompt: str, max_tokens: int) -> str:
    """What the backend ``echo`` answers."""
    words = prompt.split()
    return " ".join(words[index % len(words)] for index in range(max_tokens))


@dataclass(slots=True)
class Expected:
    """How a job may end. ``text`` is what a success must say; a cancelled one may have said a part of it."""

    text: str | None
    states: frozenset[str] = ENDED_WELL
    kills: bool = False  # meant to end the process that runs it

    def complaint(self, state: str, text: str | None) -> str | None:
        """What is wrong with this end, if anything."""
        if state not in self.states:
            return f"is {state} and not {' or '.join(sorted(self.states))}"
        if self.text is None or state not in ("succeeded", "cancelled"):
            return None
        if state == "succeeded" and text != self.text:
            return f"said {text!r:.60} and not {self.text!r:.60}"
        if text is not None and not self.text.startswith(text):
            return f"said {text!r:.60}, which does not begin {self.text!r:.60}"
        return None


def request(rng: random.Random, number: int, *, longest: int) -> dict[str, Any]:
    """A request of a size that work has: most are short, some are long, some very long (up to ``longest`` tokens)."""
    share = rng.random()
    if share < 0.6:
        tokens = rng.randint(1, max(2, longest // 25))
    elif share < 0.9:
        tokens = rng.randint(longest // 25, max(2, longest // 3))
    else:
        tokens = rng.randint(longest // 2, longest)
    words = [f"job{number}", *(f"w{rng.randrange(1000)}" for _ in range(rng.randint(1, 12)))]
    return {"prompt": " ".join(words), "max_tokens": tokens, "priority": rng.choice((0, 3, 3, 6, 6, 6))}
