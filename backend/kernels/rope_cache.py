# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""From the fused query-key-value product to attention's inputs: head norms, rotation and the write to the cache."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

_HEADS = 8  # heads a program takes


@triton.jit
def _rotate(
    source,
    target,
    head,
    inside,
    cos,
    sin,
    norm_weight,
    eps,
    norm: tl.constexpr,
    plus_one: tl.constexpr,
    head_size: tl.constexpr,
    half: tl.constexpr,
    half_pad: tl.constexpr,
    tail_pad: tl.constexpr,
):
    """Norm and rotate the heads ``head`` that start at ``source``; store them at ``target`` in the same layout."""
    pair = tl.arange(0, half_pad)
    mask = inside[:, None] & (pair < half)[None, :]
    place = head[:, None] * head_size + pair[None, :]
    first = tl.load(source + place, mask=mask, other=0.0)
    second = tl.load(source + half + place, mask=mask, other=0.0)
    dtype = first.dtype
    x, y = first.to(tl.float32), second.to(tl.float32)
    rest = tl.arange(0, tail_pad)
    tail_mask = inside[:, None] & (rest < head_size - 2 * half)[None, :]
    tail_place = head[:, None] * head_size + 2 * half + rest[None, :]
    if head_size > 2 * half:
        z = tl.load(source + tail_place, mask=tail_mask, other=0.0).to(tl.float32)
    if norm:
        square = tl.sum(x * x, axis=1) + tl.sum(y * y, axis=1)
        if head_size > 2 * half:
            square += tl.sum(z * z, axis=1)
        scale = tl.rsqrt(square / head_size + eps)[:, None]
        x = _weigh(x * scale, norm_weight + pair, pair < half, dtype, plus_one)
        y = _weigh(y * scale, norm_weight + half + pair, pair < half, dtype, plus_one)
        if head_size > 2 * half:
            z = _weigh(z * scale, norm_weight + 2 * half + rest, rest < head_size - 2 * half, dtype, plus_one)
    tl.store(target + place, (x * cos[None, :] - y * sin[None, :]).to(dtype), mask=mask)
    tl.store(target + half + place, (y * cos[None, :] + x * sin[None, :]).to(dtype), mask=mask)
    if head_size > 2 * half:
        tl.store(target + tail_place, z.to(dtype), mask=tail_mask)


@triton.jit
def _weigh(x, weight, mask, dtype: tl.constexpr, plus_one: tl.constexpr):
    """Multiply by a norm's weight, rounding where transformers does; float32 in and out."""
    w = tl.load(weight, mask=mask, other=0.0).to(tl.float32)[None, :]
    result = x * (w + 1.0) if plus_one else x.to(dtype).to(tl.float32) * w
    return result.to(dtype).to(tl.float32)


@triton.jit
def _rope_and_cache_kernel(
    qkv,
    positions,
    cos_sin,
    cache_slots,
    keys,
    values,
    query_out,
    q_weight,
    k_weight,
    qkv_stride,
    query_stride,
    slot_stride,
    eps,
    num_heads: tl.constexpr,
    num_kv_heads: tl.constexpr,
    head_size: tl.constexpr,
    head_pad: tl.constexpr,
    half: tl.constexpr,
    half_pad: tl.constexpr,
    tail_pad: tl.constexpr,
    heads: tl.constexpr,
    norm: tl.constexpr,
    plus_one: tl.constexpr,
    pdl: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    query_parts: tl.constexpr = (num_heads + heads - 1) // heads
    if pdl:
        gdc_launch_dependents()
        gdc_wait()
    pair = tl.arange(0, half_pad)
    angles = cos_sin + tl.load(positions + token).to(tl.int64) * (2 * half)
    cos = tl.load(angles + pair, mask=pair < half, other=0.0)
    sin = tl.load(angles + half + pair, mask=pair < half, other=0.0)
    row = qkv + token * qkv_stride
    if part < query_parts:
        head = part * heads + tl.arange(0, heads)
        _rotate(
            row,
            query_out + token * query_stride,
            head,
            head < num_heads,
            cos,
            sin,
            q_weight,
            eps,
            norm,
            plus_one,
            head_size,
            half,
            half_pad,
            tail_pad,
        )
    else:
        slot = tl.load(cache_slots + token).to(tl.int64)
        head = (part - query_parts) * heads + tl.arange(0, heads)
        inside = (head < num_kv_heads) & (slot >= 0)
        row_k = row + num_heads * head_size
        _rotate(
            row_k,
            keys + slot * slot_stride,
            head,
            inside,
            cos,
            sin,
            k_weight,
            eps,
            norm,
            plus_one,
            head_size,
            half,
            half_pad,
            tail_pad,
        )
        column = tl.arange(0, head_pad)
        place = head[:, None] * head_size + column[None, :]
        mask = inside[:, None] & (column < head_size)[None, :]
        v = tl.load(row_k + num_kv_heads * head_size + place, mask=mask)
        tl.store(values + slot * slot_stride + place, v, mask=mask)


def rope_and_cache(
    qkv: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    cache_slots: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    num_heads: int,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
    norm_offset: int = 0,
    query_out: Tensor | None = None,
    pdl: bool = False,
) -> Tensor:
    """Norm (if asked) and rotate queries and keys, and store keys and values in the paged cache; one kernel.

    Args:
        qkv: [T, (num_heads + 2 * kv_heads) * head_size], rows contiguous: all query heads, then keys, then values.
            Its queries are overwritten unless ``query_out`` is given.
        positions: i32[T].
        cos_sin: f32[max_len, rotary], contiguous: cosines of the ``rotary / 2`` frequencies, then sines, with any
            attention scaling already multiplied in. Where ``rotary`` is less than the head size the rest of a head
            is left as it is.
        cache_slots: i32[T], block * block_size + offset; a negative slot stores nothing.
        keys, values: [blocks, block_size, kv_heads, head_size], contiguous.
        num_heads: query heads.
        q_norm, k_norm: [head_size] weights of the norm of each head (both or none), e.g. Qwen3.
        eps, norm_offset: of these norms; see ``add_rms_norm``.
        query_out: [T, num_heads, head_size] with contiguous rows, or None: in place.
        pdl: programmatic dependent launch.

    Returns:
        The rotated queries, [T, num_heads, head_size]: ``query_out``, or a view of ``qkv``.

    Raises:
        ValueError: shapes or strides do not fit.
    """
    tokens = qkv.shape[0]
    num_kv_heads, head_size = keys.shape[2:]
    rotary = cos_sin.shape[1]
    if qkv.shape[1] != (num_heads + 2 * num_kv_heads) * head_size or qkv.stride(1) != 1:
        raise ValueError(
            f"qkv {tuple(qkv.shape)} does not hold {num_heads} + 2 * {num_kv_heads} heads of {head_size}"
        )
    if not keys.is_contiguous() or not values.is_contiguous() or keys.shape != values.shape:
        raise ValueError("keys and values must be contiguous and of one shape")
    if rotary % 2 or rotary > head_size or not cos_sin.is_contiguous():
        raise ValueError(f"cos_sin {tuple(cos_sin.shape)} does not fit heads of {head_size}")
    if (q_norm is None) != (k_norm is None):
        raise ValueError("give both of q_norm and k_norm, or none")
    query = qkv[:, : num_heads * head_size].view(tokens, num_heads, head_size)
    target = query if query_out is None else query_out
    if target.shape != query.shape or target.stride(2) != 1 or target.stride(1) != head_size:
        raise ValueError(f"query_out {tuple(target.shape)} does not fit queries {tuple(query.shape)}")
    if tokens == 0:
        return target
    heads = min(_HEADS, triton.next_power_of_2(max(num_heads, num_kv_heads)))
    grid = (tokens, triton.cdiv(num_heads, heads) + triton.cdiv(num_kv_heads, heads))
    _rope_and_cache_kernel[grid](
        qkv,
        positions,
        cos_sin,
        cache_slots,
        keys,
        values,
        target,
        q_norm,
        k_norm,
        qkv.stride(0),
        target.stride(0),
        num_kv_heads * head_size,
        eps,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        head_pad=triton.next_power_of_2(head_size),
        half=rotary // 2,
        half_pad=triton.next_power_of_2(rotary // 2),
        tail_pad=triton.next_power_of_2(max(head_size - rotary, 1)),
        heads=heads,
        norm=q_norm is not None,
        plus_one=norm_offset == 1,
        pdl=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )
    return target
