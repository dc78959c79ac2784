"""A step that never ends on the GPU: the worker is held for dead, and the device is free for the next one."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from models_db.tables import AttemptOutcome, JobState
from tests.fleet.fleet import Fleet, RedisServer
from tests.gpu.gpu_backends import POISON
from tests.gpu.gpu_driver import make_config
from tests.gpu.gpu_models import save_family

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(shutil.which("redis-server") is None, reason="needs redis-server"),
]

ALONE = True  # a hung kernel's time slices would be taken from the other processes' steps
PATIENCE_S = 120.0
"""For a worker to start: PyTorch, the model and its graphs."""


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    model = save_family("llama", tmp_path / "model")
    config = make_config(model, max_num_seqs=4, debug_delay="compute:5000")
    server = RedisServer(tmp_path)
    made = Fleet(
        server,
        f"sqlite:///{tmp_path / 'fleet.db'}",
        engine=config.model_dump(mode="json", exclude_unset=True),
        engine_stall_s=3,
        heartbeat_interval_s=0.3,
        dead_after_s=3.0,
    )
    yield made
    made.close()
    server.stop()


def start(fleet: Fleet, backend: str) -> Any:
    return fleet.worker(wait=False, backend=backend).wait_for(" ready.", PATIENCE_S)


def test_a_kernel_that_never_ends_ends_its_worker_and_frees_the_gpu(
    fleet: Fleet, record_property: Callable[[str, object], None]
) -> None:
    worker = start(fleet, "tests.gpu.gpu_backends:hangs_of_poison")
    fleet.submit("neighbour", token_ids=[5] * 20, prompt=None, max_tokens=400, ignore_eos=True)
    fleet.wait_state("neighbour", JobState.RUNNING)
    fleet.submit("deadly", token_ids=[POISON] * 20, prompt=None, max_tokens=20, ignore_eos=True)
    hung_at = time.monotonic()
    assert worker.wait(PATIENCE_S) == 70
    record_property("seconds from the hang to the worker's end", f"{time.monotonic() - hung_at:.1f}")
    assert "EngineStalledError" in worker.log
    jobs = ("neighbour", "deadly")
    assert [fleet.state(job) for job in jobs] == [JobState.QUEUED] * 2
    assert [fleet.attempts(job) for job in jobs] == [[AttemptOutcome.LOST]] * 2
    start(fleet, "async")
    for job in jobs:
        fleet.wait_state(job, JobState.SUCCEEDED, PATIENCE_S)
