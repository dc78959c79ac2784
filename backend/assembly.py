"""Builds a running engine core from a configuration: load, probe, size the cache, compare with the native model."""

from __future__ import annotations

import importlib.util
import itertools
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from backend.api import MAX_LOGPROBS, UnsupportedModelError
from backend.attention.interface import (
    ATTENTION_NAME,
    STEP_ARGUMENT,
    AttentionKernel,
    ProbeStep,
)
from backend.attention.sdpa import SdpaKernel
from backend.blocks import BlockAllocator
from backend.config import EngineConfig
from backend.core import EngineCore, OutputSink
from backend.graphs import GraphRunner, decode_buckets
from backend.kv_cache import (
    MIB,
    KVCache,
    LayerShape,
    bytes_per_block,
    check_num_blocks,
    choose_num_blocks,
    memory_fraction,
)
from backend.loading import LoadedModel, load_model, unsupported
from backend.memory import MARGIN_BYTES, DeviceMemory, Needs, device_memory, memory_errors, step_bytes
from backend.packed_linear import pack_linears
from backend.row_params import padding_column
from backend.rows import RowTable
from backend.runner import ModelRunner, ModuleForward, Runner, SamplingStage, StepForward
from backend.sampling import PenaltyState, Sampler, SamplingBatch
from backend.scheduler import Scheduler, StepPlan
from backend.slots import Slot, SlotLimits, StepInputs, StepLayout, StepShape
from backend.streams import Streams, make_streams

logger = logging.getLogger(__name__)

_CHECK_TOKENS = 40
_CHECK_DECODE = 6  # of them, computed one at a time
# Largest difference of a token's paged and native logits, as a share of the largest logit. The native softmax, norms
# and rotary embedding are float32 even in a float64 model.
_TOLERANCE = {torch.float64: 1e-4, torch.float32: 2e-3, torch.bfloat16: 0.1, torch.float16: 0.05}


@dataclass(slots=True)
class EngineParts:
    """What a configuration came to."""

    core: EngineCore
    loaded: LoadedModel
    cache: KVCache
    kernel: AttentionKernel
    forward: StepForward
    runner: ModelRunner | GraphRunner

    def describe(self) -> dict[str, str | int]:
        """How the layers run, JSON-safe: fused or as the model's modules, and what the graphs take."""
        kind = "modules" if isinstance(self.forward, ModuleForward) else "fused"
        if not isinstance(self.runner, GraphRunner):
            return {"layers": kind}
        return {
            "layers": kind,
            "graphs": self.runner.num_graphs,
            "graph_bytes": self.runner.pool_bytes,
            "graph_shared_bytes": self.runner.shared_bytes,
        }

    def summary(self, free_bytes: int, needs: Needs) -> str:
        """One line for the log: what was chosen, and where the memory went."""
        how = self.describe()
        graphs = "no CUDA graphs"
        if isinstance(self.runner, GraphRunner):
            taken = (self.runner.pool_bytes + self.runner.shared_bytes) / MIB
            graphs = f"{self.runner.num_graphs} CUDA graphs in {taken:.0f} MiB"
        cache = self.cache
        return (
            f"{self.loaded.name} on {self.loaded.device}: attention {self.kernel.name}, decode and prefill; layers "
            f"{how['layers']}; {graphs}; KV cache {cache.num_blocks} blocks of {cache.block_size} tokens in "
            f"{cache.num_bytes / MIB:.0f} MiB; {needs.total / MIB:.0f} MiB kept for steps, graphs and sampling; "
            f"{free_bytes / MIB:.0f} MiB free"
        )


def build_engine(
    config: EngineConfig,
    sink: Callable[[LoadedModel], OutputSink],
    clock: Callable[[], float],
    memory: DeviceMemory | None = None,
) -> EngineParts:
    """Load the model and put an engine around it. ``memory`` is the device's own when not given.

    Raises:
        ConfigurationError: the model cannot be found, does not fit, or is one that the engine cannot run.
    """
    loaded = load_model(config)
    memory = memory or device_memory(loaded.device)
    probe = probe_layers(loaded)
    native = native_logits(loaded)
    kernel = choose_kernel(config, loaded, probe)
    forward = verified_forward(config, loaded, probe, kernel, native)
    if loaded.device.type == "cpu":
        logger.info("%d linear layers packed for this CPU", pack_linears(loaded.model))
    graphs = config.cuda_graphs and can_capture(loaded, probe.layers, kernel, forward, config.block_size)
    streams = make_streams(loaded.device, config.debug_delay)
    slots = make_slots(config, loaded.max_model_len, loaded.device, streams)

    def over(cache: KVCache) -> ModelRunner | GraphRunner:
        if not graphs:
            sampling = SamplingStage(loaded.vocab_size, loaded.device, max_num_seqs=config.max_num_seqs)
            return ModelRunner(forward, cache, sampling)
        return GraphRunner(
            forward,
            cache,
            vocab_size=loaded.vocab_size,
            dtype=loaded.dtype,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_blocks=-(-loaded.max_model_len // config.block_size),
        )

    advice = "Lower max_num_batched_tokens, max_num_seqs or max_model_len, or free memory on the device"
    with memory_errors("The largest step", memory, advice):
        needs = measure_needs(config, loaded, probe.layers, forward, over, slots, streams, memory)
    cache = make_cache(config, loaded, probe.layers, kernel, memory.free(), needs)
    runner = over(cache)
    core = make_core(
        config,
        runner=runner,
        num_blocks=cache.num_blocks,
        max_model_len=loaded.max_model_len,
        device=loaded.device,
        sink=sink(loaded),
        clock=clock,
        streams=streams,
        slots=slots,
        layout=runner.layout if isinstance(runner, GraphRunner) else None,
    )
    if isinstance(runner, GraphRunner):
        with memory_errors("The CUDA graphs", memory, advice):
            runner.capture(slots, streams)
    parts = EngineParts(core=core, loaded=loaded, cache=cache, kernel=kernel, forward=forward, runner=runner)
    logger.info("%s", parts.summary(memory.free(), needs))
    return parts


def choose_kernel(config: EngineConfig, loaded: LoadedModel, probe: ProbeStep) -> AttentionKernel:
    """Our Triton kernels on a GPU, PyTorch's operators elsewhere."""
    if loaded.device.type != "cuda" or loaded.dtype == torch.float64:
        return SdpaKernel()
    shapes = set(probe.layers)
    if len(shapes) > 1 or importlib.util.find_spec("triton") is None:
        logger.warning("attention runs on PyTorch's operators: no Triton, or layers of different shapes")
        return SdpaKernel()
    from backend.attention.triton_paged import TritonKernel

    return TritonKernel(
        row_sizes=decode_buckets(config.max_num_seqs),
        num_heads=probe.num_heads,
        num_kv_heads=probe.layers[0].heads,
        head_size=probe.layers[0].head_size,
        max_model_len=loaded.max_model_len,
        dtype=loaded.dtype,
        device=loaded.device,
    )


def choose_forward(
    config: EngineConfig, loaded: LoadedModel, probe: ProbeStep, kernel: AttentionKernel
) -> StepForward:
    """Fused layers where the model fits a pattern and runs on a GPU, its own modules elsewhere."""
    if config.fused and kernel.name == "triton":
        from backend.fused import FusedDecoder, UnfitModelError

        try:
            return FusedDecoder(loaded.model, probe.params, kernel, max_model_len=loaded.max_model_len)
        except UnfitModelError as exc:
            logger.info("the model runs through its own modules: %s", exc)
    return ModuleForward(loaded.model, kernel)


def verified_forward(
    config: EngineConfig,
    loaded: LoadedModel,
    probe: ProbeStep,
    kernel: AttentionKernel,
    native: torch.Tensor,
) -> StepForward:
    """The way through the layers that ``choose_forward`` names, or the model's own modules where its logits differ.

    Raises:
        UnsupportedModelError: the modules' logits on the paged cache differ from the model's own as well.
    """
    forward = choose_forward(config, loaded, probe, kernel)
    if not isinstance(forward, ModuleForward):
        try:
            verify_paged(loaded, probe.layers, native, forward, config.block_size)
            return forward
        except UnsupportedModelError as exc:
            # Parts that look like a pattern's may compute something else, a rotation of some layers only for one.
            logger.info("the model runs through its own modules: fused, %s", exc)
            forward = ModuleForward(loaded.model, kernel)
    verify_paged(loaded, probe.layers, native, forward, config.block_size)
    return forward


@torch.inference_mode()
def can_capture(
    loaded: LoadedModel,
    layers: list[LayerShape],
    kernel: AttentionKernel,
    forward: StepForward,
    block_size: int,
) -> bool:
    """Whether CUDA graphs can hold a forward pass: nothing in it depends on lengths that only the host knows, and
    nothing waits for the device, as some mixtures of experts and rotary embeddings do."""
    if loaded.device.type != "cuda":
        return False
    if kernel.name != "triton":
        logger.warning("steps run without CUDA graphs, since attention runs on PyTorch's operators")
        return False
    cache = KVCache(layers, num_blocks=1, block_size=block_size, dtype=loaded.dtype, device=loaded.device)
    inputs, shape = _single_row(0, 1, block_size, loaded.device, decode=True)
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        forward(torch.zeros_like(inputs.input_ids), inputs, shape, cache)
    except RuntimeError as exc:
        if "synchronizing" not in str(exc):
            raise
        logger.warning("steps run without CUDA graphs, since the model's layers wait for the device")
        return False
    finally:
        torch.cuda.set_sync_debug_mode(before)
    return True


def make_core(
    config: EngineConfig,
    *,
    runner: Runner,
    num_blocks: int,
    max_model_len: int,
    device: torch.device,
    sink: OutputSink,
    clock: Callable[[], float] = time.monotonic,
    streams: Streams | None = None,
    slots: tuple[Slot, Slot] | None = None,
    layout: Callable[[StepPlan], StepLayout | None] | None = None,
) -> EngineCore:
    """The host side of an engine around any runner; tests and benchmarks give it a stub."""
    streams = streams or make_streams(device, config.debug_delay)
    slots = slots or make_slots(config, max_model_len, device, streams)
    allocator = BlockAllocator(num_blocks, prefix_cache=config.prefix_cache)
    scheduler = Scheduler(
        allocator,
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_penalty_tokens=_penalty_tokens(config, max_model_len),
        prefix_cache=config.prefix_cache,
        min_bulk_seqs=config.min_bulk_seqs,
    )
    streams.join_others()  # weights, cache and buffers were made on the default stream
    return EngineCore(
        scheduler=scheduler,
        allocator=allocator,
        rows=RowTable(config.max_num_seqs, -(-max_model_len // config.block_size)),
        slots=slots,
        runner=runner,
        streams=streams,
        sink=sink,
        block_size=config.block_size,
        sync=config.mode == "sync",
        clock=clock,
        layout=layout or (lambda plan: None),
    )


def make_slots(
    config: EngineConfig, max_model_len: int, device: torch.device, streams: Streams
) -> tuple[Slot, Slot]:
    """The two slots of an engine with this configuration."""
    limits = SlotLimits(
        tokens=max(config.max_num_batched_tokens, config.max_num_seqs),
        rows=config.max_num_seqs,
        blocks=-(-max_model_len // config.block_size),
        logprobs=MAX_LOGPROBS,
        penalty_tokens=_penalty_tokens(config, max_model_len),
    )
    return (
        Slot(limits, device, streams, poison=config.debug_poison),
        Slot(limits, device, streams, poison=config.debug_poison),
    )


def _penalty_tokens(config: EngineConfig, max_model_len: int) -> int:
    # At least one sequence with penalties can be admitted, whatever its length.
    return max_model_len + config.max_num_batched_tokens


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
    inputs, shape = _single_row(
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
        inputs, shape = _single_row(
            start, end, block_size, loaded.device, decode=start > 0 and start >= decode_from
        )
        logits = forward(ids[start:end].to(torch.int32), inputs, shape, cache)
        errors.append((logits - native[start:end]).abs().amax(dim=-1))
    decode_steps = count - decode_from
    parts = [*errors[:-decode_steps], torch.cat(errors[-decode_steps:])]
    exact = loaded.dtype in (torch.float32, torch.float64)
    error = (
        torch.stack([part.max() if exact else part.median() for part in parts]).max().item()
    )  # NaN if any is
    scale = native.abs().max().item()
    if not error <= _TOLERANCE[loaded.dtype] * max(scale, 1e-6):
        raise unsupported(
            f"its logits on the paged cache differ from its own by {error:.3g} (largest logit {scale:.3g})"
        )


def _single_row(
    start: int, end: int, block_size: int, device: torch.device, *, decode: bool
) -> tuple[StepInputs, StepShape]:
    """Inputs of a step with one row of known tokens in blocks 0, 1, 2, …"""

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
