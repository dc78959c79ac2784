# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Linear layers for few rows, where reading the weights is all the work.

Stream-K: the tiles of the weight matrix, in order, are cut into one equal run a program, so that every
multiprocessor reads the same number of bytes whatever the shape. A run that ends inside a row of tiles leaves a
partial sum, and the program that ends last adds the partial sums up, in a fixed order. The weights are the left
operand: the matrix units then need no padding of the few rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

MAX_ROWS = 64
_CHUNK = 4  # partial sums loaded at a time


@dataclass(frozen=True, slots=True)
class LinearConfig:
    """Launch constants: weight rows and columns a tile, programs, warps, stages of the load pipeline."""

    outputs: int
    inputs: int
    programs: int
    warps: int
    stages: int


class LinearWorkspace:
    """Partial sums of one launch at a time; launches that share one must follow each other on a stream."""

    def __init__(self, device: torch.device, *, max_programs: int = 528, tile: int = 128 * MAX_ROWS) -> None:
        self.max_programs = max_programs
        self.tile = tile
        self.sums = torch.empty(2 * max_programs * tile, dtype=torch.float32, device=device)
        # Programs that have ended, of each row of tiles; the last one sets it back to zero.
        self.counters = torch.zeros(65536, dtype=torch.int32, device=device)

    def bytes(self) -> int:
        """Device memory held."""
        return self.sums.nbytes + self.counters.nbytes


@triton.jit
def _prefetch(address, bytes_each: tl.constexpr):
    """Ask for ``bytes_each`` bytes at each address to be brought to the L2 cache."""
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], " + bytes_each + "; mov.u32 $0, 0;",
        "=r,l",
        [address],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


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
    programs: tl.constexpr,
    stages: tl.constexpr,
    chunk: tl.constexpr,
    has_bias: tl.constexpr,
    ahead: tl.constexpr,
    ahead_bytes: tl.constexpr,
    pdl: tl.constexpr,
):
    program = tl.program_id(0)
    depth = tl.cdiv(num_inputs, inputs)
    units = tl.cdiv(num_outputs, outputs) * depth
    start = program * units // programs
    stop = (program + 1) * units // programs
    each = tl.arange(0, outputs)
    if pdl:
        # Weights are nobody's output: fetch the first of them while the kernel before this one ends.
        for i in tl.static_range(ahead):
            unit = tl.minimum(start + i, stop - 1)
            source_row = tl.minimum(unit // depth * outputs + each, num_outputs - 1).to(tl.int64)
            _prefetch(weight + source_row * num_inputs + unit % depth * inputs, ahead_bytes)
        gdc_wait()
    at = start
    while at < stop:
        tile = at // depth
        base = tile * depth
        end = tl.minimum(stop, base + depth)
        acc = tl.zeros([outputs, rows_pad], tl.float32)
        for unit in tl.range(at, end, num_stages=stages):
            column = (unit - base) * inputs
            w = weight_tiles.load([tile * outputs, column])
            x = x_tiles.load([0, column])
            acc = tl.dot(w, tl.trans(x), acc)
        if pdl:  # noqa: SIM102 -- one is known when the kernel is compiled, the other when it runs
            if end == stop:
                gdc_launch_dependents()
        owner = True
        whole = (at == base) & (end == base + depth)
        place = each[:, None] * rows_pad + tl.arange(0, rows_pad)[None, :]
        if not whole:
            # The slot of a run's last tile row, if it began inside the run, is its second one.
            slot = program * 2 + (start < base).to(tl.int32)
            tl.store(sums + slot.to(tl.int64) * (outputs * rows_pad) + place, acc)
            first = _owner(base, units, programs)
            count = _owner(base + depth - 1, units, programs) - first + 1
            tl.debug_barrier()  # every thread's stores come before the one thread's release
            owner = tl.atomic_add(counters + tile, 1, sem="acq_rel") == count - 1
            if owner:
                acc = tl.zeros([outputs, rows_pad], tl.float32)
                for some in range(0, count, chunk):
                    for i in tl.static_range(chunk):
                        other = first + some + i
                        began = other * units // programs
                        source = other * 2 + (began < base).to(tl.int32)
                        acc += tl.load(
                            sums + source.to(tl.int64) * (outputs * rows_pad) + place,
                            mask=(place >= 0) & (some + i < count),
                            other=0.0,
                            cache_modifier=".cg",
                        )
                tl.store(counters + tile, 0)
        if owner:
            output = tile * outputs + each
            row = tl.arange(0, rows_pad)
            result = acc
            if has_bias:
                result += tl.load(bias + output, mask=output < num_outputs, other=0.0).to(tl.float32)[:, None]
            target = y + row[:, None].to(tl.int64) * y_stride + output[None, :]
            mask = (row < rows)[:, None] & (output < num_outputs)[None, :]
            tl.store(target, tl.trans(result).to(y.dtype.element_ty), mask=mask)
        at = end


@triton.jit
def _owner(unit, units, programs: tl.constexpr):
    """The program whose run holds ``unit``: the last one that starts at or before it."""
    return ((unit + 1) * programs - 1) // units


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
        x: [M, K], bfloat16 or float16, contiguous, M at most 64.
        weight: [N, K], contiguous, 16-byte aligned.
        bias: [N] or None.
        workspace: see ``LinearWorkspace``.
        config: see ``linear_config``.
        output: [M, N] with contiguous rows, or None: a new tensor.
        pdl: programmatic dependent launch; the first weights are then fetched before the wait.

    Raises:
        ValueError: shapes or strides do not fit, or the workspace is too small.
    """
    rows, num_inputs = x.shape
    num_outputs = weight.shape[0]
    if rows > MAX_ROWS or weight.shape[1] != num_inputs or num_inputs % 8:
        raise ValueError(f"cannot multiply x {tuple(x.shape)} by weight {tuple(weight.shape)} here")
    if not x.is_contiguous() or not weight.is_contiguous():
        raise ValueError("x and weight must be contiguous")
    rows_pad = max(16, triton.next_power_of_2(rows))
    tiles = triton.cdiv(num_outputs, config.outputs)
    programs = min(config.programs, tiles * triton.cdiv(num_inputs, config.inputs))
    if programs > workspace.max_programs or config.outputs * rows_pad > workspace.tile:
        raise ValueError(
            f"the workspace holds less than {programs} programs of {config.outputs} x {rows_pad} sums"
        )
    if tiles > len(workspace.counters):
        raise ValueError(f"the workspace counts {len(workspace.counters)} rows of tiles, not {tiles}")
    if output is None:
        output = torch.empty((rows, num_outputs), dtype=x.dtype, device=x.device)
    elif output.shape != (rows, num_outputs) or output.stride(1) != 1:
        raise ValueError(f"output {tuple(output.shape)} does not fit")
    if rows == 0:
        return output
    _skinny_linear_kernel[(programs,)](
        TensorDescriptor.from_tensor(x, [rows_pad, config.inputs]),
        TensorDescriptor.from_tensor(weight, [config.outputs, config.inputs]),
        weight,
        bias,
        output,
        workspace.sums,
        workspace.counters,
        rows,
        num_outputs,
        num_inputs,
        output.stride(0),
        rows_pad=rows_pad,
        outputs=config.outputs,
        inputs=config.inputs,
        programs=programs,
        stages=config.stages,
        chunk=_CHUNK,
        has_bias=bias is not None,
        ahead=config.stages if num_inputs % config.inputs == 0 else 0,
        ahead_bytes=str(config.inputs * x.element_size()),
        pdl=pdl,
        num_warps=config.warps,
        launch_pdl=pdl,
    )
    return output
