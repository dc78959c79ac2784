"""The kernels' benchmark keeps what it has and compares like with like; all of it but the GPU runs here."""

from __future__ import annotations

import argparse
import ast
import ctypes
import functools
import importlib.util
import json
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from backend.attention.interface import AttentionParams, register_attention
from backend.attention.sdpa import SdpaKernel
from backend.kv_cache import KVCache, LayerShape
from backend.runner import ModuleForward
from benchmarks.gpu_works import LLAMA_8B, TINY
from benchmarks.kernels import __main__ as command
from benchmarks.kernels import common, layer_compile, linear_lt
from benchmarks.kernels.common import Bench, Report
from benchmarks.kernels.cublas_lt import (
    Algorithm,
    CublasLt,
    CublasLtError,
    HeuristicResult,
    loaded_library,
)
from benchmarks.kernels.plain_decoder import PlainDecoder
from benchmarks.kernels.steps import Step

HEADS, KV_HEADS, SIZE = TINY["num_attention_heads"], TINY["num_key_value_heads"], TINY["head_dim"]
BLOCK = 4

# ---------------------------------------------------------------------------------------------------------- options


def test_parts_are_chosen_by_name_and_comparisons_run_only_if_named() -> None:
    usual = command.parse_options([]).parts
    assert usual == ["rates", "small", "sampling", "decode", "linear", "chain", "prefill"]
    for option in ("--parts", "--only"):
        assert command.parse_options([option, "linear_lt, layer_compile"]).parts == [
            "linear_lt",
            "layer_compile",
        ]
    for bad in ("linear,nope", "", ","):
        with pytest.raises(argparse.ArgumentTypeError, match="linear_lt, layer_compile"):
            command.parse_parts(bad)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--parts", "nope"], "nope is no part"),
        (["--output", "found.json"], "found.json"),
        (["--compile-budget", "-1"], "-1.0. Give 0 or more"),
    ],
)
def test_bad_options_are_refused_by_name(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        command.parse_options(arguments)
    assert said in capsys.readouterr().err


def test_every_part_has_its_function() -> None:
    for part, module in command.PARTS.items():
        found = importlib.util.find_spec(f"benchmarks.kernels.{module}")
        assert found is not None
        assert found.origin is not None
        body = ast.parse(Path(found.origin).read_text(encoding="utf-8")).body
        assert f"bench_{part}" in {node.name for node in body if isinstance(node, ast.FunctionDef)}


def test_a_report_keeps_what_it_has_and_goes_on_after_a_failure(tmp_path: Path) -> None:
    report = Report(tmp_path / "found.txt")
    report("a GPU")
    report.record("one", rows=1, micros={"ours": 1.5})
    with report.guarded("two"):
        raise RuntimeError("out of\nluck")
    assert (tmp_path / "found.txt").read_text() == "a GPU\n  FAILED two: RuntimeError: out of luck\n"
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["records"] == [
        {"part": "one", "rows": 1, "micros": {"ours": 1.5}},
        {"part": "failures", "what": "two", "error": "RuntimeError: out of luck"},
    ]


# ------------------------------------------------------------------------------------------------------------ layers

STEPS: dict[str, list[tuple[int, int]]] = {
    "one row": [(1, 6)],
    "rows that decode": [(1, 5), (1, 0), (1, 11)],
    "prompts": [(5, 0), (9, 3)],
    "both": [(1, 7), (1, 2), (6, 0)],
}


def toy_model() -> Any:
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        LlamaConfig(**TINY), attn_implementation=register_attention(), dtype=torch.float32
    )
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
        elif parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=0.2)
    return model.eval().requires_grad_(False)


def toy_params() -> list[AttentionParams]:
    return [AttentionParams(scaling=SIZE**-0.5, window=None, softcap=None, sinks=None)] * TINY[
        "num_hidden_layers"
    ]


def toy_cache(step: Step) -> KVCache:
    shapes = [LayerShape(KV_HEADS, SIZE)] * TINY["num_hidden_layers"]
    cache = KVCache(
        shapes, num_blocks=step.num_blocks, block_size=BLOCK, dtype=torch.float32, device=torch.device("cpu")
    )
    generator = torch.Generator().manual_seed(1)
    for tensor in (*cache.keys, *cache.values):
        tensor.normal_(generator=generator)
    return cache


def toy_step(chunks: list[tuple[int, int]]) -> Step:
    return Step.of(chunks, block_size=BLOCK, vocabulary=TINY["vocab_size"], device="cpu")


@pytest.mark.parametrize("chunks", STEPS.values(), ids=STEPS)
def test_the_plain_decoder_computes_what_the_engine_computes_on_a_cpu(chunks: list[tuple[int, int]]) -> None:
    """Logits and cache; the engine runs the model's own modules there."""
    step = toy_step(chunks)
    expected_cache, cache = toy_cache(step), toy_cache(step)
    untouched = cache.keys[1].clone()
    expected = ModuleForward(toy_model(), SdpaKernel())(step.tokens, step.inputs, step.shape, expected_cache)
    plain = PlainDecoder.of(toy_model(), toy_params(), SdpaKernel(), max_model_len=64)
    logits = plain(step.tokens, step.inputs, step.shape, cache)
    assert logits.shape == (len(chunks), TINY["vocab_size"])
    torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-3)
    for got, wanted in zip(
        (*cache.keys, *cache.values), (*expected_cache.keys, *expected_cache.values), strict=True
    ):
        torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-4)
    assert int((cache.keys[1] != untouched).any(-1).any(-1).sum()) == sum(new for new, _ in chunks)


def test_the_halves_compile_whole_and_once_for_all_layers() -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    torch.compiler.reset()
    step = toy_step(STEPS["both"])
    expected_cache, cache = toy_cache(step), toy_cache(step)
    plain = PlainDecoder.of(toy_model(), toy_params(), SdpaKernel(), max_model_len=64)
    expected = plain(step.tokens, step.inputs, step.shape, expected_cache)
    counter = CompileCounterWithBackend("aot_eager")
    before, after = (
        torch.compile(half, backend=counter, fullgraph=True, dynamic=False) for half in plain.halves
    )
    plain.halves = before, after
    logits = plain(step.tokens, step.inputs, step.shape, cache)
    torch.testing.assert_close(logits, expected)
    torch.testing.assert_close(cache.keys, expected_cache.keys)
    assert counter.frame_count == 2


def test_steps_are_laid_out_as_the_engine_does_it() -> None:
    step = toy_step(STEPS["both"])
    inputs, shape = step.inputs, step.shape
    assert inputs.positions.tolist() == [7, 2, 0, 1, 2, 3, 4, 5]
    assert inputs.query_starts.tolist() == [0, 1, 2, 8]
    assert inputs.prefill_starts.tolist() == [2, 2, 2, 8]
    assert inputs.kv_lengths.tolist() == [8, 3, 6]
    assert inputs.decode_lengths.tolist() == [8, 3, 0]
    assert inputs.sample_tokens.tolist() == [0, 1, 7]
    assert (shape.num_decode, shape.has_prefill, shape.long_prefill) == (2, True, False)
    blocks = inputs.block_table[2]
    assert inputs.cache_slots[2:].tolist() == [
        int(blocks[at // BLOCK]) * BLOCK + at % BLOCK for at in range(6)
    ]
    assert toy_step([(512, 0)] * 4).shape.long_prefill
    with pytest.raises(ValueError, match="decode must come first"):
        toy_step([(6, 0), (1, 7)])


def test_a_time_limit_is_not_taken_for_an_error_of_the_compilers() -> None:
    def compiler() -> None:
        try:
            time.sleep(30)
        except Exception:
            return

    with (
        pytest.raises(layer_compile.CompileTimeoutError, match="more than 0 s"),
        layer_compile.time_limit(0.05),
    ):
        compiler()


class ToyForward(ModuleForward):
    """Stands in for the engine's fused decoder."""

    layers: list[Any]


@pytest.fixture
def toy_sides(monkeypatch: pytest.MonkeyPatch) -> layer_compile.Sides:
    """Toy shapes on the CPU in place of the GPU's; the clock counts the layers of a call."""
    for name, value in (("HEADS", HEADS), ("KV_HEADS", KV_HEADS), ("SIZE", SIZE), ("BLOCK", BLOCK)):
        monkeypatch.setattr(layer_compile, name, value)
    monkeypatch.setattr(layer_compile, "BF16", torch.float32)
    monkeypatch.setattr(layer_compile, "DEVICE", "cpu")
    monkeypatch.setattr(layer_compile, "VOCABULARY", TINY["vocab_size"])
    monkeypatch.setattr(layer_compile, "WORKS", STEPS)
    monkeypatch.setattr(layer_compile, "AUTOTUNE_ORDER", tuple(reversed(STEPS)))
    monkeypatch.setattr(layer_compile, "wake", lambda: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    kernel = SdpaKernel()
    plain = PlainDecoder.of(toy_model(), toy_params(), kernel, max_model_len=64)
    ours = ToyForward(toy_model(), SdpaKernel())  # its scratch may be used in inference mode only

    def timed(calls: list[functools.partial[object]], *, replays: int = 7) -> float:
        for call in calls:
            call()
        return 10.0 + 90.0 * len(getattr(calls[0].args[0], "layers", ()))

    monkeypatch.setattr(layer_compile, "timed", timed)
    sides = layer_compile.Sides(kernel, ours, plain, plain.layers)  # type: ignore[arg-type]
    monkeypatch.setattr(layer_compile, "make_sides", lambda: sides)
    return sides


def test_layers_are_compared_and_what_fails_is_said(
    toy_sides: layer_compile.Sides, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_, modes = torch.compile, []

    def fake(half: Any, *, mode: str, **options: Any) -> Any:
        modes.append(mode)
        if mode != "default" and len(modes) > 2 * len(STEPS) + 2:
            raise RuntimeError("no more")
        return compile_(half, backend="aot_eager", **options)

    monkeypatch.setattr(torch, "compile", fake)
    report = Report()
    layer_compile.bench_layer_compile(Bench(report))
    found = {r["work"]: r for r in report.records if r["part"] == "layer_compile"}
    assert list(found) == list(STEPS)
    assert not [line for line in report.lines if "WRONG" in line]
    for name, record in found.items():
        # The last of them was autotuned first.
        autotuned = {layer_compile.AUTOTUNED} if name == "both" else set()
        assert set(record["micros"]) == {"attention", "ours", "plain", "default"} | autotuned
        layer = {mode: record["micros"][mode] for mode in ("ours", "plain", "default")}
        assert layer == dict.fromkeys(layer, 90.0)  # what is outside the layers falls out
        (line,) = [line for line in report.lines if line.startswith(f"  {name:24}")]
        assert line.endswith("  1.000, less attention 1.000")
    failed = [r for r in report.records if r["part"] == "failures"]
    assert [r["error"] for r in failed] == ["RuntimeError: no more"] * 3
    assert len(toy_sides.plain.layers) == len(toy_sides.layers) == TINY["num_hidden_layers"]


def test_compilation_ends_with_its_budget(
    toy_sides: layer_compile.Sides, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(half: Any, **options: Any) -> Any:
        return lambda *arguments: time.sleep(60)

    monkeypatch.setattr(torch, "compile", slow)
    report = Report()
    layer_compile.bench_layer_compile(Bench(report, compile_budget=0.05))
    untried = [line for line in report.lines if "NOT TRIED" in line]
    assert len(untried) == 2 * len(STEPS) - 1
    (failed,) = [r for r in report.records if r["part"] == "failures"]
    assert failed["what"] == "default, one row, compiling"
    assert failed["error"].startswith("CompileTimeoutError")
    assert len(toy_sides.plain.layers) == TINY["num_hidden_layers"]
    assert "ours" in next(r for r in report.records if r["part"] == "layer_compile")["micros"]


def test_wrong_logits_are_said() -> None:
    report = Report()
    layer_compile.check(report, "right", torch.ones(3), torch.ones(3))
    assert report.lines == []
    for wrong in (torch.zeros(3), torch.full((3,), torch.nan)):
        layer_compile.check(report, "wrong", wrong, torch.ones(3))
    assert len(report.records) == 2


# ---------------------------------------------------------------------------------------------------------- cuBLASLt


class FakeLt:
    """Computes what cuBLASLt would by its rules: matrices stored by columns, found through pointers."""

    def __init__(self, proposals: int = 3) -> None:
        self.proposals = proposals
        self.descriptors: dict[int, dict[str, int]] = {}
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        self.calls.append(name)
        return lambda *arguments: 0

    def _new(self, target: Any, **values: int) -> int:
        number = len(self.descriptors) + 1
        self.descriptors[number] = values
        target._obj.value = number
        return 0

    def cublasLtMatmulDescCreate(self, target: Any, compute: Any, scale: Any) -> int:  # noqa: N802
        assert (compute.value, scale.value) == (68, 0)
        return self._new(target)

    def cublasLtMatmulDescSetAttribute(self, desc: Any, name: Any, value: Any, size: Any) -> int:  # noqa: N802
        assert size.value == 4
        self.descriptors[desc.value][{3: "a", 4: "b"}[name.value]] = value._obj.value
        return 0

    def cublasLtMatrixLayoutCreate(self, target: Any, kind: Any, rows: Any, columns: Any, ld: Any) -> int:  # noqa: N802
        assert kind.value == 14
        return self._new(target, rows=rows.value, columns=columns.value, ld=ld.value)

    def cublasLtMatmulAlgoGetHeuristic(self, *arguments: Any) -> int:  # noqa: N802
        *_, limit, results, count = arguments
        for index in range(min(limit.value, self.proposals)):
            results[index].algorithm.data[0] = index
            results[index].state = 1 if index == 1 else 0  # the second cannot be run
        count._obj.value = min(limit.value, self.proposals)
        return 0

    def cublasLtMatmulAlgoConfigGetAttribute(  # noqa: N802
        self, algorithm: Any, name: Any, value: Any, size: Any, written: Any
    ) -> int:
        assert size.value == ctypes.sizeof(value._obj)
        if name.value == 8:
            return 7  # not supported
        value._obj.value = algorithm._obj.data[0] if name.value == 0 else 2 if name.value == 2 else 0
        return 0

    def cublasLtMatmul(  # noqa: N802
        self, handle: Any, desc: Any, alpha: Any, a: Any, a_layout: Any, b: Any, b_layout: Any, beta: Any,
        c: Any, c_layout: Any, d: Any, d_layout: Any, algorithm: Any, workspace: Any, size: Any, stream: Any,
    ) -> int:  # fmt: skip
        assert (alpha._obj.value, beta._obj.value, size.value) == (1.0, 0.0, 32 * 2**20)
        assert (c.value, c_layout.value) == (d.value, d_layout.value)
        operations = self.descriptors[desc.value]
        left, right = self._matrix(a, a_layout), self._matrix(b, b_layout)
        left, right = (m.T if operations[k] else m for m, k in ((left, "a"), (right, "b")))
        self._matrix(d, d_layout).copy_((left.float() @ right.float()).bfloat16())
        return 0

    def _matrix(self, pointer: Any, layout: Any) -> Tensor:
        shape = self.descriptors[layout.value]
        assert shape["ld"] == shape["rows"]
        count = shape["rows"] * shape["columns"]
        buffer = (ctypes.c_uint16 * count).from_address(pointer.value)
        flat = torch.frombuffer(buffer, dtype=torch.bfloat16)
        return flat.view(shape["columns"], shape["rows"]).T


def test_products_are_laid_out_by_columns() -> None:
    lt = CublasLt(FakeLt(), "cpu")
    x, weight = torch.randn(3, 16).bfloat16(), torch.randn(8, 16).bfloat16()
    output = torch.full((3, 8), torch.nan, dtype=torch.bfloat16)
    product = lt.product(3, 8, 16)
    found = product.algorithms(16)
    assert [str(each) for each in found] == ["split 2", "id 2 split 2"]  # zeros say nothing
    assert "cluster" not in found[0].facts
    product.run(x, weight, output, found[0])
    torch.testing.assert_close(output, (x.float() @ weight.float().T).bfloat16(), rtol=0.02, atol=0.02)
    assert len(product.algorithms(1)) == 1


def test_structures_have_the_sizes_of_the_header() -> None:
    assert ctypes.sizeof(Algorithm) == 64
    assert ctypes.sizeof(HeuristicResult) == 96
    offsets = {name: getattr(HeuristicResult, name).offset for name in ("workspace_bytes", "state", "waves")}
    assert offsets == {"workspace_bytes": 64, "state": 72, "waves": 76}


def test_a_refused_call_is_named() -> None:
    library = SimpleNamespace(cublasLtCreate=lambda handle: 1)
    with pytest.raises(CublasLtError, match="cublasLtCreate returned status 1"):
        CublasLt(library, "cpu")


def test_the_loaded_library_is_found(tmp_path: Path) -> None:
    maps = tmp_path / "maps"
    maps.write_text(
        "7f00-7f01 r-xp 00000000 00:01 17 /opt/a folder/libcublas.so.13\n"
        "7f01-7f02 rw-p 00000000 00:00 0\n"
        "7f02-7f03 r-xp 00000000 00:01 18   /opt/a folder/libcublasLt.so.13\n"
    )
    assert loaded_library(maps) == "/opt/a folder/libcublasLt.so.13"
    maps.write_text("7f01-7f02 rw-p 00000000 00:00 0\n")
    with pytest.raises(OSError, match="no libcublasLt"):
        loaded_library(maps)


@pytest.fixture
def product() -> Any:
    weights = [torch.randn(8, 16).bfloat16() for _ in range(2)]
    x = torch.randn(3, 16).bfloat16()
    return SimpleNamespace(
        rows=3, name="qkv", outputs=8, inputs=16, weights=weights, x=x, y=torch.empty(3, 8, dtype=torch.bfloat16),
        expected=x.float() @ weights[0].float().T, used=None,
    )  # fmt: skip


def test_linear_layers_are_compared_and_the_best_proposal_is_timed_again(
    product: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # cuBLAS, PyTorch's way to Lt, two proposals, the best of them again.
    clock = iter((50.0, 40.0, 30.0, 20.0, 21.0))

    def timed(calls: list[Callable[[], object]]) -> float:
        for call in calls:
            call()
        return next(clock)

    blas: list[str] = []
    monkeypatch.setattr(linear_lt, "timed", timed)
    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", lambda to=None: blas.append(to) or "x")
    report = Report()
    ours = {((64, 128, 1, 4, 2), False): 26.0, ((64, 128, 1, 4, 2), True): 25.0}
    linear_lt.compare(report, product, CublasLt(FakeLt(), "cpu"), lambda: ours)
    (record,) = report.records
    assert record["micros"] == {
        "cuBLAS": 50.0,
        "torch Lt": 40.0,
        "Lt best": 21.0,
        "Lt first": 30.0,
        "ours": 25.0,
    }
    assert record["what"]["Lt best"] == "2 of 2: id 2 split 2"
    assert record["what"]["ours"] == "64-128-1-4-2 pdl"
    assert blas == [None, "cublaslt", "x"]  # and back
    (line,) = report.lines
    assert line.split()[:7] == ["3", "qkv", "11.1", "50.0", "40.0", "30.0", "21.0"]
    assert line.endswith("25.0  Lt best (2 of 2: id 2 split 2)")


def test_linear_layers_go_on_without_what_fails(product: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong product, a library that refuses, and our kernels where they do not take the rows."""
    monkeypatch.setattr(linear_lt, "timed", lambda calls: 50.0)

    def refuse(to: str | None = None) -> None:
        raise RuntimeError("not here")

    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", refuse)
    report = Report()
    product.expected = product.expected + 1
    linear_lt.compare(report, product, CublasLt(FakeLt(), "cpu"), None)
    assert [line.split()[0] for line in report.lines] == ["FAILED", "WRONG", "WRONG", "3"]
    assert report.lines[-1].split()[2:] == ["11.1", "50.0", "-", "-", "-", "-", "cuBLAS"]
    assert report.records[-1]["micros"] == {"cuBLAS": 50.0}


def test_the_shapes_are_those_of_the_model() -> None:
    assert common.LINEARS["qkv"] == (6144, LLAMA_8B["hidden_size"])
    assert common.LINEARS["gate-up"] == (2 * LLAMA_8B["intermediate_size"], LLAMA_8B["hidden_size"])
    assert common.LINEARS["down"] == (LLAMA_8B["hidden_size"], LLAMA_8B["intermediate_size"])
    assert common.LINEARS["head"] == (LLAMA_8B["vocab_size"], LLAMA_8B["hidden_size"])
    heads = LLAMA_8B["num_attention_heads"], LLAMA_8B["num_key_value_heads"], LLAMA_8B["head_dim"]
    assert heads == (common.HEADS, common.KV_HEADS, common.SIZE)
    assert set(layer_compile.AUTOTUNE_ORDER) == set(layer_compile.WORKS)
