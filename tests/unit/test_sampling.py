"""The sampler against transformers' own processors, and the independence of rows from their neighbours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from backend import philox
from backend.sampling import PenaltyState, SampledTokens, Sampler, SamplingBatch, top_candidates
from tests.gpu.sample_rows import Row

CPU = torch.device("cpu")


def padded(lists: Sequence[Sequence[Any]], fill: float, dtype: torch.dtype) -> Tensor:
    width = max(map(len, lists), default=0)
    return torch.tensor([[*row, *[fill] * (width - len(row))] for row in lists], dtype=dtype)


def batch_of(rows: Sequence[Row], num_logprobs: int = -1) -> SamplingBatch:
    def column(name: str, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.tensor([getattr(row, name) for row in rows], dtype=dtype)

    return SamplingBatch(
        temperature=column("temperature"),
        top_k=column("top_k", torch.int32),
        top_p=column("top_p"),
        min_p=column("min_p"),
        seed=column("seed", torch.int64),
        output_index=column("index", torch.int32),
        repetition_penalty=column("repetition"),
        presence_penalty=column("presence"),
        frequency_penalty=column("frequency"),
        penalty_row=torch.tensor(
            [i if row.penalised else -1 for i, row in enumerate(rows)], dtype=torch.int32
        ),
        bias_ids=padded([list(row.bias) for row in rows], -1, torch.int32),
        bias_values=padded([list(row.bias.values()) for row in rows], 0, torch.float32),
        banned_ids=padded([row.banned for row in rows], -1, torch.int32),
        any_random=any(row.temperature > 0 for row in rows),
        any_top_k=any(row.top_k > 0 for row in rows),
        any_top_p=any(row.top_p < 1 for row in rows),
        any_min_p=any(row.min_p > 0 for row in rows),
        any_penalty=any(row.penalised for row in rows),
        any_bias=any(row.bias for row in rows),
        any_banned=any(row.banned for row in rows),
        num_logprobs=num_logprobs,
    )


def sample(logits: Tensor, rows: Sequence[Row], num_logprobs: int = -1) -> SampledTokens:
    state = PenaltyState(len(rows), logits.shape[1], CPU)
    for i, row in enumerate(rows):
        if row.penalised:
            state.init_row(i, torch.tensor(row.prompt, dtype=torch.int64), torch.tensor(row.output).long())
    return Sampler(logits.shape[1], CPU, state).sample(logits, batch_of(rows, num_logprobs))


def tokens(logits: Tensor, rows: Sequence[Row]) -> list[int]:
    return sample(logits, rows).token_ids.tolist()


def normal(
    rows: int, vocab: int, seed: int, scale: float = 3.0, dtype: torch.dtype = torch.float64
) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, vocab, generator=generator, dtype=torch.float64) * scale).to(dtype)


def expected_token(logits: Tensor, row: Row) -> int:
    """What transformers' processors, in the order of ``generate``, and Gumbel noise make of one row (f64[V])."""
    before = LogitsProcessorList()
    if row.bias:
        before.append(SequenceBiasLogitsProcessor([[[token], value] for token, value in row.bias.items()]))
    if row.repetition != 1:
        before.append(RepetitionPenaltyLogitsProcessor(row.repetition))
    ids = torch.tensor([row.prompt + row.output], dtype=torch.int64)
    scores = before(ids, logits[None])
    for token in set(row.output):
        scores[0, token] -= row.presence + row.frequency * row.output.count(token)
    after = LogitsProcessorList()
    if row.banned:
        after.append(
            MinNewTokensLengthLogitsProcessor(len(row.prompt), len(row.output) + 1, list(row.banned))
        )
    if row.temperature == 0:
        return int(after(ids, scores)[0].argmax())
    after.append(TemperatureLogitsWarper(row.temperature))
    if row.top_k:
        after.append(TopKLogitsWarper(row.top_k))
    if row.top_p < 1:
        after.append(TopPLogitsWarper(row.top_p))
    if row.min_p:
        after.append(MinPLogitsWarper(row.min_p))
    u = philox.uniform(torch.tensor([row.seed]), torch.tensor([row.index]), torch.arange(len(logits)))
    return int((after(ids, scores) - (-(1 - u).log()).log())[0].argmax())


def share(low: float, high: float) -> st.SearchStrategy[float]:
    return st.floats(low, high, width=32)


def rows_for(vocab: int) -> st.SearchStrategy[Row]:
    token = st.integers(0, vocab - 1)
    some = st.lists(token, max_size=12).map(tuple)
    return st.builds(
        Row,
        temperature=st.one_of(st.just(0.0), share(0.0625, 4)),
        top_k=st.one_of(st.just(0), st.integers(1, 100), st.integers(1, 2 * vocab)),
        top_p=st.one_of(st.just(1.0), share(0.0625, 0.9375)),
        min_p=st.one_of(st.just(0.0), share(0.0078125, 0.5)),
        seed=st.integers(0, 2**63 - 1),
        index=st.integers(0, 1_000_000),
        repetition=st.one_of(st.just(1.0), share(0.5, 2)),
        presence=st.one_of(st.just(0.0), share(-2, 2)),
        frequency=st.one_of(st.just(0.0), share(-2, 2)),
        bias=st.dictionaries(token, share(-100, 100), max_size=5),
        banned=st.lists(token, max_size=3, unique=True).map(tuple),
        prompt=st.lists(token, min_size=1, max_size=12).map(tuple),
        output=some,
    )


@settings(max_examples=150, deadline=None)
@given(
    st.data(),
    st.sampled_from([5, 67, 301, 1500, 9001]),
    st.integers(0, 2**31),
    st.sampled_from([0.1, 3.0, 9.0]),
)
def test_equals_transformers_processors(data: st.DataObject, vocab: int, seed: int, scale: float) -> None:
    rows = data.draw(st.lists(rows_for(vocab), min_size=1, max_size=4))
    logits = normal(len(rows), vocab, seed, scale)
    assert tokens(logits, rows) == [expected_token(logits[i], row) for i, row in enumerate(rows)]


@pytest.mark.parametrize(
    "row",
    [
        Row(temperature=1.5, top_p=0.95),  # thousands of tokens in the nucleus
        Row(temperature=50.0, top_p=0.999),
        Row(temperature=2.0, top_k=700, top_p=0.9),
        Row(temperature=2.0, top_k=15_000, top_p=0.99),
        Row(temperature=3.0, top_k=15_000),
        Row(temperature=3.0, min_p=0.001),
        Row(temperature=0.7, top_p=0.9, min_p=0.05, top_k=50),
        Row(temperature=1.0),
        Row(temperature=100.0),
        Row(temperature=0.01),
    ],
)
def test_wide_supports_are_exact(row: Row) -> None:
    logits = normal(6, 20_002, seed=4)
    rows = [replace(row, seed=seed) for seed in range(6)]
    assert tokens(logits, rows) == [expected_token(logits[i], each) for i, each in enumerate(rows)]


@pytest.mark.parametrize("vocab", [3, 32_769, 49_155, 131_080])
def test_whole_rows_are_exact_for_any_size_of_the_vocabulary(vocab: int) -> None:
    logits = normal(7, vocab, seed=vocab)
    seen = (0, vocab // 2, vocab - 1)
    rows = [Row(temperature=2.0, seed=seed, index=11) for seed in range(7)]
    rows[3:] = [replace(row, temperature=0.0, frequency=2.0, output=seen) for row in rows[3:]]
    logits[3:, list(seen)] += 12.0
    assert tokens(logits, rows) == [expected_token(logits[i], row) for i, row in enumerate(rows)]


# -------------------------------------------------------------------------------------- independence of neighbours


@settings(max_examples=60, deadline=None)
@given(
    st.data(),
    st.sampled_from([7, 130, 2001, 9001]),
    st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
    st.integers(0, 2**31),
)
def test_a_row_alone_equals_the_row_among_neighbours(
    data: st.DataObject, vocab: int, dtype: torch.dtype, seed: int
) -> None:
    rows = data.draw(st.lists(rows_for(vocab), min_size=2, max_size=7))
    logits = normal(len(rows), vocab, seed, dtype=dtype)
    together = sample(logits, rows, num_logprobs=3)
    order = data.draw(st.permutations(range(len(rows))))
    permuted = sample(logits[list(order)], [rows[i] for i in order], num_logprobs=3)
    for place, i in enumerate(order):
        alone = sample(logits[i : i + 1], rows[i : i + 1], num_logprobs=3)
        for name in ("token_ids", "logprobs", "top_ids", "top_logprobs"):
            ours, one, moved = (getattr(result, name) for result in (together, alone, permuted))
            assert torch.equal(ours[i], one[0])
            assert torch.equal(ours[i], moved[place])


def test_real_vocabulary_and_many_rows_equal_single_rows() -> None:
    kinds = [
        Row(temperature=1.0),
        Row(),
        Row(temperature=0.8, top_p=0.9),
        Row(temperature=1.0, top_k=50, top_p=0.9),
    ]
    rows = [replace(kinds[i % 4], seed=i, index=3 * i) for i in range(24)]
    logits = normal(24, 49_152, seed=8, dtype=torch.float32)
    together = tokens(logits, rows)
    assert together == [tokens(logits[i : i + 1], [row])[0] for i, row in enumerate(rows)]
    assert together == tokens(logits.flip(0), rows[::-1])[::-1]


def test_a_bad_row_fails_alone() -> None:
    rows = [Row(temperature=float(i % 2), seed=i, repetition=1.5, output=(1, 2)) for i in range(8)]
    logits = normal(8, 300, seed=5, dtype=torch.float32)
    clean = tokens(logits, rows)
    broken = logits.clone()
    broken[0, 17] = torch.nan
    broken[3, 299] = torch.nan
    broken[4] = -torch.inf
    broken[7, 0] = torch.inf
    got = tokens(broken, rows)
    assert [got[i] for i in (0, 3, 4, 7)] == [-1] * 4
    assert [got[i] for i in (1, 2, 5, 6)] == [clean[i] for i in (1, 2, 5, 6)]
    assert tokens(broken, [replace(row, banned=(17, 299)) for row in rows])[0] == -1  # a ban does not hide it


# ------------------------------------------------------------------------------------------------ greedy and ties


@given(st.lists(st.lists(st.integers(-2, 2), min_size=6, max_size=6), min_size=1, max_size=5))
def test_greedy_takes_the_lowest_id_of_the_largest(values: list[list[int]]) -> None:
    logits = torch.tensor(values, dtype=torch.float32)
    assert tokens(logits, [Row()] * len(values)) == [row.index(max(row)) for row in values]


@given(
    st.lists(st.lists(st.integers(-3, 3), min_size=40, max_size=40), min_size=1, max_size=4),
    st.integers(1, 40),
)
def test_candidates_are_ordered_by_value_then_id(values: list[list[int]], width: int) -> None:
    ordered, ids = top_candidates(torch.tensor(values, dtype=torch.float32), width)
    for row, got, got_ids in zip(values, ordered.tolist(), ids.tolist(), strict=True):
        expected = sorted(range(40), key=lambda i: (-row[i], i))[:width]
        assert got_ids == expected
        assert got == [row[i] for i in expected]


def test_ties_at_the_border_of_a_filter_go_to_the_lower_ids() -> None:
    logits = torch.zeros(400, 100)
    logits[:, 50] = 1.0
    rows = [Row(temperature=1.0, top_k=3, seed=seed) for seed in range(400)]
    assert set(tokens(logits, rows)) == {50, 0, 1}
    rows = [Row(temperature=1.0, top_p=0.05, seed=seed) for seed in range(400)]  # e + 4 of e + 99
    assert set(tokens(logits, rows)) == {50, 0, 1, 2}


def test_filters_that_keep_everything_change_nothing() -> None:
    logits = normal(40, 500, seed=6, dtype=torch.float32)
    plain = tokens(logits, [Row(temperature=1.3, seed=seed) for seed in range(40)])
    for wide in (Row(top_k=500), Row(top_k=10**6), Row(min_p=1e-30), Row(top_k=500, min_p=1e-30)):
        assert tokens(logits, [replace(wide, temperature=1.3, seed=seed) for seed in range(40)]) == plain


def test_extreme_logits() -> None:
    vocab = 5000
    one_hot = torch.full((vocab,), -torch.inf)
    one_hot[123] = 4.0
    steep = torch.linspace(-1e30, 1e30, vocab)
    for logits, expected in ((one_hot, 123), (steep, vocab - 1)):
        for row in (Row(), Row(temperature=1.0), Row(temperature=1e-30), Row(temperature=1.0, top_p=0.5)):
            assert tokens(logits[None], [row]) == [expected]
    level = torch.full((300, vocab), 3.0)
    drawn = tokens(level, [Row(temperature=1.0, seed=seed) for seed in range(300)])
    assert drawn == [
        expected_token(level[0].double(), Row(temperature=1.0, seed=seed)) for seed in range(300)
    ]
    two = torch.full((2000, 3), -torch.inf)
    two[:, 1:] = torch.tensor([0.0, -0.1])
    counts = torch.bincount(
        sample(two, [Row(temperature=1.0, seed=s) for s in range(2000)]).token_ids, minlength=3
    )
    assert counts[0] == 0
    assert 950 < counts[1] < 1150


# ---------------------------------------------------------------------------------------------------- distribution


@pytest.mark.parametrize(
    "row", [Row(temperature=0.8), Row(temperature=1.0, top_k=6), Row(temperature=1.0, top_p=0.9)]
)
@pytest.mark.parametrize("across", ["seeds", "steps"])
def test_frequencies_follow_the_distribution(row: Row, across: str) -> None:
    count, logits = 6000, torch.linspace(0, 2.5, 10)
    rows = [
        replace(row, seed=i, index=2) if across == "seeds" else replace(row, seed=99, index=i)
        for i in range(count)
    ]
    drawn = torch.bincount(sample(logits.expand(count, 10), rows).token_ids, minlength=10)
    kept = torch.full((10,), -torch.inf)
    keep = 6 if row.top_k else 9 if row.top_p < 1 else 10
    if row.top_p < 1:
        ordered = (logits / row.temperature).softmax(0).flip(0)
        keep = int((ordered.cumsum(0) - ordered < row.top_p).sum())
    kept[10 - keep :] = logits[10 - keep :] / row.temperature
    expected = kept.softmax(0) * count
    assert drawn[: 10 - keep].sum() == 0
    inside = expected > 0
    chi_square = ((drawn[inside] - expected[inside]) ** 2 / expected[inside]).sum().item()
    assert chi_square < 27.9  # 0.1 % quantile for nine degrees of freedom; seeds are fixed


# ------------------------------------------------------------------------------------------------------- penalties


def test_penalties_see_every_token_sampled_before() -> None:
    vocab, steps = 30, 25
    row = Row(temperature=0.9, seed=3, repetition=1.25, presence=0.5, frequency=0.25, prompt=(1, 2, 2))
    state = PenaltyState(3, vocab, CPU)
    sampler = Sampler(vocab, CPU, state)
    state.output_counts.fill_(9)  # a former owner's
    state.prompt_mask.fill_(True)
    state.init_row(2, torch.tensor(row.prompt), torch.empty(0, dtype=torch.int64))
    output: tuple[int, ...] = ()
    for index in range(steps):
        now = replace(row, index=index, output=output)
        logits = normal(1, vocab, seed=index, scale=1.0)
        batch = batch_of([now])
        batch.penalty_row.fill_(2)
        token = int(sampler.sample(logits, batch).token_ids)
        assert token == expected_token(logits[0], now)
        output += (token,)
    rebuilt = PenaltyState(3, vocab, CPU)
    rebuilt.init_row(2, torch.tensor(row.prompt), torch.tensor(output))
    assert torch.equal(rebuilt.output_counts[2], state.output_counts[2])
    assert torch.equal(rebuilt.prompt_mask[2], state.prompt_mask[2])


def test_rows_without_penalties_count_into_the_dummy_row_only() -> None:
    state = PenaltyState(2, 5, CPU)
    state.observe(torch.tensor([-1, 1, 1], dtype=torch.int32), torch.tensor([3, 4, -1]))
    assert state.output_counts.tolist()[:2] == [[0] * 5, [0, 0, 0, 0, 1]]
    assert PenaltyState.num_bytes(2, 5) == state.output_counts.nbytes + state.prompt_mask.nbytes == 3 * 5 * 5


def test_penalties_need_a_state() -> None:
    with pytest.raises(ValueError, match="PenaltyState"):
        Sampler(5, CPU).sample(torch.zeros(1, 5), batch_of([Row(presence=1.0)]))


def test_banned_tokens_with_padding_and_token_zero() -> None:
    logits = torch.tensor([[5.0, 4.0, 3.0]] * 4)
    rows = [Row(banned=(0, 1)), Row(banned=(0,)), Row(), Row(banned=(2,))]
    assert tokens(logits, rows) == [2, 1, 0, 0]
    rows = [Row(bias={0: -2.0, 2: 1.5}), Row(bias={2: 2.5}), Row(bias={1: 0.5, 0: -100.0}), Row()]
    assert tokens(logits, rows) == [2, 2, 1, 0]


# -------------------------------------------------------------------------------------------------------- logprobs


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_logprobs_are_those_of_the_raw_logits(dtype: torch.dtype) -> None:
    logits = normal(3, 50, seed=2, dtype=dtype)
    rows = [
        Row(bias={7: 100.0}),
        Row(temperature=2.0, top_k=3),
        Row(repetition=2.0, prompt=(1,), banned=(4,)),
    ]
    result = sample(logits, rows, num_logprobs=4)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    expected = logits.to(wide).log_softmax(dim=-1)
    assert result.token_ids[0] == 7
    assert result.logprobs is not None
    assert result.logprobs.dtype == wide
    assert torch.equal(result.logprobs, expected[torch.arange(3), result.token_ids])
    assert result.top_ids is not None
    assert result.top_ids.dtype == torch.int32
    assert torch.equal(result.top_ids.long(), logits.sort(dim=1, descending=True, stable=True).indices[:, :4])
    assert result.top_logprobs is not None
    assert torch.equal(result.top_logprobs, expected.gather(1, result.top_ids.long()))


def test_logprobs_only_where_asked_for() -> None:
    logits = normal(1, 6, seed=1)
    nothing, chosen, wide = (sample(logits, [Row()], num_logprobs=n) for n in (-1, 0, 20))
    assert nothing.logprobs is None
    assert chosen.logprobs is not None
    assert chosen.top_ids is None
    assert wide.top_ids is not None
    assert wide.top_ids.shape == (1, 6)


# ------------------------------------------------------------------------------------------------------ the contract


def test_logits_are_not_modified() -> None:
    logits = normal(2, 40, seed=9, dtype=torch.float32)
    before = logits.clone()
    sample(logits, [Row(temperature=1.0, bias={1: 2.0}, repetition=1.5, prompt=(3,), banned=(2,)), Row()], 2)
    assert torch.equal(logits, before)


def test_empty_batch_and_wrong_shapes() -> None:
    assert Sampler(5, CPU).sample(torch.zeros(0, 5), batch_of([])).token_ids.shape == (0,)
    for logits in (torch.zeros(2, 5), torch.zeros(1, 6), torch.zeros(5)):
        with pytest.raises(ValueError, match="do not fit"):
            Sampler(5, CPU).sample(logits, batch_of([Row()]))
