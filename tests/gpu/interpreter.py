"""Where kernels run: on the GPU, or in Triton's interpreter with ``TRITON_INTERPRET=1``."""

from __future__ import annotations

import os

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
KERNEL_MARKS = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not INTERPRETED and not torch.cuda.is_available(),
        reason="no CUDA device, and TRITON_INTERPRET is not 1",
    ),
]
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
# The interpreter truncates where it should round to bf16.
DTYPES = [F32, F16] if INTERPRETED else [F32, BF16, F16]
