"""Everything of a step that runs on the compute stream: carry-over, forward pass, logits, sampling."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch

from backend.attention.interface import STEP_ARGUMENT, AttentionKernel, PagedStep
from backend.kv_cache import KVCache
from backend.row_params import RowParam
from backend.sampling import PenaltyState, Sampler, SamplingBatch
from backend.slots import Slot, StepInputs, StepShape


class Runner(Protocol):
    """Computes a step. The engine core knows no more of the model than this."""

    def execute(self, slot: Slot, previous: Slot | None) -> None:
        """Compute the step that is in ``slot`` and store its outcome there.

        ``previous`` is the slot whose step has not retired yet, from which tokens are carried over. Called within
        the compute stream's context; must not block.
        """


class StepForward(Protocol):
    """A way to get from tokens to logits over the paged cache."""

    # Whether its kernels start while the one before them ends (programmatic dependent launch).
    early_launch: bool

    def __call__(
        self,
        tokens: torch.Tensor,
        inputs: StepInputs,
        shape: StepShape,
        cache: KVCache,
        output: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Logits ``[S, vocabulary]`` of ``inputs.sample_tokens``; ``tokens`` is int32 ``[T]``.

        Written to ``output``, if given, of the model's type.
        """


class ModuleForward:
    """The model's own modules, with our attention.

    The model computes its own head (``logits_to_keep``), so that scaling and soft caps of logits are its affair.
    """

    early_launch = False

    def __init__(self, model: Any, kernel: AttentionKernel) -> None:
        self._model = model
        self._kernel = kernel

    @torch.inference_mode()
    def __call__(
        self,
        tokens: torch.Tensor,
        inputs: StepInputs,
        shape: StepShape,
        cache: KVCache,
        output: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See ``StepForward``."""
        result = self._model(
            input_ids=tokens.unsqueeze(0),
            position_ids=inputs.positions.unsqueeze(0),
            use_cache=False,
            logits_to_keep=inputs.sample_tokens,
            **{STEP_ARGUMENT: PagedStep(cache, self._kernel, inputs, shape)},
        )
        logits: torch.Tensor = result.logits[0]
        return logits if output is None else output.copy_(logits)


def sampling_batch(inputs: StepInputs, shape: StepShape) -> SamplingBatch:
    """The parameters of a step's rows as the reference sampler takes them; call it once they are on the device."""
    count = shape.params.shape[1]
    ints = inputs.params[:, :count]
    floats = ints.view(torch.float32)
    host = shape.params
    any_random = bool(host[RowParam.TEMPERATURE].any())
    host_floats = host.view(np.float32)
    borders = host[[RowParam.BIAS_START, RowParam.BAN_START, RowParam.LIST_END]]
    bias_width, ban_width = (int(n) for n in np.diff(borders, axis=0).max(axis=1, initial=0))
    bias_ids, bias_values = _padded(
        inputs.lists, ints[RowParam.BIAS_START], ints[RowParam.BAN_START], bias_width
    )
    banned_ids, _ = _padded(inputs.lists, ints[RowParam.BAN_START], ints[RowParam.LIST_END], ban_width)
    return SamplingBatch(
        temperature=floats[RowParam.TEMPERATURE],
        top_k=ints[RowParam.TOP_K],
        top_p=floats[RowParam.TOP_P],
        min_p=floats[RowParam.MIN_P],
        seed=inputs.seeds[:count],
        output_index=ints[RowParam.OUTPUT_INDEX],
        repetition_penalty=floats[RowParam.REPETITION_PENALTY],
        presence_penalty=floats[RowParam.PRESENCE_PENALTY],
        frequency_penalty=floats[RowParam.FREQUENCY_PENALTY],
        penalty_row=ints[RowParam.PENALTY_ROW],
        bias_ids=bias_ids,
        bias_values=bias_values,
        banned_ids=banned_ids,
        any_random=any_random,
        any_top_k=any_random and bool(host[RowParam.TOP_K].any()),
        any_top_p=any_random and bool((host_floats[RowParam.TOP_P] < 1.0).any()),
        any_min_p=any_random and bool((host_floats[RowParam.MIN_P] > 0.0).any()),
        any_penalty=bool((host[RowParam.PENALTY_ROW] >= 0).any()),
        any_bias=bias_width > 0,
        any_banned=ban_width > 0,
        num_logprobs=shape.num_logprobs,
    )


def _padded(
    lists: torch.Tensor, start: torch.Tensor, end: torch.Tensor, width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids, padded with -1, and values, padded with 0, of each row's entries: int32 and float32 ``[S, width]``."""
    if width == 0:
        nothing = lists[:0].view(1, 0).expand(len(start), 0)
        return nothing, nothing.view(torch.float32)
    entry = start[:, None] + torch.arange(width, dtype=torch.int32, device=lists.device)
    outside = entry >= end[:, None]
    at = 2 * entry.masked_fill_(outside, 0)
    ids = lists[at].masked_fill_(outside, -1)
    return ids, lists[at + 1].view(torch.float32).masked_fill_(outside, 0.0)


class SamplingStage:
    """From logits to a slot's output by the reference sampler: penalty rows, sampling, packing."""

    def __init__(self, vocab_size: int, device: torch.device, *, max_num_seqs: int) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._max_num_seqs = max_num_seqs
        self._penalties: PenaltyState | None = None
        self._sampler = Sampler(vocab_size, device)

    def start_rows(self, inputs: StepInputs, shape: StepShape) -> None:
        """Rebuild the penalty rows of the sequences that joined in this step."""
        if not shape.fresh:
            return
        if self._penalties is None:
            self._penalties = PenaltyState(self._max_num_seqs, self._vocab_size, self._device)
            self._sampler.penalties = self._penalties
        tokens = inputs.packed[shape.fresh_at :]
        for row, first, middle, end in shape.fresh:
            self._penalties.init_row(row, tokens[first:middle].long(), tokens[middle:end].long())

    def sample(self, slot: Slot, logits: torch.Tensor) -> None:
        """Sample ``logits [S, vocabulary]`` as the slot's rows ask for."""
        assert slot.inputs is not None
        sampled = self._sampler.sample(logits, sampling_batch(slot.inputs, slot.shape))
        slot.store_output(sampled.token_ids, sampled.logprobs, sampled.top_ids, sampled.top_logprobs)


class ModelRunner:
    """Runs each step as it comes, operation by operation."""

    def __init__(self, forward: StepForward, cache: KVCache, sampling: SamplingStage) -> None:
        self._forward = forward
        self._cache = cache
        self._sampling = sampling

    @torch.inference_mode()
    def execute(self, slot: Slot, previous: Slot | None) -> None:
        """See ``Runner.execute``."""
        inputs, shape = slot.inputs, slot.shape
        assert inputs is not None
        self._sampling.start_rows(inputs, shape)
        tokens = inputs.input_ids
        if shape.has_carry:
            assert previous is not None
            tokens = carry_over(tokens, inputs.carry_over, previous.device_tokens)
        logits = self._forward(tokens, inputs, shape, self._cache)
        if slot.sampled:
            self._sampling.sample(slot, logits)


def carry_over(tokens: torch.Tensor, source: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:
    """Replace each placeholder by the token that the previous step sampled; all int32 on the device.

    ``source[i]`` is the sampled row of the previous step that feeds token ``i``, or -1 to keep ``tokens[i]``.
    """
    if previous.numel() == 0:
        return tokens
    # A row without usable logits sampled -1; its sequence fails once that has retired, and this row is discarded.
    carried = previous.index_select(0, source.clamp(min=0)).clamp(min=0)
    return torch.where(source >= 0, carried, tokens)
