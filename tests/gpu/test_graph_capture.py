"""No garbage is collected while a graph is captured: a dead graph that were met there would invalidate the capture."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from backend.graphs import GraphRunner
from tests.gpu.gpu_driver import CoreDriver
from tests.gpu.gpu_models import save_family

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture
def collections() -> Iterator[list[bool]]:
    """Of each collection from now on, many as they are: whether this thread's stream was being captured."""
    found: list[bool] = []

    def note(phase: str, _info: dict[str, Any]) -> None:
        if phase == "start":
            found.append(torch.cuda.is_current_stream_capturing())

    before = gc.get_threshold()
    gc.callbacks.append(note)
    gc.set_threshold(50)
    yield found
    gc.set_threshold(*before)
    gc.callbacks.remove(note)


def test_nothing_is_collected_during_a_capture(tmp_path: Path, collections: list[bool]) -> None:
    driver = CoreDriver(save_family("llama", tmp_path), dtype="bfloat16")
    assert isinstance(driver.parts.runner, GraphRunner)
    assert driver.parts.runner.num_graphs > 0
    assert len(collections) > driver.parts.runner.num_graphs
    assert not any(collections)


def capture_while_a_dead_graph_is_collected() -> None:
    stream = torch.cuda.Stream()
    x = torch.zeros(100, device="cuda")
    dead = torch.cuda.CUDAGraph()
    with torch.cuda.graph(dead, stream=stream):
        x.add(1)
    dying: list[object] = [dead]
    dying.append(dying)  # nothing but the collector frees it
    del dead
    with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream, capture_error_mode="thread_local"):
        x.add(1)
        del dying
        gc.collect()


def test_a_dead_graph_invalidates_a_capture() -> None:
    """Why that matters; should this fail one day, the guard may go.

    In a process of its own: PyTorch's generator stays as it was in the capture that broke off.
    """
    code = f"import runpy; runpy.run_path({__file__!r})['capture_while_a_dead_graph_is_collected']()"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert "during capture" in ended.stderr
