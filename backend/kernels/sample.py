"""Sampling in four kernels, without a sort: the very tokens that ``backend.sampling`` draws.

1. ``sample_scan`` reads the logits once. It applies biases, penalties and bans, and of each tile of the vocabulary it
   keeps the largest score and, for random rows, the largest perturbed one, in float32.
2. ``sample_filter`` finds the value and the token id that bound what rows with top-k or top-p keep.
3. ``rescan_kernel`` looks for the perturbed scores of what rows with any filter keep.
4. ``choose_kernel`` looks again at the few tiles that can hold the winner, in float64 and in the same correctly
   rounded steps as ``backend.philox``. It counts the token for later penalties, and reports log-probabilities.

Everything that differs between rows is read on the device, and each program leaves at once where its row does not
ask for what it does. So one captured launch serves every mix of rows.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from backend.kernels import token_counts
from backend.kernels.sample_choose import choose_kernel, rescan_kernel
from backend.kernels.sample_filter import filter_kernel
from backend.kernels.sample_scan import scan_kernel
from backend.row_params import NUM_PARAMS

_TILE = 4096
_SCAN_REGISTERS = 64  # a thread: most rows need few, and more programs at a time hide the memory's latency
_RESCAN_REGISTERS = 128
_RESCANS = 8  # programs a row
_ROOM = 4096  # tokens among which a filter's bound is searched one by one


class SampleWorkspace:
    """What the kernels hand to each other, and the token counts, which last from step to step.

    Launches that share a workspace must follow each other on a stream.
    """

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        def floats(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=torch.float32, device=device)

        def ints(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=torch.int32, device=device)

        self.max_rows = max_rows
        self.vocab_size = vocab_size
        tiles = triton.cdiv(vocab_size, _TILE)
        self.peaks, self.noisy = floats(max_rows, tiles), floats(max_rows, tiles)
        self.raw_peaks, self.raw_sums = floats(max_rows, tiles), floats(max_rows, tiles)
        self.ids = ints(max_rows, tiles)
        self.bounds, self.bound_ids = floats(max_rows), ints(max_rows)
        self.spare_values, self.spare_ids = floats(max_rows, _ROOM), ints(max_rows, _ROOM)
        self.scores = floats(max_rows, vocab_size)  # of rows with biases, penalties or bans
        self.counts = ints(max_rows, vocab_size)  # see backend.kernels.token_counts

    @staticmethod
    def num_bytes(max_rows: int, vocab_size: int) -> int:
        """Device memory that a workspace takes."""
        a_row = 5 * -(-vocab_size // _TILE) + 2 + 2 * _ROOM + vocab_size
        return 4 * max_rows * a_row + token_counts.num_bytes(max_rows, vocab_size)


def sample(
    logits: Tensor,
    seeds: Tensor,
    params: Tensor,
    lists: Tensor,
    *,
    workspace: SampleWorkspace,
    output: Tensor,
    records: Tensor,
    alternatives: int,
    pdl: bool = False,
) -> None:
    """One token a row: the most likely where the temperature is 0, else drawn from what the row's filters keep.

    Ties go to the lowest token id. A row whose scores are unusable (NaN, or no finite maximum) yields -1.

    Args:
        logits: [S, V], rows contiguous; float32, bfloat16 or float16. Not modified.
        seeds: i64[S].
        params: i32[NUM_PARAMS, S], contiguous; see ``backend.row_params``. The penalty rows among them are rows of
            ``workspace.counts``, each used by one row of the step.
        lists: i32, contiguous: pairs of a token id and the bits of a float32, which ``params`` refers to.
        workspace: for at least S rows of V tokens.
        output: i32[S].
        records: i32, contiguous, ``1 + 2 * alternatives`` words a row. A row that asks for log-probabilities leaves
            here the bits of its token's, then ids of the most likely tokens, then the bits of theirs.
        alternatives: the most that a row may ask for.
        pdl: programmatic dependent launch.

    Raises:
        ValueError: shapes do not fit, or the workspace is too small.
    """
    rows, vocab_size = logits.shape
    if (
        logits.stride(1) != 1
        or params.shape != (NUM_PARAMS, rows)
        or len(seeds) != rows
        or len(output) != rows
    ):
        raise ValueError(f"logits {tuple(logits.shape)} do not fit parameters {tuple(params.shape)}")
    if not params.is_contiguous() or records.numel() < rows * (1 + 2 * alternatives):
        raise ValueError("parameters must be contiguous, and records must hold every row")
    if rows > workspace.max_rows or vocab_size != workspace.vocab_size:
        raise ValueError(
            f"the workspace is for {workspace.max_rows} rows of {workspace.vocab_size} tokens, not "
            f"{rows} of {vocab_size}"
        )
    if rows == 0:
        return
    w = workspace
    tiles = triton.cdiv(vocab_size, _TILE)
    sizes = (logits.stride(0), vocab_size, tiles, rows)
    launch = {"pdl": pdl, "launch_pdl": pdl}
    # A fused multiply-add rounds once where the reference rounds twice.
    exact = launch | {"tile": _TILE, "enable_fp_fusion": False}
    tiles_pad = max(32, triton.next_power_of_2(tiles))
    scan_kernel[(tiles, rows)](
        logits,
        seeds,
        params,
        lists,
        w.counts,
        w.scores,
        w.peaks,
        w.ids,
        w.noisy,
        w.raw_peaks,
        w.raw_sums,
        *sizes,
        num_warps=8,
        maxnreg=_SCAN_REGISTERS,
        **exact,
    )
    filter_kernel[(rows,)](
        logits,
        w.scores,
        params,
        w.peaks,
        w.bounds,
        w.bound_ids,
        w.spare_values,
        w.spare_ids,
        *sizes,
        tiles_pad=tiles_pad,
        tile=_TILE,
        room=_ROOM,
        # The low bits that are zero in every logit of a narrow type need no search.
        narrow_bits={torch.bfloat16: 16, torch.float16: 13}.get(logits.dtype, 0),
        num_warps=16,
        **launch,
    )
    rescan_kernel[(min(tiles, _RESCANS), rows)](
        logits,
        w.scores,
        seeds,
        params,
        w.peaks,
        w.noisy,
        w.bounds,
        w.bound_ids,
        *sizes,
        tiles_pad=tiles_pad,
        num_warps=8,
        maxnreg=_RESCAN_REGISTERS,
        **exact,
    )
    choose_kernel[(rows,)](
        logits,
        w.scores,
        seeds,
        params,
        w.counts,
        w.peaks,
        w.ids,
        w.noisy,
        w.bounds,
        w.bound_ids,
        w.raw_peaks,
        w.raw_sums,
        output,
        records,
        *sizes,
        alternatives=alternatives,
        tiles_pad=tiles_pad,
        num_warps=16,
        **exact,
    )
