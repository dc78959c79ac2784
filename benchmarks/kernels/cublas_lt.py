"""cuBLASLt through ctypes: every algorithm that its heuristics propose for a product, where PyTorch takes the first.

The constants are those of ``cublasLt.h``, the same in CUDA 12 and 13. The library is the one that PyTorch has loaded.
"""

from __future__ import annotations

import ctypes
from ctypes import byref, c_float, c_int, c_int64, c_size_t, c_uint16, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

WORKSPACE_BYTES = 32 * 2**20  # what NVIDIA advises for Hopper, and what PyTorch gives cuBLAS there
_COMPUTE_32F, _REAL_32F, _REAL_16BF = 68, 0, 14
_OP_N, _OP_T = 0, 1
_DESC_TRANSA, _DESC_TRANSB = 3, 4
_PREF_MAX_WORKSPACE_BYTES = 1
# Facts of an algorithm that tell it from others: name, number and type in ``cublasLtMatmulAlgoConfigAttributes_t``.
_FACTS: tuple[tuple[str, int, type[ctypes._SimpleCData[int]]], ...] = (
    ("id", 0, c_int),
    ("tile", 1, c_uint32),
    ("split", 2, c_int),
    ("reduction", 3, c_uint32),
    ("swizzle", 4, c_uint32),
    ("custom", 5, c_uint32),
    ("stages", 6, c_uint32),
    ("inner", 7, c_uint16),
    ("cluster", 8, c_uint16),
)


class CublasLtError(RuntimeError):
    """A call that cuBLASLt refused; names the call and the status."""


class Algorithm(ctypes.Structure):
    """``cublasLtMatmulAlgo_t``."""

    _fields_ = (("data", c_uint64 * 8),)


class HeuristicResult(ctypes.Structure):
    """``cublasLtMatmulHeuristicResult_t``."""

    _fields_ = (
        ("algorithm", Algorithm),
        ("workspace_bytes", c_size_t),
        ("state", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    )


def loaded_library(maps: Path = Path("/proc/self/maps")) -> str:
    """Where this process has cuBLASLt from.

    Raises:
        OSError: it has none, as on a machine without CUDA.
    """
    for line in maps.read_text(encoding="utf-8").splitlines():
        path = line.split(maxsplit=5)[5:]
        if path and Path(path[0]).name.startswith("libcublasLt.so"):
            return path[0]
    raise OSError("this process has loaded no libcublasLt. Install a PyTorch with CUDA")


class CublasLt:
    """The library with a handle and a workspace on the current device.

    Args:
        library: for tests; the one that PyTorch has loaded, if unset.
        device: where the workspace lies.

    Raises:
        OSError, CublasLtError: it is missing, or makes no handle.
    """

    def __init__(self, library: Any = None, device: str = "cuda") -> None:
        self._library = ctypes.CDLL(loaded_library()) if library is None else library
        self.workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._handle = c_void_p()
        self.call("cublasLtCreate", byref(self._handle))

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function that returns a status.

        Raises:
            CublasLtError: the status is not success.
        """
        status = getattr(self._library, name)(*arguments)
        if status:
            raise CublasLtError(f"{name} returned status {status}")

    def product(self, rows: int, outputs: int, inputs: int) -> LtProduct:
        """``x [rows, inputs] @ weight [outputs, inputs]ᵀ`` in bfloat16, accumulated in float32."""
        operation = c_void_p()
        self.call("cublasLtMatmulDescCreate", byref(operation), c_int(_COMPUTE_32F), c_int(_REAL_32F))
        for attribute, value in ((_DESC_TRANSA, _OP_T), (_DESC_TRANSB, _OP_N)):
            setting = c_int(value)
            self.call(
                "cublasLtMatmulDescSetAttribute",
                operation,
                c_int(attribute),
                byref(setting),
                c_size_t(ctypes.sizeof(setting)),
            )
        # Its matrices are stored by columns, so that each of ours is there its own transpose: yᵀ = (Wᵀ)ᵀ xᵀ.
        weight = self._layout(inputs, outputs)
        x = self._layout(inputs, rows)
        y = self._layout(outputs, rows)
        return LtProduct(self, operation, weight, x, y)

    def matmul(self, product: LtProduct, x: Tensor, weight: Tensor, output: Tensor, found: Found) -> None:
        """Launch on the current stream; see ``LtProduct``."""
        one, zero = c_float(1.0), c_float(0.0)
        self.call(
            "cublasLtMatmul",
            self._handle,
            product.operation,
            byref(one),
            c_void_p(weight.data_ptr()),
            product.weight,
            c_void_p(x.data_ptr()),
            product.x,
            byref(zero),
            c_void_p(output.data_ptr()),
            product.y,
            c_void_p(output.data_ptr()),
            product.y,
            byref(found.algorithm),
            c_void_p(self.workspace.data_ptr()),
            c_size_t(WORKSPACE_BYTES),
            c_void_p(torch.cuda.current_stream().cuda_stream if x.is_cuda else 0),
        )

    def heuristics(self, product: LtProduct, limit: int) -> list[HeuristicResult]:
        """What the library proposes, the one that it holds for the fastest first; at most ``limit``."""
        preference = c_void_p()
        self.call("cublasLtMatmulPreferenceCreate", byref(preference))
        most = c_uint64(WORKSPACE_BYTES)
        self.call(
            "cublasLtMatmulPreferenceSetAttribute",
            preference,
            c_int(_PREF_MAX_WORKSPACE_BYTES),
            byref(most),
            c_size_t(ctypes.sizeof(most)),
        )
        results = (HeuristicResult * limit)()
        count = c_int()
        self.call(
            "cublasLtMatmulAlgoGetHeuristic",
            self._handle,
            product.operation,
            product.weight,
            product.x,
            product.y,
            product.y,
            preference,
            c_int(limit),
            results,
            byref(count),
        )
        self.call("cublasLtMatmulPreferenceDestroy", preference)
        return [result for result in results[: count.value] if result.state == 0]

    def describe(self, algorithm: Algorithm) -> dict[str, int]:
        """The facts that this algorithm states about itself, as numbers of ``cublasLt.h``."""
        facts = {}
        for name, attribute, kind in _FACTS:
            value, written = kind(), c_size_t()
            try:
                self.call(
                    "cublasLtMatmulAlgoConfigGetAttribute",
                    byref(algorithm),
                    c_int(attribute),
                    byref(value),
                    c_size_t(ctypes.sizeof(value)),
                    byref(written),
                )
            except CublasLtError:
                continue  # an algorithm need not know every one
            facts[name] = value.value
        return facts

    def _layout(self, rows: int, columns: int) -> c_void_p:
        """Of a matrix stored by columns without gaps."""
        layout = c_void_p()
        self.call(
            "cublasLtMatrixLayoutCreate",
            byref(layout),
            c_int(_REAL_16BF),
            c_uint64(rows),
            c_uint64(columns),
            c_int64(rows),
        )
        return layout


@dataclass(frozen=True, slots=True)
class Found:
    """An algorithm for one product."""

    algorithm: Algorithm
    facts: dict[str, int]

    def __str__(self) -> str:
        return " ".join(f"{name} {value}" for name, value in self.facts.items() if value)


@dataclass(frozen=True, slots=True)
class LtProduct:
    """One shape of product; its descriptors live as long as the process."""

    lt: CublasLt
    operation: c_void_p
    weight: c_void_p
    x: c_void_p
    y: c_void_p

    def algorithms(self, limit: int = 16) -> list[Found]:
        """The library's own choice first, then its alternatives."""
        found = [result.algorithm for result in self.lt.heuristics(self, limit)]
        return [Found(algorithm, self.lt.describe(algorithm)) for algorithm in found]

    def run(self, x: Tensor, weight: Tensor, output: Tensor, found: Found) -> Tensor:
        """``x weightᵀ`` into ``output``, all contiguous bfloat16 of this product's shape, on the current stream."""
        self.lt.matmul(self, x, weight, output, found)
        return output
