# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""The bound of top-k and top-p by bisection over the bits of float32, with passes over the whole vocabulary."""

from __future__ import annotations

import triton
import triton.language as tl

from backend.kernels.sample_numbers import key_value, load_scores, order_key


@triton.jit
def _place(key):
    """An int64 key as int32; nothing reaches the largest one."""
    return tl.minimum(key, 2147483647).to(tl.int32)


@triton.jit
def _counts(logits, scores, adjusted, least, step, vocab_size, tile: tl.constexpr, low_bits):
    """How many tokens of a row have at least the keys ``least``, ``least + step`` and ``least + 2 * step``."""
    low, middle, high = _place(least), _place(least + step), _place(least + 2 * step)
    first = tl.zeros([tile], tl.int32)
    second = tl.zeros([tile], tl.int32)
    third = tl.zeros([tile], tl.int32)
    for at in tl.range(0, vocab_size, tile, num_stages=2):
        token = at + tl.arange(0, tile)
        score = load_scores(logits, scores, token, token < vocab_size, adjusted, float("-inf"))
        # What lies beyond the vocabulary ranks below everything.
        key = tl.where(token < vocab_size, order_key(score, low_bits), -2147483648)
        first += (key >= low).to(tl.int32)
        second += (key >= middle).to(tl.int32)
        third += (key >= high).to(tl.int32)
    return tl.sum(first, axis=0), tl.sum(second, axis=0), tl.sum(third, axis=0)


@triton.jit
def _masses(
    logits, scores, adjusted, least, step, peak, temperature, vocab_size, tile: tl.constexpr, low_bits
):
    """Sums of exp((logit - peak) / temperature) over the same three sets of tokens as ``_counts``."""
    low, middle, high = _place(least), _place(least + step), _place(least + 2 * step)
    first = tl.zeros([tile], tl.float32)
    second = tl.zeros([tile], tl.float32)
    third = tl.zeros([tile], tl.float32)
    for at in tl.range(0, vocab_size, tile, num_stages=2):
        token = at + tl.arange(0, tile)
        score = load_scores(logits, scores, token, token < vocab_size, adjusted, float("-inf"))
        weight = tl.exp((score - peak) / temperature)
        key = order_key(score, low_bits)
        first += tl.where(key >= low, weight, 0.0)
        second += tl.where(key >= middle, weight, 0.0)
        third += tl.where(key >= high, weight, 0.0)
    return (
        tl.sum(first.to(tl.float64), axis=0),
        tl.sum(second.to(tl.float64), axis=0),
        tl.sum(third.to(tl.float64), axis=0),
    )


@triton.jit
def _nth_id(logits, scores, adjusted, key, n, vocab_size, tile: tl.constexpr, low_bits):
    """Id of the ``n``-th token, from 1, with exactly this key; a huge id where there are fewer."""
    before = 0
    found = 2147483647
    for at in tl.range(0, vocab_size, tile):
        token = at + tl.arange(0, tile)
        inside = token < vocab_size
        here = inside & (
            order_key(load_scores(logits, scores, token, inside, adjusted, 0.0), low_bits) == key
        )
        rank = before + tl.cumsum(here.to(tl.int32), axis=0)
        found = tl.minimum(found, tl.min(tl.where(here & (rank == n), token, 2147483647), axis=0))
        before += tl.sum(here.to(tl.int32), axis=0)
    return found


@triton.jit
def bisect_row(
    logits,
    scores,
    bound_at,
    bound_id_at,
    adjusted,
    peak,
    temperature,
    limited,
    top_k,
    top_p,
    vocab_size,
    tile: tl.constexpr,
    narrow_bits: tl.constexpr,
):
    """Store value and id of the last token that a row keeps."""
    low_bits = tl.where(adjusted, 0, narrow_bits)
    lowest = order_key(tl.full([], float("-inf"), tl.float32), low_bits)
    highest = order_key(peak, low_bits)
    bound = lowest
    allowed = tl.full([], 2147483647, tl.int32)  # tokens kept among those of the bound's own value
    if limited:
        bound = _search_count(logits, scores, adjusted, top_k, lowest, highest, vocab_size, tile, low_bits)
        above_bound, _, _ = _counts(
            logits, scores, adjusted, bound.to(tl.int64) + 1, 0, vocab_size, tile, low_bits
        )
        allowed = top_k - above_bound
    if top_p < 1:
        least = tl.where(limited, bound + 1, bound).to(tl.int64)
        mass, _, _ = _masses(
            logits, scores, adjusted, least, 0, peak, temperature, vocab_size, tile, low_bits
        )
        if limited:
            weight = tl.exp((key_value(bound, low_bits) - peak) / temperature).to(tl.float64)
            mass += weight * allowed.to(tl.float64)
        goal = tl.maximum(top_p.to(tl.float64) * mass, 1e-300)  # at least the likeliest token
        nucleus = _search_mass(
            logits, scores, adjusted, goal, bound, highest, peak, temperature, vocab_size, tile, low_bits
        )
        above, _, _ = _masses(
            logits,
            scores,
            adjusted,
            nucleus.to(tl.int64) + 1,
            0,
            peak,
            temperature,
            vocab_size,
            tile,
            low_bits,
        )
        weight = tl.exp((key_value(nucleus, low_bits) - peak) / temperature).to(tl.float64)
        wanted = tl.where(weight > 0, tl.ceil((goal - above) / weight), 1.0)
        wanted = tl.minimum(tl.maximum(wanted, 1.0), 2147483647.0).to(tl.int32)
        allowed = tl.where(nucleus > bound, wanted, tl.minimum(allowed, wanted))
        bound = nucleus
    tl.store(bound_at, key_value(bound, low_bits))
    tl.store(bound_id_at, _nth_id(logits, scores, adjusted, bound, allowed, vocab_size, tile, low_bits))


@triton.jit
def _search_count(logits, scores, adjusted, wanted, low, high, vocab_size, tile: tl.constexpr, low_bits):
    """The largest key that at least ``wanted`` tokens reach; all reach ``low``, none is above ``high``."""
    low = low.to(tl.int64)
    high = high.to(tl.int64)
    while low < high:
        step = quarter(low, high)
        first, second, third = _counts(logits, scores, adjusted, low + step, step, vocab_size, tile, low_bits)
        low, high = narrow(low, high, step, first >= wanted, second >= wanted, third >= wanted)
    return low.to(tl.int32)


@triton.jit
def _search_mass(
    logits, scores, adjusted, goal, low, high, peak, temperature, vocab_size, tile: tl.constexpr, low_bits
):
    """The largest key such that the tokens that reach it weigh at least ``goal``, or ``low``."""
    low = low.to(tl.int64)
    high = high.to(tl.int64)
    while low < high:
        step = quarter(low, high)
        first, second, third = _masses(
            logits, scores, adjusted, low + step, step, peak, temperature, vocab_size, tile, low_bits
        )
        low, high = narrow(low, high, step, first >= goal, second >= goal, third >= goal)
    return low.to(tl.int32)


@triton.jit
def quarter(low, high):
    """A quarter of the keys from ``low`` to ``high``, at least one: every pass tries three places between them."""
    return tl.maximum((high - low + 1) // 4, 1)


@triton.jit
def narrow(low, high, step, first, second, third):
    """The range that is left when the largest good key is known to reach, or not, ``low`` + 1, 2 and 3 steps."""
    good = first.to(tl.int64) + second.to(tl.int64) + third.to(tl.int64)  # one after the other, never a gap
    least = low + good * step
    most = tl.where(good < 3, least + step - 1, high)
    # With a step of one, the third place may lie beyond ``high``, where nothing is good.
    return least, tl.maximum(tl.minimum(most, high), least)
