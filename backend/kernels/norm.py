# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Root-mean-square norm, with the residual addition before it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def _add_rms_norm_kernel(
    x,
    residual,
    weight,
    normed,
    summed,
    x_stride,
    part_stride,
    residual_stride,
    size,
    eps,
    parts: tl.constexpr,
    plus_one: tl.constexpr,
    has_residual: tl.constexpr,
    block: tl.constexpr,
    pdl: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, block)
    inside = column < size
    w = tl.load(weight + column, mask=inside, other=0.0)
    if pdl:
        gdc_launch_dependents()
        gdc_wait()
    dtype = normed.dtype.element_ty
    value = tl.load(x + row * x_stride + column, mask=inside, other=0.0)
    for part in tl.static_range(1, parts):
        value += tl.load(x + part * part_stride + row * x_stride + column, mask=inside, other=0.0)
    value = value.to(dtype)
    if has_residual:
        other = tl.load(residual + row * residual_stride + column, mask=inside, other=0.0)
        value = (value.to(tl.float32) + other.to(tl.float32)).to(dtype)
        tl.store(summed + row * size + column, value, mask=inside)
    wide = value.to(tl.float32)
    scaled = wide * tl.rsqrt(tl.sum(wide * wide, axis=0) / size + eps)
    # transformers rounds to the input's type before it multiplies, but for Gemma after.
    base = scaled if plus_one else scaled.to(dtype).to(tl.float32)
    factor = w.to(tl.float32) + 1.0 if plus_one else w.to(tl.float32)
    result = base * factor
    tl.store(normed + row * size + column, result.to(dtype), mask=inside)


def add_rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, *, offset: int = 0, pdl: bool = False
) -> tuple[Tensor, Tensor]:
    """``residual + x``, and its root-mean-square norm, in one pass; rounded where transformers rounds.

    Args:
        x: [T, N], rows contiguous; float32, bfloat16 or float16. Or f32[P, T, N], contiguous: P parts whose sum,
            rounded to ``residual``'s type, is ``x`` (see ``partial_linear``).
        residual: [T, N], like ``x``, or None: then nothing is added.
        weight: [N].
        eps: added to the mean square.
        offset: 0 multiplies by ``weight`` in ``x``'s type as Llama does; 1 by ``1 + weight`` in float32 as Gemma.
        pdl: programmatic dependent launch.

    Returns:
        The normed rows and the sum (``x`` itself without a residual), both [T, N]; the inputs are not modified.

    Raises:
        ValueError: shapes or strides do not fit.
    """
    if x.dim() not in (2, 3) or x.stride(-1) != 1 or weight.shape != x.shape[-1:] or offset not in (0, 1):
        raise ValueError(f"cannot norm x {tuple(x.shape)} with weight {tuple(weight.shape)}, offset {offset}")
    if residual is not None and (residual.shape != x.shape[-2:] or residual.stride(1) != 1):
        raise ValueError(f"residual {tuple(residual.shape)} does not fit x {tuple(x.shape)}")
    if x.dim() == 3 and (residual is None or not x.is_contiguous()):
        raise ValueError("parts of x must be contiguous and need a residual")
    rows, size = x.shape[-2:]
    dtype = x.dtype if residual is None else residual.dtype
    normed = torch.empty((rows, size), dtype=dtype, device=x.device)
    summed = x if residual is None else torch.empty_like(normed)
    if rows == 0:
        return normed, summed
    block = triton.next_power_of_2(size)
    _add_rms_norm_kernel[(rows,)](
        x,
        residual,
        weight,
        normed,
        summed,
        x.stride(-2),
        rows * size,
        0 if residual is None else residual.stride(0),
        size,
        eps,
        parts=x.shape[0] if x.dim() == 3 else 1,
        plus_one=offset == 1,
        has_residual=residual is not None,
        block=block,
        pdl=pdl,
        num_warps=min(max(block // 512, 1), 16),
        launch_pdl=pdl,
    )
    return normed, summed
