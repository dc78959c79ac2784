"""Model and tokenizer through transformers: safetensors, GGUF or random weights, checked before they are loaded."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from backend.api import ConfigurationError, UnsupportedModelError
from backend.attention.interface import ATTENTION_NAME, register_attention
from backend.config import EngineConfig
from backend.kv_cache import MIB, LayerShape, available_memory, bytes_per_block, memory_fraction
from backend.model_source import ModelSource, check_reachable, resolve_model
from backend.prompts import PromptEncoder
from backend.support import check_supported, context_limit

logger = logging.getLogger(__name__)

_DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
_DUMMY_SEED = 0


@dataclass(slots=True)
class LoadedModel:
    """A model in evaluation mode on its device, and what the engine needs to know of it."""

    model: Any  # transformers PreTrainedModel
    encoder: PromptEncoder
    name: str
    device: torch.device
    dtype: torch.dtype
    vocab_size: int
    max_model_len: int
    eos_ids: frozenset[int]

    @property
    def tokenizer(self) -> Any | None:
        """The transformers tokenizer, or ``None`` where requests are token ids only."""
        return self.encoder.tokenizer


def resolve_device(name: str) -> torch.device:
    """The device of a configuration.

    Raises:
        ConfigurationError: there is no such device here.
    """
    if name == "auto":
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    try:
        device = torch.device(name)
        if device.type not in ("cpu", "cuda"):
            raise RuntimeError(f"nothing here runs on {device.type}")
    except RuntimeError as exc:
        raise ConfigurationError(
            f"device {name!r} is unknown. Use 'auto', 'cpu', 'cuda' or 'cuda:N'"
        ) from exc
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise ConfigurationError(
                f"device {name!r}: PyTorch sees no CUDA device here. Use 'cpu' or 'auto'"
            )
        index = device.index or 0
        if index >= torch.cuda.device_count():
            raise ConfigurationError(
                f"device {name!r}: there are {torch.cuda.device_count()} CUDA devices here"
            )
        return torch.device("cuda", index)
    return device


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """The context, of the calling thread, in which kernels of Triton run on this device: they go to the current one,
    wherever their tensors lie."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def load_model(config: EngineConfig, *, attn_implementation: str = ATTENTION_NAME) -> LoadedModel:
    """Load what ``config`` names, with the given transformers attention (ours by default).

    Raises:
        UnsupportedModelError: the paged engine cannot run this architecture.
        ConfigurationError: the model or its tokenizer cannot be found or does not fit the device.
    """
    device = resolve_device(config.device)
    source = resolve_model(config.model)
    model_config = _read_config(source, config)
    paged = attn_implementation == ATTENTION_NAME
    model_class = _causal_class(model_config)
    if paged:
        register_attention()
        check_supported(model_config, model_class)
    text_config = model_config.get_text_config(decoder=True)
    max_model_len = context_limit(text_config, config.max_model_len)
    dtype = _choose_dtype(config, model_config, device)
    _check_size(config, model_config, dtype, device, max_model_len)

    if config.load_format == "dummy":
        model = _random_model(model_config, dtype, device, attn_implementation, config.trust_remote_code)
    else:
        model = _pretrained_model(source, model_config, dtype, device, attn_implementation, config)
    model.eval().requires_grad_(False)
    if dtype == torch.float64:
        # PyTorch's grouped matrix product, the default for mixtures of experts, has no float64.
        model.set_experts_implementation("eager")
    vocab_size = int(text_config.vocab_size)
    tokenizer = _load_tokenizer(source, config)
    return LoadedModel(
        model=model,
        encoder=PromptEncoder(tokenizer, vocab_size),
        name=config.model,
        device=device,
        dtype=dtype,
        vocab_size=vocab_size,
        max_model_len=max_model_len,
        eos_ids=frozenset(i for i in _eos_ids(model, tokenizer) if 0 <= i < vocab_size),
    )


def _read_config(source: ModelSource, config: EngineConfig) -> Any:
    from transformers import AutoConfig

    check_reachable(source, "config.json")
    try:
        return AutoConfig.from_pretrained(
            source.location, local_files_only=source.local, trust_remote_code=config.trust_remote_code
        )
    except (OSError, ValueError) as exc:
        if "trust_remote_code" in str(exc):
            raise ConfigurationError(
                f"model {source.name!r} brings its own Python code, which is not run by default. "
                "Set trust_remote_code if you trust its authors"
            ) from exc
        raise ConfigurationError(
            f"model {source.name!r} cannot be found or read: {_first_line(exc)}. "
            "Give a hub name that can be reached, a folder, a .gguf file or 'smollm2'"
        ) from exc


def _causal_class(model_config: Any) -> Any:
    from transformers import AutoModelForCausalLM

    try:
        found = AutoModelForCausalLM._model_mapping[type(model_config)]
    except KeyError:
        return None
    return found[0] if isinstance(found, tuple) else found


def _choose_dtype(config: EngineConfig, model_config: Any, device: torch.device) -> torch.dtype:
    if config.dtype != "auto":
        return _DTYPES[config.dtype]
    if device.type == "cpu":
        return torch.float32
    own = getattr(model_config.get_text_config(decoder=True), "dtype", None) or getattr(
        model_config, "dtype", None
    )
    return own if isinstance(own, torch.dtype) and own != torch.float32 else torch.bfloat16


def _check_size(
    config: EngineConfig, model_config: Any, dtype: torch.dtype, device: torch.device, max_model_len: int
) -> None:
    """Refuse what cannot fit before minutes are spent on loading it: the weights, and one sequence's cache."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(
            model_config, dtype=dtype, trust_remote_code=config.trust_remote_code
        )
    needed = sum(p.numel() for p in skeleton.parameters()) * dtype.itemsize
    free = available_memory(device)
    name = str(dtype).removeprefix("torch.")
    if needed > free:
        raise ConfigurationError(
            f"the model needs {needed / MIB:.0f} MiB for its weights in {name}, but "
            f"{free / MIB:.0f} MiB are free on {device}. Choose a smaller model or dtype, or free memory"
        )
    if config.num_kv_blocks is not None:
        return
    blocks = -(-max_model_len // config.block_size)
    layers = expected_layers(model_config.get_text_config(decoder=True))
    sequence = blocks * bytes_per_block(layers, config.block_size, dtype)
    share = memory_fraction(config.kv_memory_fraction, device)
    if sequence > (free - needed) * share:
        raise ConfigurationError(
            f"the KV cache of one sequence of {max_model_len} tokens needs {sequence / MIB:.0f} MiB, but of the "
            f"{free / MIB:.0f} MiB that are free on {device} the weights take {needed / MIB:.0f} MiB, and the cache "
            f"gets {share:.3g} of the rest, {(free - needed) * share / MIB:.0f} MiB. Lower max_model_len, raise "
            "kv_memory_fraction, choose a smaller model or dtype, or free memory"
        )


def expected_layers(text_config: Any) -> list[LayerShape]:
    """The cache's layers as far as a configuration tells; the first forward pass shows what they really are."""
    count = getattr(text_config, "num_hidden_layers", None)
    attention_heads = getattr(text_config, "num_attention_heads", None)
    heads = getattr(text_config, "num_key_value_heads", None) or attention_heads
    size = getattr(text_config, "head_dim", None)
    hidden = getattr(text_config, "hidden_size", None)
    if size is None and isinstance(attention_heads, int) and isinstance(hidden, int):
        size = hidden // attention_heads
    if not (isinstance(count, int) and isinstance(heads, int) and isinstance(size, int)):
        return []
    return [LayerShape(heads, size)] * count


def _random_model(
    model_config: Any, dtype: torch.dtype, device: torch.device, attention: str, trust: bool
) -> Any:
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.device(device):
        torch.manual_seed(_DUMMY_SEED)
        return AutoModelForCausalLM.from_config(
            model_config, dtype=dtype, attn_implementation=attention, trust_remote_code=trust
        )


def _pretrained_model(
    source: ModelSource,
    model_config: Any,
    dtype: torch.dtype,
    device: torch.device,
    attention: str,
    config: EngineConfig,
) -> Any:
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            source.location,
            config=model_config,
            dtype=dtype,
            attn_implementation=attention,
            local_files_only=source.local,
            trust_remote_code=config.trust_remote_code,
            output_loading_info=True,
        )
    except (OSError, RuntimeError, ValueError, SafetensorError) as exc:
        raise ConfigurationError(
            f"the weights of model {source.name!r} cannot be read: {_first_line(exc)}. "
            "Check the folder, or use load_format 'dummy' for random weights"
        ) from exc
    if missing := sorted(info["missing_keys"]):
        # transformers gives them random values and carries on.
        raise ConfigurationError(
            f"the weights of model {source.name!r} lack {len(missing)} tensors, {missing[0]} among them. "
            "Complete the folder, or use load_format 'dummy' for random weights"
        )
    return model.to(device)


def _load_tokenizer(source: ModelSource, config: EngineConfig) -> Any | None:
    if config.tokenizer == "none":
        return None
    from transformers import AutoTokenizer

    origin = resolve_model(config.tokenizer, setting="tokenizer") if config.tokenizer else source
    check_reachable(origin, "tokenizer_config.json")
    try:
        return AutoTokenizer.from_pretrained(
            origin.location, local_files_only=origin.local, trust_remote_code=config.trust_remote_code
        )
    except (OSError, ValueError, KeyError) as exc:
        if config.tokenizer is None and config.load_format == "dummy":
            logger.warning("no tokenizer with model %s: it takes token_ids only", source.name)
            return None
        raise ConfigurationError(
            f"the tokenizer of {origin.name!r} cannot be loaded: {_first_line(exc)}. "
            "Set tokenizer to a model that has one, or to 'none' for token ids only"
        ) from exc


def _eos_ids(model: Any, tokenizer: Any | None) -> frozenset[int]:
    """The ids that end a sequence: the generation configuration's, as ``generate`` uses them, else the next best."""
    for owner in (getattr(model, "generation_config", None), model.config, tokenizer):
        ids = getattr(owner, "eos_token_id", None)
        if ids is not None:
            return frozenset(int(i) for i in (ids if isinstance(ids, list | tuple) else [ids]))
    return frozenset()


def _first_line(exc: BaseException) -> str:
    lines = str(exc).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(exc).__name__


def unsupported(message: str) -> UnsupportedModelError:
    """An error about a model that loaded but does not compute right on the paged cache."""
    return UnsupportedModelError(f"{message}. Choose another model, or the 'transformers' backend")
