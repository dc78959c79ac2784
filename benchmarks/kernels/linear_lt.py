"""The linear layers beside cuBLASLt: PyTorch's way to it, and the best of what its heuristics propose.

PyTorch's tunable operators (``torch.cuda.tunable``) are left out: on CUDA they know only the default, on ROCm more.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.kernels.common import LINEARS, PEAK_BYTES, Bench, Report, relative_error, timed, wake
from benchmarks.kernels.cublas_lt import CublasLt, Found

if TYPE_CHECKING:  # it needs Triton, the comparison by itself does not
    from benchmarks.kernels.linear import Product

ROWS = (1, 8, 16, 32, 64, 128, 256)
ALGORITHMS = 16
COLUMNS = ("cuBLAS", "torch Lt", "Lt first", "Lt best", "ours")
TOLERANCE = 1e-2


def bench_linear_lt(bench: Bench) -> None:
    """All products at all rows, one after the other; a table of microseconds."""
    from backend.kernels.skinny_linear import MAX_ROWS
    from benchmarks.kernels.linear import Product, make_weights, time_ours

    report = bench.report
    report("linear layers beside cuBLASLt, µs; floor: the weights at 4.55 TB/s; * where ours is used")
    report(
        "torch Lt: torch.mm with preferred_blas_library('cublaslt'). Lt first: the first proposal of its heuristics"
    )
    report(
        f"with 32 MiB of workspace. Lt best: the best of up to {ALGORITHMS} proposals, timed once more. ours: the"
    )
    report(f"best of the plain and the dependent launch, up to {MAX_ROWS} rows")
    report("  rows product    floor" + "".join(f"{name:>9}" for name in COLUMNS) + "  the fastest, and what")
    wake()
    lt: CublasLt | None = None
    with report.guarded("cuBLASLt"):
        lt = CublasLt()
    for name in LINEARS:
        with report.guarded(name):
            weights = make_weights(name)
            for rows in ROWS:
                with report.guarded(f"{name}, {rows} rows"):
                    product = Product(rows, name, weights)
                    ours = functools.partial(time_ours, report, product, bench.sweep)
                    compare(report, product, lt, ours if rows <= MAX_ROWS else None)
            del weights


def compare(
    report: Report,
    product: Product,
    lt: CublasLt | None,
    time_ours: Callable[[], Mapping[tuple[Any, bool], float]] | None,
) -> None:
    """One line and one record; ``time_ours`` gives our kernels' times by launch constants and dependent launch."""
    x, y = product.x, product.y
    mm = [functools.partial(torch.mm, x, w.T, out=y) for w in product.weights]
    what = f"{product.name}, {product.rows} rows"
    times: dict[str, float] = {"cuBLAS": timed(mm)}
    details: dict[str, Any] = {}
    with report.guarded(f"torch Lt, {what}"):
        times["torch Lt"] = with_blas("cublaslt", lambda: timed(mm))
    if lt is not None:
        with report.guarded(f"Lt, {what}"):
            times |= time_lt(report, product, lt, details)
    if time_ours is not None:
        with report.guarded(f"ours, {what}"):
            if ours := time_ours():
                shape, pdl = min(ours, key=lambda key: ours[key])
                times["ours"] = ours[shape, pdl]
                details["ours"] = "-".join(map(str, shape)) + " pdl" * pdl
    report(row(product.rows, product.name, product.used is not None, times, details))
    report.record(
        "linear_lt",
        rows=product.rows,
        product=product.name,
        used=product.used is not None,
        micros=times,
        what=details,
    )


def row(rows: int, name: str, used: bool, times: dict[str, float], details: dict[str, Any]) -> str:
    """A line of the table; a dash where nothing was measured."""
    outputs, inputs = LINEARS[name]
    cells = "".join(f"{times[column]:9.1f}" if column in times else f"{'-':>9}" for column in COLUMNS)
    fastest = min(times, key=lambda column: times[column])
    what = f" ({details[fastest]})" if fastest in details else ""
    floor = outputs * inputs * 2 / PEAK_BYTES
    return f"  {rows:4} {name:8}{'*' if used else ' '}{floor:7.1f}{cells}  {fastest}{what}"


def with_blas(backend: str, call: Callable[[], float]) -> float:
    """Call with another library behind ``torch.mm``, and set back the one before."""
    before = torch.backends.cuda.preferred_blas_library()
    torch.backends.cuda.preferred_blas_library(backend)
    try:
        return call()
    finally:
        torch.backends.cuda.preferred_blas_library(before)


def time_lt(report: Report, product: Product, lt: CublasLt, details: dict[str, Any]) -> dict[str, float]:
    """Microseconds of the first and of the best proposal; proposals that are wrong or fail are reported."""
    shape = lt.product(product.rows, product.outputs, product.inputs)
    proposals = shape.algorithms(ALGORITHMS)
    times: dict[int, float] = {}

    def calls(found: Found) -> list[Callable[[], object]]:
        return [functools.partial(shape.run, product.x, w, product.y, found) for w in product.weights]

    for index, found in enumerate(proposals):
        what = f"Lt {index} ({found}), {product.name}, {product.rows} rows"
        with report.guarded(what):
            product.y.zero_()
            difference = relative_error(
                shape.run(product.x, product.weights[0], product.y, found), product.expected
            )
            if not difference < TOLERANCE:
                report(f"  WRONG {what}: relative error {difference}")
                continue
            times[index] = timed(calls(found))
    if not times:
        return {}
    best = min(times, key=lambda index: times[index])
    details["Lt best"] = f"{best + 1} of {len(proposals)}: {proposals[best]}"
    details["Lt all"] = times
    # The best of many is too good by chance: it counts as timed afresh.
    result = {"Lt best": timed(calls(proposals[best]))}
    return result | ({"Lt first": times[0]} if 0 in times else {})
