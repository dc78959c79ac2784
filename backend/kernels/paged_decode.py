# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Decode attention over the paged cache: one query a row, keys and values shared out to several programs.

The number of splits is fixed when the kernel is launched (a CUDA graph holds it), but what each split takes is
worked out on the device from the row's length at that time. The program of a row and head that ends last merges
the partial results, so no second kernel is needed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from backend.kernels.prefetch import prefetch

MAX_SPLITS = 64


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """Launch constants: keys a tile, splits of a row, warps a program, stages of the load pipeline."""

    tile: int
    splits: int
    warps: int
    stages: int


def decode_config(
    rows: int, max_context: int, *, num_kv_heads: int, head_size: int, dtype: torch.dtype, pdl: bool = False
) -> DecodeConfig:
    """What measured best for this launch; depends on nothing that changes between replays of one graph.

    Args:
        rows: of the launch, padding included.
        max_context: most keys a row is expected to have while these constants are in use; longer rows are still
            computed correctly.
        pdl: programmatic dependent launch; see ``paged_decode``.
    """
    programs = rows * num_kv_heads
    splits = max(1, min(256 // programs, max_context // 64, MAX_SPLITS))
    if dtype == torch.float32 or head_size > 128:
        return DecodeConfig(32, splits, 8, 2)
    if programs * splits > 264:
        return DecodeConfig(64, splits, 4, 2)
    # Two programs a multiprocessor keep the memory busy. Where they start while the kernel before ends, they go to
    # the multiprocessors that are free first, and with the shared memory of three stages three of them would fit
    # there and leave others idle.
    return DecodeConfig(64, splits, 4, 4 if pdl else 3)


def padded_head(head_size: int) -> int:
    """Elements that a head takes in a kernel's tiles: matrix products need powers of two, and 16 at least."""
    return max(16, int(triton.next_power_of_2(head_size)))


class DecodeWorkspace:
    """Partial results of one launch at a time; launches that share one must follow each other on a stream."""

    def __init__(
        self, max_rows: int, num_heads: int, head_size: int, max_splits: int, device: torch.device
    ) -> None:
        self.capacity = max_rows * num_heads * max_splits
        self.max_rows = max_rows
        self.num_heads = num_heads
        self.head_pad = padded_head(head_size)
        self.sums = torch.empty(self.capacity * self.head_pad, dtype=torch.float32, device=device)
        self.stats = torch.empty(self.capacity * 2, dtype=torch.float32, device=device)
        # Splits of a row and head that have ended; the last one sets it back to zero.
        self.counters = torch.zeros(max_rows * num_heads, dtype=torch.int32, device=device)

    def bytes(self) -> int:
        """Device memory held."""
        return self.sums.nbytes + self.stats.nbytes + self.counters.nbytes


@triton.jit(do_not_specialize=["table_stride", "table_width", "window"])
def _decode_kernel(
    query,
    keys,
    values,
    block_table,
    kv_lengths,
    sinks,
    output,
    sums,
    stats,
    counters,
    scale,
    softcap,
    window,
    query_stride,
    query_head_stride,
    output_stride,
    table_stride,
    table_width,
    page_stride,
    token_stride,
    head_stride,
    group: tl.constexpr,
    group_pad: tl.constexpr,
    head_size: tl.constexpr,
    head_pad: tl.constexpr,
    block_size: tl.constexpr,
    tile: tl.constexpr,
    stages: tl.constexpr,
    line: tl.constexpr,
    undivided: tl.constexpr,
    has_window: tl.constexpr,
    has_softcap: tl.constexpr,
    has_sinks: tl.constexpr,
    precision: tl.constexpr,
    pdl: tl.constexpr,
):
    if pdl:
        gdc_launch_dependents()  # what comes next may fetch its weights while the last programs here end
    # Heads run fastest: programs that read neighbouring bytes run at the same time.
    kv_head = tl.program_id(0)
    split = tl.program_id(1)
    row = tl.program_id(2)
    num_kv_heads = tl.num_programs(0)
    splits = tl.num_programs(1)
    log2_e: tl.constexpr = 1.4426950408889634
    table = block_table + row.to(tl.int64) * table_stride
    length = tl.load(kv_lengths + row)
    begin = 0
    if undivided:
        share = tl.maximum(tl.cdiv(length, tile), 1) * tile
        start = 0
        end = length
        position = tl.arange(0, tile)
        # Not masked by the length: that is on its way here at the same time.
        page = tl.load(table + tl.minimum(position // block_size, table_width - 1))
        page = tl.where(position < end, page, 0)
    else:
        if has_window:
            begin = tl.maximum(length - window, 0) // tile * tile
        share = tl.maximum(tl.cdiv(tl.cdiv(length - begin, splits), tile), 1) * tile
        start = begin + split * share
        if (start >= length) & (split > 0):
            return
        end = tl.minimum(start + share, length)
        position = start + tl.arange(0, tile)
        page = tl.load(table + position // block_size, mask=position < end, other=0)
    if pdl:
        # Tokens of earlier steps lie in the cache already: fetch the first of them while the kernel before this
        # one, which stores this step's, ends.
        place = (
            page.to(tl.int64) * page_stride + (position % block_size) * token_stride + kv_head * head_stride
        )
        lines = place[:, None] + tl.arange(0, head_pad // line)[None, :] * line
        prefetch(keys + lines)
        prefetch(values + lines)
        gdc_wait()

    member = tl.arange(0, group_pad)
    column = tl.arange(0, head_pad)
    in_group = member < group
    in_head = column < head_size
    head = kv_head * group + member
    mask = in_group[:, None] & in_head[None, :]
    q = tl.load(
        query + row.to(tl.int64) * query_stride + head[:, None] * query_head_stride + column[None, :],
        mask=mask,
        other=0.0,
    )
    peak = tl.full([group_pad], float("-inf"), tl.float32)
    total = tl.zeros([group_pad], tl.float32)
    if has_sinks:
        sink = tl.load(sinks + head, mask=in_group & (split == 0), other=float("-inf")).to(tl.float32)
        peak = sink * log2_e
        total = tl.where(in_group & (split == 0), 1.0, 0.0)
    acc = tl.zeros([group_pad, head_pad], tl.float32)
    key_head = keys + kv_head * head_stride + column[None, :]
    value_head = values + kv_head * head_stride + column[None, :]
    for at in tl.range(start, end, tile, num_stages=stages):
        position = at + tl.arange(0, tile)
        valid = position < end
        place = page.to(tl.int64) * page_stride + (position % block_size) * token_stride
        # One tile ahead, so that the pipeline of keys and values never waits for the block table.
        page = tl.load(table + (position + tile) // block_size, mask=position + tile < end, other=0)
        load_mask = valid[:, None] & in_head[None, :] if head_size < head_pad else valid[:, None]
        k = tl.load(key_head + place[:, None], mask=load_mask, other=0.0, eviction_policy="evict_first")
        v = tl.load(value_head + place[:, None], mask=load_mask, other=0.0, eviction_policy="evict_first")
        score = tl.dot(q, tl.trans(k), input_precision=precision) * scale
        if has_softcap:
            score = softcap * (1.0 - 2.0 / (tl.exp(score * (2.0 / softcap)) + 1.0))
        seen = valid
        if has_window:
            seen = valid & (position >= length - window)
        score = tl.where(seen[None, :], score * log2_e, float("-inf"))
        highest = tl.maximum(peak, tl.max(score, axis=1))
        weight = tl.exp2(score - highest[:, None])
        shrink = tl.exp2(peak - highest)
        total = total * shrink + tl.sum(weight, axis=1)
        acc = acc * shrink[:, None]
        acc = tl.dot(weight.to(v.dtype), v, acc, input_precision=precision)
        peak = highest

    target = output + row.to(tl.int64) * output_stride
    active = tl.maximum(tl.cdiv(length - begin, share), 1)
    if active == 1:
        result = acc / tl.where(total > 0, total, 1.0)[:, None]
        place_out = target + head[:, None] * head_size + column[None, :]
        tl.store(place_out, result.to(output.dtype.element_ty), mask=mask)
    else:
        first = (row * num_kv_heads + kv_head).to(tl.int64) * group * splits
        slot = first + member * splits + split
        tl.store(sums + slot[:, None] * head_pad + column[None, :], acc, mask=in_group[:, None])
        tl.store(stats + slot * 2, peak, mask=in_group)
        tl.store(stats + slot * 2 + 1, total, mask=in_group)
        counter = counters + row * num_kv_heads + kv_head
        tl.debug_barrier()  # every thread's stores come before the one thread's release
        if tl.atomic_add(counter, 1, sem="acq_rel") == active - 1:
            _merge(
                sums,
                stats,
                target,
                first,
                kv_head,
                active,
                splits,
                group,
                head_size,
                head_pad,
            )
            tl.store(counter, 0)


@triton.jit
def _merge(
    sums,
    stats,
    target,
    first,
    kv_head,
    active,
    splits,
    group: tl.constexpr,
    head_size: tl.constexpr,
    head_pad: tl.constexpr,
):
    """Weigh the partial results of one row and key head, and store the row."""
    all_splits: tl.constexpr = 64  # MAX_SPLITS
    split_chunk: tl.constexpr = 8
    members: tl.constexpr = triton.next_power_of_2(group)
    member = tl.arange(0, members)
    column = tl.arange(0, head_pad)
    each = tl.arange(0, all_splits)
    slot = first + member[:, None] * splits + each[None, :]
    mask = (member < group)[:, None] & (each < active)[None, :]
    peaks = tl.load(stats + slot * 2, mask=mask, other=float("-inf"), cache_modifier=".cg")
    totals = tl.load(stats + slot * 2 + 1, mask=mask, other=0.0, cache_modifier=".cg")
    highest = tl.max(peaks, axis=1)
    highest = tl.where(member < group, highest, 0.0)
    total = tl.sum(totals * tl.exp2(peaks - highest[:, None]), axis=1)
    acc = tl.zeros([members, head_pad], tl.float32)
    for at in range(0, active, split_chunk):
        some = at + tl.arange(0, split_chunk)
        source = first + member[:, None] * splits + some[None, :]
        ended = (member < group)[:, None] & (some < active)[None, :]
        peak = tl.load(stats + source * 2, mask=ended, other=float("-inf"), cache_modifier=".cg")
        part = tl.load(
            sums + source[:, :, None] * head_pad + column[None, None, :],
            mask=ended[:, :, None],
            other=0.0,
            cache_modifier=".cg",
        )
        acc += tl.sum(part * tl.exp2(peak - highest[:, None])[:, :, None], axis=1)
    result = acc / tl.where(total > 0, total, 1.0)[:, None]
    place = target + (kv_head * group + member)[:, None] * head_size + column[None, :]
    inside = (member < group)[:, None] & (column < head_size)[None, :]
    tl.store(place, result.to(target.dtype.element_ty), mask=inside)


def paged_decode(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    block_table: Tensor,
    kv_lengths: Tensor,
    *,
    scale: float,
    workspace: DecodeWorkspace,
    config: DecodeConfig,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    output: Tensor | None = None,
    pdl: bool = False,
) -> Tensor:
    """Attention of one query a row over its cached keys, the query's own included.

    Args:
        query: [R, heads, head_size]; contiguous heads of any stride (a slice of the fused product will do).
        keys, values: [blocks, block_size, kv_heads, head_size], contiguous, of the query's type.
        block_table: i32[R, W], rows of any stride.
        kv_lengths: i32[R], read on the device; rows of length 0 yield zeros.
        scale: multiplies the scores.
        workspace: for at least R rows and ``config.splits``; see ``DecodeWorkspace``.
        config: see ``decode_config``.
        window: a query sees itself and ``window - 1`` tokens before it.
        softcap: scores become ``softcap * tanh(score / softcap)``.
        sinks: [heads], one more logit a head that takes part in the softmax and yields nothing.
        output: [R, heads, head_size] with contiguous rows, or None: a new tensor.
        pdl: programmatic dependent launch. ``kv_lengths``, ``block_table`` and the tokens of earlier steps are then
            read before the wait: the two kernels before this one on the stream must not write them.

    Raises:
        ValueError: shapes or strides do not fit, or the workspace is too small.
    """
    rows, num_heads, head_size = query.shape
    block_size, num_kv_heads = keys.shape[1:3]
    if keys.shape != values.shape or keys.shape[3] != head_size or num_heads % num_kv_heads:
        raise ValueError(f"keys {tuple(keys.shape)} do not fit queries {tuple(query.shape)}")
    if (
        not keys.is_contiguous()
        or not values.is_contiguous()
        or query.stride(2) != 1
        or block_table.stride(1) != 1
    ):
        raise ValueError("keys, values, and the last dimension of query and block_table must be contiguous")
    if rows * num_heads * config.splits > workspace.capacity or rows > workspace.max_rows:
        raise ValueError(
            f"the workspace holds less than {rows} rows of {num_heads} heads x {config.splits} splits"
        )
    if num_heads > workspace.num_heads or padded_head(head_size) > workspace.head_pad:
        raise ValueError(f"the workspace is not for {num_heads} heads of size {head_size}")
    if not 1 <= config.splits <= MAX_SPLITS:
        raise ValueError(f"splits is {config.splits}; it must be 1 to {MAX_SPLITS}")
    if output is None:
        output = torch.empty((rows, num_heads, head_size), dtype=query.dtype, device=query.device)
    elif output.shape != query.shape or output.stride(2) != 1 or output.stride(1) != head_size:
        raise ValueError(f"output {tuple(output.shape)} does not fit queries {tuple(query.shape)}")
    if rows == 0:
        return output
    group = num_heads // num_kv_heads
    _decode_kernel[(num_kv_heads, config.splits, rows)](
        query,
        keys,
        values,
        block_table,
        kv_lengths,
        sinks,
        output,
        workspace.sums,
        workspace.stats,
        workspace.counters,
        scale,
        softcap or 0.0,
        window or 0,
        query.stride(0),
        query.stride(1),
        output.stride(0),
        block_table.stride(0),
        block_table.shape[1],
        keys.stride(0),
        keys.stride(1),
        keys.stride(2),
        group=group,
        group_pad=max(16, triton.next_power_of_2(group)),
        head_size=head_size,
        head_pad=padded_head(head_size),
        block_size=block_size,
        tile=config.tile,
        stages=config.stages,
        line=min(128 // query.element_size(), padded_head(head_size)),
        undivided=config.splits == 1 and window is None,
        has_window=window is not None,
        has_softcap=softcap is not None,
        has_sinks=sinks is not None,
        precision="ieee" if query.dtype == torch.float32 else "tf32",
        pdl=pdl,
        num_warps=config.warps,
        launch_pdl=pdl,
    )
    return output
