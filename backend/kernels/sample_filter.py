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
def _count(row, least, vocab_size, tile: tl.constexpr, low_bits: tl.constexpr):
    """How many tokens of a row have at least the key ``least``."""
    total = tl.zeros([tile], tl.int32)
    for at in tl.range(0, vocab_size, tile):
        token = at + tl.arange(0, tile)
        inside = token < vocab_size
        key = _key(tl.load(row + token, mask=inside, other=0.0).to(tl.float32), low_bits)
        total += (inside & (key >= least)).to(tl.int32)
    return tl.sum(total, axis=0)


@triton.jit
def _mass(row, least, peak, temperature, vocab_size, tile: tl.constexpr, low_bits: tl.constexpr):
    """Sum of exp((logit - peak) / temperature) over the tokens of a row with at least the key ``least``."""
    total = tl.zeros([tile], tl.float64)
    for at in tl.range(0, vocab_size, tile):
        token = at + tl.arange(0, tile)
        score = tl.load(row + token, mask=token < vocab_size, other=float("-inf")).to(tl.float32)
        weight = tl.exp((score - peak) / temperature)
        total += tl.where(_key(score, low_bits) >= least, weight, 0.0).to(tl.float64)
    return tl.sum(total, axis=0)


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
            allowed = top_k - _count(row, bound + 1, vocab_size, tile, low_bits)
        if top_p < 1:
            least = tl.where(limited, bound + 1, bound)
            mass = _mass(row, least, peak, temperature, vocab_size, tile, low_bits)
            if limited:
                weight = tl.exp((_value(bound, low_bits) - peak) / temperature).to(tl.float64)
                mass += weight * allowed.to(tl.float64)
            goal = top_p.to(tl.float64) * mass
            nucleus = _search_mass(row, goal, bound, highest, peak, temperature, vocab_size, tile, low_bits)
            above = _mass(row, nucleus + 1, peak, temperature, vocab_size, tile, low_bits)
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
        middle = (low + high + 1) >> 1
        enough = _count(row, middle, vocab_size, tile, low_bits) >= wanted
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle - 1)
    return low.to(tl.int32)


@triton.jit
def _search_mass(
    row, goal, low, high, peak, temperature, vocab_size, tile: tl.constexpr, low_bits: tl.constexpr
):
    """The largest key such that the tokens that reach it weigh at least ``goal``, or ``low``."""
    low = low.to(tl.int64)
    high = high.to(tl.int64)
    while low < high:
        middle = (low + high + 1) >> 1
        enough = _mass(row, middle, peak, temperature, vocab_size, tile, low_bits) >= goal
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle - 1)
    return low.to(tl.int32)
