"""Which models are taken, which are refused before their weights are read, and what is said about it."""

from __future__ import annotations

import json
import logging
import shutil
import socket
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from backend import assembly, loading, model_source
from backend.api import ConfigurationError, UnsupportedModelError
from backend.assembly import build_engine, verified_forward
from backend.attention.sdpa import SdpaKernel
from backend.config import EngineConfig
from backend.fused import UnfitModelError, find_pattern, fuse_layer
from backend.kv_cache import KVCache, bytes_per_block
from backend.loading import LoadedModel, expected_layers, load_model
from backend.model_source import resolve_model
from backend.probe import native_logits, probe_layers, verify_paged
from backend.runner import ModuleForward
from backend.sizing import largest_step
from tests.engine.conftest import TinyModel
from tests.engine.tiny_models import VOCAB, save_tiny_model

TINY: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
}


@pytest.fixture
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading or making weights is a failure."""

    def fail(*_args: object, **_options: object) -> None:
        raise AssertionError("weights were loaded")

    monkeypatch.setattr(loading, "_pretrained_model", fail)
    monkeypatch.setattr(loading, "_random_model", fail)
    monkeypatch.setattr(loading, "_check_size", fail)


def save_config(folder: Path, model_type: str, **values: Any) -> str:
    from transformers import AutoConfig

    AutoConfig.for_model(model_type, **values).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize(
    ("model_type", "changes", "reason"),
    [
        ("mamba", {"num_hidden_layers": 2}, "attention interface"),
        ("t5", {}, "no causal language model"),
        ("bart", {"is_encoder_decoder": True}, "encoder-decoder"),
        ("llama4_text", {"num_hidden_layers": 4, "num_local_experts": 2}, "chunked_attention"),
        ("gemma3n_text", {"num_hidden_layers": 20, "num_kv_shared_layers": 10}, "share the keys and values"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "dynamic"),
        ("lfm2", {"layer_types": ["conv", "full_attention"]}, "conv"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "not causal"),
    ],
)
@pytest.mark.usefixtures("no_weights")
def test_what_the_paged_cache_cannot_represent(
    tmp_path: Path, model_type: str, changes: dict[str, Any], reason: str
) -> None:
    folder = save_config(tmp_path, model_type, **{**TINY, **changes})
    with pytest.raises(UnsupportedModelError, match=reason) as caught:
        load_model(EngineConfig(model=folder, tokenizer="none", device="cpu"))
    assert repr(model_type) in str(caught.value)
    assert "transformers" in str(caught.value)


@pytest.mark.usefixtures("no_weights")
def test_more_context_than_the_model_has(tmp_path: Path) -> None:
    folder = save_config(tmp_path, "llama", **TINY)
    with pytest.raises(UnsupportedModelError, match=r"max_model_len is 65, but .* 64"):
        load_model(EngineConfig(model=folder, tokenizer="none", device="cpu", max_model_len=65))


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize(
    "name", ["/no/such/folder", "./nowhere", "~/nowhere-at-all", "a/b/c", "/no/such/file.gguf"]
)
def test_paths_that_do_not_exist(name: str) -> None:
    with pytest.raises(ConfigurationError, match=r"there is no (folder|file)") as caught:
        load_model(EngineConfig(model=name, device="cpu"))
    assert repr(name) in str(caught.value)


@pytest.mark.usefixtures("no_weights")
def test_a_folder_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"no config\.json"):
        load_model(EngineConfig(model=str(tmp_path), device="cpu"))


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"model_type": "no-such-type"}'])
def test_a_folder_with_a_useless_config(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigurationError, match="cannot be found or read"):
        load_model(EngineConfig(model=str(tmp_path), device="cpu"))


@pytest.mark.usefixtures("no_weights")
def test_a_hub_name_that_cannot_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigurationError, match="'nobody/no-such-model' cannot be found or read"):
        load_model(EngineConfig(model="nobody/no-such-model", device="cpu"))


@pytest.mark.usefixtures("no_weights")
def test_a_hub_that_cannot_be_reached_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    with socket.socket() as closed:  # bound and not listening: refuses every connection
        closed.bind(("127.0.0.1", 0))
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(
            huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{closed.getsockname()[1]}"
        )
        began = time.monotonic()
        with pytest.raises(ConfigurationError, match=r"'nobody/no-such-model'.* hub cannot be reached"):
            load_model(EngineConfig(model="nobody/no-such-model", device="cpu"))
    assert time.monotonic() - began < 22  # its own retries take 24 s


@pytest.mark.parametrize("device", ["gpu", "cuda:99", "cuda", "meta", "mps"])
def test_devices_that_are_not_there(device: str) -> None:
    if device == "cuda" and torch.cuda.is_available():
        device = "cuda:98"
    with pytest.raises(ConfigurationError, match=device):
        load_model(EngineConfig(model="smollm2", device=device))


# ---------------------------------------------------------------------------------------------------- broken weights


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_tiny_model("llama", tmp_path / "model")


def load(folder: Path, **options: Any) -> LoadedModel:
    return load_model(EngineConfig(model=str(folder), tokenizer="none", device="cpu", **options))


def test_a_folder_without_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigurationError, match=r"weights of model .* cannot be read"):
        load(folder)
    assert load(folder, load_format="dummy").vocab_size == VOCAB


def test_weights_that_are_cut_off(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(ConfigurationError, match=r"weights of model .* cannot be read"):
        load(folder)


def test_weights_that_are_not_all_there(folder: Path) -> None:
    """Whatever is missing would be random."""
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    tensors = load_file(path)
    name = next(n for n in tensors if "layers.1.mlp.down_proj" in n)
    del tensors[name]
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(ConfigurationError, match=r"layers\.1\.mlp\.down_proj"):
        load(folder)


def test_weights_of_another_shape(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["intermediate_size"] += 16
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigurationError, match="weights of model"):
        load(folder)


def test_a_file_that_is_no_gguf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENMILL_CACHE_DIR", str(tmp_path / "cache"))
    path = tmp_path / "broken.gguf"
    path.write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(ConfigurationError, match=r"broken\.gguf"):
        resolve_model(str(path))
    assert not [p for p in (tmp_path / "cache" / "gguf").iterdir() if not p.name.endswith(".lock")]


def test_a_tokenizer_that_is_not_there(folder: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"tokenizer of .* cannot be loaded"):
        load_model(EngineConfig(model=str(folder), device="cpu"))


def test_a_path_of_a_tokenizer_that_does_not_exist(folder: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"^tokenizer: there is no folder '/no/such/folder'"):
        load_model(EngineConfig(model=str(folder), tokenizer="/no/such/folder", device="cpu"))


def test_a_cache_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TOKENMILL_CACHE_DIR", str(tmp_path / "file"))
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF")
    with pytest.raises(ConfigurationError, match="TOKENMILL_CACHE_DIR"):
        resolve_model(str(path))


def test_a_conversion_that_was_killed_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKENMILL_CACHE_DIR", str(tmp_path))
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF")

    def half(_path: Path, folder: Path) -> None:
        (folder / "half").touch()
        raise KeyboardInterrupt

    def whole(_path: Path, folder: Path) -> None:
        (folder / "whole").touch()

    with monkeypatch.context() as killed:  # nothing is tidied up by a process that is killed
        killed.setattr(shutil, "rmtree", lambda *_args, **_options: None)
        killed.setattr(model_source, "_convert", half)
        with pytest.raises(KeyboardInterrupt):
            resolve_model(str(path))
    monkeypatch.setattr(model_source, "_convert", whole)
    target = model_source.convert_gguf(path)
    assert [p.name for p in target.iterdir()] == ["whole"]
    assert [p for p in target.parent.iterdir() if p.is_dir()] == [target]


def test_an_end_outside_the_vocabulary_ends_nothing(tmp_path: Path) -> None:
    folder = save_tiny_model("llama", tmp_path / "model", eos_token_id=[5, 4096])
    assert load(folder).eos_ids == {5}


def test_a_tokenizer_with_more_tokens_than_the_model(tmp_path: Path, llama: TinyModel) -> None:
    from backend.api import Prompt, RequestError

    small = save_tiny_model("llama", tmp_path / "small", vocab_size=40)
    loaded = load_model(EngineConfig(model=str(small), tokenizer=str(llama.folder), device="cpu"))
    assert loaded.encoder.encode(Prompt(prompt="a"))
    with pytest.raises(RequestError, match="outside the vocabulary of 40") as caught:
        loaded.encoder.encode(Prompt(prompt="the cat sat on the mat"))
    assert caught.value.field == "prompt"


# ------------------------------------------------------------------------------------------------------ verification


def test_attention_that_computes_something_else_is_noticed(tiny: Any) -> None:
    """A kernel that forgets the sliding window, the soft cap or the sinks must not pass the comparison at load."""
    from dataclasses import replace

    class Forgetful(SdpaKernel):
        def __init__(self, **forgotten: None) -> None:
            super().__init__()
            self._forgotten = forgotten

        def attend(self, query, layer, cache, inputs, shape, params):  # type: ignore[no-untyped-def]
            return super().attend(query, layer, cache, inputs, shape, replace(params, **self._forgotten))

    for family, forgotten in (
        ("mistral-window", {"window": None}),
        ("gemma2", {"softcap": None}),
        ("gpt-oss", {"sinks": None}),
    ):
        model = tiny(family)
        native = native_logits(model.loaded)
        forward = ModuleForward(model.loaded.model, SdpaKernel())
        verify_paged(model.loaded, model.layers, native, forward, 4)
        forgetful = ModuleForward(model.loaded.model, Forgetful(**forgotten))
        with pytest.raises(UnsupportedModelError, match="differ from its own"):
            verify_paged(model.loaded, model.layers, native, forgetful, 4)


@pytest.mark.parametrize("model_type", ["bert", "roberta"])
def test_encoders_are_refused_at_the_latest_by_comparison(tmp_path: Path, model_type: str) -> None:
    folder = save_config(tmp_path, model_type, **TINY)
    config = EngineConfig(model=folder, load_format="dummy", tokenizer="none", device="cpu", max_model_len=32)
    with pytest.raises(UnsupportedModelError):
        build_engine(config, lambda _loaded: None, lambda: 0.0)  # type: ignore[arg-type, return-value]


class FullMemory:
    """Almost nothing is left once the weights are loaded."""

    def free(self) -> int:
        return 5000

    def watch(self) -> None:
        pass

    def peak(self) -> int:
        return 0


def test_no_room_for_the_cache(folder: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"KV cache does not fit.*Lower max_model_len"):
        build_engine(
            EngineConfig(model=str(folder), tokenizer="none", device="cpu"),
            lambda _loaded: None,  # type: ignore[arg-type, return-value]
            lambda: 0.0,
            FullMemory(),
        )


def test_the_largest_step_runs_over_a_cache_of_one_block(folder: Path) -> None:
    config = EngineConfig(
        model=str(folder),
        tokenizer="none",
        device="cpu",
        max_num_seqs=3,
        max_num_batched_tokens=48,
        block_size=4,
    )
    loaded = load_model(config)
    layers = probe_layers(loaded).layers
    cache = KVCache(layers, num_blocks=1, block_size=4, dtype=loaded.dtype, device=loaded.device)
    cache.keys[0].fill_(7)
    shapes = []
    forward = ModuleForward(loaded.model, SdpaKernel())

    def watched(*arguments: Any) -> torch.Tensor:
        logits = forward(*arguments)
        shapes.append((arguments[0].shape, logits.shape))
        return logits

    largest_step(config, loaded, watched, cache)  # type: ignore[arg-type]
    assert shapes == [((48,), (3, loaded.vocab_size))]
    written = (cache.keys[0].flatten(0, 1) != 7).any(dim=-1).any(dim=-1)
    assert written.tolist() == [True] + [False] * 7


def test_no_room_for_one_sequence_is_found_before_the_weights_are_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = EngineConfig(model=str(folder), tokenizer="none", device="cpu", dtype="float32", block_size=16)
    loaded = load_model(config)
    weights = sum(p.numel() for p in loaded.model.parameters()) * 4
    layers = probe_layers(loaded).layers
    assert expected_layers(loaded.model.config) == layers
    sequence = -(-loaded.max_model_len // 16) * bytes_per_block(layers, 16, torch.float32)

    def fail(*_args: object) -> None:
        raise AssertionError("weights were loaded")

    monkeypatch.setattr(loading, "_pretrained_model", fail)
    monkeypatch.setattr(loading, "available_memory", lambda _device: weights + 2 * sequence - 2)
    with pytest.raises(
        ConfigurationError, match=r"KV cache of one sequence of \d+ tokens needs .*weights take"
    ):
        load_model(config)
    monkeypatch.setattr(loading, "available_memory", lambda _device: weights + 2 * sequence)
    with pytest.raises(AssertionError, match="weights were loaded"):
        load_model(config)


def test_no_room_for_the_blocks_that_were_asked_for(folder: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"num_kv_blocks is 1000000000000, .* at most \d+"):
        build_engine(
            EngineConfig(model=str(folder), tokenizer="none", device="cpu", num_kv_blocks=10**12),
            lambda _loaded: None,
            lambda: 0.0,  # type: ignore[arg-type, return-value]
        )


def test_no_room_for_the_weights(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "available_memory", lambda _device: 5000)
    with pytest.raises(ConfigurationError, match=r"MiB for its weights in float32, but .* free"):
        load(folder)


# --------------------------------------------------------------------------------------------------- fused or modules


def test_fused_weights_leave_the_modules_at_work(folder: Path) -> None:
    """They are views of the fused matrices: a model that turns out not to fit can still run through its modules."""
    loaded = load(folder, dtype="float32")
    before = native_logits(loaded)
    layers = loaded.model.model.layers
    pattern = find_pattern(layers, loaded.model.config)
    for layer, params in zip(layers, probe_layers(loaded).params, strict=True):
        attention, mlp = layer.self_attn, layer.mlp
        originals = [m.weight.clone() for m in (attention.q_proj, attention.k_proj, attention.v_proj)]
        fused = fuse_layer(layer, pattern, params)
        assert torch.equal(fused.qkv, torch.cat(originals))
        for modules, matrix in (
            ((attention.q_proj, attention.k_proj, attention.v_proj), fused.qkv),
            ((mlp.gate_proj, mlp.up_proj), fused.gate_up),
        ):
            assert torch.equal(torch.cat([m.weight for m in modules]), matrix)
            storage = matrix.untyped_storage().data_ptr()
            assert all(m.weight.untyped_storage().data_ptr() == storage for m in modules)
    assert torch.equal(native_logits(loaded), before)


@pytest.mark.parametrize(
    "biased",
    [("self_attn.q_proj",), ("self_attn.k_proj", "self_attn.v_proj"), ("mlp.up_proj",), ("mlp.gate_proj",)],
)
def test_layers_with_biases_that_the_fused_ones_have_no_place_for_are_not_fused(
    folder: Path, biased: tuple[str, ...]
) -> None:
    model = load(folder, dtype="float32").model
    for name in biased:
        linear = model.model.layers[1].get_submodule(name)
        linear.bias = torch.nn.Parameter(torch.ones(linear.out_features))
    with pytest.raises(UnfitModelError, match="built differently"):
        find_pattern(model.model.layers, model.config)


def test_fused_layers_that_compute_something_else_give_way_to_the_modules(
    tiny: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny("llama")
    kernel = SdpaKernel()
    modules = ModuleForward(model.loaded.model, kernel)

    def wrong(*arguments: Any) -> torch.Tensor:
        return modules(*arguments) * 1.1

    native = native_logits(model.loaded)
    config = EngineConfig(block_size=4)
    monkeypatch.setattr(assembly, "choose_forward", lambda *_arguments: wrong)
    with caplog.at_level(logging.INFO, "backend.assembly"):
        forward = verified_forward(config, model.loaded, probe_layers(model.loaded), kernel, native)
    assert isinstance(forward, ModuleForward)
    assert "differ from its own" in caplog.text
    monkeypatch.setattr(assembly, "choose_forward", lambda *_arguments: modules)
    with pytest.raises(UnsupportedModelError):
        verified_forward(config, model.loaded, probe_layers(model.loaded), kernel, native + 100)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_few_tokens_that_go_another_way_are_rounding_in_16_bits_only(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    """As where the experts of a mixture are nearly tied. What goes wrong in all of a part's tokens is a mistake."""
    folder = save_tiny_model("llama", tmp_path / "model")
    loaded = load(folder, dtype=str(dtype).removeprefix("torch."))
    layers = probe_layers(loaded).layers
    native = native_logits(loaded).clone()
    modules = ModuleForward(loaded.model, SdpaKernel())

    def verify(wrong: set[int]) -> None:
        def forward(tokens: torch.Tensor, inputs: Any, *rest: Any) -> torch.Tensor:
            logits = modules(tokens, inputs, *rest).clone()
            here = [i for i, position in enumerate(inputs.positions.tolist()) if position in wrong]
            logits[here] += 100.0
            return logits

        verify_paged(loaded, layers, native, forward, 4)

    verify(set())
    if dtype == torch.bfloat16:
        verify({3, 20, 39})
    else:
        with pytest.raises(UnsupportedModelError, match="differ from its own"):
            verify({39})
    for part in (range(17), range(17, 34), range(34, 40)):
        with pytest.raises(UnsupportedModelError, match="differ from its own"):
            verify(set(part))
    native[5, 3] = float("nan")
    with pytest.raises(UnsupportedModelError, match="differ from its own"):
        verify(set())
