# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Gated activations over the fused gate-and-up product."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def _activate_and_mul_kernel(
    x, output, x_stride, size, gelu: tl.constexpr, block: tl.constexpr, pdl: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < size
    if pdl:
        gdc_launch_dependents()
        gdc_wait()
    raw = tl.load(x + row * x_stride + column, mask=inside, other=0.0)
    up = tl.load(x + row * x_stride + size + column, mask=inside, other=0.0)
    gate = raw.to(tl.float32)
    if gelu:
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        tanh = 1.0 - 2.0 / (tl.exp(2.0 * inner) + 1.0)
        gate = 0.5 * gate * (1.0 + tanh)
    else:
        gate = gate / (1.0 + tl.exp(-gate))
    # transformers rounds the activation before it multiplies.
    result = gate.to(raw.dtype).to(tl.float32) * up.to(tl.float32)
    tl.store(output + row * size + column, result.to(raw.dtype), mask=inside)


def silu_and_mul(x: Tensor, *, pdl: bool = False) -> Tensor:
    """``silu(x[:, :I]) * x[:, I:]`` of ``x [T, 2 * I]`` (rows contiguous) -> [T, I]."""
    return _activate_and_mul(x, gelu=False, pdl=pdl)


def gelu_tanh_and_mul(x: Tensor, *, pdl: bool = False) -> Tensor:
    """``gelu(x[:, :I]) * x[:, I:]``, with the tanh form of gelu; see ``silu_and_mul``."""
    return _activate_and_mul(x, gelu=True, pdl=pdl)


def _activate_and_mul(x: Tensor, *, gelu: bool, pdl: bool) -> Tensor:
    if x.dim() != 2 or x.shape[1] % 2 or x.stride(1) != 1:
        raise ValueError(f"cannot split x {tuple(x.shape)} into gate and up")
    rows, size = x.shape[0], x.shape[1] // 2
    output = torch.empty((rows, size), dtype=x.dtype, device=x.device)
    if rows == 0:
        return output
    block = min(triton.next_power_of_2(size), 1024)
    _activate_and_mul_kernel[(rows, triton.cdiv(size, block))](
        x, output, x.stride(0), size, gelu=gelu, block=block, pdl=pdl, num_warps=4, launch_pdl=pdl
    )
    return output
