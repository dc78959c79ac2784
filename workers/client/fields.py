"""What may be asked for beside the prompt, as type checkers and editors want it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, TypedDict


class PayloadFields(TypedDict, total=False):
    """The fields of ``workers.payload.GeneratePayload``, which checks them and says what they mean, in docs/payload.md
    too; all but the prompt and the model."""

    version: Literal[1]
    priority: int
    deadline_s: float | None
    tenant: str | None
    custom_id: str | None
    return_token_ids: bool
    stream: bool
    callback_url: str | None
    callback_include_output: bool
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int | None
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float] | Mapping[str, float]
    max_tokens: int
    min_tokens: int
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    logprobs: int | None
