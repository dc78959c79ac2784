"""When a sequence ends, and what its output is then. Plain Python, without torch; any one thread a sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from backend.api import FinishReason, RequestError, TokenLogprob
from backend.detokenizer import IncrementalDetokenizer, TextDecoder, Tokenizer

__all__ = [
    "AssembledPiece",
    "Finish",
    "IncrementalDetokenizer",
    "MatcherStep",
    "OutputAssembler",
    "StopCriteria",
    "StopStringMatcher",
    "TextDecoder",
]


class Finish(NamedTuple):
    """Why a sequence ended, and the stop string or token id that ended it."""

    reason: FinishReason
    stop_reason: str | int | None = None


@dataclass(frozen=True, slots=True)
class StopCriteria:
    """The token-level rules of one sequence.

    While fewer than ``min_tokens`` tokens exist, the ``ending_ids`` are masked on the device, so the first that can
    end a sequence is token number ``min_tokens + 1``, as with transformers' ``min_new_tokens``. A stop string counts
    from token number ``min_tokens`` on; one that is complete earlier is ordinary text.
    """

    max_new: int  # the length limit, the context limit included
    eos_ids: frozenset[int] = frozenset()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    min_tokens: int = 0

    @property
    def ending_ids(self) -> frozenset[int]:
        """Token ids that end the sequence."""
        return self.stop_token_ids if self.ignore_eos else self.stop_token_ids | self.eos_ids

    def check_token(self, token_id: int, output_index: int) -> Finish | None:
        """Whether the token ``output_index`` (from 0) ends the sequence. A stop wins over the length limit."""
        ends = token_id in self.stop_token_ids or (not self.ignore_eos and token_id in self.eos_ids)
        if ends and output_index >= self.min_tokens:
            return Finish(FinishReason.STOP, token_id)
        return Finish(FinishReason.LENGTH) if output_index + 1 >= self.max_new else None


class _Automaton:
    """Knuth-Morris-Pratt: the state is the length of the longest beginning of ``pattern`` that ends the text."""

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.state = 0
        self._failure = [0] * (len(pattern) + 1)  # state -> the next shorter one that also ends the text
        length = 0
        for i in range(1, len(pattern)):
            while length and pattern[i] != pattern[length]:
                length = self._failure[length]
            length += pattern[i] == pattern[length]
            self._failure[i + 1] = length

    def step(self, state: int, char: str) -> int:
        if state == len(self.pattern):
            state = self._failure[state]
        while state and char != self.pattern[state]:
            state = self._failure[state]
        return state + (char == self.pattern[state])

    @property
    def overlap(self) -> int:
        """Length of the text's end that a later match could begin with."""
        return self.state if self.state < len(self.pattern) else self._failure[self.state]


class MatcherStep(NamedTuple):
    """Text that may be shown now, and the stop string that ends the sequence here, if one does."""

    text: str
    stop: str | None = None


class StopStringMatcher:
    """Finds stop strings in text that arrives in pieces, also across their borders.

    The stop string that is complete first wins, the longest of those that end together; so the cut does not depend
    on how the text is divided into tokens. Text that could be the beginning of a stop string is held back.
    """

    def __init__(self, stops: Sequence[str], min_tokens: int = 0) -> None:
        self._automata = [_Automaton(stop) for stop in stops]
        self._min_tokens = min_tokens
        self._held = ""  # the certain text's end, not shown
        self._seen_pending = ""

    def push(self, piece: str, token_count: int, pending: str = "") -> MatcherStep:
        """Take the text that one token made certain.

        Args:
            piece: certain text that follows all earlier pieces.
            token_count: number of tokens so far, this one included. With ``min_tokens`` or more, a stop string
                that is complete now ends the sequence, and this token is its last.
            pending: what would follow if the sequence ended here. A stop string in it counts, for then it does end
                here; otherwise it comes again, changed or not, in a later piece or pending text.

        Returns:
            On a match the text before the stop string, which is dropped with all that follows it.
        """
        text = self._held + piece + pending
        start, certain = len(self._held), len(self._held) + len(piece)
        # A stop string that was complete in an earlier pending text was looked at then, and came too early.
        fresh = start + _common_prefix(self._seen_pending, text[start:])
        counts = token_count >= self._min_tokens
        states = [automaton.state for automaton in self._automata]
        for position in range(start, len(text)):
            found = ""
            for i, automaton in enumerate(self._automata):
                states[i] = automaton.step(states[i], text[position])
                if states[i] == len(automaton.pattern) > len(found):
                    found = automaton.pattern
            if found and counts and position >= fresh:
                self._held = ""
                return MatcherStep(text[: position + 1 - len(found)], found)
            if position == certain - 1:
                for automaton, state in zip(self._automata, states, strict=True):
                    automaton.state = state
        self._seen_pending = pending
        shown = certain - max((automaton.overlap for automaton in self._automata), default=0)
        self._held = text[shown:certain]
        return MatcherStep(text[:shown])

    def flush(self) -> str:
        """What is held back, when the sequence ended for another reason."""
        held, self._held = self._held, ""
        return held


def _common_prefix(a: str, b: str) -> int:
    length = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        length += 1
    return length


class AssembledPiece(NamedTuple):
    """What one token added to the output: text that will not change, the tokens up to it, and the end, if it is one.

    All pieces of a sequence joined are its text and its tokens.
    """

    text: str
    token_ids: tuple[int, ...]
    finish: Finish | None = None


class OutputAssembler:
    """Tokens, log-probabilities and text of one sequence, in agreement about where it ends.

    ``push`` once a token until ``finish`` is set, or ``end`` early (cancel, deadline). A stop string is cut from the
    text and all its tokens are kept. A token id that ends the sequence is kept, and has no text.

    Without a stream and without stop strings the text is decoded once, at the end.
    """

    def __init__(
        self,
        tokenizer: TextDecoder | Tokenizer | None,
        criteria: StopCriteria,
        stops: Sequence[str] = (),
        *,
        stream: bool = False,
    ) -> None:
        """Start a sequence.

        Args:
            tokenizer: the model's ``TextDecoder`` (best: it is made once), or its tokenizer; None: there is no text.
            criteria: the token-level rules.
            stops: strings that end the sequence.
            stream: whether pieces are looked at as they come.

        Raises:
            RequestError: stop strings are given without a tokenizer.
        """
        if stops and tokenizer is None:
            raise RequestError(
                "stop strings need a tokenizer, and this model is loaded without one",
                field="stop",
                value=tuple(stops),
                fix="Use stop_token_ids",
            )
        self.criteria = criteria
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.finish: Finish | None = None
        decoder = tokenizer
        if decoder is not None and not isinstance(decoder, TextDecoder):
            decoder = TextDecoder(decoder)
        self._decoder = decoder
        self._detokenizer = IncrementalDetokenizer(decoder) if decoder and (stream or stops) else None
        self._matcher = StopStringMatcher(stops, criteria.min_tokens) if stops else None
        self._parts: list[str] = []
        self._reported = 0  # tokens that were part of a piece

    @property
    def text(self) -> str:
        """The text so far; the whole of it once ``finish`` is set."""
        return "".join(self._parts)

    def push(self, token_id: int, logprob: TokenLogprob | None = None) -> AssembledPiece:
        """Take the next token.

        Raises:
            ValueError: the sequence has ended already.
        """
        if self.finish:
            raise ValueError(f"token {token_id} comes after the end of its sequence ({self.finish.reason})")
        self.token_ids.append(token_id)
        if logprob is not None:
            self.logprobs.append(logprob)
        self.finish = self.criteria.check_token(token_id, len(self.token_ids) - 1)
        if self.finish and self.finish.reason is FinishReason.STOP:
            return self._piece(self._rest(without_last=True))
        text = self._feed(self._detokenizer.push(token_id)) if self._detokenizer else ""
        if self.finish and self.finish.reason is FinishReason.LENGTH:
            text += self._rest()
        return self._piece(text)

    def end(self, reason: FinishReason) -> AssembledPiece:
        """End here, with all that was held back; without effect on a sequence that has ended."""
        if self.finish:
            return AssembledPiece("", (), self.finish)
        self.finish = Finish(reason)
        return self._piece(self._rest())

    def _feed(self, certain: str) -> str:
        """Send certain text through the stop strings; a match sets ``finish``."""
        if self._matcher is None or self._detokenizer is None:
            return certain
        text, stop = self._matcher.push(certain, len(self.token_ids), self._detokenizer.pending)
        if stop is not None:
            self.finish = Finish(FinishReason.STOP, stop)
        return text

    def _rest(self, *, without_last: bool = False) -> str:
        """All text that is not out yet, at the end of the sequence."""
        if self._detokenizer is None:
            shown = self.token_ids[:-1] if without_last else self.token_ids
            return self._decoder.decode(shown) if self._decoder else ""
        ended = self.finish
        text = self._feed(self._detokenizer.flush())
        if self._matcher and self.finish is ended:
            text += self._matcher.flush()
        return text

    def _piece(self, text: str) -> AssembledPiece:
        if text:
            self._parts.append(text)
        if not (text or self.finish or self._decoder is None):
            return AssembledPiece("", ())
        token_ids = tuple(self.token_ids[self._reported :])
        self._reported = len(self.token_ids)
        return AssembledPiece(text, token_ids, self.finish)
