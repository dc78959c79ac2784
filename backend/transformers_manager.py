"""What the peer backend needs of transformers' ``ContinuousBatchingManager``: making, ending, and its limits."""

from __future__ import annotations

from typing import Any

from backend.api import ConfigurationError, RequestError, SamplingParams
from backend.config import EngineConfig
from backend.kv_cache import LayerShape, available_memory, bytes_per_block, choose_num_blocks

_STOP_S = 60.0
_CPU_FRACTION = 0.25  # of the free memory; masks and activations of its steps are large, too
_PAGE = 256  # the manager's own default


def make_manager(loaded: Any, config: EngineConfig) -> Any:
    """A ``ContinuousBatchingManager`` over a ``LoadedModel``: greedy, and its own defaults where we name no size.

    Raises:
        ConfigurationError: transformers cannot batch this model.
    """
    from transformers import ContinuousBatchingConfig, GenerationConfig

    batching = ContinuousBatchingConfig(
        max_requests_per_batch=config.max_num_seqs,
        max_batch_tokens=config.max_num_batched_tokens,
        max_memory_percent=config.kv_memory_fraction if loaded.device.type == "cuda" else None,
        allow_block_sharing=config.prefix_cache,
        **_cache_size(loaded, config),
    )
    # Not the model's own generation configuration: its penalties and sampling are none of the request's.
    generation = GenerationConfig(do_sample=False, eos_token_id=-1, max_new_tokens=1)
    try:
        return loaded.model.init_continuous_batching(
            generation_config=generation, continuous_batching_config=batching
        )
    except (ValueError, AttributeError) as exc:
        raise ConfigurationError(
            f"transformers cannot batch {loaded.name!r} continuously: {exc}. Use the 'async' backend"
        ) from exc


def _cache_size(loaded: Any, config: EngineConfig) -> dict[str, int]:
    """Pages of the manager's cache; nothing on a GPU, where its own measure of the free memory is the right one.

    On a CPU it would fill more than half of the main memory with zeros, whatever the model: give it no more than
    all slots at full length could use.
    """
    if config.num_kv_blocks is not None:
        return {"num_blocks": config.num_kv_blocks, "page_size": config.block_size}
    if loaded.device.type != "cpu":
        return {}
    text = loaded.model.config.get_text_config(decoder=True)
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    layers = [LayerShape(heads, size)] * text.num_hidden_layers
    blocks = choose_num_blocks(
        free_bytes=available_memory(loaded.device),
        fraction=config.kv_memory_fraction or _CPU_FRACTION,
        block_bytes=bytes_per_block(layers, config.block_size, loaded.dtype),
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        max_model_len=loaded.max_model_len,
    )
    return {"num_blocks": -(-blocks * config.block_size // _PAGE), "page_size": _PAGE}


def start_manager(manager: Any) -> None:
    """Allocate its cache and start its thread, which is a daemon because the caller is."""
    import torch

    # Its tensors are made outside inference mode: not every version runs its loop inside, and one that does not
    # could never write to them.
    manager.warmup()
    with torch.inference_mode():
        manager.start()


def has_results(manager: Any) -> bool:
    """Whether ``get_result`` would return a result at once; asking it with a timeout of 0 costs more."""
    return not manager.output_router.output_queue.empty()


def stop_manager(manager: Any) -> None:
    """End its thread, whatever it is doing, and free its cache."""
    manager.stop(block=True, timeout=_STOP_S, hard_stop=True)


def refuse_unsupported(sampling: SamplingParams, vocab_size: int) -> None:
    """Refuse what the manager cannot do for one request among others.

    Raises:
        RequestError: names the parameter.
    """
    default = SamplingParams()
    masks_eos = sampling.min_tokens > 0 and not (sampling.ignore_eos and not sampling.stop_token_ids)
    wanted = {
        "temperature": sampling.temperature > 0,
        "min_tokens": masks_eos,
        "logprobs": sampling.logprobs is not None,
        **{
            name: getattr(sampling, name) != getattr(default, name)
            for name in ("repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias")
        },
    }
    for name, given in wanted.items():
        if given:
            raise RequestError(
                "the transformers backend cannot do this for one request among others",
                field=name,
                value=getattr(sampling, name),
                fix="Leave it out, or use the 'async' backend",
            )
    if sampling.top_k > vocab_size:
        raise RequestError(
            "is beyond the vocabulary", field="top_k", value=sampling.top_k, fix=f"Use at most {vocab_size}"
        )
    for token in sampling.stop_token_ids:
        if token >= vocab_size:
            raise RequestError(
                "names a token outside the vocabulary",
                field="stop_token_ids",
                value=token,
                fix=f"Use ids below {vocab_size}",
            )
