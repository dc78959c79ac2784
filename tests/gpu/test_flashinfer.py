"""FlashInfer's kernel for long prompts: against plain attention, and behind the engine. Its first run builds it."""

from __future__ import annotations

import importlib.util
import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from backend.api import ConfigurationError
from backend.attention.flashinfer_prefill import FlashInferPrefill, find_flashinfer
from backend.attention.interface import AttentionParams
from backend.graphs import GraphRunner
from backend.slots import LONG_PREFILL_ROWS, StepShape
from backend.streams import STREAM_NAMES
from tests.gpu.gpu_driver import CoreDriver, outcome
from tests.gpu.gpu_logits import Comparing, Spy, errors, fill_mixed_graphs, forced_logits
from tests.gpu.gpu_models import VOCAB, save_family
from tests.gpu.kernel_references import attend, gather_rows, relative_error
from tests.gpu.paged_rows import make_rows

HEAD_SIZE, BLOCK_SIZE = 128, 16
PLAIN = AttentionParams(scaling=0.1, window=None, softcap=None, sinks=None)


def _hopper() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not _hopper(), reason="needs a Hopper GPU"),
    pytest.mark.skipif(importlib.util.find_spec("flashinfer") is None, reason="needs flashinfer-python"),
]

Record = Callable[[str, object], None]


def find(
    dtype: torch.dtype = torch.bfloat16, heads: int = 8, kv_heads: int = 2, width: int = 201
) -> FlashInferPrefill:
    found = find_flashinfer(
        "flashinfer",
        params=[PLAIN],
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_size=HEAD_SIZE,
        block_size=BLOCK_SIZE,
        max_tokens=2048,
        max_blocks=width,
        dtype=dtype,
        device=torch.device("cuda", 0),
    )
    assert found is not None
    return found


def random_step(rng: random.Random) -> tuple[int, list[int], list[int]]:
    """Decode rows, queries of the rows after them, and the length of every row."""
    decode = rng.choice([0, 1, 40])
    count = rng.choice([1, 3, LONG_PREFILL_ROWS])
    queries = [rng.choice([1, 17, 127, 128, 129, rng.randrange(1, 2000 // count)]) for _ in range(count)]
    queries = [min(n, 2000 // count) for n in queries]
    cached = [rng.choice([0, 1, rng.randrange(1000)]) for _ in queries]
    return (
        decode,
        queries,
        [rng.randrange(1, 300) for _ in range(decode)]
        + [n + c for n, c in zip(queries, cached, strict=True)],
    )


@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 2), (32, 8), (4, 4)])
def test_a_captured_launch_follows_every_later_plan(heads: int, kv_heads: int) -> None:
    found = find(heads=heads, kv_heads=kv_heads)
    rng = random.Random(heads)
    torch.manual_seed(heads)
    tokens, rows = 2048, 64
    lengths = [200 * BLOCK_SIZE] * rows  # and a column of the table beyond
    cache = make_rows(
        lengths,
        kv_heads=kv_heads,
        head_size=HEAD_SIZE,
        block_size=BLOCK_SIZE,
        dtype=torch.bfloat16,
        device="cuda",
    )
    table = cache.block_table.clone()
    query = torch.randn(tokens, heads + 2, HEAD_SIZE, device="cuda").to(torch.bfloat16)[:, :heads]
    outputs = [torch.zeros(tokens, heads, HEAD_SIZE, device="cuda", dtype=torch.bfloat16) for _ in (0, 1)]
    graphs = []
    for slot in (0, 1):
        found.plan(slot, StepShape(num_decode=rows))
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found.run(query, cache.keys, cache.values, table, slot=slot, scale=0.1, output=outputs[slot])
        graphs.append(graph)
    for turn in range(10):
        slot = turn % 2
        decode, queries, kv_lengths = random_step(rng)
        table.copy_(cache.block_table[torch.randperm(rows, device="cuda")])
        outputs[slot].fill_(7.0)
        found.plan(slot, StepShape(decode, True, True, slot, [1] * decode + queries, kv_lengths))
        graphs[slot].replay()
        torch.cuda.synchronize()
        assert (outputs[slot][:decode] == 7).all()
        assert (outputs[slot][decode + sum(queries) :] == 7).all()
        borders = itertools.pairwise(itertools.accumulate(queries, initial=decode))
        for row, (start, end) in enumerate(borders, start=decode):
            expected = attend(
                query[start:end],
                gather_rows(cache.keys, table, row, kv_lengths[row]),
                gather_rows(cache.values, table, row, kv_lengths[row]),
                scale=0.1,
                window=None,
                softcap=None,
                sinks=None,
            )
            assert relative_error(outputs[slot][start:end], expected) < 1e-2, f"turn {turn}, row {row}"


def test_what_it_does_not_compute_is_refused_by_name() -> None:
    with pytest.raises(ConfigurationError, match="float32"):
        find(torch.float32)


# ---------------------------------------------------------------------------------------------- behind the engine


def long_texts(count: int) -> tuple[list[list[int]], list[int]]:
    rng = random.Random(3)
    texts = [[rng.randrange(VOCAB) for _ in range(rng.randint(320, 900))] for _ in range(count)]
    return texts, [len(text) - rng.randint(1, 12) for text in texts]


def save_model(folder: Path) -> Path:
    return save_family("llama", folder, head_dim=HEAD_SIZE, max_position_embeddings=1024)


OPTIONS: dict[str, Any] = {
    "prefill_attention": "flashinfer",
    "max_num_batched_tokens": 512,
    "num_kv_blocks": 1000,
}


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of rows of each plan from now on."""
    rows: list[int] = []
    original = FlashInferPrefill.plan

    def plan(self: FlashInferPrefill, slot: int, shape: StepShape) -> None:
        rows.append(len(shape.query_lengths) - shape.num_decode if shape.query_lengths else 0)
        original(self, slot, shape)

    monkeypatch.setattr(FlashInferPrefill, "plan", plan)
    return rows


def test_logits_are_within_twice_transformers_own_error(
    tmp_path: Path, spied: list[Spy], planned: list[int], record_property: Record
) -> None:
    folder = save_model(tmp_path)
    texts, prompts = long_texts(10)
    ours = forced_logits(folder, texts, prompts, spied, **OPTIONS)
    assert sum(count > 0 for count in planned) >= 10
    rms, own_rms, most, own_most = errors(folder, texts, prompts, ours)
    record_property("root-mean-square error, ours / transformers'", f"{rms:.5f} / {own_rms:.5f}")
    record_property("largest error, ours / transformers'", f"{most:.4f} / {own_most:.4f}")
    assert rms <= 2 * own_rms


def test_graphs_compute_what_the_same_padded_step_does_uncaptured(
    tmp_path: Path, spied: list[Spy], planned: list[int], record_property: Record
) -> None:
    driver = CoreDriver(save_model(tmp_path), dtype="bfloat16", **OPTIONS)
    runner = driver.core._runner
    assert isinstance(runner, GraphRunner)
    comparing = Comparing(runner, spied[-1])
    driver.core._runner = comparing
    texts, _ = long_texts(16)
    for text in texts:
        driver.add(text, max_tokens=8)
    driver.run()
    assert any(count > 1 for count in planned)
    long = [key for key in runner._captured if key.long_prefill]
    fill_mixed_graphs(driver, long, random.Random(6))
    torch.cuda.synchronize()
    compared = comparing.check()
    assert long
    assert set(long) <= set(comparing.found)
    record_property(
        "steps compared bit by bit", f"{compared}, {len(long)} graphs with long prompts among theirs"
    )


def run_core(folder: Path, **options: Any) -> list[Any]:
    driver = CoreDriver(folder, dtype="bfloat16", **{**OPTIONS, **options})
    texts, _ = long_texts(12)
    sequences = [
        driver.add(text, max_tokens=20, temperature=(i % 2) * 0.8, seed=i) for i, text in enumerate(texts)
    ]
    driver.run()
    return [outcome(sequence) for sequence in sequences]


@pytest.mark.parametrize(
    "options",
    [{"mode": "sync"}, *({"debug_delay": f"{late}:2000"} for late in STREAM_NAMES)],
    ids=["sync", *(f"late {late}" for late in STREAM_NAMES)],
)
def test_outcomes_stay_the_same(options: dict[str, Any], tmp_path: Path, planned: list[int]) -> None:
    """The requests have no end token and are all there from the start, so that the launches are the same."""
    folder = save_model(tmp_path)
    expected = run_core(folder)
    assert any(planned)
    assert run_core(folder, **options) == expected


def test_the_choice_is_told(tmp_path: Path) -> None:
    folder = save_model(tmp_path)
    names = [
        CoreDriver(folder, dtype=dtype, **{**OPTIONS, "prefill_attention": wanted}).parts.describe()[
            "long_prefill"
        ]
        for dtype, wanted in (("bfloat16", "flashinfer"), ("bfloat16", "triton"), ("float32", "auto"))
    ]
    assert names == ["flashinfer", "triton", "triton"]
