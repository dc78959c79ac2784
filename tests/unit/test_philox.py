"""Philox against its published vectors, and the exactness that reproducible sampling rests on."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from backend import philox

WORD = 0xFFFFFFFF

# Known-answer vectors of Random123 for philox4x32, 10 rounds: counter, key, output.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((WORD,) * 4, (WORD, WORD), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def reference(counter: tuple[int, ...], key: tuple[int, ...]) -> tuple[int, ...]:
    """The same generator in Python's unbounded integers."""
    c, k = list(counter), list(key)
    for _ in range(10):
        p0, p1 = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [(p1 >> 32) ^ c[1] ^ k[0], p1 & WORD, (p0 >> 32) ^ c[3] ^ k[1], p0 & WORD]
        k = [(k[0] + 0x9E3779B9) & WORD, (k[1] + 0xBB67AE85) & WORD]
    return tuple(c)


def run(counter: tuple[int, ...], key: tuple[int, ...]) -> tuple[int, ...]:
    c0, c1, c2, c3 = (torch.tensor([word]) for word in counter)
    k0, k1 = (torch.tensor([word]) for word in key)
    return tuple(int(word) for word in philox.philox4x32((c0, c1, c2, c3), (k0, k1)))


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_known_answers(counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]) -> None:
    assert run(counter, key) == expected
    assert reference(counter, key) == expected


words = st.integers(0, WORD)


@given(st.tuples(words, words, words, words), st.tuples(words, words))
def test_equals_the_reference_for_any_counter_and_key(counter: tuple[int, ...], key: tuple[int, ...]) -> None:
    assert run(counter, key) == reference(counter, key)


@given(
    st.lists(st.tuples(st.integers(0, 2**63 - 1), st.integers(0, 2**31 - 1)), min_size=1, max_size=4),
    st.lists(st.integers(0, 300_000), min_size=1, max_size=9),
)
def test_uniform_is_keyed_by_seed_index_and_token(rows: list[tuple[int, int]], ids: list[int]) -> None:
    seeds, indices = (torch.tensor(part) for part in zip(*rows, strict=True))
    u = philox.uniform(seeds, indices, torch.tensor(ids))
    assert u.dtype == torch.float64
    for i, (seed, index) in enumerate(rows):
        for j, token in enumerate(ids):
            word = reference((token // 4, index, 0, 0), (seed & WORD, seed >> 32))[token % 4]
            assert u[i, j].item() == (word + 0.5) / 2**32


def test_words_of_whole_rows_equal_those_of_single_tokens() -> None:
    seeds, indices = torch.tensor([3, 2**62 + 1, 7]), torch.tensor([0, 5, 9], dtype=torch.int32)
    whole = torch.stack(philox.words(seeds, indices, torch.arange(25)[None]), dim=-1).flatten(1)
    single = philox.token_words(seeds, indices, torch.arange(100).expand(3, 100))
    assert torch.equal(whole, single)


def test_uniform_never_reaches_its_ends() -> None:
    ends = (torch.tensor([0.0, WORD], dtype=torch.float64) + 0.5) * 2.0**-32
    assert 0 < ends[0].item() < ends[1].item() < 1
    assert philox.gumbel(ends).isfinite().all()


def test_uniform_is_uniform_over_tokens_and_over_steps() -> None:
    for u in (
        philox.uniform(torch.tensor([11]), torch.tensor([0]), torch.arange(100_000))[0],
        philox.uniform(torch.full((100_000,), 11), torch.arange(100_000), torch.tensor([5]))[:, 0],
        philox.uniform(torch.arange(100_000), torch.zeros(100_000), torch.tensor([5]))[:, 0],
    ):
        counts = torch.histc(u, bins=100, min=0, max=1)
        chi_square = ((counts - 1000) ** 2 / 1000).sum().item()
        assert 60 < chi_square < 150  # 99 degrees of freedom: mean 99, standard deviation 14


def relative_error(got: Tensor, expected: Tensor) -> float:
    return ((got - expected).abs() / expected.abs().clamp(min=1e-300)).max().item()


def test_log_and_exp_are_accurate() -> None:
    u = torch.rand(20_000, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    near_one = 1 - 2.0**-33 * torch.arange(1, 100, dtype=torch.float64)
    x = torch.cat([u, u**20 + 2.0**-40, near_one, torch.tensor([2.0**-33, 1.0, 22.9], dtype=torch.float64)])
    assert relative_error(philox.log(x), x.log()) < 1e-15
    assert relative_error(philox.exp(-700 * u), (-700 * u).exp()) < 1e-15
    assert philox.exp(torch.tensor([0.0, -math.inf], dtype=torch.float64)).tolist() == [1.0, math.exp(-700)]


@given(st.integers(1, 70), st.integers(0, 5))
def test_log_and_exp_have_the_same_bits_wherever_a_number_stands(length: int, offset: int) -> None:
    x = torch.linspace(0.001, 30.0, 80, dtype=torch.float64)
    part = slice(offset, offset + length)
    assert torch.equal(philox.log(x)[part], philox.log(x[part]))
    assert torch.equal(philox.exp(-x)[part], philox.exp(-x[part]))
