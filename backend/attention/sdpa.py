"""Attention by PyTorch's own operators: the CPU's kernel, and the reference for every other one.

All decode rows are gathered from their blocks, padded to the longest, and attend together; prefill rows attend
one by one. The query heads that share a key head are treated as queries of one head, so that keys and values are
never repeated in memory. What depends on the step alone (tables, masks) is made once a step, not once a layer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

from backend.attention.interface import AttentionParams
from backend.kv_cache import KVCache
from backend.slots import StepInputs, StepShape


@dataclass(slots=True)
class Segment:
    """Rows that attend together: ``rows`` of them, with ``queries`` tokens each, over ``length`` cached tokens.

    ``mask`` is additive and broadcasts to ``[rows, 1, queries, length]``; ``None`` where every query sees all.
    """

    first: int  # token of the step
    rows: int
    queries: int
    blocks: torch.Tensor  # int32 [rows * blocks of a row]
    length: int
    mask: torch.Tensor | None
    foreign: torch.Tensor | None = None  # int64, gathered tokens past the end of their row in its last block


class SdpaKernel:
    """Gathers each row's keys and values, then calls ``scaled_dot_product_attention`` (or plain products where
    soft caps or sinks ask for them)."""

    name = "sdpa"

    def __init__(self) -> None:
        self._shape: StepShape | None = None
        self._segments: dict[int | None, list[Segment]] = {}
        self._scratch: dict[tuple[str, torch.dtype], torch.Tensor] = {}

    def attend(
        self,
        query: torch.Tensor,
        layer: int,
        cache: KVCache,
        inputs: StepInputs,
        shape: StepShape,
        params: AttentionParams,
    ) -> torch.Tensor:
        """See ``AttentionKernel.attend``."""
        if self._shape is not shape:
            self._shape, self._segments = shape, {}
        segments = self._segments.get(params.window)
        if segments is None:
            segments = make_segments(inputs, shape, cache, params.window, query.dtype)
            self._segments[params.window] = segments
        keys, values = cache.keys[layer], cache.values[layer]
        parts = [self._attend_segment(query, keys, values, segment, params) for segment in segments]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _attend_segment(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        segment: Segment,
        params: AttentionParams,
    ) -> torch.Tensor:
        kv_heads, head_size = keys.shape[2:]
        rows, queries = segment.rows, segment.queries
        group = query.shape[1] // kv_heads
        k = self._gather("k", keys, segment).transpose(1, 2)
        v = self._gather("v", values, segment).transpose(1, 2)
        # [rows * queries, heads, size] → [rows, kv heads, group * queries, size]
        q = query[segment.first : segment.first + rows * queries]
        q = q.reshape(rows, queries, kv_heads, group, head_size).permute(0, 2, 3, 1, 4).flatten(2, 3)
        mask = segment.mask
        if mask is not None and queries > 1:
            mask = mask.repeat(1, 1, group, 1)
        sinks = None
        if params.sinks is not None:
            sinks = params.sinks.view(1, kv_heads, group, 1).repeat_interleave(queries, dim=2)
        output = _attention(q, k, v, mask, params, sinks)
        output = output.view(rows, kv_heads, group, queries, head_size).permute(0, 3, 1, 2, 4)
        return output.reshape(rows * queries, -1, head_size)

    def _gather(self, name: str, pages: torch.Tensor, segment: Segment) -> torch.Tensor:
        """``[rows, length, kv heads, size]`` in a buffer that is used again: fresh pages are slow to touch."""
        block_size, kv_heads, head_size = pages.shape[1:]
        size = segment.blocks.numel() * block_size * kv_heads * head_size
        scratch = self._scratch.get((name, pages.dtype))
        if scratch is None or scratch.numel() < size:
            scratch = self._scratch[name, pages.dtype] = pages.new_empty(size)
        flat = scratch[:size].view(segment.blocks.numel(), -1)
        torch.index_select(pages.flatten(1), 0, segment.blocks, out=flat)
        if segment.foreign is not None:
            flat.view(-1, kv_heads * head_size).index_fill_(0, segment.foreign, 0.0)
        return flat.view(segment.rows, -1, kv_heads, head_size)[:, : segment.length]


def make_segments(
    inputs: StepInputs, shape: StepShape, cache: KVCache, window: int | None, dtype: torch.dtype
) -> list[Segment]:
    """The segments of a step for layers with this sliding window."""
    segments = []
    block_size = cache.block_size
    if shape.num_decode:
        segments.append(_decode_segment(inputs, shape, cache, window, dtype))
    at = shape.num_decode
    for row in range(shape.num_decode, len(shape.query_lengths)):
        segments.append(_prefill_segment(inputs, shape, row, at, block_size, window, dtype))
        at += shape.query_lengths[row]
    return segments


def _first_block(position: int, window: int | None, block_size: int) -> int:
    """First block that the query at ``position`` can see."""
    return 0 if window is None else max(0, position - window + 1) // block_size


def _decode_segment(
    inputs: StepInputs, shape: StepShape, cache: KVCache, window: int | None, dtype: torch.dtype
) -> Segment:
    block_size, count = cache.block_size, shape.num_decode
    lengths = shape.kv_lengths[:count]
    shortest, longest = min(lengths), max(lengths)
    begin = _first_block(shortest - 1, window, block_size)
    offset, length = begin * block_size, longest - begin * block_size
    mask = None
    if shortest < longest or window is not None:
        positions = torch.arange(offset, longest, dtype=torch.int32, device=inputs.kv_lengths.device)
        ends = inputs.kv_lengths[:count, None]
        visible = positions < ends
        if window is not None:
            visible &= positions >= ends - window
        mask = _additive(visible, dtype)[:, None, None, :]
    table = inputs.block_table[:count, begin : -(-longest // block_size)]
    if shortest == longest:
        return Segment(0, count, 1, table.reshape(-1), length, mask)
    # Past its end a row must gather nothing that another sequence wrote: a NaN there would come through the mask,
    # and a request whose keys are broken has to fail alone.
    starts = torch.arange(table.shape[1], dtype=torch.int32, device=table.device) * block_size + offset
    blocks = torch.where(starts < inputs.kv_lengths[:count, None], table, cache.dummy_block).reshape(-1)
    places = starts[:, None] + torch.arange(block_size, dtype=torch.int32, device=table.device)
    ends = inputs.kv_lengths[:count, None, None]
    foreign = ((starts[:, None] < ends) & (places >= ends)).flatten().nonzero().squeeze(1)
    return Segment(0, count, 1, blocks, length, mask, foreign)


def _prefill_segment(
    inputs: StepInputs,
    shape: StepShape,
    row: int,
    first: int,
    block_size: int,
    window: int | None,
    dtype: torch.dtype,
) -> Segment:
    queries, kv_length = shape.query_lengths[row], shape.kv_lengths[row]
    start = kv_length - queries
    begin = _first_block(start, window, block_size)
    offset = begin * block_size
    device = inputs.kv_lengths.device
    here = torch.arange(start, kv_length, device=device)[:, None]
    there = torch.arange(offset, kv_length, device=device)[None, :]
    visible = there <= here
    if window is not None:
        visible &= there > here - window
    blocks = inputs.block_table[row, begin : -(-kv_length // block_size)]
    return Segment(first, 1, queries, blocks, kv_length - offset, _additive(visible, dtype)[None, None])


def _additive(visible: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(
        ~visible, float("-inf")
    )


def _attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    params: AttentionParams,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """``[B, H, Q, D]`` over ``[B, H, L, D]``; ``mask`` broadcasts to ``[B, H, Q, L]``, ``sinks`` to 1 logit a query."""
    if params.softcap is None and sinks is None:
        return scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=params.scaling)
    scores = q @ k.transpose(-1, -2) * params.scaling
    if params.softcap is not None:
        scores = params.softcap * torch.tanh(scores / params.softcap)
    if mask is not None:
        scores = scores + mask
    precise = torch.float64 if scores.dtype == torch.float64 else torch.float32
    if sinks is not None:
        sink = sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)
        weights = torch.cat((scores, sink), dim=-1).softmax(dim=-1, dtype=precise)[..., :-1]
    else:
        weights = scores.softmax(dim=-1, dtype=precise)
    return weights.to(q.dtype) @ v
