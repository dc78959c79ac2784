"""Which models the paged engine can run correctly, told from their configuration before anything is loaded."""

from __future__ import annotations

from typing import Any

from backend.api import UnsupportedModelError

_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})


def check_supported(config: Any, model_class: Any) -> None:
    """Refuse architectures whose attention the paged cache cannot represent.

    Raises:
        UnsupportedModelError: says which property of the model is the reason.
    """
    kind = getattr(config, "model_type", type(config).__name__)

    def refuse(reason: str) -> UnsupportedModelError:
        return UnsupportedModelError(
            f"model type {kind!r} cannot run on the async engine: {reason}. Choose another model, or the "
            "'transformers' backend"
        )

    if model_class is None:
        raise refuse("transformers has no causal language model for it")
    if getattr(config, "is_encoder_decoder", False):
        raise refuse("it is an encoder-decoder model")
    if not getattr(model_class, "_supports_attention_backend", False):
        raise refuse("its attention layers do not go through transformers' attention interface")
    text = config.get_text_config(decoder=True)
    if layer_types := set(getattr(text, "layer_types", None) or ()):
        foreign = sorted(layer_types - _LAYER_TYPES)
        if foreign:
            raise refuse(
                f"it has layers of type {', '.join(foreign)}; full and sliding attention are supported"
            )
    elif getattr(text, "attention_chunk_size", None):
        raise refuse("its layers attend in chunks")
    if getattr(text, "num_kv_shared_layers", 0):
        raise refuse("some of its layers share the keys and values of others")
    if not getattr(text, "is_causal", True) or getattr(text, "use_bidirectional_attention", False):
        raise refuse("its attention is not causal")
    for rope in rope_settings(text):
        if "dynamic" in str(rope.get("rope_type", "")):
            raise refuse("its rotary embedding ('dynamic') depends on the longest sequence in the batch")


def rope_settings(text_config: Any) -> list[dict[str, Any]]:
    """The rotary-embedding settings of a configuration; several where layer types have their own."""
    settings = (
        getattr(text_config, "rope_parameters", None) or getattr(text_config, "rope_scaling", None) or {}
    )
    if not isinstance(settings, dict):
        return []
    nested = [value for value in settings.values() if isinstance(value, dict)]
    return nested or [settings]


def context_limit(text_config: Any, asked: int | None) -> int:
    """Context length in tokens: what was asked for, else what the model was made for.

    Raises:
        UnsupportedModelError: more was asked for than the model can do.
    """
    limit = int(getattr(text_config, "max_position_embeddings", 0) or 0)
    for rope in rope_settings(text_config):
        if rope.get("rope_type") == "longrope":
            # Beyond this length its factors change for the whole sequence, also for keys that are cached.
            original = rope.get("original_max_position_embeddings")
            original = original or getattr(text_config, "original_max_position_embeddings", None)
            limit = min(limit, int(original)) if original else limit
    if asked is None:
        if not limit:
            raise UnsupportedModelError("the model does not say how long its context is. Set max_model_len")
        return limit
    if limit and asked > limit:
        raise UnsupportedModelError(
            f"max_model_len is {asked}, but the model's context ends at {limit}. Lower it"
        )
    return asked
