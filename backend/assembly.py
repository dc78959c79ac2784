"""Builds a running engine core from a configuration: load, probe, size the cache, compare with the native model."""

from __future__ import annotations

import importlib.util
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from backend.api import MAX_LOGPROBS, UnsupportedModelError
from backend.attention.flashinfer_prefill import FlashInferPrefill, find_flashinfer
from backend.attention.interface import AttentionKernel, ProbeStep
from backend.attention.sdpa import SdpaKernel
from backend.blocks import BlockAllocator
from backend.config import EngineConfig
from backend.core import EngineCore, OutputSink
from backend.graphs import GraphRunner, decode_buckets
from backend.kv_cache import MIB, KVCache, LayerShape
from backend.loading import LoadedModel, load_model, on_device
from backend.memory import DeviceMemory, Needs, device_memory, memory_errors
from backend.packed_linear import pack_linears
from backend.probe import native_logits, probe_layers, single_row, verify_paged
from backend.rows import RowTable
from backend.runner import ModelRunner, ModuleForward, Runner, SamplingStage, StepForward
from backend.scheduler import Scheduler, StepPlan
from backend.sizing import make_cache, measure_needs
from backend.slots import Slot, SlotLimits, StepLayout
from backend.streams import Streams, make_streams

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class EngineParts:
    """What a configuration came to."""

    core: EngineCore
    loaded: LoadedModel
    cache: KVCache
    kernel: AttentionKernel
    forward: StepForward
    runner: ModelRunner | GraphRunner

    @property
    def long_prefill(self) -> str:
        """The kernel that steps with a few long prompts attend by."""
        return self.runner.long_prefill if isinstance(self.runner, GraphRunner) else self.kernel.name

    def describe(self) -> dict[str, str | int]:
        """How the layers run, JSON-safe: fused or as the model's modules, and what the graphs take."""
        kind = "modules" if isinstance(self.forward, ModuleForward) else "fused"
        if not isinstance(self.runner, GraphRunner):
            return {"layers": kind, "long_prefill": self.long_prefill}
        return {
            "layers": kind,
            "long_prefill": self.long_prefill,
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
            f"{self.loaded.name} on {self.loaded.device}: attention {self.kernel.name}, that of long prompts "
            f"{self.long_prefill}; layers {how['layers']}; {graphs}; "
            f"KV cache {cache.num_blocks} blocks of {cache.block_size} tokens in "
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
    with on_device(loaded.device):
        return _build(config, loaded, sink(loaded), clock, memory or device_memory(loaded.device))


def _build(
    config: EngineConfig,
    loaded: LoadedModel,
    sink: OutputSink,
    clock: Callable[[], float],
    memory: DeviceMemory,
) -> EngineParts:
    probe = probe_layers(loaded)
    native = native_logits(loaded)
    kernel = choose_kernel(config, loaded, probe)
    forward = verified_forward(config, loaded, probe, kernel, native)
    if loaded.device.type == "cpu":
        logger.info("%d linear layers packed for this CPU", pack_linears(loaded.model))
    graphs = config.cuda_graphs and can_capture(loaded, probe.layers, kernel, forward, config.block_size)
    planner = choose_long_prefill(config, loaded, probe, kernel) if graphs else None
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
            long_prefill=planner,
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
        sink=sink,
        clock=clock,
        streams=streams,
        slots=slots,
        layout=runner.layout if isinstance(runner, GraphRunner) else None,
        plan_prefill=runner.plan_prefill if isinstance(runner, GraphRunner) else None,
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


def choose_long_prefill(
    config: EngineConfig, loaded: LoadedModel, probe: ProbeStep, kernel: AttentionKernel
) -> FlashInferPrefill | None:
    """FlashInfer's kernel beside ours where it is to be had and computes the same; the kernel is told of it.

    Raises:
        ConfigurationError: it is asked for and cannot be had.
    """
    from backend.attention.triton_paged import TritonKernel

    if not isinstance(kernel, TritonKernel):
        return None
    kernel.long_prefill = find_flashinfer(
        config.prefill_attention,
        params=probe.params,
        num_heads=probe.num_heads,
        num_kv_heads=probe.layers[0].heads,
        head_size=probe.layers[0].head_size,
        block_size=config.block_size,
        max_tokens=max(config.max_num_batched_tokens, config.max_num_seqs),
        max_blocks=-(-loaded.max_model_len // config.block_size),
        dtype=loaded.dtype,
        device=loaded.device,
    )
    return kernel.long_prefill


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
    inputs, shape = single_row(0, 1, block_size, loaded.device, decode=True)
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
    plan_prefill: Callable[[Slot], None] | None = None,
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
        plan_prefill=plan_prefill or (lambda slot: None),
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
