# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Sampling in two small kernels, or four with filters, without a sort: the very tokens ``backend.sampling`` draws.

The first kernel reads the logits once. Of each tile of the vocabulary it keeps the largest logit and, for random
rows, the largest perturbed one, in float32. The last looks again only at the few tiles that can hold the winner,
in float64 and in the same correctly rounded steps as ``backend.philox``. Between the two, rows with top-k or top-p
find the value and the token id that bound what they keep (``backend.kernels.sample_filter``), and rows with any
filter look for the perturbed logits of what is kept; other rows leave at once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from backend.kernels.sample_filter import filter_kernel

_TILE = 4096


class SampleWorkspace:
    """What the first kernel hands to the second; launches that share one must follow each other on a stream."""

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        self.max_rows = max_rows
        self.vocab_size = vocab_size
        shape = (max_rows, triton.cdiv(vocab_size, _TILE))
        self.peaks = torch.empty(shape, dtype=torch.float32, device=device)
        self.ids = torch.empty(shape, dtype=torch.int32, device=device)
        self.noisy = torch.empty(shape, dtype=torch.float32, device=device)
        self.bounds = torch.empty(max_rows, dtype=torch.float32, device=device)
        self.bound_ids = torch.empty(max_rows, dtype=torch.int32, device=device)

    def bytes(self) -> int:
        """Device memory held."""
        kept = (self.peaks, self.ids, self.noisy, self.bounds, self.bound_ids)
        return sum(tensor.nbytes for tensor in kept)


@triton.jit
def _token_words(seed, output_index, first_block, tile: tl.constexpr):
    """One 32-bit word for each of ``tile`` token ids, from blocks of four ids on from ``first_block``."""
    block = first_block + tl.arange(0, tile // 4)
    zero = tl.zeros_like(block)
    w0, w1, w2, w3 = tl.philox(seed, block, zero + output_index, zero, zero)
    return tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), [tile])


@triton.jit
def _log(x):
    """``backend.philox.log``, step by step, on float64."""
    bits = x.to(tl.int64, bitcast=True)
    exponent = ((bits >> 52) & 0x7FF) - 1022
    mantissa = ((bits & 0xFFFFFFFFFFFFF) | 0x3FE0000000000000).to(tl.float64, bitcast=True)
    small = mantissa < 0.70710678118654757
    mantissa = tl.where(small, mantissa * 2, mantissa)
    power = tl.where(small, exponent - 1, exponent).to(tl.float64)
    ratio = (mantissa - 1) / (mantissa + 1)
    square = ratio * ratio
    series = tl.full(square.shape, 1 / 23, tl.float64)
    for i in tl.static_range(11):
        series = series * square + 1 / (21 - 2 * i)
    return (power * 1.90821492927058770002e-10 + 2 * ratio * series) + power * 6.93147180369123816490e-01


@triton.jit
def _exp(x):
    """``backend.philox.exp``, step by step, on float64."""
    x = tl.maximum(x, -700.0)
    scaled = x * (1 / 0.693147180559945309417)
    # Adding and subtracting 1.5 * 2**52 rounds to the nearest integer, ties to even.
    power = (scaled + 6755399441055744.0) - 6755399441055744.0
    rest = (x - power * 6.93147180369123816490e-01) - power * 1.90821492927058770002e-10
    series = tl.full(rest.shape, 1 / 87178291200, tl.float64)  # 14!
    inverse: tl.constexpr = (
        1 / 6227020800,
        1 / 479001600,
        1 / 39916800,
        1 / 3628800,
        1 / 362880,
        1 / 40320,
        1 / 5040,
        1 / 720,
        1 / 120,
        1 / 24,
        1 / 6,
        1 / 2,
        1.0,
        1.0,
    )
    for i in tl.static_range(14):
        series = series * rest + inverse[i]
    return series * ((power.to(tl.int64) + 1023) << 52).to(tl.float64, bitcast=True)


@triton.jit
def _exponential(word):
    """-log(1 - u) in float32, from whichever of u and 1 - u is small, so that no accuracy is lost."""
    u = (word.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    rest = ((word ^ 0xFFFFFFFF).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    return tl.where(u < 0.00390625, u * (1.0 + u * (0.5 + u * 0.33333333)), -tl.log(rest))


@triton.jit
def _scan_kernel(
    logits,
    temperatures,
    seeds,
    output_indices,
    peaks,
    ids,
    noisy,
    logits_stride,
    vocab_size,
    tiles,
    tile: tl.constexpr,
    pdl: tl.constexpr,
):
    part = tl.program_id(0)
    row = tl.program_id(1)
    if pdl:
        gdc_launch_dependents()
        gdc_wait()
    token = part * tile + tl.arange(0, tile)
    inside = token < vocab_size
    score = tl.load(logits + row.to(tl.int64) * logits_stride + token, mask=inside, other=float("-inf"))
    score = score.to(tl.float32)
    peak = tl.max(score, axis=0)
    best = tl.min(tl.where(inside & (score == peak), token, 2147483647), axis=0)
    broken = tl.max((score != score).to(tl.int32), axis=0) > 0
    place = row * tiles + part
    tl.store(peaks + place, tl.where(broken, float("nan"), peak))
    tl.store(ids + place, best)
    temperature = tl.load(temperatures + row)
    if temperature > 0:
        word = _token_words(tl.load(seeds + row), tl.load(output_indices + row), part * (tile // 4), tile)
        noise = _exponential(word)
        perturbed = tl.where(inside, score / temperature - tl.log(noise), float("-inf"))
        tl.store(noisy + place, tl.max(perturbed, axis=0))


@triton.jit
def _kept(score, candidate, peak, temperature, bound, bound_id, min_p):
    """Which tokens of a tile a row's filters keep; ``peak`` and ``temperature`` in float64."""
    wide = score.to(tl.float32)
    inside = (wide > bound) | ((wide == bound) & (candidate <= bound_id))
    return inside & (_exp((score.to(tl.float64) - peak) / temperature) >= min_p.to(tl.float64))


@triton.jit
def _rescan_kernel(
    logits,
    temperatures,
    seeds,
    output_indices,
    peaks,
    ids,
    noisy,
    bounds,
    bound_ids,
    min_ps,
    logits_stride,
    vocab_size,
    tiles,
    tiles_pad: tl.constexpr,
    tile: tl.constexpr,
    pdl: tl.constexpr,
):
    """For rows with filters: the largest perturbed logit of each tile once more, among the tokens that are kept."""
    part = tl.program_id(0)
    row = tl.program_id(1)
    if pdl:
        gdc_launch_dependents()
        gdc_wait()
    bound = tl.load(bounds + row)
    min_p = tl.load(min_ps + row)
    temperature = tl.load(temperatures + row)
    if (temperature > 0) & ((bound > float("-inf")) | (min_p > 0)):
        every = tl.arange(0, tiles_pad)
        peak_of = tl.load(peaks + row * tiles + every, mask=every < tiles, other=float("-inf"))
        peak = tl.max(peak_of, axis=0)
        highest = tl.full([], float("-inf"), tl.float32)
        if tl.load(peaks + row * tiles + part) >= bound:
            token = part * tile + tl.arange(0, tile)
            inside = token < vocab_size
            score = tl.load(
                logits + row.to(tl.int64) * logits_stride + token, mask=inside, other=float("-inf")
            )
            kept = inside & _kept(
                score,
                token,
                peak.to(tl.float64),
                temperature.to(tl.float64),
                bound,
                tl.load(bound_ids + row),
                min_p,
            )
            word = _token_words(tl.load(seeds + row), tl.load(output_indices + row), part * (tile // 4), tile)
            perturbed = score.to(tl.float32) / temperature - tl.log(_exponential(word))
            highest = tl.max(tl.where(kept, perturbed, float("-inf")), axis=0)
        tl.store(noisy + row * tiles + part, highest)


@triton.jit
def _choose_kernel(
    logits,
    temperatures,
    seeds,
    output_indices,
    peaks,
    ids,
    noisy,
    bounds,
    bound_ids,
    min_ps,
    output,
    logits_stride,
    vocab_size,
    tiles,
    has_filters: tl.constexpr,
    tiles_pad: tl.constexpr,
    tile: tl.constexpr,
    pdl: tl.constexpr,
):
    row = tl.program_id(0)
    if pdl:
        gdc_launch_dependents()
        gdc_wait()
    part = tl.arange(0, tiles_pad)
    mask = part < tiles
    peak_of = tl.load(peaks + row * tiles + part, mask=mask, other=float("-inf"))
    peak = tl.max(peak_of, axis=0)
    broken = tl.max((peak_of != peak_of).to(tl.int32), axis=0) > 0
    usable = (broken == 0) & (peak > float("-inf")) & (peak < float("inf"))
    first = tl.load(ids + row * tiles + part, mask=mask, other=2147483647)
    token = tl.min(tl.where(peak_of == peak, first, 2147483647), axis=0)
    temperature = tl.load(temperatures + row)
    if (temperature > 0) & usable:
        seed = tl.load(seeds + row)
        output_index = tl.load(output_indices + row)
        noisy_of = tl.load(noisy + row * tiles + part, mask=mask, other=float("-inf"))
        bar = tl.max(noisy_of, axis=0)
        # Many times what float32 loses in the logit's quotient and in the noise.
        bar -= 1e-3 + 2e-6 * (tl.abs(bar) + tl.abs(peak / temperature))
        open_tiles = mask & (noisy_of >= bar)
        if has_filters:
            bound = tl.load(bounds + row)
            bound_id = tl.load(bound_ids + row)
            min_p = tl.load(min_ps + row)
        best = tl.full([], float("-inf"), tl.float64)
        token = tl.full([], 2147483647, tl.int32)
        for _ in range(tl.sum(open_tiles.to(tl.int32), axis=0)):
            at = tl.min(tl.where(open_tiles, part, tiles_pad), axis=0)
            open_tiles = open_tiles & (part != at)
            candidate = at * tile + tl.arange(0, tile)
            inside = candidate < vocab_size
            score = tl.load(logits + row.to(tl.int64) * logits_stride + candidate, mask=inside, other=0.0)
            shifted = (score.to(tl.float64) - peak.to(tl.float64)) / temperature.to(tl.float64)
            word = _token_words(seed, output_index, at * (tile // 4), tile)
            u = (word.to(tl.float64) + 0.5) * 2.3283064365386963e-10
            kept = inside
            if has_filters:
                kept = inside & _kept(
                    score, candidate, peak.to(tl.float64), temperature.to(tl.float64), bound, bound_id, min_p
                )
            value = tl.where(kept, shifted - _log(-_log(1.0 - u)), float("-inf"))
            highest = tl.max(value, axis=0)
            lowest_id = tl.min(tl.where(value == highest, candidate, 2147483647), axis=0)
            # Tiles come in ascending order: on a tie the lower id is there already.
            token = tl.where(highest > best, lowest_id, token)
            best = tl.maximum(best, highest)
    tl.store(output + row, tl.where(usable, token, -1).to(output.dtype.element_ty))


def sample(
    logits: Tensor,
    temperature: Tensor,
    seed: Tensor,
    output_index: Tensor,
    *,
    workspace: SampleWorkspace,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
    output: Tensor | None = None,
    pdl: bool = False,
) -> Tensor:
    """One token a row: the most likely where the temperature is 0, else drawn from softmax(logits / temperature).

    Ties go to the lowest token id. Everything that differs between rows is read on the device.

    Args:
        logits: [S, V], rows contiguous; float32, bfloat16 or float16.
        temperature: f32[S].
        seed: i64[S].
        output_index: i32[S].
        workspace: for at least S rows of V tokens.
        top_k: i32[S], 0 keeps all; with ``top_p`` and ``min_p``, or all three None: no row filters.
        top_p: f32[S], 1 keeps all.
        min_p: f32[S], 0 keeps all.
        output: i32[S] or i64[S], or None: a new i32 tensor.
        pdl: programmatic dependent launch.

    Returns:
        Token ids; -1 for a row whose logits are unusable (NaN, or no finite maximum).

    Raises:
        ValueError: shapes do not fit, or the workspace is too small.
    """
    rows, vocab_size = logits.shape
    if logits.stride(1) != 1 or not len(temperature) == len(seed) == len(output_index) == rows:
        raise ValueError(f"logits {tuple(logits.shape)} do not fit parameters of {len(temperature)} rows")
    if rows > workspace.max_rows or vocab_size != workspace.vocab_size:
        raise ValueError(
            f"the workspace is for {workspace.max_rows} rows of {workspace.vocab_size} tokens, not "
            f"{rows} of {vocab_size}"
        )
    if output is None:
        output = torch.empty(rows, dtype=torch.int32, device=logits.device)
    if rows == 0:
        return output
    filters = (top_k, top_p, min_p)
    has_filters = top_k is not None
    if any((each is not None) != has_filters or (each is not None and len(each) != rows) for each in filters):
        raise ValueError("give top_k, top_p and min_p for every row, or none of them")
    tiles = triton.cdiv(vocab_size, _TILE)
    shared = (logits, temperature, seed, output_index, workspace.peaks, workspace.ids, workspace.noisy)
    _scan_kernel[(tiles, rows)](
        *shared, logits.stride(0), vocab_size, tiles, tile=_TILE, pdl=pdl, num_warps=8, launch_pdl=pdl
    )
    if has_filters:
        filter_kernel[(rows,)](
            logits,
            temperature,
            top_k,
            top_p,
            workspace.peaks,
            workspace.bounds,
            workspace.bound_ids,
            logits.stride(0),
            vocab_size,
            tiles,
            tiles_pad=triton.next_power_of_2(tiles),
            tile=2 * _TILE,
            # The low bits that are zero in every logit of a narrow type need no search.
            low_bits={torch.bfloat16: 16, torch.float16: 13}.get(logits.dtype, 0),
            pdl=pdl,
            num_warps=16,
            launch_pdl=pdl,
        )
        _rescan_kernel[(tiles, rows)](
            *shared,
            workspace.bounds,
            workspace.bound_ids,
            min_p,
            logits.stride(0),
            vocab_size,
            tiles,
            tiles_pad=triton.next_power_of_2(tiles),
            tile=_TILE,
            pdl=pdl,
            num_warps=8,
            launch_pdl=pdl,
            enable_fp_fusion=False,
        )
    _choose_kernel[(rows,)](
        *shared,
        workspace.bounds,
        workspace.bound_ids,
        min_p,
        output,
        logits.stride(0),
        vocab_size,
        tiles,
        has_filters=has_filters,
        tiles_pad=triton.next_power_of_2(tiles),
        tile=_TILE,
        pdl=pdl,
        num_warps=16,
        launch_pdl=pdl,
        enable_fp_fusion=False,  # a fused multiply-add rounds once where the reference rounds twice
    )
    return output
