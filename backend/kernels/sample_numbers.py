# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""What the sampling kernels share: random words, logarithm and exponential as in ``backend.philox``, row parameters."""

from __future__ import annotations

import triton
import triton.language as tl

from backend.row_params import RowParam

TEMPERATURE = tl.constexpr(int(RowParam.TEMPERATURE))
TOP_K = tl.constexpr(int(RowParam.TOP_K))
TOP_P = tl.constexpr(int(RowParam.TOP_P))
MIN_P = tl.constexpr(int(RowParam.MIN_P))
REPETITION_PENALTY = tl.constexpr(int(RowParam.REPETITION_PENALTY))
PRESENCE_PENALTY = tl.constexpr(int(RowParam.PRESENCE_PENALTY))
FREQUENCY_PENALTY = tl.constexpr(int(RowParam.FREQUENCY_PENALTY))
PENALTY_ROW = tl.constexpr(int(RowParam.PENALTY_ROW))
LOGPROBS = tl.constexpr(int(RowParam.LOGPROBS))
OUTPUT_INDEX = tl.constexpr(int(RowParam.OUTPUT_INDEX))
BIAS_START = tl.constexpr(int(RowParam.BIAS_START))
BAN_START = tl.constexpr(int(RowParam.BAN_START))
LIST_END = tl.constexpr(int(RowParam.LIST_END))


@triton.jit
def token_words(seed, output_index, first_block, tile: tl.constexpr):
    """One 32-bit word for each of ``tile`` token ids, from blocks of four ids on from ``first_block``."""
    block = first_block + tl.arange(0, tile // 4)
    zero = tl.zeros_like(block)
    w0, w1, w2, w3 = tl.philox(seed, block, zero + output_index, zero, zero)
    return tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), [tile])


@triton.jit
def exact_log(x):
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
def exact_exp(x):
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
def exponential(word):
    """-log(1 - u) in float32, from whichever of u and 1 - u is small, so that no accuracy is lost."""
    u = (word.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    rest = ((word ^ 0xFFFFFFFF).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    return tl.where(u < 0.00390625, u * (1.0 + u * (0.5 + u * 0.33333333)), -tl.log(rest))


@triton.jit
def int_param(asked, index: tl.constexpr, rows, row):
    """One entry of the matrix of ``backend.row_params``, which has ``rows`` columns."""
    return tl.load(asked + index * rows + row)


@triton.jit
def float_param(asked, index: tl.constexpr, rows, row):
    """The same where it holds the bits of a float32."""
    return tl.load(asked + index * rows + row).to(tl.float32, bitcast=True)


@triton.jit
def is_adjusted(asked, rows, row):
    """Whether a row's scores are not its logits: it has biases, bans or penalties."""
    listed = int_param(asked, LIST_END, rows, row) > int_param(asked, BIAS_START, rows, row)
    return listed | (int_param(asked, PENALTY_ROW, rows, row) >= 0)


@triton.jit
def load_scores(logits, scores, token, mask, adjusted, other):
    """What a row samples from, float32: its logits, or the ``scores`` made of them where it is ``adjusted``."""
    raw = tl.load(logits + token, mask=mask & (adjusted == 0), other=other).to(tl.float32)
    made = tl.load(scores + token, mask=mask & (adjusted != 0), other=other)
    return tl.where(adjusted != 0, made, raw)


@triton.jit
def order_key(x, low_bits):
    """An int32 that orders like the float32, without ``low_bits`` bits that are known to be zero."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)  # -0.0 becomes 0.0
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> low_bits


@triton.jit
def key_value(key, low_bits):
    """The float32 of a key."""
    # The bits that a key lacks are those of a number whose own are zero: ones where the sign has turned them over.
    whole = (key << low_bits) | ((key >> 31) & ((1 << low_bits) - 1))
    return (whole ^ ((whole >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def safe_quotient(score, temperature):
    """``score / temperature`` in float32, rounded anyhow, and finite for any logits of a model: at temperatures so low
    that it would not be, only tokens that share the peak's value can be drawn, and those stay equal."""
    return score / tl.maximum(temperature, 1e-30)
