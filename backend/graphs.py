"""CUDA graphs: a step's whole computation, captured once for each size and slot, replayed with one call.

Carry-over, forward pass and plain sampling are inside the graph. A graph's key is all that its launches depend on:
the padded sizes and the slot, whose buffers it reads and writes. What else changes from step to step (lengths,
block tables, positions) lies in those buffers. All graphs share one memory pool, since only one runs at a time.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from backend.kv_cache import MIB, KVCache
from backend.runner import SamplingStage, StepForward, carry_over
from backend.scheduler import StepPlan
from backend.slots import LONG_PREFILL_TOKENS, Slot, StepInputs, StepLayout, StepShape
from backend.streams import Streams

if TYPE_CHECKING:
    from backend.kernels.sample import SampleWorkspace

logger = logging.getLogger(__name__)


def decode_buckets(max_rows: int) -> list[int]:
    """Row counts that decode steps are padded to: 1, 2, 4, 8, then by 8, from 64 by 16, from 128 by 32."""
    sizes = {1, 2, 4, *range(8, 65, 8), *range(80, 129, 16), *range(160, max_rows + 32, 32)}
    return sorted({min(size, max_rows) for size in sizes})


def token_buckets(max_tokens: int) -> list[int]:
    """Token counts that steps with prefill are padded to: each a third or a half larger than the one before."""
    sizes, size = [], 32
    while size < max_tokens:
        sizes += [size, size + size // 2] if size + size // 2 < max_tokens else [size]
        size *= 2
    return [*sizes, max_tokens]


@dataclass(frozen=True, slots=True)
class GraphKey:
    """Everything that a captured launch depends on."""

    mixed: bool
    size: int  # rows of a decode step, tokens of a mixed one
    slot: int
    long_prefill: bool = False  # see StepShape


@dataclass(slots=True)
class CapturedStep:
    """A graph and the logits that it leaves, valid until the next replay of any graph."""

    graph: torch.cuda.CUDAGraph
    logits: torch.Tensor


class GraphRunner:
    """A ``Runner`` that replays graphs."""

    def __init__(
        self,
        forward: StepForward,
        cache: KVCache,
        sampling: SamplingStage,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_blocks: int,
    ) -> None:
        self._forward = forward
        self._cache = cache
        self._sampling = sampling
        self._max_rows = max_num_seqs
        self._max_blocks = max_blocks
        self._decode_sizes = decode_buckets(max_num_seqs)
        self._mixed_sizes = token_buckets(max(max_num_batched_tokens, max_num_seqs))
        self._captured: dict[GraphKey, CapturedStep] = {}
        self._slots: tuple[Slot, ...] = ()
        self._workspace: SampleWorkspace | None = None
        self.pool_bytes = 0

    @property
    def num_graphs(self) -> int:
        """Graphs of both slots."""
        return len(self._captured)

    def layout(self, plan: StepPlan) -> StepLayout:
        """The sizes that a plan is padded to."""
        if plan.num_decode == len(plan.sequences):
            sizes = self._decode_sizes
            return self._decode_layout(sizes[bisect_left(sizes, plan.num_decode)])
        sizes = self._mixed_sizes
        return self._mixed_layout(sizes[bisect_left(sizes, plan.num_tokens)])

    def _decode_layout(self, size: int) -> StepLayout:
        return StepLayout(size, size, size, self._max_blocks, self._cache.dummy_slot)

    def _mixed_layout(self, size: int) -> StepLayout:
        return StepLayout(size, self._max_rows, self._max_rows, self._max_blocks, self._cache.dummy_slot)

    @torch.inference_mode()
    def capture(self, slots: tuple[Slot, ...], streams: Streams) -> None:
        """Capture every graph of both slots, the largest first, so that the smaller ones fit into its memory."""
        began = time.perf_counter()
        self._slots = slots
        device = self._cache.keys[0].device
        torch.cuda.empty_cache()  # or memory that capturing frees would count against what it takes
        free_before = torch.cuda.mem_get_info(device)[0]
        pool = torch.cuda.graph_pool_handle()
        keys = [
            GraphKey(True, size, slot, long)
            for size in reversed(self._mixed_sizes)
            for long in ((False, True) if size >= LONG_PREFILL_TOKENS else (False,))
            for slot in range(len(slots))
        ]
        keys += [GraphKey(False, s, i) for s in reversed(self._decode_sizes) for i in range(len(slots))]
        warmed: set[GraphKey] = set()  # of either slot
        for key in keys:
            layout = self._mixed_layout(key.size) if key.mixed else self._decode_layout(key.size)
            slot, other = slots[key.slot], slots[1 - key.slot]
            inputs = slot.blank(layout, self._cache.block_size)
            with streams.h2d():
                slot.copy_in()
                slot.input_ready.record()
            shape = StepShape(num_decode=layout.rows, has_prefill=key.mixed, long_prefill=key.long_prefill)
            with streams.compute():
                slot.input_ready.wait()
                if replace(key, slot=0) not in warmed:  # compiles kernels and picks matrix products
                    self._compute(slot, other, inputs, shape)
                    warmed.add(replace(key, slot=0))
                stream = torch.cuda.current_stream(device)
                graph = torch.cuda.CUDAGraph()
                stream.synchronize()
                with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                    logits = self._compute(slot, other, inputs, shape)
            self._captured[key] = CapturedStep(graph, logits)
        streams.synchronize()
        self.pool_bytes = free_before - torch.cuda.mem_get_info(device)[0]
        logger.info(
            "%d CUDA graphs captured in %.1f s, %.0f MiB",
            len(self._captured),
            time.perf_counter() - began,
            self.pool_bytes / MIB,
        )

    def _compute(self, slot: Slot, other: Slot, inputs: StepInputs, shape: StepShape) -> torch.Tensor:
        from backend.kernels.sample import sample

        tokens = carry_over(inputs.input_ids, inputs.carry_over, other.device_out[: self._max_rows])
        logits = self._forward(tokens, inputs, shape, self._cache)
        sample(
            logits,
            inputs.temperature,
            inputs.seed,
            inputs.output_index,
            top_k=inputs.top_k,
            top_p=inputs.top_p,
            min_p=inputs.min_p,
            workspace=self._sample_workspace(logits),
            output=slot.device_out[: logits.shape[0]],
        )
        return logits

    def _sample_workspace(self, logits: torch.Tensor) -> SampleWorkspace:
        from backend.kernels.sample import SampleWorkspace

        if (
            self._workspace is None
        ):  # the first call comes before any capture, so it is not in a graph's memory
            self._workspace = SampleWorkspace(self._max_rows, logits.shape[1], logits.device)
        return self._workspace

    @torch.inference_mode()
    def execute(self, slot: Slot, previous: Slot | None) -> None:
        """See ``Runner.execute``. The tokens carried over always come from the other slot."""
        plan = slot.plan
        assert plan is not None
        mixed = plan.num_decode < len(plan.sequences)
        assert slot.inputs is not None
        size = slot.inputs.input_ids.shape[0]
        key = GraphKey(mixed, size, self._slots.index(slot), slot.shape.long_prefill)
        step = self._captured[key]
        step.graph.replay()
        if slot.sampled and not slot.plain:
            self._sampling.sample(slot, step.logits[: len(slot.sampled)])
