# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""The first kernel of sampling, one program for each tile of each row: scores, and what is largest in the tile.

Scores are the logits, after biases, penalties and bans where a row has any: those are written to a float32 buffer,
from which the later kernels read such rows. Each step rounds as ``backend.sampling`` does, and in its order.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from backend.kernels.sample_numbers import (
    BAN_START,
    BIAS_START,
    FREQUENCY_PENALTY,
    LIST_END,
    LOGPROBS,
    OUTPUT_INDEX,
    PENALTY_ROW,
    PRESENCE_PENALTY,
    REPETITION_PENALTY,
    TEMPERATURE,
    exponential,
    float_param,
    int_param,
    safe_quotient,
    token_words,
)


@triton.jit
def _add_listed(scores, lists, start, end, first_token, tile: tl.constexpr, vocab_size):
    """Add the values of list entries ``start … end - 1`` to the scores of those ids that lie in this tile.

    No id is twice in a list, so that no two threads meet.
    """
    for at in range(start, end, 256):
        entry = at + tl.arange(0, 256)
        listed = entry < end
        token = tl.load(lists + 2 * entry, mask=listed, other=-1)
        here = listed & (token >= first_token) & (token < first_token + tile) & (token < vocab_size)
        value = tl.load(lists + 2 * entry + 1, mask=here, other=0).to(tl.float32, bitcast=True)
        score = tl.load(scores + token, mask=here, other=0.0)
        tl.store(scores + token, score + value, mask=here)


@triton.jit
def _penalised(score, word, repetition, presence, frequency):
    """Scores after the penalties, by the token counts' words (``backend.kernels.token_counts``)."""
    count = word & 0x7FFFFFFF
    lower = tl.where(score < 0, score * repetition, tl.div_rn(score, repetition))
    lower -= tl.where(count > 0, presence, 0.0)
    lower -= frequency * count.to(tl.float32)
    return tl.where(word != 0, lower, score)


@triton.jit(do_not_specialize=["tiles", "rows"])
def scan_kernel(
    logits,
    seeds,
    asked,
    lists,
    counts,
    scores,
    peaks,
    ids,
    noisy,
    raw_peaks,
    raw_sums,
    logits_stride,
    vocab_size,
    tiles,
    rows,
    tile: tl.constexpr,
    pdl: tl.constexpr,
):
    part = tl.program_id(0)
    row = tl.program_id(1)
    if pdl:
        gdc_launch_dependents()
        gdc_wait()
    bias_start = int_param(asked, BIAS_START, rows, row)
    ban_start = int_param(asked, BAN_START, rows, row)
    list_end = int_param(asked, LIST_END, rows, row)
    penalty_row = int_param(asked, PENALTY_ROW, rows, row)
    logprobs = int_param(asked, LOGPROBS, rows, row)
    temperature = float_param(asked, TEMPERATURE, rows, row)
    place = row * tiles + part
    token = part * tile + tl.arange(0, tile)
    inside = token < vocab_size
    score = tl.load(logits + row.to(tl.int64) * logits_stride + token, mask=inside, other=float("-inf"))
    score = score.to(tl.float32)
    if logprobs >= 0:
        raw_peak = tl.max(score, axis=0)
        tl.store(raw_peaks + place, raw_peak)
        # Where all are -inf, the differences are NaN and the sum is 0.
        tl.store(
            raw_sums + place, tl.sum(tl.where(score > float("-inf"), tl.exp(score - raw_peak), 0.0), axis=0)
        )
    if (list_end > bias_start) | (penalty_row >= 0):
        own = scores + row.to(tl.int64) * vocab_size
        if ban_start > bias_start:
            tl.store(own + token, score, mask=inside)
            tl.debug_barrier()
            _add_listed(own, lists, bias_start, ban_start, part * tile, tile, vocab_size)
            tl.debug_barrier()
            score = tl.load(own + token, mask=inside, other=float("-inf"))
        if penalty_row >= 0:
            word = tl.load(counts + penalty_row.to(tl.int64) * vocab_size + token, mask=inside, other=0)
            score = _penalised(
                score,
                word,
                float_param(asked, REPETITION_PENALTY, rows, row),
                float_param(asked, PRESENCE_PENALTY, rows, row),
                float_param(asked, FREQUENCY_PENALTY, rows, row),
            )
        tl.debug_barrier()
        tl.store(own + token, score, mask=inside)
        if list_end > ban_start:
            tl.debug_barrier()
            _add_listed(own, lists, ban_start, list_end, part * tile, tile, vocab_size)
            tl.debug_barrier()
            score = tl.load(own + token, mask=inside, other=float("-inf"))
    peak = tl.max(score, axis=0)
    best = tl.min(tl.where(inside & (score == peak), token, 2147483647), axis=0)
    broken = tl.max((score != score).to(tl.int32), axis=0) > 0
    tl.store(peaks + place, tl.where(broken, float("nan"), peak))
    tl.store(ids + place, best)
    if temperature > 0:
        output_index = int_param(asked, OUTPUT_INDEX, rows, row)
        noise = exponential(token_words(tl.load(seeds + row), output_index, part * (tile // 4), tile))
        perturbed = tl.where(inside, safe_quotient(score, temperature) - tl.log(noise), float("-inf"))
        tl.store(noisy + place, tl.max(perturbed, axis=0))
