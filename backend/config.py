"""One frozen, validated configuration for every backend."""

from __future__ import annotations

import math
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from backend.api import ConfigurationError

# Requests of this priority and beyond are bulk work; what is more urgent goes before them.
BULK_PRIORITY = 6

DType = Literal["auto", "float64", "float32", "bfloat16", "float16"]


class EngineConfig(BaseModel):
    """How a backend loads its model and batches requests. Each field is also a setting ``TOKENMILL_ENGINE_…``."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    model: str = Field(
        "smollm2",
        min_length=1,
        description="built-in alias, hub name, or path of a folder (safetensors) or of a .gguf file",
    )
    load_format: Literal["auto", "dummy"] = Field(
        "auto", description="'dummy' gives the model random weights, for benchmarks"
    )
    tokenizer: str | None = Field(
        None,
        min_length=1,
        description="where the tokenizer comes from; the model's own when unset, 'none' for token ids only",
    )
    trust_remote_code: bool = Field(False, description="run Python code that comes with the model")
    device: str = Field("auto", description="'auto', 'cpu', 'cuda' or 'cuda:N'")
    dtype: DType = Field("auto", description="'auto' is float32 on a CPU and the model's own on a GPU")
    mode: Literal["async", "sync"] = Field(
        "async", description="'sync' retires each step before the next one is prepared"
    )

    max_num_seqs: int = Field(32, ge=1, le=4096, description="requests that run at once (slots)")
    bulk_min_share: float = Field(
        0.1,
        ge=0,
        le=1,
        description="share of the slots, and of a step's tokens, that bulk (priority 6 to 9) keeps while more urgent "
        "requests wait; rounded up, but below 1 it leaves them a slot. A worker's own share when unset",
    )
    max_num_batched_tokens: int = Field(
        512,
        ge=1,
        le=2**20,
        description="tokens a step computes at most, decode rows included; longer prompts are chunked",
    )
    max_model_len: int | None = Field(
        None, ge=2, description="context limit in tokens; the model's own when unset"
    )
    block_size: int = Field(16, ge=1, le=256, description="tokens in a block of the KV cache")
    num_kv_blocks: int | None = Field(None, ge=2, description="blocks of the KV cache; measured when unset")
    kv_memory_fraction: float | None = Field(
        None,
        gt=0.0,
        le=1.0,
        description="share of the free memory for the KV cache, when it is measured: 0.9 of a GPU's by default, "
        "0.5 of a CPU's",
    )
    prefix_cache: bool = Field(True, description="share the blocks of equal prompt beginnings")
    max_waiting: int = Field(
        100_000, ge=1, description="requests that may wait inside the engine before it refuses more"
    )
    fused: bool = Field(True, description="on a GPU, run common models by fused kernels")
    cuda_graphs: bool = Field(True, description="on a GPU, capture every step size once and replay it")
    prefill_attention: Literal["auto", "triton", "flashinfer"] = Field(
        "auto",
        description="the kernel for steps with a few long prompts, on a Hopper GPU: 'flashinfer' builds FlashInfer's "
        "FA3 kernel if need be, 'auto' takes it where it has been built, 'triton' is our own",
    )
    debug_poison: bool = Field(
        False, description="overwrite released I/O buffers, so that a use after release shows"
    )
    debug_delay: str | None = Field(
        None,
        pattern=r"^(h2d|compute|d2h):[0-9]{1,6}$",
        description="'h2d:300' holds each step's work on that stream (h2d, compute or d2h) up for 300 µs, so that "
        "a missing wait shows",
    )

    echo_tokens_per_s: float | None = Field(
        None, gt=0, description="speed of the echo backend, a request; unlimited when unset"
    )

    @property
    def min_bulk_seqs(self) -> int:
        """The slots that bulk keeps."""
        share = math.ceil(self.max_num_seqs * self.bulk_min_share)
        return share if self.bulk_min_share == 1 else min(share, self.max_num_seqs - 1)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigurationError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) is less than max_num_seqs "
                f"({self.max_num_seqs}): a step could not hold one token of each running request. "
                "Raise the first or lower the second"
            )
        return self
