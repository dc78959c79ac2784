"""One request inside the engine: its tokens, its blocks and how far it has come."""

from __future__ import annotations

from collections.abc import Sequence as TokenList
from enum import Enum

from backend.api import FinishReason, GenerationHandle, GenerationRequest, SamplingParams, TokenLogprob
from backend.blocks import ROOT_DIGEST, chain_digest


class Status(Enum):
    """Where a sequence is. A preempted sequence waits again."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Sequence:
    """State of one request, owned by the engine thread from submission on.

    Token counts: ``known`` tokens (prompt and retired outputs) are on the host; ``in_flight`` tokens have been
    sampled by a launched step that has not retired. ``num_computed`` tokens have their keys and values in the
    cache, or will have them once the launched steps have run.
    """

    __slots__ = (
        "arrived_at",
        "blocks",
        "cached_tokens",
        "deadline_at",
        "digests",
        "ending_ids",
        "eos_ids",
        "finish_reason",
        "first_scheduled_at",
        "first_token_at",
        "handle",
        "in_flight",
        "logprobs",
        "max_new_tokens",
        "needs_text",
        "num_computed",
        "num_registered",
        "number",
        "output_ids",
        "penalties_ready",
        "preemptions",
        "priority",
        "prompt_ids",
        "request",
        "row",
        "row_filled",
        "sample_index",
        "sampling",
        "seed",
        "status",
        "stop_reason",
    )

    def __init__(
        self,
        request: GenerationRequest,
        handle: GenerationHandle,
        prompt_ids: list[int],
        *,
        number: int,
        seed: int,
        eos_ids: frozenset[int],
        max_new_tokens: int,
        arrived_at: float,
    ) -> None:
        self.request = request
        self.handle = handle
        self.sampling: SamplingParams = request.sampling
        self.priority = request.priority
        self.prompt_ids = prompt_ids
        self.number = number  # submission order
        self.seed = seed
        self.eos_ids = frozenset() if self.sampling.ignore_eos else eos_ids
        self.ending_ids = self.eos_ids | frozenset(self.sampling.stop_token_ids)
        self.needs_text = bool(self.sampling.stop) or request.stream
        self.max_new_tokens = max_new_tokens  # max_tokens, cut at the context limit
        self.arrived_at = arrived_at
        self.deadline_at = None if request.deadline_s is None else arrived_at + request.deadline_s
        self.output_ids: list[int] = []
        self.logprobs: list[TokenLogprob] | None = [] if self.sampling.logprobs is not None else None
        self.status = Status.WAITING
        self.num_computed = 0
        self.num_registered = 0  # leading full blocks that the prefix cache has been told of
        self.in_flight = 0
        self.sample_index = -1  # among the sampled rows of the step that is in flight
        self.row = -1  # row of per-sequence state while running
        self.row_filled = False  # whether that row has been written since admission
        # Whether the device's counts in that row have been rebuilt since admission.
        self.penalties_ready = False
        self.blocks: list[int] = []
        self.digests: list[bytes] = []  # of the full blocks of known tokens, as far as needed
        self.cached_tokens = 0
        self.preemptions = 0
        self.first_scheduled_at: float | None = None
        self.first_token_at: float | None = None
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None

    @property
    def num_known(self) -> int:
        """Tokens whose values the host has."""
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def num_total(self) -> int:
        """Known tokens and those in flight."""
        return len(self.prompt_ids) + len(self.output_ids) + self.in_flight

    def tokens(self, start: int, stop: int) -> list[int]:
        """Known tokens ``start … stop - 1`` of prompt and output."""
        split = len(self.prompt_ids)
        if stop <= split:
            return self.prompt_ids[start:stop]
        if start >= split:
            return self.output_ids[start - split : stop - split]
        return self.prompt_ids[start:] + self.output_ids[: stop - split]

    def extend_digests(self, count: int, block_size: int) -> TokenList[bytes]:
        """Digests of the first ``count`` full blocks; each is computed once in a sequence's life."""
        digests = self.digests
        while len(digests) < count:
            start = len(digests) * block_size
            parent = digests[-1] if digests else ROOT_DIGEST
            digests.append(chain_digest(parent, self.tokens(start, start + block_size)))
        return digests[:count]
