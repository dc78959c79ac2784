"""When a sequence ends, and the text that its tokens stand for. Plain Python: runs on any thread, without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from backend.api import FinishReason, TokenLogprob


class Tokenizer(Protocol):
    """What is needed of a transformers tokenizer."""

    @property
    def all_special_ids(self) -> list[int]: ...

    def decode(
        self, token_ids: list[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool
    ) -> str: ...


class Finish(NamedTuple):
    """Why a sequence ended, and the stop string or token id that ended it."""

    reason: FinishReason
    stop_reason: str | int | None = None


class AssembledPiece(NamedTuple):
    """What one token added: text that will not change any more, the tokens behind it, and the end, if it is one."""

    text: str
    token_ids: tuple[int, ...]
    finish: Finish | None = None


@dataclass(frozen=True, slots=True)
class StopCriteria:
    """The token-level rules of one sequence. ``max_new`` is the length limit, context limit included."""

    max_new: int
    eos_ids: frozenset[int] = frozenset()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    min_tokens: int = 0

    @property
    def ending_ids(self) -> frozenset[int]:
        """Token ids that end the sequence."""
        return self.stop_token_ids if self.ignore_eos else self.stop_token_ids | self.eos_ids

    def banned_ids(self, output_index: int) -> frozenset[int]:
        """Token ids to mask on the device when the token ``output_index`` (from 0) is sampled."""
        return self.ending_ids if output_index < self.min_tokens else frozenset()

    def check_token(self, token_id: int, output_index: int) -> Finish | None:
        """Whether the token at ``output_index`` (from 0) ends the sequence. A stop wins over the length limit."""
        if output_index >= self.min_tokens and token_id in self.ending_ids:
            return Finish(FinishReason.STOP, token_id)
        if output_index + 1 >= self.max_new:
            return Finish(FinishReason.LENGTH)
        return None


class OutputAssembler:
    """Tokens, log-probabilities and text of one sequence, kept in agreement about where it ends.

    ``push`` once a token until a piece has ``finish``; ``end`` finishes early (cancel, deadline).
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        criteria: StopCriteria,
        stops: tuple[str, ...] = (),
        *,
        stream: bool = False,
    ) -> None:
        self.criteria = criteria
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.text = ""
        self.finish: Finish | None = None

    def push(self, token_id: int, logprob: TokenLogprob | None = None) -> AssembledPiece:
        """Take the next token."""
        self.token_ids.append(token_id)
        if logprob is not None:
            self.logprobs.append(logprob)
        self.finish = self.criteria.check_token(token_id, len(self.token_ids) - 1)
        return AssembledPiece("", (token_id,), self.finish)

    def end(self, reason: FinishReason) -> AssembledPiece:
        """End early; releases what was held back."""
        self.finish = Finish(reason)
        return AssembledPiece("", (), self.finish)
