"""What the kernels must compute, in plain PyTorch and float64 where rounding matters."""

from __future__ import annotations

import torch
from torch import Tensor


def relative_error(output: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm of ``expected``; infinite when ``output`` has a NaN or infinity."""
    if not output.isfinite().all():
        return float("inf")
    difference = output.double() - expected.double()
    return float(difference.norm() / expected.double().norm().clamp(min=1e-30))


def gather_rows(pages: Tensor, block_table: Tensor, row: int, length: int) -> Tensor:
    """One row's cached tokens, [length, kv_heads, head_size]."""
    blocks = -(-length // pages.shape[1])
    return pages[block_table[row, :blocks].long()].flatten(0, 1)[:length]


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Causal attention of ``query [Q, heads, size]``, the last Q of the L tokens of ``keys``, in float64."""
    group = query.shape[1] // keys.shape[1]
    q = query.double().transpose(0, 1)
    k = keys.double().repeat_interleave(group, dim=1).transpose(0, 1)
    v = values.double().repeat_interleave(group, dim=1).transpose(0, 1)
    scores = q @ k.transpose(1, 2) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    length = keys.shape[0]
    here = torch.arange(length - query.shape[0], length, device=query.device)[:, None]
    there = torch.arange(length, device=query.device)[None]
    visible = there <= here
    if window is not None:
        visible &= there > here - window
    scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is not None:
        sink = sinks.double().view(-1, 1, 1).expand(-1, scores.shape[1], 1)
        scores = torch.cat((scores, sink), dim=-1)
    weights = scores.softmax(dim=-1)[..., :length]
    return (weights @ v).transpose(0, 1)


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: int) -> Tensor:
    """Rounded as transformers' Llama (``offset`` 0) and Gemma (1) norms are."""
    wide = x.float()
    scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if offset:
        return (scaled * (1.0 + weight.float())).to(x.dtype)
    return weight * scaled.to(x.dtype)


def rotate(x: Tensor, cos_sin: Tensor, positions: Tensor) -> Tensor:
    """Neox rotation of ``x [T, heads, size]`` in float32."""
    half = cos_sin.shape[1] // 2
    angles = cos_sin[positions.long()][:, None]
    cos, sin = angles[..., :half], angles[..., half:]
    wide = x.float()
    first, second, rest = wide[..., :half], wide[..., half : 2 * half], wide[..., 2 * half :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1).to(x.dtype)
