"""The sampling kernels against the reference sampler: the same tokens, whatever the rows ask for.

On a machine without a GPU the same tests run in Triton's interpreter with ``TRITON_INTERPRET=1``, some slowly.
"""

from __future__ import annotations

import random
import zlib

import pytest
import torch

from tests.gpu.interpreter import BF16, DEVICE, DTYPES, F32, INTERPRETED, KERNEL_MARKS
from tests.gpu.sample_rows import Case, Row, random_row

pytestmark = KERNEL_MARKS
ROWS = 6 if INTERPRETED else 64
VOCABS = [50, 4500] if INTERPRETED else [50, 32003, 128256]
INF, NAN = float("inf"), float("nan")


@pytest.fixture
def draw(request: pytest.FixtureRequest) -> random.Random:
    """Seeded by the test's name, and PyTorch too."""
    seed = zlib.crc32(request.node.name.encode())
    torch.manual_seed(seed)
    return random.Random(seed)


def normal(rows: int, vocab: int, dtype: torch.dtype, *, scale: float = 2.0, steps: int = 0) -> torch.Tensor:
    """Random logits; rounded to ``steps`` a unit, if given, so that many tokens share a value."""
    logits = torch.randn(rows, vocab, device=DEVICE) * scale
    return ((logits * steps).round() / steps if steps else logits).to(dtype)


def seeded(draw: random.Random, **options: object) -> Row:
    return Row(seed=draw.randrange(2**63), index=draw.randrange(2**31), **options)  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------- plain and filtered rows


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [7, *VOCABS])
def test_plain_rows(vocab: int, dtype: torch.dtype, draw: random.Random) -> None:
    temperatures = [0.0 if i % 3 == 0 else draw.uniform(0.05, 1.5) for i in range(ROWS)]
    temperatures[1] = 1e-5
    rows = [seeded(draw, temperature=t) for t in temperatures]
    Case(rows, vocab, DEVICE).check(normal(ROWS, vocab, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["k", "p", "min", "all"])
@pytest.mark.parametrize("vocab", VOCABS)
def test_filtered_rows(vocab: int, kind: str, dtype: torch.dtype, draw: random.Random) -> None:
    rows = []
    for _ in range(ROWS):
        options: dict[str, object] = {"temperature": draw.uniform(0.3, 1.3)}
        if kind in ("k", "all"):
            options["top_k"] = draw.randint(1, min(vocab, draw.choice([5, 60, 3000])))
        if kind in ("p", "all"):
            options["top_p"] = draw.choice([1e-9, draw.uniform(0.01, 0.999), 0.9, 0.99999])
        if kind in ("min", "all"):
            options["min_p"] = draw.uniform(0.0, 0.3)
        rows.append(seeded(draw, **options))
    rows[3] = seeded(draw, temperature=0.9)  # one row without filters
    rows[5] = Row()  # and a greedy one
    Case(rows, vocab, DEVICE).check(normal(ROWS, vocab, dtype, steps=16))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", ["flat", "steep", "two levels", "spread", "few finite"])
def test_filters_over_every_shape_of_logits(shape: str, dtype: torch.dtype, draw: random.Random) -> None:
    """Shapes that the histograms cannot tell apart, and such that need one pass, two passes or none."""
    vocab = 1203 if INTERPRETED else 100_003
    filters: list[dict[str, object]] = [
        {"top_p": 0.9},
        {"top_p": 0.3},
        {"top_p": 0.999},
        {"top_k": 1},
        {"top_k": 40},
        {"top_k": vocab // 2},
        {"top_k": 300, "top_p": 0.8},
        {"top_k": vocab // 2, "top_p": 0.8},
        {"top_p": 0.9, "temperature": 30.0},
        {"top_p": 0.9, "temperature": 0.01},
        {"top_p": 0.9, "temperature": 1e-37},
    ]
    rows = [seeded(draw, **{"temperature": 1.0, **options}) for options in filters]
    logits = {
        "flat": torch.zeros(len(rows), vocab),
        "steep": torch.randn(len(rows), vocab) * 30,
        "two levels": (torch.rand(len(rows), vocab) < 0.5).float(),
        "spread": torch.randn(len(rows), vocab) * 0.7,
        "few finite": torch.full((len(rows), vocab), -INF),
    }[shape]
    if shape == "few finite":
        logits[:, ::97] = torch.randn(len(rows), len(logits[0, ::97]))
    Case(rows, vocab, DEVICE).check(logits.to(DEVICE, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("level", [0.0, 1.5, -1.5])
@pytest.mark.parametrize("vocab", [3000, 9000])
def test_ties_at_the_border_are_cut_by_token_id(
    vocab: int, level: float, dtype: torch.dtype, draw: random.Random
) -> None:
    """Few tokens share the border's value, and more than are gathered."""
    count = 12 if INTERPRETED else 40
    logits = torch.full((count, vocab), level, device=DEVICE, dtype=dtype)
    logits[:, vocab - 9] += 0.5
    if not level:
        logits[:, 1] = -0.0
    rows = [seeded(draw, temperature=1.0, top_k=4) for _ in range(count)]
    tokens = Case(rows, vocab, DEVICE).check(logits)
    assert set(tokens) <= {vocab - 9, 0, 1, 2}
    assert len(set(tokens)) > 2


def test_ties_and_unusable_rows() -> None:
    vocab = 10000
    logits = torch.zeros(8, vocab, device=DEVICE)
    logits[1, [7000, 4097]] = 3.0
    logits[2, 9000] = NAN
    logits[3] = -INF
    logits[4, 5] = INF
    logits[5], logits[5, 9999] = -INF, 1.0
    logits[6, 0] = NAN
    logits[7, :5000] = -1.0
    rows = [Row(temperature=t, seed=i, index=i, logprobs=3) for i, t in enumerate([0, 0, 0, 0, 1, 1, 1, 0.0])]
    tokens = Case(rows, vocab, DEVICE).check(logits)
    assert tokens == [0, 4097, -1, -1, -1, 9999, -1, 5000]


# ------------------------------------------------------------------------------------- penalties, biases, bans, records


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("round_", range(1 if INTERPRETED else 3))
def test_every_mix_of_options(vocab: int, dtype: torch.dtype, round_: int, draw: random.Random) -> None:
    """Several steps, each of which counts what the one before it sampled."""
    rows = [random_row(draw, vocab) for _ in range(ROWS)]
    case = Case(rows, vocab, DEVICE, padding=3)
    for step in range(1 if INTERPRETED else 4):
        case.check(normal(ROWS + 3, vocab, dtype, steps=0 if step % 2 else 8))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "options",
    [
        {"repetition": 1.7, "prompt": (0, 1, 2), "output": (2, 2, 4)},
        {"repetition": 0.3, "presence": 1.1, "prompt": (3, 3), "output": ()},
        {"frequency": -1.3, "prompt": (5,), "output": (1,) * 40 + (0,) * 3},
        {"bias": {0: -100.0, 4999: 99.5, 5002: 0.1}},
        {"banned": (0, 4095, 4096, 5002)},
        {"bias": dict.fromkeys(range(1024), -3.25), "banned": tuple(range(500, 628))},
        {
            "bias": {7: 2.5, 8: -2.5},
            "banned": (7,),
            "repetition": 1.3,
            "presence": 0.7,
            "frequency": 0.9,
            "prompt": (8,),
            "output": (7, 9, 9),
        },
    ],
    ids=["repetition", "presence", "frequency", "bias", "ban", "long lists", "all"],
)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_scores_are_those_of_the_reference_to_the_bit(
    options: dict[str, object], temperature: float, dtype: torch.dtype, draw: random.Random
) -> None:
    vocab = 5003
    case = Case([seeded(draw, temperature=temperature, **options)], vocab, DEVICE)
    for _ in range(3):
        logits = normal(1, vocab, dtype, scale=8.0)
        expected = case.sampler._processed(logits, case.batch())[0]
        case.check(logits)
        assert torch.equal(case.workspace.scores[0], expected)


def test_options_that_decide(draw: random.Random) -> None:
    """The favourite is penalised, biased or banned away; each of these changes the token."""
    vocab = 5003
    logits = torch.zeros(6, vocab, device=DEVICE)
    logits[:, 4500] = 2.0
    logits[:, 17] = 1.5
    rows = [
        Row(),
        Row(repetition=2.0, prompt=(4500,)),
        Row(presence=1.0, output=(4500,)),
        Row(frequency=0.3, output=(4500, 4500)),
        Row(bias={17: 0.6}),
        Row(banned=(4500,)),
    ]
    assert Case(rows, vocab, DEVICE).check(logits) == [4500, 17, 17, 17, 17, 17]


def test_a_row_that_everything_is_banned_from_is_unusable(draw: random.Random) -> None:
    vocab = 50
    rows = [
        Row(banned=tuple(range(vocab))),
        Row(bias={3: 1.0}),
        seeded(draw, temperature=1.0, repetition=1.2),
    ]
    logits = normal(3, vocab, F32)
    logits[1, 3], logits[2, 9] = INF, NAN
    assert Case(rows, vocab, DEVICE).check(logits) == [-1, -1, -1]


def test_log_probabilities_of_equal_and_of_impossible_tokens() -> None:
    vocab = 9000
    logits = torch.full((4, vocab), -INF, device=DEVICE)
    logits[0, [5, 8999, 4097]] = 1.0  # fewer finite ones than alternatives asked for
    logits[1] = 0.0  # all equal
    logits[2, ::2] = torch.arange(vocab // 2, device=DEVICE) % 7
    logits[3] = torch.linspace(-5, 5, vocab, device=DEVICE)
    rows = [Row(logprobs=20), Row(logprobs=20), Row(logprobs=3), Row(logprobs=0, bias={0: 50.0})]
    assert Case(rows, vocab, DEVICE).check(logits) == [5, 0, 12, 0]


def test_fewer_tokens_than_alternatives(draw: random.Random) -> None:
    Case([Row(logprobs=20), seeded(draw, temperature=1.0, logprobs=9)], 7, DEVICE).check(normal(2, 7, F32))


def test_a_row_does_not_depend_on_its_neighbours(draw: random.Random) -> None:
    vocab = VOCABS[-1]
    rows = [random_row(draw, vocab) for _ in range(6)]
    logits = normal(6, vocab, F32)
    together, records = Case(rows, vocab, DEVICE).ours(logits)
    for i, row in enumerate(rows):
        alone, record = Case([row], vocab, DEVICE).ours(logits[i : i + 1])
        assert alone[0] == together[i]
        assert torch.equal(record[0], records[i])


def test_a_workspace_too_small_is_refused() -> None:
    case = Case([Row()], 50, DEVICE)
    with pytest.raises(ValueError, match="workspace"):
        case.ours(torch.zeros(1, 51, device=DEVICE))
    with pytest.raises(ValueError, match="do not fit"):
        case.ours(torch.zeros(2, 50, device=DEVICE))


@pytest.mark.skipif(INTERPRETED, reason="needs a GPU")
def test_dependent_launches_in_a_graph_sample_the_same(draw: random.Random) -> None:
    vocab = 128256
    rows = [random_row(draw, vocab) for _ in range(32)]
    logits = normal(32, vocab, BF16)
    case = Case(rows, vocab, DEVICE)
    start = case.workspace.counts.clone()
    expected, records = case.ours(logits)
    records = records.clone()
    replay = case.captured(logits)
    for _ in range(10):
        case.workspace.counts.copy_(start)
        tokens, again = replay()
        assert tokens == expected
        assert torch.equal(again, records)
