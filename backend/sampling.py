"""Batched sampling: one row of parameters a sequence, every row a pure function of its own inputs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(slots=True)
class SamplingBatch:
    """Parameters of the S rows that sample in one step; tensors live on the sampler's device.

    The flags are host-side shortcuts: a flag that is True without need costs time, one that is False although a
    row needs it is an error of the caller.
    """

    temperature: Tensor  # f32[S]; 0 is greedy
    top_k: Tensor  # i32[S]; 0 keeps all
    top_p: Tensor  # f32[S]; 1 keeps all
    min_p: Tensor  # f32[S]; 0 keeps all
    seed: Tensor  # i64[S]
    output_index: Tensor  # i32[S]; index of the token to be sampled among the sequence's new tokens
    repetition_penalty: Tensor  # f32[S]; 1 is none
    presence_penalty: Tensor  # f32[S]
    frequency_penalty: Tensor  # f32[S]
    penalty_row: Tensor  # i32[S]; row of PenaltyState, -1 for none
    bias_ids: Tensor  # i32[S, Kb]; -1 pads
    bias_values: Tensor  # f32[S, Kb]
    banned_ids: Tensor  # i32[S, Ks]; -1 pads

    any_random: bool = False
    any_top_k: bool = False
    any_top_p: bool = False
    any_min_p: bool = False
    any_penalty: bool = False
    any_bias: bool = False
    any_banned: bool = False
    num_logprobs: int = -1  # most alternatives any row asks for; 0 the sampled token's only, -1 nobody asks


@dataclass(slots=True)
class SampledTokens:
    """What one step sampled. A row whose logits are unusable (NaN, or no finite maximum) has token id -1."""

    token_ids: Tensor  # i64[S]
    logprobs: Tensor | None = None  # f32[S] (f64 for f64 logits)
    top_ids: Tensor | None = None  # i32[S, K]
    top_logprobs: Tensor | None = None  # like logprobs, [S, K]


class PenaltyState:
    """Per-sequence token counts on the device, under a persistent row a sequence; the last row is a dummy."""

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        self.max_rows = max_rows
        self.output_counts = torch.zeros(max_rows + 1, vocab_size, dtype=torch.int32, device=device)
        self.prompt_mask = torch.zeros(max_rows + 1, vocab_size, dtype=torch.bool, device=device)

    def init_row(self, row: int, prompt_ids: Tensor, output_ids: Tensor) -> None:
        """Rebuild ``row`` from a sequence's tokens (i64[...] on the device), in its first sampling step."""
        counts, mask = self.output_counts[row], self.prompt_mask[row]
        counts.zero_()
        mask.zero_()
        mask.index_fill_(0, prompt_ids, True)
        counts.index_add_(0, output_ids, torch.ones_like(output_ids, dtype=torch.int32))

    def observe(self, rows: Tensor, sampled: Tensor) -> None:
        """Count one sampled token a row (i32[S], i64[S]); rows of -1 and tokens of -1 are not counted."""
        target = torch.where((rows < 0) | (sampled < 0), self.max_rows, rows).long()
        ones = torch.ones_like(sampled, dtype=torch.int32)
        self.output_counts.index_put_((target, sampled.clamp(min=0)), ones, accumulate=True)

    def bytes(self) -> int:
        """Device memory held."""
        return self.output_counts.nbytes + self.prompt_mask.nbytes


class Sampler:
    """Turns logits into tokens. ``sample`` counts the tokens into ``penalties`` itself."""

    def __init__(self, vocab_size: int, device: torch.device, penalties: PenaltyState | None = None) -> None:
        self.vocab_size = vocab_size
        self.device = device
        self.penalties = penalties

    def sample(self, logits: Tensor, batch: SamplingBatch) -> SampledTokens:
        """Sample one token for each row of ``logits`` (S, V)."""
        peak = logits.amax(dim=-1)
        token_ids = torch.where(peak.isfinite(), logits.argmax(dim=-1), -1)
        return SampledTokens(token_ids)
