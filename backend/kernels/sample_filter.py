# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Top-k and top-p without a sort: a search for the value that bounds what a row keeps.

Both keep a prefix of the tokens in order of descending logit, equal logits by ascending id. Such a prefix is told
by its last token: its value, found by bisection over the bits of float32, and its id, which matters where others
share the value.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def _key(x, low_bits: tl.constexpr):
    """An int32 that orders like the float32, without ``low_bits`` bits that are known to be zero."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)  # -0.0 becomes 0.0
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> low_bits


@triton.jit
def _value(key, low_bits: tl.constexpr):
    """The smallest float32 of a key."""
    whole = key << low_bits
    return (whole ^ ((whole >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _place(key):
    """An int64 key as int32; nothing reaches the largest one."""
    return tl.minimum(key, 2147483647).to(tl.int32)


@triton.jit
def _counts(row, least, step, vocab_size, tile: tl.constexpr, low_bits: tl.constexpr):
    """How many tokens of a row have at least the keys ``least``, ``least + step`` and ``least + 2 * step``."""
    low, middle, high = _place(least), _place(least + step), _place(least + 2 * step)
    first = tl.zeros([tile], tl.int32)
    second = tl.zeros([tile], tl.int32)
    third = tl.zeros([tile], tl.int32)
    for at in tl.range(0, vocab_size, tile, num_stages=4):
        token = at + tl.arange(0, tile)
        score = tl.load(row + token, mask=token < vocab_size, other=float("-inf")).to(tl.float32)
        # What lies beyond the vocabulary ranks below everything.
        key = tl.where(token < vocab_size, _key(score, low_bits), -2147483648)
        first += (key >= low).to(tl.int32)
        second += (key >= middle).to(tl.int32)
        third += (key >= high).to(tl.int32)
    return tl.sum(first, axis=0), tl.sum(second, axis=0), tl.sum(third, axis=0)


@triton.jit
def _masses(row, least, step, peak, temperature, vocab_size, tile: tl.constexpr, low_bits: tl.constexpr):
    """Sums of exp((logit - peak) / temperature) over the same three sets of tokens as ``_counts``."""
    low, middle, high = _place(least), _place(least + step), _place(least + 2 * step)
    first = tl.zeros([tile], tl.float32)
    second = tl.zeros([tile], tl.float32)
    third = tl.zeros([tile], tl.float32)
    for at in tl.range(0, vocab_size, tile, num_stages=4):
        token = at + tl.arange(0, tile)
        score = tl.load(row + token, mask=token < vocab_size, other=float("-inf")).to(tl.float32)
        weight = tl.exp((score - peak) / temperature)
        key = _key(score, low_bits)
        first += tl.where(key >= low, weight, 0.0)
        second += tl.where(key >= middle, weight, 0.0)
        third += tl.where(key >= high, weight, 0.0)
    return (
        tl.sum(first.to(tl.float64), axis=0),
        tl.sum(second.to(tl.float64), axis=0),
        tl.sum(third.to(tl.float64), axis=0),
    )


@triton.jit
def _nth_id(row, key, n, vocab_size, tile: tl.constexpr, low_bits: tl.constexpr):
    """Id of the ``n``-th token, from 1, with exactly this key; a huge id where there are fewer."""
    before = 0
    found = 2147483647
    for at in tl.range(0, vocab_size, tile):
        token = at + tl.arange(0, tile)
        inside = token < vocab_size
        here = inside & (_key(tl.load(row + token, mask=inside, other=0.0).to(tl.float32), low_bits) == key)
        rank = before + tl.cumsum(here.to(tl.int32), axis=0)
        found = tl.minimum(found, tl.min(tl.where(here & (rank == n), token, 2147483647), axis=0))
        before += tl.sum(here.to(tl.int32), axis=0)
    return found


@triton.jit
def filter_kernel(
    logits,
    temperatures,
    top_ks,
    top_ps,
    peaks,
    bounds,
    bound_ids,
    logits_stride,
    vocab_size,
    tiles,
    tiles_pad: tl.constexpr,
    tile: tl.constexpr,
    low_bits: tl.constexpr,
    pdl: tl.constexpr,
):
    """One row: store the value and id of the last token kept, or -inf where the row keeps all."""
    index = tl.program_id(0)
    if pdl:
        gdc_launch_dependents()
        gdc_wait()
    temperature = tl.load(temperatures + index)
    top_k = tl.load(top_ks + index)
    top_p = tl.load(top_ps + index)
    limited = (top_k > 0) & (top_k < vocab_size)
    part = tl.arange(0, tiles_pad)
    peak_of = tl.load(peaks + index * tiles + part, mask=part < tiles, other=float("-inf"))
    peak = tl.max(peak_of, axis=0)
    broken = tl.max((peak_of != peak_of).to(tl.int32), axis=0) > 0
    usable = (broken == 0) & (peak > float("-inf")) & (peak < float("inf"))
    tl.store(bounds + index, float("-inf"))
    tl.store(bound_ids + index, 2147483647)
    if (temperature > 0) & usable & (limited | (top_p < 1)):
        row = logits + index.to(tl.int64) * logits_stride
        lowest = _key(tl.full([], float("-inf"), tl.float32), low_bits)
        highest = _key(peak, low_bits)
        bound = lowest
        allowed = tl.full([], 2147483647, tl.int32)  # tokens kept among those of the bound's own value
        if limited:
            bound = _search_count(row, top_k, lowest, highest, vocab_size, tile, low_bits)
            above_bound, _, _ = _counts(row, bound.to(tl.int64) + 1, 0, vocab_size, tile, low_bits)
            allowed = top_k - above_bound
        if top_p < 1:
            least = tl.where(limited, bound + 1, bound).to(tl.int64)
            mass, _, _ = _masses(row, least, 0, peak, temperature, vocab_size, tile, low_bits)
            if limited:
                weight = tl.exp((_value(bound, low_bits) - peak) / temperature).to(tl.float64)
                mass += weight * allowed.to(tl.float64)
            goal = tl.maximum(top_p.to(tl.float64) * mass, 1e-300)  # at least the likeliest token
            nucleus = _search_mass(row, goal, bound, highest, peak, temperature, vocab_size, tile, low_bits)
            above, _, _ = _masses(
                row, nucleus.to(tl.int64) + 1, 0, peak, temperature, vocab_size, tile, low_bits
            )
            weight = tl.exp((_value(nucleus, low_bits) - peak) / temperature).to(tl.float64)
            wanted = tl.where(weight > 0, tl.ceil((goal - above) / weight), 1.0)
            wanted = tl.minimum(tl.maximum(wanted, 1.0), 2147483647.0).to(tl.int32)
            allowed = tl.where(nucleus > bound, wanted, tl.minimum(allowed, wanted))
            bound = nucleus
        tl.store(bounds + index, _value(bound, low_bits))
        tl.store(bound_ids + index, _nth_id(row, bound, allowed, vocab_size, tile, low_bits))


@triton.jit
def _search_count(row, wanted, low, high, vocab_size, tile: tl.constexpr, low_bits: tl.constexpr):
    """The largest key that at least ``wanted`` tokens reach; all reach ``low``, none is above ``high``."""
    low = low.to(tl.int64)
    high = high.to(tl.int64)
    while low < high:
        step = _step(low, high)
        first, second, third = _counts(row, low + step, step, vocab_size, tile, low_bits)
        low, high = _narrow(low, high, step, first >= wanted, second >= wanted, third >= wanted)
    return low.to(tl.int32)


@triton.jit
def _search_mass(
    row, goal, low, high, peak, temperature, vocab_size, tile: tl.constexpr, low_bits: tl.constexpr
):
    """The largest key such that the tokens that reach it weigh at least ``goal``, or ``low``."""
    low = low.to(tl.int64)
    high = high.to(tl.int64)
    while low < high:
        step = _step(low, high)
        first, second, third = _masses(row, low + step, step, peak, temperature, vocab_size, tile, low_bits)
        low, high = _narrow(low, high, step, first >= goal, second >= goal, third >= goal)
    return low.to(tl.int32)


@triton.jit
def _step(low, high):
    """A quarter of the keys from ``low`` to ``high``, at least one: every pass tries three places between them."""
    return tl.maximum((high - low + 1) // 4, 1)


@triton.jit
def _narrow(low, high, step, first, second, third):
    """The range that is left when the largest good key is known to reach, or not, ``low`` + 1, 2 and 3 steps."""
    good = first.to(tl.int64) + second.to(tl.int64) + third.to(tl.int64)  # one after the other, never a gap
    least = low + good * step
    most = tl.where(good < 3, least + step - 1, high)
    # With a step of one, the third place may lie beyond ``high``, where nothing is good.
    return least, tl.maximum(tl.minimum(most, high), least)
