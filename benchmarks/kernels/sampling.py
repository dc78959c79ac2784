"""Sampling: all four kernels, by what the rows ask for."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import torch

from backend.kernels.sample import SampleWorkspace, sample
from backend.row_params import RowParam, padding_column
from benchmarks.kernels.common import VOCAB, Bench, timed

ALTERNATIVES = 20
# What every row asks for.
ASKED: dict[str, dict[RowParam, float]] = {
    "greedy": {},
    "temperature": {RowParam.TEMPERATURE: 1.0},
    "top-p": {RowParam.TEMPERATURE: 1.0, RowParam.TOP_P: 0.9},
    "top-p 0.99": {RowParam.TEMPERATURE: 1.0, RowParam.TOP_P: 0.99},
    "top-k": {RowParam.TEMPERATURE: 1.0, RowParam.TOP_K: 50},
    "top-k, top-p": {RowParam.TEMPERATURE: 1.0, RowParam.TOP_K: 50, RowParam.TOP_P: 0.9},
    "min-p": {RowParam.TEMPERATURE: 1.0, RowParam.MIN_P: 0.05},
    "penalties": {RowParam.REPETITION_PENALTY: 1.1, RowParam.PENALTY_ROW: 0},
    "300 biases": {RowParam.LIST_END: 300, RowParam.BAN_START: 300},
    "logprobs 0": {RowParam.LOGPROBS: 0},
    "logprobs 5": {RowParam.LOGPROBS: 5},
    "logprobs 20": {RowParam.LOGPROBS: 20},
}
FLOATS = (RowParam.TEMPERATURE, RowParam.TOP_P, RowParam.MIN_P, RowParam.REPETITION_PENALTY)


def sampling_kernels(
    rows: int, vocab: int, *, scale: float = 1.0
) -> dict[str, Callable[[int, bool], object]]:
    """Launches by name, of a turn and whether with dependent launch; logits are normal numbers times ``scale``."""
    device = torch.device("cuda")
    logits = [(torch.randn(rows, vocab, device=device) * scale).bfloat16() for _ in range(4)]
    workspace = SampleWorkspace(rows, vocab, device)
    workspace.counts.copy_((torch.rand(rows, vocab, device=device) < 0.01).int())
    seeds = torch.arange(rows, device=device)
    lists = torch.stack((torch.arange(300, dtype=torch.int32, device=device) * 400,) * 2, dim=1).flatten()
    output = torch.empty(rows, dtype=torch.int32, device=device)
    records = torch.empty(rows, 1 + 2 * ALTERNATIVES, dtype=torch.int32, device=device)

    def launch(params: torch.Tensor, turn: int, pdl: bool) -> None:
        sample(
            logits[turn % 4],
            seeds,
            params,
            lists,
            workspace=workspace,
            output=output,
            records=records,
            alternatives=ALTERNATIVES,
            pdl=pdl,
        )

    def params(asked: dict[RowParam, float]) -> torch.Tensor:
        matrix = np.repeat(padding_column()[:, None], rows, axis=1)
        for name, value in asked.items():
            if name in FLOATS:
                matrix.view(np.float32)[name] = value
            else:
                matrix[name] = int(value)
        if RowParam.PENALTY_ROW in asked:
            matrix[RowParam.PENALTY_ROW] = np.arange(rows)
        return torch.from_numpy(matrix).to(device)

    return {name: functools.partial(launch, params(asked)) for name, asked in ASKED.items()} | {
        "torch.argmax": lambda turn, pdl: logits[turn % 4].argmax(dim=1)
    }


def bench_sampling(bench: Bench) -> None:
    """Few rows and many, over two kinds of logits."""
    report = bench.report
    report("sampling, µs: plain, with dependent launch; logits are normal numbers, or three times these")
    for rows in (32, 256):
        for scale in (1.0, 3.0):
            for name, kernel in sampling_kernels(rows, VOCAB, scale=scale).items():
                plain, dependent = (
                    timed([functools.partial(kernel, turn, pdl) for turn in range(8)])
                    for pdl in (False, True)
                )
                report(f"  rows {rows:3} x{scale:.0f} {name:12} {plain:6.1f} {dependent:6.1f}")
