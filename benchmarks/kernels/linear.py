"""The linear layers of few rows: cuBLAS, and ours where they take as many."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import torch
from torch import Tensor

from backend.kernels.skinny_linear import LinearConfig, LinearWorkspace, linear_config, skinny_linear
from benchmarks.kernels.common import LINEARS, Bench, Report, random, relative_error, rotations, timed

LinearShape = tuple[int, int, int, int, int]  # the fields of a ``LinearConfig``
LINEAR_SWEEP: dict[str, list[LinearShape]] = {
    "qkv": [
        (64, 128, 2, 4, 4),
        (64, 128, 2, 4, 5),
        (64, 64, 4, 4, 5),
        (64, 64, 2, 4, 8),
        (64, 128, 3, 4, 3),
        (64, 128, 5, 4, 2),
        (128, 64, 4, 4, 4),
    ],
    "o": [
        (64, 128, 4, 4, 4),
        (64, 128, 4, 4, 3),
        (64, 64, 4, 4, 8),
        (64, 64, 8, 4, 4),
        (64, 128, 2, 4, 6),
        (64, 64, 6, 4, 5),
    ],
    "gate-up": [
        (64, 128, 1, 4, 2),
        (64, 64, 1, 4, 3),
        (64, 64, 1, 4, 4),
        (128, 64, 1, 4, 4),
        (128, 128, 1, 4, 2),
        (64, 128, 1, 8, 2),
    ],
    "down": [
        (64, 128, 4, 4, 4),
        (64, 128, 4, 8, 4),
        (64, 64, 4, 4, 8),
        (64, 64, 8, 4, 4),
        (64, 256, 4, 4, 2),
        (64, 64, 6, 4, 5),
    ],
    "head": [
        (64, 128, 1, 4, 2),
        (64, 64, 1, 4, 4),
        (64, 64, 1, 4, 3),
        (64, 128, 1, 4, 3),
        (128, 128, 1, 4, 2),
    ],
}


def bench_linear(bench: Bench) -> None:
    """All products at several rows; the best of ours at 32 rows are kept for the chain."""
    bench.report(
        "linear layers, µs: cuBLAS, then ours, plain and with dependent launch; * where ours is used"
    )
    for rows, name in itertools.product((1, 16, 64, 32), LINEARS):
        config = bench_one_linear(bench.report, name, rows, bench.sweep and rows >= 32)
        if rows == 32:
            bench.best_linears[name] = config


def bench_one_linear(report: Report, name: str, rows: int, sweep: bool) -> LinearConfig:
    product = Product(rows, name, make_weights(name))
    cublas = timed([functools.partial(torch.mm, product.x, w.T, out=product.y) for w in product.weights])
    ours = time_ours(report, product, sweep)
    best = sorted(ours, key=lambda key: ours[key])
    mark = "*" if product.used else " "
    line = f"  rows {rows:2} {name:8}{mark}cuBLAS {cublas:6.1f} ({product.rate(cublas):4.2f} TB/s)"
    for shape, pdl in best[:5]:
        micros = ours[shape, pdl]
        line += f" | {micros:.1f} ({product.rate(micros):4.2f}) {'-'.join(map(str, shape))}{' pdl' * pdl}"
    report(line)
    return LinearConfig(*best[0][0])


def make_weights(name: str) -> list[Tensor]:
    """Weights of a product, as many as no cache holds."""
    outputs, inputs = LINEARS[name]
    count = min(rotations(outputs * inputs * 2), 12)
    return [random(outputs, inputs) * 0.02 for _ in range(count)]


class Product:
    """``y = x Wᵀ`` of a model's weight matrices by turns, and the right result with the first of them."""

    def __init__(self, rows: int, name: str, weights: list[Tensor]) -> None:
        self.rows, self.name, self.weights = rows, name, weights
        self.outputs, self.inputs = weights[0].shape
        self.x, self.y = random(rows, self.inputs), random(rows, self.outputs)
        self.expected = self.x.float() @ weights[0].float().T
        # None where cuBLAS is as fast, and the engine takes it.
        self.used = linear_config(rows, self.outputs, self.inputs, self.x.device)

    def rate(self, micros: float) -> float:
        """TB/s at which the weights were read."""
        return self.outputs * self.inputs * 2 / 1e6 / micros


def time_ours(report: Report, product: Product, sweep: bool) -> dict[tuple[LinearShape, bool], float]:
    """Microseconds by launch constants and dependent launch; those that are wrong or do not fit are reported."""
    workspace = LinearWorkspace(torch.device("cuda"))
    x, y, chosen = product.x, product.y, product.used
    shapes = LINEAR_SWEEP[product.name] if sweep or chosen is None else []
    if not sweep:
        shapes = shapes[:1]
    if chosen is not None:
        shapes = [dataclasses.astuple(chosen), *shapes]
    times = {}
    for shape in dict.fromkeys(shapes):
        call = functools.partial(skinny_linear, x, workspace=workspace, config=LinearConfig(*shape), output=y)
        try:
            difference = relative_error(call(product.weights[0]), product.expected)
            if not difference < 1e-2:
                report(f"  WRONG {product.name} {shape}: relative error {difference}")
                continue
            for pdl in (False, True):
                times[shape, pdl] = timed([functools.partial(call, w, pdl=pdl) for w in product.weights])
        except Exception as error:  # a configuration that does not fit is an answer too
            report(f"  FAILED {product.name} {shape}: {type(error).__name__} {str(error)[:200]}")
    return times
