# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Top-k and top-p without a sort: a search for the token that bounds what a row keeps.

Both keep a prefix of the tokens in order of descending score, equal scores by ascending id. Such a prefix is told
by its last token: its value, and its id, which matters where others share the value.

The search goes by the distance from the peak, in units of the temperature. Each pass over a row counts and weighs the
tokens within three distances, so it leaves a quarter of the range that holds the bound. Once few enough tokens lie in
the range, they are gathered, and bisected over the bits of their values, then over the ids of equal ones. Rows that
defeat this (thousands of equal logits at the bound, or a top-k of thousands) are bisected over the whole vocabulary
instead (``backend.kernels.sample_bisect``).
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

_PASSES = tl.constexpr(10)
_FIRST_STEP = tl.constexpr(3.0)


@triton.jit
def _distance(score, peak, inverse):
    """How far a score lies below the peak, in units of the temperature. Rounded, but in the order of the scores."""
    return (peak - score) * inverse


@triton.jit
def _weigh(
    logits,
    scores,
    adjusted,
    peak,
    inverse,
    first,
    second,
    third,
    vocab_size,
    tile: tl.constexpr,
):
    """Counts and masses of the tokens nearer to the peak than three distances, and the mass of all."""
    one, two, three = tl.zeros([tile], tl.int32), tl.zeros([tile], tl.int32), tl.zeros([tile], tl.int32)
    a, b, c = tl.zeros([tile], tl.float32), tl.zeros([tile], tl.float32), tl.zeros([tile], tl.float32)
    every = tl.zeros([tile], tl.float32)
    for at in tl.range(0, vocab_size, tile, num_stages=1):
        token = at + tl.arange(0, tile)
        score = load_scores(logits, scores, token, token < vocab_size, adjusted, float("-inf"))
        distance = _distance(score, peak, inverse)
        weight = tl.exp(-distance)
        every += weight
        one += (distance < first).to(tl.int32)
        two += (distance < second).to(tl.int32)
        three += (distance < third).to(tl.int32)
        a += tl.where(distance < first, weight, 0.0)
        b += tl.where(distance < second, weight, 0.0)
        c += tl.where(distance < third, weight, 0.0)
    return (
        tl.sum(one, axis=0),
        tl.sum(two, axis=0),
        tl.sum(three, axis=0),
        tl.sum(a.to(tl.float64), axis=0),
        tl.sum(b.to(tl.float64), axis=0),
        tl.sum(c.to(tl.float64), axis=0),
        tl.sum(every.to(tl.float64), axis=0),
    )


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
    # The bound is not nearer than ``near``, before which come ``above`` tokens, and nearer than ``far``.
    near = tl.full([], 0.0, tl.float32)
    far = tl.full([], float("inf"), tl.float32)
    step = tl.full([], _FIRST_STEP, tl.float32)
    above = tl.full([], 0, tl.int32)
    within = tl.zeros([], tl.int32) + vocab_size  # tokens nearer than ``far``, or more
    mass_above = tl.full([], 0.0, tl.float64)
    mass = tl.full([], 0.0, tl.float64)
    whole = limited & (top_p < 1)  # all of the top k are needed, since their mass is
    passes = tl.full([], 0, tl.int32)
    while (passes == 0) | ((within - tl.where(whole, 0, above) > room) & (passes < _PASSES)):
        first, second, third = near + step, near + 2 * step, near + 3 * step
        one, two, three, a, b, c, mass = _weigh(
            logits, scores, adjusted, peak, inverse, first, second, third, vocab_size, tile
        )
        goal = tl.maximum(top_p.to(tl.float64) * mass, 1e-300)
        reached_one = tl.where(limited, one >= top_k, a >= goal)
        reached_two = tl.where(limited, two >= top_k, b >= goal)
        reached_three = tl.where(limited, three >= top_k, c >= goal)
        within = tl.where(
            reached_one, one, tl.where(reached_two, two, tl.where(reached_three, three, within))
        )
        far = tl.where(reached_one, first, tl.where(reached_two, second, tl.where(reached_three, third, far)))
        above = tl.where(reached_one, above, tl.where(reached_two, one, tl.where(reached_three, two, three)))
        mass_above = tl.where(
            reached_one, mass_above, tl.where(reached_two, a, tl.where(reached_three, b, c))
        )
        near = tl.where(
            reached_one, near, tl.where(reached_two, first, tl.where(reached_three, second, third))
        )
        step = tl.where(far < float("inf"), (far - near) * 0.25, 2 * step)
        passes += 1
    near = tl.where(whole, 0.0, near)
    above = tl.where(whole, 0, above)
    mass_above = tl.where(whole, 0.0, mass_above)

    if within - above > room:
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
        # Gather the tokens of the range: those at each place of a tile together, whose number a first pass counts.
        held = tl.zeros([tile], tl.int32)
        for at in tl.range(0, vocab_size, tile, num_stages=1):
            token = at + tl.arange(0, tile)
            score = load_scores(logits, scores, token, token < vocab_size, adjusted, float("-inf"))
            distance = _distance(score, peak, inverse)
            held += ((distance >= near) & (distance < far)).to(tl.int32)
        gathered = tl.sum(held, axis=0)
        entry = tl.cumsum(held, axis=0) - held
        for at in tl.range(0, vocab_size, tile, num_stages=1):
            token = at + tl.arange(0, tile)
            score = load_scores(logits, scores, token, token < vocab_size, adjusted, float("-inf"))
            distance = _distance(score, peak, inverse)
            taken = (distance >= near) & (distance < far)
            tl.store(spare_values + entry, score, mask=taken & (entry < room))
            tl.store(spare_ids + entry, token, mask=taken & (entry < room))
            entry += taken.to(tl.int32)
        tl.debug_barrier()
        _bound_among(
            spare_values,
            spare_ids,
            gathered,
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
            vocab_size,
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
    vocab_size,
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
    bound = tl.where(count > 0, bound, order_key(tl.full([], float("-inf"), tl.float32), low_bits))
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
    level = tl.load(ids + entry, mask=here & (key == bound), other=2147483647)
    tl.store(bound_at, key_value(bound, low_bits))
    tl.store(bound_id_at, _nth_id(level, allowed, vocab_size))


@triton.jit
def _nth_id(ids, n, vocab_size):
    """The ``n``-th smallest of different ids, from 1; ``vocab_size`` if there are fewer. Larger ids fill up ``ids``."""
    low = tl.full([], 0, tl.int32)
    high = tl.zeros([], tl.int32) + vocab_size
    while low < high:
        middle = low + (high - low) // 2
        enough = tl.sum((ids <= middle).to(tl.int32), axis=0) >= n
        high = tl.where(enough, middle, high)
        low = tl.where(enough, low, middle + 1)
    return low
