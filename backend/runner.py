"""Everything of a step that runs on the compute stream: carry-over, forward pass, logits, sampling."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from backend.attention.interface import STEP_ARGUMENT, AttentionKernel, PagedStep
from backend.kv_cache import KVCache
from backend.sampling import PenaltyState, Sampler
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

    def __call__(
        self, tokens: torch.Tensor, inputs: StepInputs, shape: StepShape, cache: KVCache
    ) -> torch.Tensor:
        """Logits ``[S, vocabulary]`` of ``inputs.sample_tokens``; ``tokens`` is int32 ``[T]``."""


class ModuleForward:
    """The model's own modules, with our attention.

    The model computes its own head (``logits_to_keep``), so that scaling and soft caps of logits are its affair.
    """

    def __init__(self, model: Any, kernel: AttentionKernel) -> None:
        self._model = model
        self._kernel = kernel

    @torch.inference_mode()
    def __call__(
        self, tokens: torch.Tensor, inputs: StepInputs, shape: StepShape, cache: KVCache
    ) -> torch.Tensor:
        """See ``StepForward``."""
        output = self._model(
            input_ids=tokens.unsqueeze(0),
            position_ids=inputs.positions.unsqueeze(0),
            use_cache=False,
            logits_to_keep=inputs.sample_tokens,
            **{STEP_ARGUMENT: PagedStep(cache, self._kernel, inputs, shape)},
        )
        logits: torch.Tensor = output.logits[0]
        return logits


class SamplingStage:
    """From logits to a slot's output: penalty rows, sampler, packing."""

    def __init__(self, vocab_size: int, device: torch.device, *, max_num_seqs: int) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._max_num_seqs = max_num_seqs
        self._penalties: PenaltyState | None = None
        self._sampler = Sampler(vocab_size, device)

    def sample(self, slot: Slot, logits: torch.Tensor) -> None:
        """Sample ``logits [S, vocabulary]`` as the slot's rows ask for."""
        assert slot.inputs is not None
        self._prepare_penalties(slot)
        sampled = self._sampler.sample(logits, slot.inputs.sampling)
        slot.store_output(sampled.token_ids, sampled.logprobs, sampled.top_ids, sampled.top_logprobs)

    def _prepare_penalties(self, slot: Slot) -> None:
        if not slot.inputs or not slot.inputs.sampling.any_penalty:
            return
        if self._penalties is None:
            self._penalties = PenaltyState(self._max_num_seqs, self._vocab_size, self._device)
            self._sampler.penalties = self._penalties
        for sequence in slot.shape.new_penalty_rows:
            # A row's first sampling step comes after the last step of its previous owner on this stream, the
            # late one included, so nothing writes to it from here on but its new owner.
            prompt = torch.tensor(sequence.prompt_ids, dtype=torch.int64, device=self._device)
            outputs = torch.tensor(sequence.output_ids, dtype=torch.int64, device=self._device)
            self._penalties.init_row(sequence.row, prompt, outputs)


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
