"""CUDA graphs: a step's whole computation, captured once for each size and slot, replayed with one call.

Carry-over, forward pass and sampling are inside the graph. A graph's key is all that its launches depend on: the
padded sizes and the slot, whose buffers it reads and writes. What else changes from step to step (lengths, block
tables, positions, sampling parameters) lies in those buffers. All graphs share one memory pool, since only one runs
at a time; nothing in it outlives a replay. Logits and what sampling keeps lie in buffers outside of it.
"""

from __future__ import annotations

import gc
import logging
import time
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch

from backend.api import MAX_LOGPROBS
from backend.attention.flashinfer_prefill import FlashInferPrefill
from backend.kv_cache import MIB, KVCache
from backend.memory import MARGIN_BYTES, DeviceMemory, GraphKind, Needs, graph_bytes, step_bytes
from backend.runner import StepForward, carry_over
from backend.scheduler import StepPlan
from backend.slots import LONG_PREFILL_TOKENS, Slot, StepInputs, StepLayout, StepShape
from backend.streams import Streams

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


def shared_bytes(max_num_seqs: int, vocab_size: int, dtype: torch.dtype) -> int:
    """Device memory that all graphs share outside their pool: logits, and what sampling keeps."""
    from backend.kernels.sample import SampleWorkspace

    return max_num_seqs * vocab_size * dtype.itemsize + SampleWorkspace.num_bytes(max_num_seqs, vocab_size)


@contextmanager
def no_collection() -> Iterator[None]:
    """Keep the garbage collector from running: what a dead object does to the device as it goes, such as freeing
    page-locked memory, would invalidate a capture in this thread."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class GraphRunner:
    """A ``Runner`` that replays graphs."""

    def __init__(
        self,
        forward: StepForward,
        cache: KVCache,
        *,
        vocab_size: int,
        dtype: torch.dtype,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_blocks: int,
        long_prefill: FlashInferPrefill | None = None,
    ) -> None:
        self._forward = forward
        self._cache = cache
        self._long_prefill = long_prefill
        self._vocab_size = vocab_size
        self._dtype = dtype  # of the logits
        self._max_rows = max_num_seqs
        self._max_blocks = max_blocks
        self._decode_sizes = decode_buckets(max_num_seqs)
        self._mixed_sizes = token_buckets(max(max_num_batched_tokens, max_num_seqs))
        self._captured: dict[GraphKey, torch.cuda.CUDAGraph] = {}
        self._slots: tuple[Slot, ...] = ()
        self.pool_bytes = 0
        self.shared_bytes = 0

    @property
    def num_graphs(self) -> int:
        """Graphs of both slots."""
        return len(self._captured)

    @property
    def long_prefill(self) -> str:
        """The kernel by which a few long prompts attend."""
        return "triton" if self._long_prefill is None else self._long_prefill.name

    def layout(self, plan: StepPlan) -> StepLayout:
        """The sizes that a plan is padded to."""
        if plan.num_decode == len(plan.sequences):
            sizes = self._decode_sizes
            return self._decode_layout(sizes[bisect_left(sizes, plan.num_decode)])
        sizes = self._mixed_sizes
        return self._mixed_layout(sizes[bisect_left(sizes, plan.num_tokens)])

    def plan_prefill(self, slot: Slot) -> None:
        """Send what a long prefill's kernel wants planned; call within the h2d stream's context."""
        if self._long_prefill is not None and slot.shape.long_prefill:
            self._long_prefill.plan(self._slots.index(slot), slot.shape)

    def padded_shape(self, key: GraphKey) -> StepShape:
        """What the host knows of every step that a graph serves."""
        layout = self._mixed_layout(key.size) if key.mixed else self._decode_layout(key.size)
        planned = key.slot if key.long_prefill and self._long_prefill is not None else None
        return StepShape(
            num_decode=layout.rows,
            has_prefill=key.mixed,
            long_prefill=key.long_prefill,
            planned_slot=planned,
        )

    def _decode_layout(self, size: int) -> StepLayout:
        return StepLayout(size, size, size, self._max_blocks, self._cache.dummy_slot)

    def _mixed_layout(self, size: int) -> StepLayout:
        return StepLayout(size, self._max_rows, self._max_rows, self._max_blocks, self._cache.dummy_slot)

    @torch.inference_mode()
    def measure(self, slots: tuple[Slot, Slot], streams: Streams, memory: DeviceMemory) -> Needs:
        """What ``capture`` will take, found by capturing the largest graphs of each kind and giving them up again.

        The cache may be of any size, so it is called on a runner over a small one, which serves nothing else.
        """
        free = memory.free()
        self._prepare(slots, streams)
        shared = free - memory.free()
        step, kinds = 0, []
        for mixed in (True, False):
            every = [key for key in self._keys() if key.mixed == mixed]
            largest = [replace(every[0], slot=slot) for slot in range(len(slots))]
            step = max(step, step_bytes(memory, partial(self._warm, every[0])))
            kinds.append(GraphKind(len(every), [partial(self._capture, key) for key in largest]))
        return Needs(step=step, graphs=shared + graph_bytes(memory, kinds), margin=MARGIN_BYTES)

    @torch.inference_mode()
    def capture(self, slots: tuple[Slot, Slot], streams: Streams) -> None:
        """Capture every graph of both slots, the largest first, so that the smaller ones fit into its memory."""
        from backend.kernels.token_counts import start_rows

        began = time.perf_counter()
        device = self._cache.keys[0].device
        self._prepare(slots, streams)
        torch.cuda.empty_cache()  # or memory that capturing frees would count against what it takes
        free_before = torch.cuda.mem_get_info(device)[0]
        for key in self._keys():
            if key.slot == 0:
                self._warm(key)
            self._captured[key] = self._capture(key)
            logger.debug("%s: %d bytes free", key, torch.cuda.mem_get_info(device)[0])
        with streams.compute():  # compiles it: a row of no tokens
            start_rows(
                torch.tensor([0, 4, 4, 4], dtype=torch.int32, device=device), 0, 1, self._workspace.counts
            )
        streams.synchronize()
        torch.cuda.empty_cache()  # what the steps before each capture left behind
        self.pool_bytes = free_before - torch.cuda.mem_get_info(device)[0]
        logger.info(
            "%d CUDA graphs captured in %.1f s, %.0f MiB, and %.0f MiB that they share",
            len(self._captured),
            time.perf_counter() - began,
            self.pool_bytes / MIB,
            self.shared_bytes / MIB,
        )

    def _keys(self) -> list[GraphKey]:
        """All graphs in the order of their capture, mixed steps first, the largest of each kind first."""
        mixed = [
            GraphKey(True, size, slot, long)
            for size in reversed(self._mixed_sizes)
            for long in ((False, True) if size >= LONG_PREFILL_TOKENS else (False,))
            for slot in range(len(self._slots))
        ]
        decode = [
            GraphKey(False, size, slot)
            for size in reversed(self._decode_sizes)
            for slot in range(len(self._slots))
        ]
        return mixed + decode

    def _prepare(self, slots: tuple[Slot, Slot], streams: Streams) -> None:
        """Make what all graphs share."""
        from backend.kernels.sample import SampleWorkspace

        self._slots, self._streams = slots, streams
        device = self._cache.keys[0].device
        self._logits = torch.empty(self._max_rows, self._vocab_size, dtype=self._dtype, device=device)
        self._workspace = SampleWorkspace(self._max_rows, self._vocab_size, device)
        self.shared_bytes = shared_bytes(self._max_rows, self._vocab_size, self._dtype)
        self._pool = torch.cuda.graph_pool_handle()

    def _warm(self, key: GraphKey) -> None:
        """Run a step of padding as it is: that compiles kernels and picks matrix products."""
        inputs, shape = self._blank(key)
        with self._streams.compute():
            self._slots[key.slot].input_ready.wait()
            self._compute(self._slots[key.slot], self._slots[1 - key.slot], inputs, shape)

    def _capture(self, key: GraphKey) -> torch.cuda.CUDAGraph:
        inputs, shape = self._blank(key)
        slot = self._slots[key.slot]
        with self._streams.compute():
            slot.input_ready.wait()
            stream = torch.cuda.current_stream(self._logits.device)
            graph = torch.cuda.CUDAGraph()
            stream.synchronize()
            with (
                no_collection(),
                torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"),
            ):
                self._compute(slot, self._slots[1 - key.slot], inputs, shape)
        return graph

    def _blank(self, key: GraphKey) -> tuple[StepInputs, StepShape]:
        """The inputs of a step of nothing but padding, on their way to the device."""
        layout = self._mixed_layout(key.size) if key.mixed else self._decode_layout(key.size)
        slot, shape = self._slots[key.slot], self.padded_shape(key)
        inputs = slot.blank(layout, self._cache.block_size)
        with self._streams.h2d():
            slot.copy_in()
            if self._long_prefill is not None and shape.planned_slot is not None:
                self._long_prefill.plan(shape.planned_slot, shape)
            slot.input_ready.record()
        return inputs, shape

    def _compute(self, slot: Slot, other: Slot, inputs: StepInputs, shape: StepShape) -> None:
        from backend.kernels.sample import sample

        tokens = carry_over(inputs.input_ids, inputs.carry_over, other.device_out[: self._max_rows])
        rows = inputs.sample_tokens.shape[0]
        logits = self._forward(tokens, inputs, shape, self._cache, self._logits[:rows])
        sample(
            logits,
            inputs.seeds,
            inputs.params,
            inputs.lists,
            workspace=self._workspace,
            output=slot.device_out[:rows],
            records=slot.device_records,
            alternatives=MAX_LOGPROBS,
            pdl=self._forward.early_launch,
        )

    @torch.inference_mode()
    def execute(self, slot: Slot, previous: Slot | None) -> None:
        """See ``Runner.execute``. The tokens carried over always come from the other slot."""
        plan, inputs = slot.plan, slot.inputs
        assert plan is not None
        assert inputs is not None
        mixed = plan.num_decode < len(plan.sequences)
        size = inputs.input_ids.shape[0]
        key = GraphKey(mixed, size, self._slots.index(slot), slot.shape.long_prefill)
        if slot.shape.fresh:  # one launch ahead of the graph, in steps in which such sequences join
            from backend.kernels.token_counts import start_rows

            start_rows(inputs.packed, slot.shape.fresh_at, len(slot.shape.fresh), self._workspace.counts)
        self._captured[key].replay()
