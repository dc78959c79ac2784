"""A decoder of fused weights in plain PyTorch operations, in two halves a layer that ``torch.compile`` may take.

It computes what ``backend.fused`` computes, with attention by the same kernel, which stands between the halves: no
compiler could look into it anyway. The angles of the rotation are looked up once a step, not in each layer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear, silu

from backend.attention.interface import AttentionKernel, AttentionParams
from backend.fused import FusedLayer, find_pattern, fuse_layer, rope_table
from backend.kv_cache import KVCache
from backend.slots import StepInputs, StepShape

Half = Callable[..., tuple[Tensor, Tensor]]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As transformers' Llama rounds it."""
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """``x [T, heads, size]`` by ``cos`` and ``sin [T, 1, size / 2]``, in float32."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def make_halves(num_heads: int, eps: float) -> tuple[Half, Half]:
    """What comes before a layer's attention, and what comes after it."""

    def before(
        hidden: Tensor,
        residual: Tensor,
        norm: Tensor,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        slots: Tensor,
        keys: Tensor,
        values: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """The rotated queries and the residual; keys and values are written to the cache.

        ``keys`` and ``values`` are ``[slots, heads, size]``: were they made so in here, the compiler would write to a
        copy of the whole cache, and copy that back.
        """
        residual = residual + hidden
        kv_heads, size = keys.shape[1:]
        heads = linear(rms_norm(residual, norm, eps), qkv).view(-1, num_heads + 2 * kv_heads, size)
        query, key, value = heads.split((num_heads, kv_heads, kv_heads), dim=1)
        keys[slots] = rotate(key, cos, sin)
        values[slots] = value
        return rotate(query, cos, sin), residual

    def after(
        mixed: Tensor, residual: Tensor, output: Tensor, norm: Tensor, gate_up: Tensor, down: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The layer's output, not yet added to the residual, and the residual."""
        residual = residual + linear(mixed.flatten(1), output)
        gate, up = linear(rms_norm(residual, norm, eps), gate_up).chunk(2, dim=-1)
        return linear(silu(gate) * up, down), residual

    return before, after


@dataclass(slots=True)
class PlainDecoder:
    """A whole pass, like ``backend.fused.FusedDecoder``'s; ``halves`` may be replaced by compiled ones."""

    layers: list[FusedLayer]
    embedding: Tensor
    norm: Tensor
    head: Tensor
    rope: Tensor
    eps: float
    kernel: AttentionKernel
    halves: tuple[Half, Half]

    @classmethod
    def of(
        cls,
        model: Any,
        attention: list[AttentionParams],
        kernel: AttentionKernel,
        *,
        max_model_len: int,
        layers: list[FusedLayer] | None = None,
    ) -> PlainDecoder:
        """From a Llama model without biases; ``layers`` are its layers where they have been fused already."""
        config, base = model.config, model.model
        if layers is None:
            pattern = find_pattern(base.layers, config)
            layers = [
                fuse_layer(layer, pattern, params)
                for layer, params in zip(base.layers, attention, strict=True)
            ]
        weight = base.embed_tokens.weight
        return cls(
            layers,
            weight,
            base.norm.weight,
            model.lm_head.weight,
            rope_table(base.rotary_emb, max_model_len, weight.device),
            float(config.rms_norm_eps),
            kernel,
            make_halves(int(config.num_attention_heads), float(config.rms_norm_eps)),
        )

    @torch.no_grad()
    def __call__(self, tokens: Tensor, inputs: StepInputs, shape: StepShape, cache: KVCache) -> Tensor:
        """Logits of ``inputs.sample_tokens``."""
        before, after = self.halves
        hidden = embedding(tokens, self.embedding)
        residual = torch.zeros_like(hidden)
        cos, sin = self.rope[inputs.positions].unsqueeze(1).chunk(2, dim=-1)
        cos, sin = cos.contiguous(), sin.contiguous()
        slots = inputs.cache_slots.long()
        for index, layer in enumerate(self.layers):
            query, residual = before(
                hidden,
                residual,
                layer.input_norm,
                layer.qkv,
                cos,
                sin,
                slots,
                cache.keys[index].flatten(0, 1),
                cache.values[index].flatten(0, 1),
            )
            mixed = self.kernel.attend(query, index, cache, inputs, shape, layer.attention)
            hidden, residual = after(
                mixed, residual, layer.output, layer.post_norm, layer.gate_up, layer.down
            )
        rows = (hidden + residual)[inputs.sample_tokens]
        return linear(rms_norm(rows, self.norm, self.eps), self.head)
