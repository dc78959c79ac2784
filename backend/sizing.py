"""How many blocks the cache gets: what the largest steps take is measured first, and the rest is the cache's."""

from __future__ import annotations

from collections.abc import Callable

import torch

from backend.api import MAX_LOGPROBS
from backend.attention.interface import AttentionKernel
from backend.config import EngineConfig
from backend.graphs import GraphRunner
from backend.kv_cache import (
    KVCache,
    LayerShape,
    bytes_per_block,
    check_num_blocks,
    choose_num_blocks,
    memory_fraction,
)
from backend.loading import LoadedModel
from backend.memory import MARGIN_BYTES, DeviceMemory, Needs, step_bytes
from backend.probe import single_row
from backend.runner import ModelRunner, StepForward
from backend.sampling import PenaltyState, Sampler, SamplingBatch
from backend.slots import Slot
from backend.streams import Streams


def measure_needs(
    config: EngineConfig,
    loaded: LoadedModel,
    layers: list[LayerShape],
    forward: StepForward,
    over: Callable[[KVCache], ModelRunner | GraphRunner],
    slots: tuple[Slot, Slot],
    streams: Streams,
    memory: DeviceMemory,
) -> Needs:
    """What the engine will take once the cache is made: measured by its largest steps over a cache of one block."""
    state = PenaltyState.num_bytes(config.max_num_seqs, loaded.vocab_size)
    if loaded.device.type != "cuda":
        return Needs(state=state)
    small = KVCache(
        layers, num_blocks=1, block_size=config.block_size, dtype=loaded.dtype, device=loaded.device
    )
    runner = over(small)
    streams.join_others()  # weights, cache and buffers were made on the default stream
    if isinstance(runner, GraphRunner):
        return runner.measure(slots, streams, memory)
    step = step_bytes(memory, lambda: largest_step(config, loaded, forward, small))
    return Needs(step=step, state=state, margin=MARGIN_BYTES)


@torch.inference_mode()
def largest_step(config: EngineConfig, loaded: LoadedModel, forward: StepForward, cache: KVCache) -> None:
    """The most tokens a step may have, at the end of the longest context, and every row sampling by every option.

    All of it lies in block 0: how much memory a step takes does not depend on where its tokens are.
    """
    count = min(config.max_num_batched_tokens, loaded.max_model_len)
    inputs, shape = single_row(
        loaded.max_model_len - count, loaded.max_model_len, config.block_size, loaded.device, decode=False
    )
    inputs.block_table.zero_()
    inputs.cache_slots.zero_()
    rows = config.max_num_seqs
    inputs.sample_tokens = torch.zeros(rows, dtype=torch.int32, device=loaded.device)
    logits = forward(torch.zeros_like(inputs.input_ids), inputs, shape, cache)
    Sampler(loaded.vocab_size, loaded.device).sample(logits, _every_option(rows, loaded.device))


def _every_option(rows: int, device: torch.device) -> SamplingBatch:
    def full(value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.full((rows,), value, dtype=dtype, device=device)

    ids = torch.zeros(rows, 1, dtype=torch.int32, device=device)
    return SamplingBatch(
        temperature=full(1.0),
        top_k=full(0, torch.int32),
        top_p=full(0.999),
        min_p=full(0.001),
        seed=full(0, torch.int64),
        output_index=full(0, torch.int32),
        repetition_penalty=full(1.0),
        presence_penalty=full(0.0),
        frequency_penalty=full(0.0),
        penalty_row=full(-1, torch.int32),
        bias_ids=ids,
        bias_values=ids.to(torch.float32),
        banned_ids=ids,
        any_random=True,
        any_top_p=True,
        any_min_p=True,
        any_bias=True,
        any_banned=True,
        num_logprobs=MAX_LOGPROBS,
    )


def make_cache(
    config: EngineConfig,
    loaded: LoadedModel,
    layers: list[LayerShape],
    kernel: AttentionKernel,
    free_bytes: int,
    needs: Needs,
) -> KVCache:
    """The cache, sized by the configuration or by the memory that is free beside what is still needed."""
    block_bytes = bytes_per_block(layers, config.block_size, loaded.dtype)
    if kernel.name == "sdpa" and loaded.device.type == "cuda":
        # It gathers the rows' blocks of a layer, all of them in the worst step.
        block_bytes += max(bytes_per_block([layer], config.block_size, loaded.dtype) for layer in layers)
    if config.num_kv_blocks is not None:
        num_blocks = check_num_blocks(
            config.num_kv_blocks, free_bytes=free_bytes, block_bytes=block_bytes, needed_bytes=needs.total
        )
    else:
        num_blocks = choose_num_blocks(
            free_bytes=free_bytes,
            fraction=memory_fraction(config.kv_memory_fraction, loaded.device),
            block_bytes=block_bytes,
            block_size=config.block_size,
            max_num_seqs=config.max_num_seqs,
            max_model_len=loaded.max_model_len,
            needed_bytes=needs.total,
        )
    return KVCache(
        layers, num_blocks=num_blocks, block_size=config.block_size, dtype=loaded.dtype, device=loaded.device
    )
