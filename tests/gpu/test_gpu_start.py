"""What an engine says when it starts on a GPU, and what a start leaves for the next one."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from backend.graphs import GraphRunner
from backend.kv_cache import MIB
from tests.gpu.gpu_driver import CoreDriver
from tests.gpu.gpu_models import DEVICE, save_family

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

Record = Callable[[str, object], None]


# ---------------------------------------------------------------------------------------------------- what is said


def said_at_start(caplog: pytest.LogCaptureFixture, driver: CoreDriver) -> str:
    """The line of the log that sums the start up, without the bytes that were free by then."""
    (line,) = [r.getMessage() for r in caplog.records if r.getMessage().startswith(driver.parts.loaded.name)]
    found = re.fullmatch(r"(.+); \d+ MiB kept for steps, graphs and sampling; \d+ MiB free", line)
    assert found, line
    return found[1]


def test_fused_layers_our_kernels_and_graphs_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = save_family("llama", tmp_path)
    with caplog.at_level(logging.INFO, "backend.assembly"):
        driver = CoreDriver(folder, dtype="bfloat16", prefill_attention="triton")
    runner = driver.parts.runner
    assert isinstance(runner, GraphRunner)
    taken = (runner.pool_bytes + runner.shared_bytes) / MIB
    # Decode steps of 1, 2, 4, 8 and 12 rows, mixed ones of 32, 48 and 64 tokens, for either slot. Three layers, two
    # heads of 32 numbers, keys and values, 2 bytes each, 240 blocks of 16 tokens: 2.8 MiB.
    assert said_at_start(caplog, driver) == (
        f"{folder} on {DEVICE}: attention triton, that of long prompts triton; layers fused; "
        f"16 CUDA graphs in {taken:.0f} MiB; KV cache 240 blocks of 16 tokens in 3 MiB"
    )


@pytest.mark.parametrize(
    ("options", "attention", "layers"),
    [
        ({"dtype": "float64"}, "sdpa", "modules"),
        ({"dtype": "bfloat16", "fused": False, "prefill_attention": "triton"}, "triton", "modules"),
        ({"dtype": "bfloat16", "prefill_attention": "triton"}, "triton", "fused"),
    ],
    ids=["float64", "unfused", "fused"],
)
def test_what_runs_without_graphs_is_told(
    options: dict[str, object],
    attention: str,
    layers: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder = save_family("llama", tmp_path)
    with caplog.at_level(logging.INFO, "backend.assembly"):
        driver = CoreDriver(folder, cuda_graphs=False, **options)
    assert said_at_start(caplog, driver).startswith(
        f"{folder} on {DEVICE}: attention {attention}, that of long prompts {attention}; layers {layers}; "
        "no CUDA graphs; KV cache 240 blocks of 16 tokens in "
    )


# --------------------------------------------------------------------------------------------------- what is built

_START = """
import sys
from tests.gpu.gpu_driver import run_engine
from tests.gpu.gpu_models import make_prompts

kinds = [{}, {"temperature": 0.8, "top_p": 0.9, "seed": 1}, {"frequency_penalty": 0.4, "logprobs": 2}]
tokens, details = run_engine(
    sys.argv[1],
    make_prompts(6),
    [{"max_tokens": 6, **kinds[i % 3]} for i in range(6)],
    dtype="bfloat16",
    max_num_seqs=4,
    prefill_attention="triton",
)
assert all(len(got) == 6 for got in tokens)
assert "graphs" in details
assert details["layers"] == "fused"
"""


def built(cache: Path) -> dict[str, int]:
    """The files in Triton's cache, and when each was written."""
    return {
        str(path.relative_to(cache)): path.stat().st_mtime_ns for path in cache.rglob("*") if path.is_file()
    }


def test_a_second_process_builds_no_kernel(tmp_path: Path, record_property: Record) -> None:
    folder, cache = save_family("llama", tmp_path / "model"), tmp_path / "cache"
    cache.mkdir()
    after = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", _START, str(folder)],
            env={**os.environ, "TRITON_CACHE_DIR": str(cache)},
            capture_output=True,
            text=True,
            timeout=250,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        after.append(built(cache))
    first, second = after
    kernels = sum(name.endswith(".cubin") for name in first)
    record_property("kernels built by the first process", kernels)
    assert kernels > 5
    assert second == first
