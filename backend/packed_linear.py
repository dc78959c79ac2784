"""Linear layers with weights laid out for oneDNN, which multiplies few rows on a CPU about twice as fast."""

from __future__ import annotations

import torch
from torch import nn

_BATCH_HINT = 32
_TOLERANCE = 1e-4


class PackedLinear(nn.Module):
    """``y = x Wᵀ + b`` through oneDNN's packed weights; takes ``[…, in_features]``."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self._packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), _BATCH_HINT)
        self._bias = linear.bias

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """The product of the last dimension."""
        result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            inputs, self._packed, self._bias, "none", [], ""
        )
        return result


def pack_linears(model: nn.Module) -> int:
    """Replace the model's float32 linear layers where this PyTorch build can pack them.

    Each replacement is compared with its original first. Returns how many were replaced: 0 where oneDNN is
    missing, which costs speed and nothing else.
    """
    count = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if (
                type(child) is nn.Linear
                and child.weight.dtype == torch.float32
                and child.weight.device.type == "cpu"
            ):
                packed = _pack(child)
                if packed is None:
                    return count
                setattr(parent, name, packed)
                count += 1
    return count


@torch.inference_mode()
def _pack(linear: nn.Linear) -> PackedLinear | None:
    # The operators are private to PyTorch: any surprise means going on without them.
    try:
        packed = PackedLinear(linear)
        probe = torch.linspace(-1, 1, 2 * linear.in_features).view(2, -1)
        expected, got = linear(probe), packed(probe)
    except (AttributeError, RuntimeError, TypeError):
        return None
    scale = max(1.0, float(expected.abs().max()))
    return packed if float((got - expected).abs().max()) <= _TOLERANCE * scale else None
