"""Prefill of a few long rows by FlashInfer's FA3 kernel, where that is faster than ours: on Hopper, in 16 bits.

FlashInfer's wrapper plans a step in Python and copies page lists to the device for it. Here its compiled module is
called directly: the kernel works through lists of tiles, one for each processor, which the module's ``plan`` makes
from lengths that the host knows, in a page-locked buffer of its slot, and sends to the device on the stream of the
step's other inputs. Pages are read from the slot's own block table, since a tile's first page may lie anywhere. So a
captured launch serves every later plan.
"""

from __future__ import annotations

import importlib.util
import itertools
import logging
import time
from importlib.metadata import version
from typing import Any, Literal

import numpy as np
import torch

from backend.api import ConfigurationError
from backend.attention.interface import AttentionParams
from backend.slots import LONG_PREFILL_ROWS, StepShape

logger = logging.getLogger(__name__)

_HEAD_SIZES = (64, 128, 256)
_TILE = 128  # queries of a tile, at least; of its lists the kernel needs room for so many tiles
_LISTS = 7  # words that the plan keeps of each tile
_LARGEST_DIFFERENCE = 0.03  # of averages of normal numbers; a part in 16 bits rounds to 0.008
_CAUSAL, _NHD = 1, 0  # FlashInfer's codes of a mask and a layout


class FlashInferPrefill:
    """The compiled module, and what a plan takes of host and device memory in each slot."""

    name = "flashinfer"

    def __init__(
        self,
        module: Any,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_size: int,
        block_size: int,
        max_tokens: int,
        max_blocks: int,
        device: torch.device,
        num_slots: int = 2,
    ) -> None:
        """``max_tokens`` of a step; ``max_blocks`` is the width of its block table."""
        self._module = module
        self.num_heads, self.num_kv_heads, self.head_size = num_heads, num_kv_heads, head_size
        self.block_size = block_size
        self.max_tokens = max_tokens
        self.max_blocks = max_blocks
        self.device = device
        self.num_slots = num_slots
        words = _LISTS * num_heads * (-(-max_tokens // _TILE) + LONG_PREFILL_ROWS)
        pinned = device.type == "cuda"
        count = 4 * words + 2**14  # and a border for each processor, and alignment
        self._on_device = [torch.zeros(count, dtype=torch.uint8, device=device) for _ in range(num_slots)]
        self._host = [torch.zeros(count, dtype=torch.uint8, pin_memory=pinned) for _ in range(num_slots)]
        self._nothing = torch.zeros(16, dtype=torch.int32, device=device)
        self._starts = torch.zeros(LONG_PREFILL_ROWS + 1, dtype=torch.int32)
        self._pages = torch.zeros(LONG_PREFILL_ROWS, dtype=torch.int32)
        self._lengths = torch.zeros(LONG_PREFILL_ROWS, dtype=torch.int32)
        self._layout: list[int] | None = None  # where the plan keeps what; the same for every step

    @property
    def max_length(self) -> int:
        """Tokens of a row that the block table has room for."""
        return self.max_blocks * self.block_size

    def suits(self, params: AttentionParams) -> bool:
        """Whether a layer's attention is plain enough."""
        return params.window is None and params.softcap is None and params.sinks is None

    def plan(self, slot: int, shape: StepShape) -> None:
        """Plan the rows after the decode rows, at most ``LONG_PREFILL_ROWS``, and send the plan to the device.

        Call it within the h2d stream's context, before the slot's inputs are marked as ready; the step that used
        the slot before must have retired. Never blocks.
        """
        first = shape.num_decode  # a row, and its first token: decode rows have one each
        queries = shape.query_lengths[first:]
        count = len(queries)
        starts, pages, lengths = self._starts.numpy(), self._pages.numpy(), self._lengths.numpy()
        starts[0] = first
        starts[1 : count + 1] = first + np.cumsum(queries, dtype=np.int32)
        starts[count + 1 :] = starts[count]
        pages[:count] = np.arange(first, first + count) * self.max_blocks
        lengths[:count] = shape.kv_lengths[first:]
        lengths[count:] = 0
        layout = self._module.plan(
            self._nothing,
            self._on_device[slot],
            self._host[slot],
            self._starts,
            self._pages,
            self._lengths,
            self.max_tokens,  # and the number of rows: the layout depends on these two
            LONG_PREFILL_ROWS,
            self.num_heads,
            self.num_kv_heads,
            self.block_size,
            True,  # a layout for graphs
            self.head_size,
            self.head_size,
            True,  # causal
            -1,  # no window
        )
        if self._layout is None:
            self._layout = list(layout)

    def run(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        block_table: torch.Tensor,
        *,
        slot: int,
        scale: float,
        output: torch.Tensor,
    ) -> None:
        """Attend as the slot's plan says; writes the planned tokens of ``output`` and no others.

        Args:
            query, output: [T, heads, head_size], contiguous heads; output contiguous.
            keys, values: [blocks, block_size, kv_heads, head_size].
            block_table: i32[R, W], contiguous, W as given to the constructor.
        """
        assert self._layout is not None, "nothing has been planned"
        self._module.paged_run(
            self._nothing,
            self._on_device[slot],
            self._layout,
            query,
            keys,
            values,
            self._nothing,  # these four belong to the other backends of FlashInfer
            self._nothing,
            block_table.view(-1),
            self._nothing,
            output,
            None,  # no log-sum-exp wanted
            _CAUSAL,
            _NHD,
            -1,  # no window
            False,  # starts when the kernel before it has ended
            None,
            None,
            None,
            None,
            0.0,  # no soft cap
            scale,
            1.0,  # of the values
            0,
        )


def find_flashinfer(
    wanted: Literal["auto", "triton", "flashinfer"],
    *,
    params: list[AttentionParams],
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    block_size: int,
    max_tokens: int,
    max_blocks: int,
    dtype: torch.dtype,
    device: torch.device,
) -> FlashInferPrefill | None:
    """FlashInfer's kernel if it is to be used.

    ``auto`` takes it where it is installed and its kernels have been built, ``flashinfer`` builds them, which needs
    ``nvcc`` and takes some minutes once.

    Raises:
        ConfigurationError: it is wanted and cannot be had.
    """
    if wanted == "triton":
        return None
    reason = _unfit(params, head_size, dtype, device)
    found = None
    if reason is None:
        module, reason = _load(dtype, head_size, device, build=wanted == "flashinfer")
    if reason is None:
        try:
            found = FlashInferPrefill(
                module,
                num_heads=num_heads,
                num_kv_heads=num_kv_heads,
                head_size=head_size,
                block_size=block_size,
                max_tokens=max_tokens,
                max_blocks=max_blocks,
                device=device,
            )
            same = computes_the_same(found, dtype)
        except Exception as exc:
            reason = _misfit(f"cannot be called: {type(exc).__name__}: {exc}")
        else:
            if not same:
                reason = _misfit("computes another attention than our kernel")
    if reason is None:
        return found
    if wanted == "flashinfer":
        raise ConfigurationError(
            f"prefill_attention is 'flashinfer', but {reason}. Mend that, or leave the setting at 'auto'"
        )
    logger.debug("long prompts attend by our own kernel: %s", reason)
    return None


def _misfit(what: str) -> str:
    """Say, also where nobody asked for it, that an installed FlashInfer cannot be used: it may be a newer one."""
    reason = f"FlashInfer {version('flashinfer-python')} {what}"
    logger.warning("%s; long prompts attend by our own kernel", reason)
    return reason


@torch.inference_mode()
def computes_the_same(found: FlashInferPrefill, dtype: torch.dtype) -> bool:
    """Compare with our own kernel, on random numbers: rows of odd lengths after decode rows, pages in any order."""
    from backend.kernels.paged_prefill import paged_prefill, prefill_config

    device = found.device
    decode = 2
    queries, lengths = [], []
    room = found.max_tokens - decode
    for wanted, cached in ((130, 77), (33, 0), (1, 40)):
        count = max(min(wanted, room, found.max_length), 0)
        queries.append(count)
        lengths.append(min(count + cached, found.max_length))
        room -= count
    shape = StepShape(decode, True, True, 0, [1] * decode + queries, [1] * decode + lengths)
    rows = decode + len(queries)
    generator = torch.Generator().manual_seed(0)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator).to(device, dtype)

    num_blocks = sum(-(-length // found.block_size) for length in shape.kv_lengths)
    order = torch.randperm(num_blocks, generator=generator).to(device, torch.int32)
    table = torch.zeros(rows, found.max_blocks, dtype=torch.int32, device=device)
    used = 0
    for row, length in enumerate(shape.kv_lengths):
        width = -(-length // found.block_size)
        table[row, :width] = order[used : used + width]
        used += width
    keys, values = (
        normal(num_blocks, found.block_size, found.num_kv_heads, found.head_size) for _ in range(2)
    )
    query = normal(decode + sum(queries), found.num_heads + 2, found.head_size)[:, : found.num_heads]
    ours = torch.zeros(query.shape, dtype=dtype, device=device)
    theirs = ours.clone()
    starts = torch.tensor([*range(decode), *itertools.accumulate(queries, initial=decode)])
    paged_prefill(
        query,
        keys,
        values,
        table,
        starts.clamp(min=decode).to(device, torch.int32),
        torch.tensor(shape.kv_lengths).to(device, torch.int32),
        scale=found.head_size**-0.5,
        output=ours,
        config=prefill_config(found.num_heads // found.num_kv_heads, found.head_size, dtype, long=True),
    )
    for slot in range(found.num_slots):
        theirs.zero_()
        found.plan(slot, shape)
        found.run(query, keys, values, table, slot=slot, scale=found.head_size**-0.5, output=theirs)
        if not torch.allclose(theirs.float(), ours.float(), rtol=0.0, atol=_LARGEST_DIFFERENCE):
            return False
    return True


def _unfit(
    params: list[AttentionParams], head_size: int, dtype: torch.dtype, device: torch.device
) -> str | None:
    if torch.cuda.get_device_capability(device)[0] != 9:
        return "its FA3 kernels need a Hopper GPU"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"its kernels do not compute in {str(dtype).removeprefix('torch.')}"
    if head_size not in _HEAD_SIZES:
        return f"its kernels have no heads of size {head_size}"
    if not any(p.window is None and p.softcap is None and p.sinks is None for p in params):
        return "each layer has a sliding window, a soft cap or sinks"
    if importlib.util.find_spec("flashinfer") is None:
        return "the package flashinfer-python is not installed"
    return None


def _load(dtype: torch.dtype, head_size: int, device: torch.device, *, build: bool) -> tuple[Any, str | None]:
    """The compiled module, or why there is none."""
    with torch.cuda.device(device):
        try:
            from flashinfer.jit import gen_batch_prefill_module

            spec = gen_batch_prefill_module(
                "fa3", dtype, dtype, dtype, torch.int32, head_size, head_size, 0, False, False, False
            )
        except Exception as exc:  # another version, or one whose own dependencies are missing
            return None, _misfit(f"has no such kernels: {type(exc).__name__}: {exc}")
        if not build and not spec.is_compiled:
            return None, "its kernels have not been built; prefill_attention 'flashinfer' builds them"
        began = time.perf_counter()
        if not spec.is_compiled:
            logger.info("building FlashInfer's prefill kernels, which takes some minutes once")
        try:
            module = spec.build_and_load()
        except Exception as exc:  # whatever a compiler, a linker or a loader may say
            return None, _misfit(f"cannot build or load its kernels: {exc}")
        logger.info("FlashInfer's prefill kernels ready after %.1f s", time.perf_counter() - began)
        return module, None
