"""Attention by PyTorch's own operators: the CPU's kernel, and the reference for every other one.

Decode rows of similar length are gathered from their blocks and attend together; the query heads that share a
key head are treated as queries of one head, so that keys and values are never repeated in memory. Prefill rows
attend one by one.
"""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

from backend.attention.interface import AttentionParams
from backend.kv_cache import KVCache
from backend.slots import StepInputs, StepShape


class SdpaKernel:
    """Gathers each row's keys and values, then calls ``scaled_dot_product_attention`` (or plain products where
    soft caps or sinks ask for them)."""

    name = "sdpa"

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
        keys, values = cache.keys[layer], cache.values[layer]
        output = torch.empty_like(query)
        for first, last in decode_groups(shape):
            output[first:last] = _attend_decode(query, keys, values, inputs, shape, params, first, last)
        at = shape.num_decode
        for row in range(shape.num_decode, len(shape.query_lengths)):
            length = shape.query_lengths[row]
            output[at : at + length] = _attend_row(
                query[at : at + length], keys, values, inputs.block_table[row], shape.kv_lengths[row], params
            )
            at += length
        return output


def decode_groups(shape: StepShape) -> list[tuple[int, int]]:
    """Ranges of consecutive decode rows that attend together; computed once a step."""
    if shape.decode_groups is None:
        shape.decode_groups = [(0, shape.num_decode)] if shape.num_decode else []
    return shape.decode_groups


def _first_block(position: int, window: int | None, block_size: int) -> int:
    """First block that the query at ``position`` can see."""
    return 0 if window is None else max(0, position - window + 1) // block_size


def _attend_decode(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    inputs: StepInputs,
    shape: StepShape,
    params: AttentionParams,
    first: int,
    last: int,
) -> torch.Tensor:
    block_size, kv_heads, head_size = keys.shape[1:]
    lengths = shape.kv_lengths[first:last]
    shortest, longest = min(lengths), max(lengths)
    begin = _first_block(shortest - 1, params.window, block_size)
    end = -(-longest // block_size)
    count = last - first
    table = inputs.block_table[first:last, begin:end].reshape(-1)
    gathered = (count, (end - begin) * block_size, kv_heads, head_size)
    k = keys.index_select(0, table).view(gathered).transpose(1, 2)
    v = values.index_select(0, table).view(gathered).transpose(1, 2)
    q = query[first:last].reshape(count, kv_heads, -1, head_size)

    offset = begin * block_size
    mask = None
    if shortest < end * block_size or params.window is not None:
        positions = torch.arange(offset, end * block_size, dtype=torch.int32, device=query.device)
        ends = inputs.kv_lengths[first:last, None]
        mask = positions < ends
        if params.window is not None:
            mask &= positions >= ends - params.window
        mask = mask[:, None, None, :]
    sinks = None if params.sinks is None else params.sinks.view(1, kv_heads, -1, 1)
    return _attention(q, k, v, mask, params, sinks).reshape(count, -1, head_size)


def _attend_row(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    table: torch.Tensor,
    kv_length: int,
    params: AttentionParams,
) -> torch.Tensor:
    block_size, kv_heads, head_size = keys.shape[1:]
    count = query.shape[0]
    start = kv_length - count
    begin = _first_block(start, params.window, block_size)
    end = -(-kv_length // block_size)
    blocks = table[begin:end]
    offset = begin * block_size
    k = keys.index_select(0, blocks).flatten(0, 1)[: kv_length - offset].transpose(0, 1)
    v = values.index_select(0, blocks).flatten(0, 1)[: kv_length - offset].transpose(0, 1)

    here = torch.arange(start, kv_length, device=query.device)[:, None]
    there = torch.arange(offset, kv_length, device=query.device)[None, :]
    mask = there <= here
    if params.window is not None:
        mask &= there > here - params.window
    # [tokens, heads, size] → [kv heads, group * tokens, size]
    group = query.shape[1] // kv_heads
    q = query.view(count, kv_heads, group, head_size).permute(1, 2, 0, 3).reshape(1, kv_heads, -1, head_size)
    mask = mask.repeat(group, 1)
    sinks = None
    if params.sinks is not None:
        sinks = params.sinks.view(1, kv_heads, group, 1).repeat_interleave(count, dim=2)
    output = _attention(q, k[None], v[None], mask, params, sinks)
    return output.view(kv_heads, group, count, head_size).permute(2, 0, 1, 3).reshape(count, -1, head_size)


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
        scores = scores.masked_fill(~mask, float("-inf"))
    precise = torch.float64 if scores.dtype == torch.float64 else torch.float32
    if sinks is not None:
        sink = sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)
        weights = torch.cat((scores, sink), dim=-1).softmax(dim=-1, dtype=precise)[..., :-1]
    else:
        weights = scores.softmax(dim=-1, dtype=precise)
    return weights.to(q.dtype) @ v
