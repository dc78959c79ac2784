# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Top-k and top-p without a sort: a search for the token that bounds what a row keeps.

Both keep a prefix of the tokens in order of descending score, equal scores by ascending id. Such a prefix is told
by its last token: its value, and its id, which matters where others share the value.

The search narrows down in a few passes over a row. A histogram over the distance from the peak, in units of the
temperature, bounds the mass above each bin from both sides, since a token's weight is known from its bin to a factor;
so it tells a range of bins that holds the bound. Once few enough tokens lie in the range, they are gathered, weighed
one by one, and bisected over the bits of their values. Rows that defeat this (thousands of equal logits at the bound,
or a bound beyond the histogram) are bisected over the whole vocabulary instead (``backend.kernels.sample_bisect``).
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from backend.kernels.sample_bisect import bisect_row, narrow, quarter
from backend.kernels.sample_numbers import (
    TEMPERATURE,
    TOP_K,
    TOP_P,
    float_param,
    int_param,
    is_adjusted,
    key_value,
    load_scores,
    order_key,
)

_BINS = tl.constexpr(256)
_SCALE = tl.constexpr(16.0)  # bins a unit of distance in the first pass; they reach weights of exp(-15.9)
_PASSES = tl.constexpr(3)


@triton.jit
def _distance(score, peak, inverse):
    """How far a score lies below the peak, in units of the temperature. Rounded, but in the order of the scores."""
    return (peak - score) * inverse


@triton.jit
def _bin(distance, start, scale):
    """Bins 1 to 254, ``scale`` a unit of distance from ``start`` on; 0 nearer to the peak, 255 beyond."""
    inner = 1 + tl.minimum((distance - start) * scale, 254.0).to(tl.int32)
    return tl.where(distance < start, 0, inner)


@triton.jit
def _range(counts, start, scale, mass, mass_above, limited, top_k, top_p):
    """First and last bin that can hold the bound, and how many tokens they hold.

    ``counts`` are the tokens of each bin. Those of bin 0 weigh ``mass_above``, and all of the row ``mass``; those of
    another bin weigh as its borders tell.
    """
    every = tl.arange(0, _BINS)
    edge = start + (every - 1).to(tl.float32) / scale
    inner = (every > 0) & (every < 255)
    number = tl.where(inner, counts, 0).to(tl.float32)
    heaviest = number * tl.exp(-edge)
    lightest = number * tl.exp(-edge - 1.0 / scale)
    upper = mass_above + tl.cumsum(heaviest, axis=0)
    lower = mass_above + tl.cumsum(lightest, axis=0)
    last = tl.full([], 255, tl.int32)
    least = mass
    most = mass
    if limited:
        reached = tl.cumsum(counts, axis=0)
        last = tl.min(tl.where(reached >= top_k, every, 255), axis=0)
        # Of the tokens in the last bin, only some are among the top k.
        at = every == last
        some = (top_k - tl.sum(tl.where(at, reached - counts, 0), axis=0)).to(tl.float32)
        share = some / tl.maximum(tl.sum(tl.where(at, number, 0.0), axis=0), 1.0)
        least = tl.sum(tl.where(at, lower - lightest * (1.0 - share), 0.0), axis=0)
        most = tl.sum(tl.where(at, upper - heaviest * (1.0 - share), 0.0), axis=0)
    first = last
    if top_p < 1:
        # Margins of many times what float32 loses in the sums.
        first = tl.min(tl.where(upper >= top_p * least * 0.9999, every, 255), axis=0)
        if not limited:
            last = tl.min(tl.where(lower >= top_p * most * 1.0001, every, 255), axis=0)
    first = tl.maximum(tl.minimum(first, last), 1)
    last = tl.maximum(first, last)
    held = tl.sum(tl.where((every >= first) & (every <= last), counts, 0), axis=0)
    return first, last, held


@triton.jit(do_not_specialize=["tiles", "rows"])
def filter_kernel(
    logits,
    scores,
    asked,
    peaks,
    bounds,
    bound_ids,
    spare_values,
    spare_ids,
    logits_stride,
    vocab_size,
    tiles,
    rows,
    tiles_pad: tl.constexpr,
    tile: tl.constexpr,
    room: tl.constexpr,
    narrow_bits: tl.constexpr,
    pdl: tl.constexpr,
):
    """One row: store the value and id of the last token kept, or -inf where the row keeps all."""
    index = tl.program_id(0)
    if pdl:
        gdc_launch_dependents()
        gdc_wait()
    temperature = float_param(asked, TEMPERATURE, rows, index)
    top_k = int_param(asked, TOP_K, rows, index)
    top_p = float_param(asked, TOP_P, rows, index)
    limited = (top_k > 0) & (top_k < vocab_size)
    if (temperature > 0) & (limited | (top_p < 1)):
        part = tl.arange(0, tiles_pad)
        peak_of = tl.load(peaks + index * tiles + part, mask=part < tiles, other=float("-inf"))
        peak = tl.max(peak_of, axis=0)
        broken = tl.max((peak_of != peak_of).to(tl.int32), axis=0) > 0
        if (broken == 0) & (peak > float("-inf")) & (peak < float("inf")):
            _bound_row(
                logits + index.to(tl.int64) * logits_stride,
                scores + index.to(tl.int64) * vocab_size,
                bounds + index,
                bound_ids + index,
                spare_values + index * room,
                spare_ids + index * room,
                is_adjusted(asked, rows, index),
                peak,
                temperature,
                limited,
                top_k,
                top_p,
                vocab_size,
                tile,
                room,
                narrow_bits,
            )
        else:
            tl.store(bounds + index, float("-inf"))
    else:
        tl.store(bounds + index, float("-inf"))


@triton.jit
def _bound_row(
    logits,
    scores,
    bound_at,
    bound_id_at,
    spare_values,
    spare_ids,
    adjusted,
    peak,
    temperature,
    limited,
    top_k,
    top_p,
    vocab_size,
    tile: tl.constexpr,
    room: tl.constexpr,
    narrow_bits: tl.constexpr,
):
    inverse = tl.minimum(1.0 / temperature, 1e30)
    start = tl.full([], 0.0, tl.float32)
    scale = tl.full([], _SCALE, tl.float32)
    first = tl.full([], 1, tl.int32)
    last = tl.full([], 254, tl.int32)
    held = tl.full([], 2147483647, tl.int32)
    mass = tl.full([], 0.0, tl.float64)
    passes = tl.full([], 0, tl.int32)
    while (held > room) & (last < 255) & (passes < _PASSES):
        if passes > 0:
            # A bin more on either side, for what rounding moves.
            end = start + (last + 1).to(tl.float32) / scale
            start = tl.maximum(start + (first - 2).to(tl.float32) / scale, 0.0)
            scale = 254.0 / (end - start)
        counts = tl.zeros([_BINS], tl.int32)
        weights = tl.zeros([tile], tl.float32)
        weights_above = tl.zeros([tile], tl.float32)
        for at in tl.range(0, vocab_size, tile, num_stages=2):
            token = at + tl.arange(0, tile)
            score = load_scores(logits, scores, token, token < vocab_size, adjusted, float("-inf"))
            place = _bin(_distance(score, peak, inverse), start, scale)
            counts += tl.histogram(place, _BINS)
            weight = tl.exp((score - peak) / temperature)
            weights += weight
            weights_above += tl.where(place == 0, weight, 0.0)
        mass = tl.sum(weights.to(tl.float64), axis=0)
        mass_above = tl.sum(weights_above, axis=0)
        first, last, held = _range(
            counts, start, scale, mass.to(tl.float32), mass_above, limited, top_k, top_p
        )
        passes += 1

    if (held > room) | (last == 255):
        bisect_row(
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
            tile,
            narrow_bits,
        )
    else:
        # Gather the tokens of the range by ascending id, and weigh what is above it.
        above = tl.zeros([tile], tl.int32)
        weights_above = tl.zeros([tile], tl.float32)
        gathered = 0
        for at in tl.range(0, vocab_size, tile, num_stages=2):
            token = at + tl.arange(0, tile)
            inside = token < vocab_size
            score = load_scores(logits, scores, token, inside, adjusted, float("-inf"))
            place = _bin(_distance(score, peak, inverse), start, scale)
            weights_above += tl.where(place < first, tl.exp((score - peak) / temperature), 0.0)
            above += (place < first).to(tl.int32)
            taken = inside & (place >= first) & (place <= last)
            entry = gathered + tl.cumsum(taken.to(tl.int32), axis=0) - 1
            tl.store(spare_values + entry, score, mask=taken & (entry < room))
            tl.store(spare_ids + entry, token, mask=taken & (entry < room))
            gathered += tl.sum(taken.to(tl.int32), axis=0)
        tl.debug_barrier()
        _bound_among(
            spare_values,
            spare_ids,
            gathered,
            tl.sum(above, axis=0),
            tl.sum(weights_above.to(tl.float64), axis=0),
            mass,
            bound_at,
            bound_id_at,
            peak,
            temperature,
            limited,
            top_k,
            top_p,
            room,
            tl.where(adjusted, 0, narrow_bits),
        )


@triton.jit
def _bound_among(
    values,
    ids,
    count,
    above,
    mass_above,
    mass,
    bound_at,
    bound_id_at,
    peak,
    temperature,
    limited,
    top_k,
    top_p,
    room: tl.constexpr,
    low_bits,
):
    """The bound is one of ``count`` gathered tokens; ``above`` others, of mass ``mass_above``, come before them."""
    entry = tl.arange(0, room)
    here = entry < count
    value = tl.load(values + entry, mask=here, other=float("-inf"))
    key = tl.where(here, order_key(value, low_bits), -2147483648)
    weight = tl.where(here, tl.exp((value - peak) / temperature), 0.0)
    bound = tl.min(tl.where(here, key, 2147483647), axis=0)
    highest = tl.max(key, axis=0)
    allowed = tl.full([], 2147483647, tl.int32)  # tokens kept among those of the bound's own value
    if limited:
        wanted = top_k - above
        low, high = bound.to(tl.int64), highest.to(tl.int64)
        while low < high:
            step = quarter(low, high)
            one = tl.sum((key >= low + step).to(tl.int32), axis=0)
            two = tl.sum((key >= low + 2 * step).to(tl.int32), axis=0)
            three = tl.sum((key >= low + 3 * step).to(tl.int32), axis=0)
            low, high = narrow(low, high, step, one >= wanted, two >= wanted, three >= wanted)
        bound = low.to(tl.int32)
        allowed = wanted - tl.sum((key > bound).to(tl.int32), axis=0)
        of_bound = tl.exp((key_value(bound, low_bits) - peak) / temperature).to(tl.float64)
        mass = mass_above + tl.sum(tl.where(key > bound, weight, 0.0).to(tl.float64), axis=0)
        mass += of_bound * allowed.to(tl.float64)
    if top_p < 1:
        goal = tl.maximum(top_p.to(tl.float64) * mass, 1e-300) - mass_above  # at least the likeliest token
        low, high = bound.to(tl.int64), highest.to(tl.int64)
        while low < high:
            step = quarter(low, high)
            one = tl.sum(tl.where(key >= low + step, weight, 0.0).to(tl.float64), axis=0)
            two = tl.sum(tl.where(key >= low + 2 * step, weight, 0.0).to(tl.float64), axis=0)
            three = tl.sum(tl.where(key >= low + 3 * step, weight, 0.0).to(tl.float64), axis=0)
            low, high = narrow(low, high, step, one >= goal, two >= goal, three >= goal)
        nucleus = low.to(tl.int32)
        heavier = tl.sum(tl.where(key > nucleus, weight, 0.0).to(tl.float64), axis=0)
        of_bound = tl.exp((key_value(nucleus, low_bits) - peak) / temperature).to(tl.float64)
        wanted = tl.where(of_bound > 0, tl.ceil((goal - heavier) / of_bound), 1.0)
        wanted = tl.minimum(tl.maximum(wanted, 1.0), 2147483647.0).to(tl.int32)
        allowed = tl.where(nucleus > bound, wanted, tl.minimum(allowed, wanted))
        bound = nucleus
    level = here & (key == bound)
    rank = tl.cumsum(level.to(tl.int32), axis=0)
    token = tl.load(ids + entry, mask=level, other=2147483647)
    tl.store(bound_at, key_value(bound, low_bits))
    tl.store(bound_id_at, tl.min(tl.where(level & (rank == allowed), token, 2147483647), axis=0))
