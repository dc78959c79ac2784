"""The engine on a CUDA device, in float32, against transformers' ``generate``."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.gpu_driver import CoreDriver, run_engine
from tests.gpu.gpu_models import FAMILIES, NEW_TOKENS, UNFUSED, generate, make_prompts, save_family

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

Record = Callable[[str, object], None]


OPTIONS: list[dict[str, Any]] = [
    {},
    {"mode": "sync"},
    {"cuda_graphs": False},
    {"fused": False},
    {"num_kv_blocks": 36, "block_size": 4},
    {"block_size": 7},
    {"max_num_batched_tokens": 20},
    {"fused": False, "cuda_graphs": False, "mode": "sync", "prefix_cache": False},
]
UNCAPTURED = ("mixtral", "qwen3-moe", "gpt-oss", "phi3-longrope")  # in float32


def changes_nothing(family: str, options: dict[str, Any]) -> bool:
    """Whether a family runs like this anyway, as another set of options has it already."""
    return (options == {"fused": False} and family in UNFUSED) or (
        options == {"cuda_graphs": False} and family in UNCAPTURED
    )


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_family(family, tmp_path_factory.mktemp(family))


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return make_prompts(40)


@pytest.fixture(scope="module")
def expected(folder: Path, prompts: list[list[int]]) -> list[list[int]]:
    return generate(folder, prompts)


@pytest.mark.parametrize(
    ("family", "options"),
    [(f, o) for f in sorted(FAMILIES) for o in OPTIONS if not changes_nothing(f, o)],
    indirect=["family"],
    ids=str,
)
def test_greedy_tokens_equal_generate(
    family: str,
    folder: Path,
    prompts: list[list[int]],
    expected: list[list[int]],
    options: dict[str, Any],
    record_property: Record,
) -> None:
    rng = random.Random(2)
    lengths = [rng.randint(1, NEW_TOKENS) for _ in prompts]
    got, details = run_engine(folder, prompts, [{"max_tokens": n} for n in lengths], **options)
    wrong = [i for i, (g, e, n) in enumerate(zip(got, expected, lengths, strict=True)) if g != e[:n]]
    record_property(
        "tokens equal to generate's", f"{sum(lengths)} in {len(got)} requests, {len(wrong)} differ"
    )
    assert not wrong
    assert details["layers"] == (
        "modules" if family in UNFUSED or not options.get("fused", True) else "fused"
    )
    if not options:
        record_property("layers, graphs", f"{details['layers']}, {details.get('graphs', 'none')}")
        assert ("graphs" in details) == (family not in UNCAPTURED)
    if "num_kv_blocks" in options:
        assert details["preemptions"] > 0


@pytest.mark.parametrize(
    ("family", "graphs"),
    [(f, g) for f in sorted(FAMILIES) for g in (True, False) if g or f not in UNCAPTURED],
    indirect=["family"],
)
def test_batches_that_shrink_and_grow_between_buckets(
    folder: Path, prompts: list[list[int]], expected: list[list[int]], graphs: bool
) -> None:
    """Waves of arrivals of any size at any step: row counts wander through all buckets, up and down."""
    driver = CoreDriver(folder, cuda_graphs=graphs)
    rng = random.Random(3)
    waiting = list(range(len(prompts)))
    added: dict[int, tuple[Any, int]] = {}
    counts = []
    while waiting or driver.core.has_work():
        if waiting and rng.random() < 0.25:
            for _ in range(min(len(waiting), rng.choice((1, 1, 2, 7, 12)))):
                i = waiting.pop(0)
                length = rng.randint(1, NEW_TOKENS)
                added[i] = driver.add(prompts[i], max_tokens=length), length
        driver.core.step()
        counts.append(len(driver.core.scheduler.running))
    assert [s.output_ids for s, _ in added.values()] == [expected[i][:n] for i, (_, n) in added.items()]
    assert len(set(counts)) > 9
    turns = [b > a for a, b in itertools.pairwise(counts) if a != b]
    assert sum(a != b for a, b in itertools.pairwise(turns)) > 10  # up and down again


def test_float64_runs_without_graphs(tmp_path: Path, prompts: list[list[int]]) -> None:
    """Its attention is PyTorch's, which takes lengths from the host: a graph would keep the first step's."""
    folder = save_family("llama", tmp_path)
    some = prompts[:12]
    got, details = run_engine(folder, some, [{"max_tokens": 12}] * len(some), dtype="float64")
    assert got == generate(folder, some, 12)
    assert details["attention"] == "sdpa"
    assert "graphs" not in details
