"""A CUDA error in mid-step. It spoils the process for good, so each case has one of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.gpu.gpu_models import save_family

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

_CRASH = """
import sys, threading
import torch
from backend.api import EngineDeadError, Prompt
from backend.engine import AsyncEngine
from tests.gpu.gpu_driver import make_config, submit
from tests.gpu.gpu_models import make_prompts

folder, kind, graphs = sys.argv[1:]

class Breaking:
    "Runs so many steps, then one that goes wrong on the device."
    def __init__(self, runner, steps):
        self._runner, self._left = runner, steps
    def execute(self, slot, previous):
        self._left -= 1
        if self._left == 0 and kind == "assertion":
            outside = torch.full((4,), 10**6, device="cuda")
            torch.zeros(8, device="cuda")[outside]
        if self._left == 0 and kind == "address":
            slot.inputs.block_table.fill_(2**29)
        self._runner.execute(slot, previous)

engine = AsyncEngine(make_config(folder, max_num_seqs=4, cuda_graphs=graphs == "graphs"))
engine.start()
engine._parts.core._runner = Breaking(engine._parts.core._runner, 20)
told = threading.Event()
engine.add_death_callback(lambda error: told.set())
handles = [submit(engine, Prompt(token_ids=tuple(p)), max_tokens=60) for p in make_prompts(40)]
answers = []
for handle in handles:
    try:
        handle.result(timeout=60)
        answers.append("result")
    except EngineDeadError as error:
        assert "CUDA" in str(error), error
        answers.append("dead")
assert told.wait(30)
engine._thread.join(30)
assert not engine._thread.is_alive()
try:
    submit(engine, Prompt(token_ids=(5,)), max_tokens=1)
except EngineDeadError as error:
    print("refused", flush=True)
stats = engine.stats()
assert (stats.running, stats.waiting) == (0, 0), stats
assert stats.requests_finished + stats.requests_failed == len(handles)
engine.shutdown(drain=True)
print(answers.count("dead"), answers.count("result"), flush=True)
"""


@pytest.mark.parametrize("graphs", ["graphs", "no graphs"])
@pytest.mark.parametrize("kind", ["assertion", "address"])
def test_a_cuda_error_ends_the_engine_and_answers_everyone(tmp_path: Path, kind: str, graphs: str) -> None:
    folder = save_family("llama", tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", _CRASH, str(folder), kind, graphs],
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == ["refused", "40", "0"], done.stdout
    assert "the engine has died" in done.stderr
