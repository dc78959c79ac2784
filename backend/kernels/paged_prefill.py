# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Causal attention of many queries a row over the paged cache: prefill, and chunks of a prefill.

The grid is an upper bound of the query tiles; each program finds its row among ``query_starts`` on the device, so
the host plans nothing and a captured launch serves every mix of rows that its bounds allow.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from backend.kernels.paged_decode import padded_head

_UNMASKED_PAIRS = 128  # of a tile, from where a loop without masks before the one with them pays


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    """Launch constants: (query, head) pairs and keys a tile, warps, stages of the load pipeline."""

    pairs: int
    tile: int
    warps: int
    stages: int


def prefill_config(group: int, head_size: int, dtype: torch.dtype, *, long: bool) -> PrefillConfig:
    """What measured best for a few rows of hundreds of tokens (``long``), or for many of about a hundred.

    ``group`` query heads share a key head.
    """
    smallest = max(16, triton.next_power_of_2(group))
    if dtype == torch.float32:
        return PrefillConfig(max(smallest, 32 if head_size <= 64 else 16), 32, 8, 2)
    if head_size > 128:
        return PrefillConfig(max(smallest, 64), 32, 4, 2)
    if not long:
        return PrefillConfig(max(smallest, 64), 32, 4, 3)
    return PrefillConfig(max(smallest, 128), 64, 8, 3)


@triton.jit(do_not_specialize=["table_stride", "window", "num_rows"])
def _prefill_kernel(
    query,
    keys,
    values,
    block_table,
    query_starts,
    kv_lengths,
    sinks,
    output,
    scale,
    softcap,
    window,
    num_rows,
    query_stride,
    query_head_stride,
    output_stride,
    table_stride,
    page_stride,
    token_stride,
    head_stride,
    rows_pad: tl.constexpr,
    group: tl.constexpr,
    head_size: tl.constexpr,
    head_pad: tl.constexpr,
    block_size: tl.constexpr,
    pairs: tl.constexpr,
    tile: tl.constexpr,
    stages: tl.constexpr,
    unmasked_first: tl.constexpr,
    has_window: tl.constexpr,
    has_softcap: tl.constexpr,
    has_sinks: tl.constexpr,
    precision: tl.constexpr,
    pdl: tl.constexpr,
):
    kv_head = tl.program_id(0)
    queries: tl.constexpr = pairs // group
    log2_e: tl.constexpr = 1.4426950408889634
    if pdl:
        gdc_wait()
    # All rows at once: a search among them would be as many loads that wait for each other.
    each = tl.arange(0, rows_pad)
    starts = tl.load(query_starts + each, mask=each < num_rows, other=0)
    counts = tl.load(query_starts + each + 1, mask=each < num_rows, other=0) - starts
    tiles = tl.cdiv(counts, queries)
    ends = tl.cumsum(tiles, axis=0)
    # The last tiles of a row see most keys: they come first, so that no long one starts when all others end.
    program = tl.sum(tiles, axis=0) - 1 - tl.program_id(1)
    if program < 0:
        return
    row = tl.sum((ends <= program).to(tl.int32), axis=0)
    first = (program - tl.sum(tl.where(each < row, tiles, 0), axis=0)) * queries
    row_start = tl.sum(tl.where(each == row, starts, 0), axis=0)
    row_queries = tl.sum(tl.where(each == row, counts, 0), axis=0)

    pair = tl.arange(0, pairs)
    local = first + pair // group
    head = kv_head * group + pair % group
    column = tl.arange(0, head_pad)
    in_head = column < head_size
    live = (local < row_queries) & (pair < queries * group)
    mask = live[:, None] & in_head[None, :]
    token = (row_start + local).to(tl.int64)
    q = tl.load(
        query + (token * query_stride + head * query_head_stride)[:, None] + column[None, :],
        mask=mask,
        other=0.0,
    )
    length = tl.load(kv_lengths + row)
    here = length - row_queries + local  # position of each query
    last = tl.minimum(first + queries, row_queries)
    end = length - row_queries + last
    begin = 0
    if has_window:
        begin = tl.maximum(length - row_queries + first - window + 1, 0) // tile * tile

    peak = tl.full([pairs], float("-inf"), tl.float32)
    total = tl.zeros([pairs], tl.float32)
    if has_sinks:
        peak = tl.load(sinks + head, mask=live, other=0.0).to(tl.float32) * log2_e
        total = tl.full([pairs], 1.0, tl.float32)
    acc = tl.zeros([pairs, head_pad], tl.float32)
    table = block_table + tl.cast(row, tl.int64) * table_stride
    key_head = keys + kv_head * head_stride + column[None, :]
    value_head = values + kv_head * head_stride + column[None, :]
    first_position = begin + tl.arange(0, tile)
    page = tl.load(table + first_position // block_size, mask=first_position < end, other=0)
    masked_from = begin
    if unmasked_first:
        # Tiles of keys that every query here sees.
        masked_from = (length - row_queries + first + 1) // tile * tile
        for at in tl.range(begin, masked_from, tile, num_stages=stages):
            position = at + tl.arange(0, tile)
            place = page.to(tl.int64) * page_stride + (position % block_size) * token_stride
            page = tl.load(table + (position + tile) // block_size, mask=position + tile < end, other=0)
            if head_size < head_pad:
                k = tl.load(key_head + place[:, None], mask=in_head[None, :], other=0.0)
                v = tl.load(value_head + place[:, None], mask=in_head[None, :], other=0.0)
            else:
                k = tl.load(key_head + place[:, None])
                v = tl.load(value_head + place[:, None])
            score = _score(q, k, scale, softcap, has_softcap, precision)
            highest = tl.maximum(peak, tl.max(score, axis=1))
            weight = tl.exp2(score - highest[:, None])
            shrink = tl.exp2(peak - highest)
            total = total * shrink + tl.sum(weight, axis=1)
            acc = tl.dot(weight.to(v.dtype), v, acc * shrink[:, None], input_precision=precision)
            peak = highest
    for at in tl.range(masked_from, end, tile, num_stages=stages):
        position = at + tl.arange(0, tile)
        valid = position < end
        place = page.to(tl.int64) * page_stride + (position % block_size) * token_stride
        # One tile ahead, so that the pipeline of keys and values never waits for the block table.
        page = tl.load(table + (position + tile) // block_size, mask=position + tile < end, other=0)
        load_mask = valid[:, None] & in_head[None, :] if head_size < head_pad else valid[:, None]
        k = tl.load(key_head + place[:, None], mask=load_mask, other=0.0)
        v = tl.load(value_head + place[:, None], mask=load_mask, other=0.0)
        seen = position[None, :] <= here[:, None]
        if has_window:
            seen = seen & (position[None, :] > here[:, None] - window)
        score = _score(q, k, scale, softcap, has_softcap, precision)
        score = tl.where(seen, score, float("-inf"))
        highest = tl.maximum(peak, tl.max(score, axis=1))
        # A query may see nothing of the first tiles; then there is no peak to subtract yet.
        base = tl.where(highest == float("-inf"), 0.0, highest)
        weight = tl.exp2(score - base[:, None])
        shrink = tl.exp2(peak - base)
        total = total * shrink + tl.sum(weight, axis=1)
        acc = tl.dot(weight.to(v.dtype), v, acc * shrink[:, None], input_precision=precision)
        peak = highest
    if pdl:
        gdc_launch_dependents()
    result = acc / tl.where(total > 0, total, 1.0)[:, None]
    target = output + (token * output_stride + head * head_size)[:, None] + column[None, :]
    tl.store(target, result.to(output.dtype.element_ty), mask=mask)


@triton.jit
def _score(q, k, scale, softcap, has_softcap: tl.constexpr, precision: tl.constexpr):
    """Scores of queries and keys for a softmax to the base of two."""
    log2_e: tl.constexpr = 1.4426950408889634
    score = tl.dot(q, tl.trans(k), input_precision=precision)
    if has_softcap:
        return (softcap * log2_e) * (1.0 - 2.0 / (tl.exp(score * (scale * 2.0 / softcap)) + 1.0))
    return score * (scale * log2_e)


def paged_prefill(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    block_table: Tensor,
    query_starts: Tensor,
    kv_lengths: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    output: Tensor | None = None,
    config: PrefillConfig,
    most_rows: int | None = None,
    pdl: bool = False,
) -> Tensor:
    """Attention of rows of queries over their cached keys, which hold the queries' own already.

    Query i of row r stands at position ``kv_lengths[r] - queries of r + i`` and sees the positions up to its own.

    Args:
        query: [T, heads, head_size]; contiguous heads of any stride. It may hold more tokens than the rows use:
            those are neither read nor written.
        keys, values: [blocks, block_size, kv_heads, head_size], contiguous, of the query's type.
        block_table: i32[R, W], rows of any stride.
        query_starts: i32[R + 1], first token of each row in ``query``, ascending; a row may be empty. It need not
            begin at 0: a slice leaves out the rows before it.
        kv_lengths: i32[R]; read on the device like ``query_starts``.
        scale, window, softcap, sinks, output, pdl: see ``paged_decode``.
        config: see ``prefill_config``.
        most_rows: no more rows than this have queries; None: all may have.

    Raises:
        ValueError: shapes or strides do not fit.
    """
    tokens, num_heads, head_size = query.shape
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
    rows = kv_lengths.shape[0]
    if query_starts.shape[0] != rows + 1:
        raise ValueError(
            f"query_starts has {query_starts.shape[0]} entries for {rows} rows; it needs {rows + 1}"
        )
    if output is None:
        output = torch.empty((tokens, num_heads, head_size), dtype=query.dtype, device=query.device)
    elif output.shape != query.shape or output.stride(2) != 1 or output.stride(1) != head_size:
        raise ValueError(f"output {tuple(output.shape)} does not fit queries {tuple(query.shape)}")
    if rows == 0 or tokens == 0:
        return output
    group = num_heads // num_kv_heads
    if config.pairs < group:
        raise ValueError(
            f"a tile of {config.pairs} pairs does not hold the {group} heads that share a key head"
        )
    tiles = tokens // (config.pairs // group) + (rows if most_rows is None else min(rows, most_rows))
    _prefill_kernel[(num_kv_heads, tiles)](
        query,
        keys,
        values,
        block_table,
        query_starts,
        kv_lengths,
        sinks,
        output,
        scale,
        softcap or 0.0,
        window or 0,
        rows,
        query.stride(0),
        query.stride(1),
        output.stride(0),
        block_table.stride(0),
        keys.stride(0),
        keys.stride(1),
        keys.stride(2),
        rows_pad=triton.next_power_of_2(rows),
        group=group,
        head_size=head_size,
        head_pad=padded_head(head_size),
        block_size=block_size,
        pairs=config.pairs,
        tile=config.tile,
        stages=config.stages,
        unmasked_first=config.pairs >= _UNMASKED_PAIRS and window is None,
        has_window=window is not None,
        has_softcap=softcap is not None,
        has_sinks=sinks is not None,
        precision="ieee" if query.dtype == torch.float32 else "tf32",
        pdl=pdl,
        num_warps=config.warps,
        launch_pdl=pdl,
    )
    return output
