# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""The last kernels of sampling: each row's token, its count for later penalties, its log-probabilities."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from backend.kernels.sample_numbers import (
    LOGPROBS,
    MIN_P,
    OUTPUT_INDEX,
    PENALTY_ROW,
    TEMPERATURE,
    exact_exp,
    exact_log,
    exponential,
    float_param,
    int_param,
    is_adjusted,
    key_value,
    load_scores,
    order_key,
    safe_quotient,
    token_words,
)


@triton.jit
def _kept(score, candidate, peak, temperature, bound, bound_id, min_p):
    """Which tokens of a tile a row's filters keep; ``peak`` and ``temperature`` in float64."""
    inside = (score > bound) | ((score == bound) & (candidate <= bound_id))
    return inside & (exact_exp((score.to(tl.float64) - peak) / temperature) >= min_p.to(tl.float64))


@triton.jit(do_not_specialize=["tiles", "rows"])
def rescan_kernel(
    logits,
    scores,
    seeds,
    asked,
    peaks,
    noisy,
    bounds,
    bound_ids,
    logits_stride,
    vocab_size,
    tiles,
    rows,
    tiles_pad: tl.constexpr,
    tile: tl.constexpr,
    pdl: tl.constexpr,
):
    """For rows with filters: the largest perturbed score of each tile once more, among the tokens that are kept."""
    first = tl.program_id(0)
    row = tl.program_id(1)
    if pdl:
        gdc_launch_dependents()
        gdc_wait()
    bound = tl.load(bounds + row)
    min_p = float_param(asked, MIN_P, rows, row)
    temperature = float_param(asked, TEMPERATURE, rows, row)
    if (temperature > 0) & ((bound > float("-inf")) | (min_p > 0)):
        every = tl.arange(0, tiles_pad)
        peak_of = tl.load(peaks + row * tiles + every, mask=every < tiles, other=float("-inf"))
        peak = tl.max(peak_of, axis=0)
        output_index = int_param(asked, OUTPUT_INDEX, rows, row)
        seed = tl.load(seeds + row)
        bound_id = tl.load(bound_ids + row)
        adjusted = is_adjusted(asked, rows, row)
        for part in range(first, tiles, tl.num_programs(0)):
            highest = tl.full([], float("-inf"), tl.float32)
            if tl.load(peaks + row * tiles + part) >= bound:
                token = part * tile + tl.arange(0, tile)
                inside = token < vocab_size
                score = load_scores(
                    logits + row.to(tl.int64) * logits_stride,
                    scores + row.to(tl.int64) * vocab_size,
                    token,
                    inside,
                    adjusted,
                    float("-inf"),
                )
                kept = inside & _kept(
                    score, token, peak.to(tl.float64), temperature.to(tl.float64), bound, bound_id, min_p
                )
                noise = exponential(token_words(seed, output_index, part * (tile // 4), tile))
                perturbed = safe_quotient(score, temperature) - tl.log(noise)
                highest = tl.max(tl.where(kept, perturbed, float("-inf")), axis=0)
            tl.store(noisy + row * tiles + part, highest)


@triton.jit(do_not_specialize=["tiles", "rows"])
def choose_kernel(
    logits,
    scores,
    seeds,
    asked,
    counts,
    peaks,
    ids,
    noisy,
    bounds,
    bound_ids,
    raw_peaks,
    raw_sums,
    output,
    records,
    logits_stride,
    vocab_size,
    tiles,
    rows,
    alternatives: tl.constexpr,
    tiles_pad: tl.constexpr,
    tile: tl.constexpr,
    pdl: tl.constexpr,
):
    """One row: store its token, or -1 where the scores are unusable; count it; store its log-probabilities."""
    row = tl.program_id(0)
    if pdl:
        gdc_launch_dependents()
        gdc_wait()
    temperature = float_param(asked, TEMPERATURE, rows, row)
    penalty_row = int_param(asked, PENALTY_ROW, rows, row)
    logprobs = int_param(asked, LOGPROBS, rows, row)
    part = tl.arange(0, tiles_pad)
    mask = part < tiles
    peak_of = tl.load(peaks + row * tiles + part, mask=mask, other=float("-inf"))
    first = tl.load(ids + row * tiles + part, mask=mask, other=2147483647)
    peak = tl.max(peak_of, axis=0)
    broken = tl.max((peak_of != peak_of).to(tl.int32), axis=0) > 0
    usable = (broken == 0) & (peak > float("-inf")) & (peak < float("inf"))
    token = tl.min(tl.where(peak_of == peak, first, 2147483647), axis=0)
    own_logits = logits + row.to(tl.int64) * logits_stride
    if (temperature > 0) & usable:
        own_scores = scores + row.to(tl.int64) * vocab_size
        adjusted = is_adjusted(asked, rows, row)
        seed = tl.load(seeds + row)
        output_index = int_param(asked, OUTPUT_INDEX, rows, row)
        bound = tl.load(bounds + row)
        bound_id = tl.load(bound_ids + row)
        min_p = float_param(asked, MIN_P, rows, row)
        filtered = (bound > float("-inf")) | (min_p > 0)
        noisy_of = tl.load(noisy + row * tiles + part, mask=mask, other=float("-inf"))
        bar = tl.max(noisy_of, axis=0)
        # Many times what float32 loses in the score's quotient and in the noise.
        bar -= 1e-3 + 2e-6 * (tl.abs(bar) + tl.abs(safe_quotient(peak, temperature)))
        open_tiles = mask & (noisy_of >= bar)
        best = tl.full([], float("-inf"), tl.float64)
        token = tl.full([], 2147483647, tl.int32)
        for _ in range(tl.sum(open_tiles.to(tl.int32), axis=0)):
            at = tl.min(tl.where(open_tiles, part, tiles_pad), axis=0)
            open_tiles = open_tiles & (part != at)
            candidate = at * tile + tl.arange(0, tile)
            inside = candidate < vocab_size
            score = load_scores(own_logits, own_scores, candidate, inside, adjusted, 0.0)
            shifted = (score.to(tl.float64) - peak.to(tl.float64)) / temperature.to(tl.float64)
            word = token_words(seed, output_index, at * (tile // 4), tile)
            u = (word.to(tl.float64) + 0.5) * 2.3283064365386963e-10
            kept = inside
            if filtered:
                kept = inside & _kept(
                    score, candidate, peak.to(tl.float64), temperature.to(tl.float64), bound, bound_id, min_p
                )
            value = tl.where(kept, shifted - exact_log(-exact_log(1.0 - u)), float("-inf"))
            highest = tl.max(value, axis=0)
            lowest_id = tl.min(tl.where(value == highest, candidate, 2147483647), axis=0)
            # Tiles come in ascending order: on a tie the lower id is there already.
            token = tl.where(highest > best, lowest_id, token)
            best = tl.maximum(best, highest)
    tl.store(output + row, tl.where(usable, token, -1).to(output.dtype.element_ty))
    if usable & (penalty_row >= 0):
        # Nobody else counts into this row, and the scan that reads it belongs to the next step.
        place = counts + penalty_row.to(tl.int64) * vocab_size + token
        tl.store(place, tl.load(place) + 1)
    if usable & (logprobs >= 0):
        _store_logprobs(
            own_logits,
            token,
            tl.load(raw_peaks + row * tiles + part, mask=mask, other=float("-inf")),
            tl.load(raw_sums + row * tiles + part, mask=mask, other=0.0),
            records + row * (1 + 2 * alternatives),
            tl.minimum(logprobs, alternatives),
            vocab_size,
            alternatives,
            tiles_pad,
            tile,
        )


@triton.jit
def _store_logprobs(
    logits,
    token,
    peak_of,
    sum_of,
    record,
    wanted,
    vocab_size,
    alternatives: tl.constexpr,
    tiles_pad: tl.constexpr,
    tile: tl.constexpr,
):
    """Log-softmax of a row's raw logits: of ``token``, and of the most likely tokens, equal ones by ascending id.

    The record holds the token's, then ids, then log-probabilities; ids are -1 beyond the vocabulary's size.
    """
    part = tl.arange(0, tiles_pad)
    peak = tl.max(peak_of, axis=0)
    shares = tl.where(peak_of > float("-inf"), sum_of * tl.exp(peak_of - peak), 0.0)
    log_sum = tl.log(tl.sum(shares, axis=0))
    chosen = tl.load(logits + token).to(tl.float32)
    tl.store(record, (chosen - peak - log_sum).to(tl.int32, bitcast=True))
    # The best key of each tile among the tokens not reported yet; none is left where it is the smallest number.
    key_of = tl.where(part * tile < vocab_size, order_key(peak_of, 0), -2147483648)
    last_key = tl.full([], 2147483647, tl.int32)
    last_id = tl.full([], -1, tl.int32)
    for place in range(wanted):
        key = tl.max(key_of, axis=0)
        at = tl.min(tl.where(key_of == key, part, tiles_pad - 1), axis=0)
        candidate = at * tile + tl.arange(0, tile)
        inside = candidate < vocab_size
        score = tl.load(logits + candidate, mask=inside, other=0.0).to(tl.float32)
        keys = tl.where(inside, order_key(score, 0), -2147483648)
        # What comes after the last one reported, in the order of all.
        keys = tl.where((keys < last_key) | ((keys == last_key) & (candidate > last_id)), keys, -2147483648)
        found = tl.min(tl.where(keys == key, candidate, 2147483647), axis=0)
        exists = key > -2147483648
        last_key = key
        last_id = found
        tl.store(record + 1 + place, tl.where(exists, found, -1))
        value = key_value(key, 0) - peak - log_sum
        tl.store(record + 1 + alternatives + place, value.to(tl.int32, bitcast=True))
        left = tl.max(tl.where(candidate == found, -2147483648, keys), axis=0)
        key_of = tl.where(part == at, left, key_of)
