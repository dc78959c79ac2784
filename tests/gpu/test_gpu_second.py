"""The engine on a device that is not the process's first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.gpu_driver import run_engine
from tests.gpu.gpu_models import generate, make_prompts, save_family

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.device_count() < 2, reason="needs two CUDA devices"
    ),
]


@pytest.mark.parametrize("options", [{}, {"fused": False, "cuda_graphs": False}], ids=["graphs", "modules"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_second_device_computes_what_the_first_does(
    tmp_path: Path, dtype: str, options: dict[str, Any]
) -> None:
    folder = save_family("llama", tmp_path)
    prompts = make_prompts(20)
    sampling = [{"max_tokens": 30}] * len(prompts)

    def tokens(device: str) -> list[list[int]]:
        return run_engine(folder, prompts, sampling, device=device, dtype=dtype, **options)[0]

    second = tokens("cuda:1")
    assert torch.cuda.current_device() == 0
    assert second == tokens("cuda:0")
    if dtype == "float32":
        assert second == generate(folder, prompts, 30)
