"""What a model's configuration tells: support, rotary settings, context."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from backend.api import UnsupportedModelError
from backend.support import check_supported, context_limit, rope_settings

GOOD = SimpleNamespace(_supports_attention_backend=True)


def config(**values: Any) -> SimpleNamespace:
    made = SimpleNamespace(model_type="made-up", **values)
    made.get_text_config = lambda decoder=False: made
    return made


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"layer_types": ["full_attention", "sliding_attention"]},
        {"layer_types": None},
        {"num_kv_shared_layers": 0},
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}},
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear"},
                "sliding_attention": {"rope_type": "default"},
            }
        },
        {"rope_parameters": None, "rope_scaling": None},
    ],
)
def test_supported(values: dict[str, Any]) -> None:
    check_supported(config(**values), GOOD)


@pytest.mark.parametrize(
    ("values", "model_class", "reason"),
    [
        ({}, None, "no causal language model"),
        ({"is_encoder_decoder": True}, GOOD, "encoder-decoder"),
        ({}, SimpleNamespace(), "attention interface"),
        ({}, SimpleNamespace(_supports_attention_backend=False), "attention interface"),
        ({"layer_types": ["full_attention", "chunked_attention"]}, GOOD, "chunked_attention"),
        ({"layer_types": ["mamba", "linear_attention"]}, GOOD, "linear_attention, mamba"),
        ({"attention_chunk_size": 8192}, GOOD, "in chunks"),
        ({"num_kv_shared_layers": 2}, GOOD, "share the keys"),
        ({"is_causal": False}, GOOD, "not causal"),
        ({"use_bidirectional_attention": True}, GOOD, "not causal"),
        ({"rope_parameters": {"rope_type": "dynamic"}}, GOOD, "dynamic"),
        ({"rope_parameters": {"full_attention": {"rope_type": "dynamic"}}}, GOOD, "dynamic"),
        ({"rope_scaling": {"rope_type": "dynamic"}}, GOOD, "dynamic"),
    ],
)
def test_refused(values: dict[str, Any], model_class: Any, reason: str) -> None:
    with pytest.raises(UnsupportedModelError, match=reason) as caught:
        check_supported(config(**values), model_class)
    assert "'made-up'" in str(caught.value)


def test_rotary_settings_of_every_shape() -> None:
    plain = {"rope_type": "default"}
    assert rope_settings(config(rope_parameters=plain)) == [plain]
    assert rope_settings(config(rope_scaling=plain)) == [plain]
    assert rope_settings(config(rope_parameters={"a": plain, "b": plain})) == [plain, plain]
    assert rope_settings(config(rope_parameters={})) == [{}]
    assert rope_settings(config(rope_parameters="odd")) == []


def test_context_is_the_models_or_less() -> None:
    assert context_limit(config(max_position_embeddings=100), None) == 100
    assert context_limit(config(max_position_embeddings=100), 100) == 100
    assert context_limit(config(max_position_embeddings=100), 10) == 10
    with pytest.raises(UnsupportedModelError, match="max_model_len is 101"):
        context_limit(config(max_position_embeddings=100), 101)


def test_a_model_that_does_not_say_takes_what_is_asked() -> None:
    assert context_limit(config(), 50) == 50
    with pytest.raises(UnsupportedModelError, match="Set max_model_len"):
        context_limit(config(), None)


def test_longrope_ends_where_its_factors_switch() -> None:
    rope = {"rope_type": "longrope", "original_max_position_embeddings": 40}
    assert context_limit(config(max_position_embeddings=100, rope_parameters=rope), None) == 40
    outside = {"rope_type": "longrope"}
    model = config(max_position_embeddings=100, rope_parameters=outside, original_max_position_embeddings=30)
    assert context_limit(model, None) == 30
    with pytest.raises(UnsupportedModelError, match="ends at 30"):
        context_limit(model, 31)
