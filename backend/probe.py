"""What a loaded model is like on the paged cache: learnt and compared by forward passes of a single row."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from backend.attention.interface import ATTENTION_NAME, STEP_ARGUMENT, ProbeStep
from backend.kv_cache import KVCache, LayerShape
from backend.loading import LoadedModel, unsupported
from backend.row_params import padding_column
from backend.runner import StepForward
from backend.slots import StepInputs, StepShape

_CHECK_TOKENS = 40
_CHECK_DECODE = 6  # of them, computed one at a time
# Largest difference of a token's paged and native logits, as a share of the largest logit. The native softmax, norms
# and rotary embedding are float32 even in a float64 model.
_TOLERANCE = {torch.float64: 1e-4, torch.float32: 2e-3, torch.bfloat16: 0.1, torch.float16: 0.05}


@torch.inference_mode()
def probe_layers(loaded: LoadedModel) -> ProbeStep:
    """Shapes and attention parameters of all layers, learnt from one forward pass, not from the configuration.

    Raises:
        UnsupportedModelError: the layers do not reach our attention as the paged cache needs it.
    """
    probe = ProbeStep()
    ids = torch.zeros(1, 4, dtype=torch.int64, device=loaded.device)
    positions = torch.arange(4, device=loaded.device)[None]
    arguments: dict[str, Any] = {STEP_ARGUMENT: probe}
    loaded.model(input_ids=ids, position_ids=positions, use_cache=False, **arguments)
    count = int(loaded.model.config.get_text_config(decoder=True).num_hidden_layers)
    missing = probe.settle(count)
    if missing:
        raise unsupported(f"layers {missing[:8]} of the model do not use the paged attention")
    return probe


def check_tokens(loaded: LoadedModel) -> torch.Tensor:
    """The tokens on which paged and native logits are compared, int64 on the model's device."""
    count = min(_CHECK_TOKENS, loaded.max_model_len)
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, loaded.vocab_size, (count,), generator=generator).to(loaded.device)


@torch.inference_mode()
def native_logits(loaded: LoadedModel) -> torch.Tensor:
    """The model's own logits of ``check_tokens``, by its own attention; before its weights are touched."""
    loaded.model.set_attn_implementation("eager")
    try:
        logits: torch.Tensor = loaded.model(input_ids=check_tokens(loaded)[None], use_cache=False).logits[0]
    finally:
        loaded.model.set_attn_implementation(ATTENTION_NAME)
    return logits


@torch.inference_mode()
def verify_paged(
    loaded: LoadedModel,
    layers: list[LayerShape],
    native: torch.Tensor,
    forward: StepForward,
    block_size: int,
) -> None:
    """Compare paged logits with the model's own on a few tokens: two prefill chunks and decode steps.

    In 16 bits, half of a part's tokens may differ by more: where the experts of a mixture are nearly tied, rounding
    sends a token to another one. What is computed wrongly shows in most tokens.

    Raises:
        UnsupportedModelError: they differ by more than the dtype explains.
    """
    ids = check_tokens(loaded)
    count = ids.shape[0]
    blocks = -(-count // block_size)
    cache = KVCache(
        layers, num_blocks=blocks, block_size=block_size, dtype=loaded.dtype, device=loaded.device
    )
    decode_from = count - max(1, min(_CHECK_DECODE, count // 4))
    borders = sorted({0, decode_from // 2, *range(decode_from, count + 1)})
    errors = []  # largest one of each token
    for start, end in itertools.pairwise(borders):
        inputs, shape = single_row(
            start, end, block_size, loaded.device, decode=start > 0 and start >= decode_from
        )
        logits = forward(ids[start:end].to(torch.int32), inputs, shape, cache)
        errors.append((logits - native[start:end]).abs().amax(dim=-1))
    decode_steps = count - decode_from
    parts = [*errors[:-decode_steps], torch.cat(errors[-decode_steps:])]
    exact = loaded.dtype in (torch.float32, torch.float64)
    # NaN if any of them is.
    error = torch.stack([part.max() if exact else part.median() for part in parts]).max().item()
    scale = native.abs().max().item()
    if not error <= _TOLERANCE[loaded.dtype] * max(scale, 1e-6):
        raise unsupported(
            f"its logits on the paged cache differ from its own by {error:.3g} (largest logit {scale:.3g})"
        )


def single_row(
    start: int, end: int, block_size: int, device: torch.device, *, decode: bool
) -> tuple[StepInputs, StepShape]:
    """Inputs of a step with one row of known tokens ``start … end - 1`` in blocks 0, 1, 2, …"""

    def ints(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    count = end - start
    inputs = StepInputs(
        input_ids=ints([0] * count),
        positions=ints(list(range(start, end))),
        carry_over=ints([-1] * count),
        cache_slots=ints(list(range(start, end))),
        query_starts=ints([0, count]),
        kv_lengths=ints([end]),
        decode_lengths=ints([end if decode else 0]),
        prefill_starts=ints([int(decode), count]),
        block_table=ints(list(range(-(-end // block_size))))[None],
        sample_tokens=ints(list(range(count))),
        seeds=torch.zeros(count, dtype=torch.int64, device=device),
        params=torch.from_numpy(padding_column())[:, None].repeat(1, count).to(device),
        lists=ints([]),
        packed=ints([]),
    )
    shape = StepShape(num_decode=int(decode), has_prefill=not decode, query_lengths=[count], kv_lengths=[end])
    return inputs, shape
