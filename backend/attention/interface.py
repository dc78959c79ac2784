"""How a transformers model reaches the paged cache, with no code per model.

Models that support transformers' attention interface call a registered function with this layer's queries, keys
and values. Ours stores keys and values in the cache and lets a kernel attend over the block tables. What the step
looks like travels as a keyword argument through the model's ``forward``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from backend.api import UnsupportedModelError
from backend.kv_cache import KVCache, LayerShape
from backend.slots import StepInputs, StepShape

ATTENTION_NAME = "tokenmill_paged"
STEP_ARGUMENT = "tokenmill_step"


@dataclass(frozen=True, slots=True)
class AttentionParams:
    """What a layer asks of its attention."""

    scaling: float
    window: int | None  # a query sees itself and window - 1 tokens before it
    softcap: float | None
    # [query heads]: a logit a head that takes part in the softmax and yields nothing.
    sinks: torch.Tensor | None


class AttentionKernel(Protocol):
    """A way to attend over the paged cache."""

    name: str

    def attend(
        self,
        query: torch.Tensor,
        layer: int,
        cache: KVCache,
        inputs: StepInputs,
        shape: StepShape,
        params: AttentionParams,
    ) -> torch.Tensor:
        """Attention of ``query [T, heads, head_size]`` over the cache, this step's tokens included; same shape."""


class StepContext(Protocol):
    """What the registered function calls back into."""

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor:
        """Store ``key`` and ``value`` (``[T, kv heads, head_size]``) and attend; see ``AttentionKernel``."""


class PagedStep:
    """One step over the real cache."""

    def __init__(self, cache: KVCache, kernel: AttentionKernel, inputs: StepInputs, shape: StepShape) -> None:
        self._cache = cache
        self._kernel = kernel
        self._inputs = inputs
        self._shape = shape
        self._slots = inputs.cache_slots.long()

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor:
        """Every row's keys and values are stored before any row attends, so rows of one step may share blocks."""
        self._cache.write(layer, self._slots, key, value)
        return self._kernel.attend(query, layer, self._cache, self._inputs, self._shape, params)


class ProbeStep:
    """Learns the cache's shape from a model's first forward pass; attends to nothing."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[LayerShape, AttentionParams]] = {}
        self.layers: list[LayerShape] = []
        self.params: list[AttentionParams] = []
        self.num_heads = 0

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor:
        """Note the layer's shape.

        Raises:
            UnsupportedModelError: keys and values differ in shape, or a layer's cache is written twice.
        """
        if key.shape != value.shape:
            raise UnsupportedModelError(
                f"layer {layer} has keys of size {key.shape[-1]} and values of size {value.shape[-1]}; "
                "the paged cache needs equal sizes"
            )
        if layer in self._seen:
            raise UnsupportedModelError(
                f"layer {layer} attends twice in one pass, as models that share caches do"
            )
        self._seen[layer] = LayerShape(heads=key.shape[1], head_size=key.shape[2]), params
        self.num_heads = query.shape[1]
        return query

    def settle(self, count: int) -> list[int]:
        """Put what was seen into ``layers`` and ``params``, in order; returns the layers that never called."""
        missing = [layer for layer in range(count) if layer not in self._seen]
        if not missing:
            self.layers = [self._seen[layer][0] for layer in range(count)]
            self.params = [self._seen[layer][1] for layer in range(count)]
        return missing


def paged_attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The function that transformers calls in each layer, with tensors ``[1, heads, T, head_size]``."""
    step: StepContext | None = kwargs.get(STEP_ARGUMENT)
    layer = getattr(module, "layer_idx", None)
    if step is None or layer is None:
        raise UnsupportedModelError(
            f"{type(module).__name__} does not pass keyword arguments or its layer number to its attention"
        )
    if attention_mask is not None:
        raise UnsupportedModelError(f"{type(module).__name__} builds an attention mask of its own")
    params = AttentionParams(
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
    )
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    output = step.attend(int(layer), q, k, v, params)
    return output.unsqueeze(0), None


def register_attention() -> str:
    """Make the paged attention known to transformers; returns its name. Registering again changes nothing."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, paged_attention_forward)
    return ATTENTION_NAME
