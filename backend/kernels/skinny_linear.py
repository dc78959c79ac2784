# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Linear layers for few rows, where reading the weights is all the work.

The depth of the product is shared out to several programs, tile by tile in turn, so that programs that run at the
same time read neighbouring bytes of the same weight rows. The program of a tile of outputs that ends last adds the
partial sums up in a fixed order; or they are left to the kernel that reads them anyway (``partial_linear``). The
weights are the left operand: the matrix units then need no padding of the few rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from backend.kernels.prefetch import prefetch

MAX_ROWS = 64


@dataclass(frozen=True, slots=True)
class LinearConfig:
    """Launch constants: weight rows and columns a tile, splits of the depth, warps, stages of the load pipeline."""

    outputs: int
    inputs: int
    splits: int
    warps: int
    stages: int


# Where these kernels beat cuBLAS on a Hopper GPU: (rows, padded to a power of two; outputs; inputs) of the product.
_FASTER = {
    (16, 4096, 4096): LinearConfig(64, 128, 4, 4, 4),
    (16, 4096, 14336): LinearConfig(64, 128, 4, 4, 4),
    (32, 4096, 4096): LinearConfig(64, 128, 2, 4, 6),
    (32, 4096, 14336): LinearConfig(64, 128, 4, 4, 4),
    (32, 28672, 4096): LinearConfig(64, 128, 1, 4, 2),
    (32, 128256, 4096): LinearConfig(64, 128, 1, 4, 2),
    (64, 28672, 4096): LinearConfig(64, 64, 1, 4, 3),
    (64, 128256, 4096): LinearConfig(128, 128, 1, 4, 2),
}


def linear_config(rows: int, outputs: int, inputs: int, device: torch.device) -> LinearConfig | None:
    """The launch constants for ``rows`` rows by a weight [outputs, inputs], or None: cuBLAS is as fast."""
    if torch.cuda.get_device_capability(device) != (9, 0):
        return None
    return _FASTER.get((_rows_pad(rows), outputs, inputs))


class LinearWorkspace:
    """Partial sums of one launch at a time; launches that share one must follow each other on a stream."""

    def __init__(self, device: torch.device, *, max_sums: int = 8 * MAX_ROWS * 8192) -> None:
        self.sums = torch.empty(max_sums, dtype=torch.float32, device=device)
        # Splits of each tile of outputs that have ended; the last one sets it back to zero.
        self.counters = torch.zeros(8192, dtype=torch.int32, device=device)

    def bytes(self) -> int:
        """Device memory held."""
        return self.sums.nbytes + self.counters.nbytes


@triton.jit
def _skinny_linear_kernel(
    x_tiles,
    weight_tiles,
    weight,
    bias,
    y,
    sums,
    counters,
    rows,
    num_outputs,
    num_inputs,
    y_stride,
    rows_pad: tl.constexpr,
    outputs: tl.constexpr,
    inputs: tl.constexpr,
    splits: tl.constexpr,
    stages: tl.constexpr,
    chunk: tl.constexpr,
    line: tl.constexpr,
    ahead: tl.constexpr,
    has_bias: tl.constexpr,
    partial: tl.constexpr,
    pdl: tl.constexpr,
):
    split = tl.program_id(0)  # runs fastest
    tile = tl.program_id(1)
    depth = tl.cdiv(num_inputs, inputs)
    output = tile * outputs + tl.arange(0, outputs)
    if pdl:
        # Weights are nobody's output: fetch the first of them while the kernel before this one ends.
        for i in tl.static_range(ahead):
            column = (split + i * splits) * inputs + tl.arange(0, inputs // line) * line
            source_row = tl.minimum(output, num_outputs - 1).to(tl.int64)
            prefetch(
                weight + source_row[:, None] * num_inputs + tl.minimum(column, num_inputs - line)[None, :]
            )
        gdc_wait()
    acc = tl.zeros([outputs, rows_pad], tl.float32)
    for unit in tl.range(split, depth, splits, num_stages=stages):
        w = weight_tiles.load([tile * outputs, unit * inputs])
        x = x_tiles.load([0, unit * inputs])
        acc = tl.dot(w, tl.trans(x), acc)
    if pdl:
        gdc_launch_dependents()
    row = tl.arange(0, rows_pad)
    mask = (row < rows)[:, None] & (output < num_outputs)[None, :]
    target = row[:, None].to(tl.int64) * y_stride + output[None, :]
    if partial:
        tl.store(y + split * rows * y_stride + target, tl.trans(acc), mask=mask)
    elif splits == 1:
        _store(y, target, mask, bias, output, num_outputs, acc, has_bias)
    else:
        place = tl.arange(0, outputs)[:, None] * rows_pad + row[None, :]
        first = (tile * splits).to(tl.int64) * (outputs * rows_pad)
        tl.store(sums + first + split * (outputs * rows_pad) + place, acc)
        tl.debug_barrier()  # every thread's stores come before the one thread's release
        if tl.atomic_add(counters + tile, 1, sem="acq_rel") == splits - 1:
            total = tl.zeros([outputs, rows_pad], tl.float32)
            for at in range(0, splits, chunk):
                for i in tl.static_range(chunk):
                    part = (at + i) * (outputs * rows_pad)
                    exists = (place >= 0) & (at + i < splits)
                    total += tl.load(
                        sums + first + part + place, mask=exists, other=0.0, cache_modifier=".cg"
                    )
            tl.store(counters + tile, 0)
            _store(y, target, mask, bias, output, num_outputs, total, has_bias)


@triton.jit
def _store(y, target, mask, bias, output, num_outputs, result, has_bias: tl.constexpr):
    if has_bias:
        result += tl.load(bias + output, mask=output < num_outputs, other=0.0).to(tl.float32)[:, None]
    tl.store(y + target, tl.trans(result).to(y.dtype.element_ty), mask=mask)


def skinny_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    workspace: LinearWorkspace,
    config: LinearConfig,
    output: Tensor | None = None,
    pdl: bool = False,
) -> Tensor:
    """``x @ weight.T + bias`` for few rows, accumulated in float32.

    Args:
        x: [M, K], bfloat16 or float16, contiguous, M at most 64, K a multiple of 8.
        weight: [N, K], contiguous, 16-byte aligned.
        bias: [N] or None.
        workspace: see ``LinearWorkspace``.
        config: see ``linear_config``.
        output: [M, N] with contiguous rows, or None: a new tensor.
        pdl: programmatic dependent launch; the first weights are then fetched before the wait.

    Raises:
        ValueError: shapes or strides do not fit, or the workspace is too small.
    """
    rows, num_outputs = x.shape[0], weight.shape[0]
    if output is None:
        output = torch.empty((rows, num_outputs), dtype=x.dtype, device=x.device)
    elif output.shape != (rows, num_outputs) or output.stride(1) != 1:
        raise ValueError(f"output {tuple(output.shape)} does not fit {rows} rows of {num_outputs}")
    tiles = triton.cdiv(num_outputs, config.outputs)
    needed = tiles * config.splits * config.outputs * _rows_pad(rows) if config.splits > 1 else 0
    if needed > workspace.sums.numel() or (needed and tiles > len(workspace.counters)):
        raise ValueError(f"the workspace holds less than {needed} sums of {tiles} tiles")
    _launch(x, weight, bias, output, output.stride(0), workspace, config, partial=False, pdl=pdl)
    return output


def partial_linear(x: Tensor, weight: Tensor, *, config: LinearConfig, pdl: bool = False) -> Tensor:
    """``x @ weight.T`` as f32[splits, M, N] that sum to it; ``add_rms_norm`` adds them up. See ``skinny_linear``."""
    output = torch.empty((config.splits, x.shape[0], weight.shape[0]), dtype=torch.float32, device=x.device)
    _launch(x, weight, None, output, weight.shape[0], None, config, partial=True, pdl=pdl)
    return output


def _rows_pad(rows: int) -> int:
    return max(16, int(triton.next_power_of_2(rows)))


def _launch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    output: Tensor,
    output_stride: int,
    workspace: LinearWorkspace | None,
    config: LinearConfig,
    *,
    partial: bool,
    pdl: bool,
) -> None:
    rows, num_inputs = x.shape
    num_outputs = weight.shape[0]
    if rows > MAX_ROWS or weight.shape[1] != num_inputs or num_inputs % 8 or x.element_size() != 2:
        raise ValueError(f"cannot multiply x {tuple(x.shape)} by weight {tuple(weight.shape)} here")
    if not x.is_contiguous() or not weight.is_contiguous():
        raise ValueError("x and weight must be contiguous")
    if rows == 0:
        return
    rows_pad = _rows_pad(rows)
    line = min(64, config.inputs)  # elements in a cache line
    _skinny_linear_kernel[(config.splits, triton.cdiv(num_outputs, config.outputs))](
        TensorDescriptor.from_tensor(x, [rows_pad, config.inputs]),
        TensorDescriptor.from_tensor(weight, [config.outputs, config.inputs]),
        weight,
        bias,
        output,
        None if workspace is None else workspace.sums,
        None if workspace is None else workspace.counters,
        rows,
        num_outputs,
        num_inputs,
        output_stride,
        rows_pad=rows_pad,
        outputs=config.outputs,
        inputs=config.inputs,
        splits=config.splits,
        stages=config.stages,
        chunk=max(1, min(config.splits, 8192 // (config.outputs * rows_pad))),
        line=line,
        ahead=config.stages if num_inputs >= config.inputs else 0,
        has_bias=bias is not None,
        partial=partial,
        pdl=pdl,
        num_warps=config.warps,
        launch_pdl=pdl,
    )
