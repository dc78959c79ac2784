"""Philox4x32-10, a counter-based random generator, in plain integer tensor operations.

A number depends on its key and counter alone, so there is no generator state to keep, to save or to share between
neighbours. Only integer operations and correctly rounded float64 operations are used: every device and every batch
shape gives the same bits. 32-bit words are held in int64 tensors.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10

Words = tuple[Tensor, Tensor, Tensor, Tensor]


def philox4x32(counter: Words, key: tuple[Tensor, Tensor]) -> Words:
    """Ten rounds of Philox4x32.

    Args:
        counter: four int64 tensors of 32-bit words, broadcastable against each other and against the key. What
            many counters share stays small through the first rounds.
        key: two int64 tensors of 32-bit words, broadcastable like the counter.

    Returns:
        Four int64 tensors of 32-bit words, in the common shape.
    """
    c0, c1, c2, c3 = counter
    shape = torch.broadcast_shapes(*(part.shape for part in (*counter, *key)))
    for k0, k1 in zip(_schedule(key[0], _KEY_STEPS[0]), _schedule(key[1], _KEY_STEPS[1]), strict=True):
        product0 = c0 * _MULTIPLIERS[0]
        product1 = c2 * _MULTIPLIERS[1]
        c0, c2 = _mix(product1, c1, k0, shape), _mix(product0, c3, k1, shape)
        c1, c3 = product1, product0
    return c0, (c1 & _MASK).expand(shape), c2, (c3 & _MASK).expand(shape)


def _schedule(key: Tensor, step: int) -> tuple[Tensor, ...]:
    """One word of the key for each round."""
    steps = torch.arange(_ROUNDS, device=key.device).view(-1, *[1] * key.dim()) * step
    return ((key[None] + steps) & _MASK).unbind(0)


def _mix(product: Tensor, word: Tensor, key: Tensor, shape: torch.Size) -> Tensor:
    """High word of ``product`` ^ ``word`` ^ ``key``.

    The 64-bit product wraps into the sign, and low words are kept as whole products: one mask at the end clears
    what both leave above the low 32 bits.
    """
    high = product >> 32
    if high.shape != shape:
        return (high ^ (word ^ key)) & _MASK
    return high.bitwise_xor_(word).bitwise_xor_(key).bitwise_and_(_MASK)


def words(seed: Tensor, output_index: Tensor, blocks: Tensor) -> Words:
    """The four words of each block of four token ids.

    Args:
        seed: i64[S], one key a row.
        output_index: integers [S], index of the token to be drawn.
        blocks: i64[S, N] or i64[1, N], token ids divided by four.

    Returns:
        Four i64[S, N]; word ``lane`` of block ``b`` belongs to token id ``4 * b + lane``.
    """
    key = seed.long()[:, None]
    index = output_index.long()[:, None] & _MASK
    zero = torch.zeros_like(index)
    return philox4x32((blocks, index, zero, zero), (key & _MASK, (key >> 32) & _MASK))


def token_words(seed: Tensor, output_index: Tensor, token_ids: Tensor) -> Tensor:
    """One 32-bit word for each token id: integers [S], [S], [S, N] -> i64[S, N]."""
    lane = token_ids & 3
    first, second, third, fourth = words(seed, output_index, token_ids.long() >> 2)
    return torch.where(lane < 2, torch.where(lane == 0, first, second), torch.where(lane == 2, third, fourth))


def uniform(seed: Tensor, output_index: Tensor, token_ids: Tensor) -> Tensor:
    """A number in the open interval (0, 1) for each token id, exactly (word + 1/2) / 2**32.

    Args:
        seed: i64[S].
        output_index: integers [S].
        token_ids: integers [S, N], or [N] for ids that all rows share.

    Returns:
        f64[S, N].
    """
    ids = token_ids[None] if token_ids.dim() == 1 else token_ids
    return (token_words(seed, output_index, ids).double() + 0.5) * 2.0**-32


def gumbel(u: Tensor) -> Tensor:
    """Standard Gumbel numbers, -log(-log(1 - u)), from float64 ``u`` in (0, 1)."""
    return -log(-log(1.0 - u))


def log(x: Tensor) -> Tensor:
    """Natural logarithm of positive, normal float64 numbers, within a few units in the last place.

    Libraries' own logarithms may differ in the last bit between devices, and between the vector part of an array
    and its tail; this one is built of correctly rounded operations alone.
    """
    mantissa, exponent = torch.frexp(x)
    small = mantissa < math.sqrt(0.5)
    mantissa = torch.where(small, mantissa * 2, mantissa)
    exponent = torch.where(small, exponent - 1, exponent).double()
    ratio = (mantissa - 1) / (mantissa + 1)  # log(m) = 2 artanh(ratio), |ratio| < 0.172
    square = ratio * ratio
    series = torch.full_like(square, 1 / 23)
    for degree in range(21, 0, -2):
        series = series * square + 1 / degree
    return (exponent * _LN2_LOW + 2 * ratio * series) + exponent * _LN2_HIGH


def exp(x: Tensor) -> Tensor:
    """Exponential function of float64 numbers that are not positive, built like ``log``; below -700 it stays."""
    x = x.clamp(min=-700.0)
    power = torch.round(x * (1 / math.log(2)))
    rest = (x - power * _LN2_HIGH) - power * _LN2_LOW
    series = torch.full_like(rest, 1 / math.factorial(14))
    for degree in range(13, -1, -1):
        series = series * rest + 1 / math.factorial(degree)
    return series * ((power.long() + 1023) << 52).view(torch.float64)


_LN2_HIGH = 6.93147180369123816490e-01  # its low 32 bits are zero: products with small integers are exact
_LN2_LOW = 1.90821492927058770002e-10
