"""Each kernel against plain PyTorch, over odd sizes.

On a machine without a GPU the same tests run in Triton's interpreter with ``TRITON_INTERPRET=1``, some slowly.
"""

from __future__ import annotations

import random
import zlib

import pytest
import torch

from tests.gpu.interpreter import BF16, DEVICE, DTYPES, F16, F32, INTERPRETED, KERNEL_MARKS
from tests.gpu.kernel_references import attend, gather_rows, relative_error, rms_norm, rotate
from tests.gpu.paged_rows import make_rows

pytestmark = KERNEL_MARKS
# Relative error against float64: what the type's own rounding of inputs and weights costs, with room.
TOLERANCE = {F32: 3e-6, F16: 2e-3, BF16: 1e-2}


@pytest.fixture(autouse=True)
def _seeded(request: pytest.FixtureRequest) -> None:
    torch.manual_seed(zlib.crc32(request.node.name.encode()))


# ------------------------------------------------------------------------------------------------------------- norm


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "size"), [(1, 64), (3, 576), (33, 4096), (5, 5120)])
@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("residual", [False, True])
def test_add_rms_norm(rows: int, size: int, dtype: torch.dtype, offset: int, residual: bool) -> None:
    from backend.kernels.norm import add_rms_norm

    wide = torch.randn(rows, size + 8, device=DEVICE).to(dtype)
    x = wide[:, :size]
    other = torch.randn(rows, size, device=DEVICE).to(dtype) if residual else None
    weight = torch.randn(size, device=DEVICE).to(dtype)
    normed, summed = add_rms_norm(x, other, weight, 1e-5, offset=offset)
    expected_sum = x if other is None else x + other
    assert torch.equal(summed, expected_sum)
    expected = rms_norm(expected_sum, weight, 1e-5, offset)
    assert relative_error(normed, expected) < (1e-6 if dtype == F32 else 1e-3)
    assert torch.equal(x, wide[:, :size])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("parts", [1, 3, 8])
def test_add_rms_norm_of_parts(parts: int, dtype: torch.dtype) -> None:
    from backend.kernels.norm import add_rms_norm

    x = torch.randn(parts, 5, 576, device=DEVICE)
    residual = torch.randn(5, 576, device=DEVICE).to(dtype)
    weight = torch.randn(576, device=DEVICE).to(dtype)
    normed, summed = add_rms_norm(x, residual, weight, 1e-5)
    total = x[0].clone()
    for part in x[1:]:
        total += part
    assert torch.equal(summed, total.to(dtype) + residual)
    assert relative_error(normed, rms_norm(summed, weight, 1e-5, 0)) < (1e-6 if dtype == F32 else 1e-3)


# ------------------------------------------------------------------------------------------------------- activation


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "size"), [(1, 96), (7, 1536), (32, 14336)])
def test_gated_activations(rows: int, size: int, dtype: torch.dtype) -> None:
    from backend.kernels.activation import gelu_tanh_and_mul, silu_and_mul

    x = (torch.randn(rows, 2 * size, device=DEVICE) * 3).to(dtype)
    gate, up = x[:, :size], x[:, size:]
    silu = torch.nn.functional.silu(gate.float()).to(dtype) * up
    gelu = torch.nn.functional.gelu(gate.float(), approximate="tanh").to(dtype) * up
    limit = 1e-6 if dtype == F32 else 1e-3
    assert relative_error(silu_and_mul(x), silu) < limit
    assert relative_error(gelu_tanh_and_mul(x), gelu) < limit


def test_gated_activations_of_extreme_values() -> None:
    from backend.kernels.activation import gelu_tanh_and_mul, silu_and_mul

    x = torch.tensor([[-200.0, -20.0, 0.0, 20.0, 200.0] + [1.0] * 5], device=DEVICE)
    expected = torch.tensor([[0.0, 0.0, 0.0, 20.0, 200.0]], device=DEVICE)
    torch.testing.assert_close(silu_and_mul(x), expected, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(gelu_tanh_and_mul(x), expected, atol=1e-6, rtol=1e-6)


# ------------------------------------------------------------------------------------------------------ rope, cache


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm", [None, 0, 1])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_size", "rotary"),
    [(32, 8, 128, 128), (9, 3, 64, 64), (4, 4, 80, 32), (14, 2, 96, 96), (5, 1, 256, 64)],
)
def test_rope_and_cache(
    heads: int, kv_heads: int, head_size: int, rotary: int, norm: int | None, dtype: torch.dtype
) -> None:
    from backend.kernels.rope_cache import rope_and_cache

    tokens, blocks, block_size = 7, 5, 16
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * head_size, device=DEVICE).to(dtype)
    angles = torch.arange(100.0)[:, None] * torch.rand(rotary // 2)
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1).to(DEVICE)
    positions = torch.randint(0, 100, (tokens,)).int().to(DEVICE)
    slots = torch.randperm(blocks * block_size)[:tokens].int().to(DEVICE)
    slots[2] = -1  # stores nothing
    weights = (
        [torch.randn(head_size, device=DEVICE).to(dtype) for _ in range(2)]
        if norm is not None
        else [None] * 2
    )
    keys = torch.randn(blocks, block_size, kv_heads, head_size, device=DEVICE).to(dtype)
    values = torch.randn_like(keys)

    q, k, v = qkv.clone().view(tokens, -1, head_size).split([heads, kv_heads, kv_heads], dim=1)
    if norm is not None:
        q, k = rms_norm(q, weights[0], 1e-6, norm), rms_norm(k, weights[1], 1e-6, norm)
    expected_keys, expected_values = keys.clone(), values.clone()
    kept = [i for i in range(tokens) if i != 2]
    expected_keys.flatten(0, 1)[slots[kept].long()] = rotate(k, cos_sin, positions)[kept]
    expected_values.flatten(0, 1)[slots[kept].long()] = v[kept]

    original = qkv.clone()
    apart = torch.empty(tokens, heads, head_size, device=DEVICE, dtype=dtype)
    kwargs = {"num_heads": heads, "q_norm": weights[0], "k_norm": weights[1], "norm_offset": norm or 0}
    rope_and_cache(qkv, positions, cos_sin, slots, keys, values, query_out=apart, **kwargs)
    assert torch.equal(qkv, original)
    limit = 1e-6 if dtype == F32 else 1e-3
    assert relative_error(apart, rotate(q, cos_sin, positions)) < limit
    assert relative_error(keys, expected_keys) < limit
    assert torch.equal(values, expected_values)
    in_place = rope_and_cache(qkv, positions, cos_sin, slots, keys, values, **kwargs)
    assert in_place.data_ptr() == qkv.data_ptr()
    assert torch.equal(in_place, apart)
    assert torch.equal(qkv[:, heads * head_size :], original[:, heads * head_size :])


# ---------------------------------------------------------------------------------------------------- decode

OPTIONS = [
    {"window": None, "softcap": None, "sinks": False},
    {"window": 100, "softcap": None, "sinks": False},
    {"window": None, "softcap": 20.0, "sinks": False},
    {"window": 37, "softcap": 30.0, "sinks": True},
]
LENGTHS = [1, 0, 2, 15, 16, 17, 63, 64, 65, 100, 333, 1024, 1025, 5000]


def _tolerance(dtype: torch.dtype, softcap: object) -> float:
    """A soft cap's tangent rounds to about 1e-7 of the cap, whatever the type of the inputs."""
    return TOLERANCE[dtype] + 1e-7 * (softcap if isinstance(softcap, float) else 0.0)


def _sinks(heads: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(heads, device=DEVICE).to(dtype) * 2


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_size", "block_size"),
    [
        (32, 8, 128, 16),
        (8, 8, 64, 32),
        (9, 3, 32, 8),
        (14, 2, 80, 16),
        (6, 1, 96, 64),
        (8, 1, 256, 16),
        (40, 2, 64, 1),
    ],
)
@pytest.mark.parametrize("splits", [1, 3, 8])
def test_paged_decode(
    heads: int,
    kv_heads: int,
    head_size: int,
    block_size: int,
    splits: int,
    options: dict[str, object],
    dtype: torch.dtype,
) -> None:
    from backend.kernels.paged_decode import DecodeConfig, DecodeWorkspace, decode_config, paged_decode

    lengths = random.Random(0).sample(LENGTHS, 6) if INTERPRETED else LENGTHS
    rows = make_rows(
        lengths, kv_heads=kv_heads, head_size=head_size, block_size=block_size, dtype=dtype, device=DEVICE
    )
    fused = torch.randn(len(lengths), heads + 2 * kv_heads, head_size, device=DEVICE).to(dtype)
    query = fused[:, :heads]
    window, softcap = options["window"], options["softcap"]
    sinks = _sinks(heads, dtype) if options["sinks"] else None
    chosen = decode_config(len(lengths), 5000, num_kv_heads=kv_heads, head_size=head_size, dtype=dtype)
    config = DecodeConfig(chosen.tile, splits, chosen.warps, chosen.stages)
    workspace = DecodeWorkspace(len(lengths), heads, head_size, splits, torch.device(DEVICE))
    arguments = (query, rows.keys, rows.values, rows.block_table, rows.kv_lengths)
    kwargs = {"scale": 0.3, "workspace": workspace, "config": config, "sinks": sinks}
    output = paged_decode(*arguments, **kwargs, window=window, softcap=softcap)
    again = paged_decode(*arguments, **kwargs, window=window, softcap=softcap)
    assert torch.equal(output, again)
    assert not workspace.counters.any()
    for row, length in enumerate(lengths):
        if not length:
            assert not output[row].any()
            continue
        expected = attend(
            query[row : row + 1],
            gather_rows(rows.keys, rows.block_table, row, length),
            gather_rows(rows.values, rows.block_table, row, length),
            scale=0.3,
            window=window,
            softcap=softcap,
            sinks=sinks,
        )
        assert relative_error(output[row : row + 1], expected) < TOLERANCE[dtype], f"row of length {length}"


@pytest.mark.parametrize("seed", range(2 if INTERPRETED else 60))
def test_paged_decode_of_random_shapes(seed: int) -> None:
    from backend.kernels.paged_decode import DecodeConfig, DecodeWorkspace, paged_decode

    rng = random.Random(seed)
    kv_heads = rng.choice([1, 2, 3, 8])
    heads = kv_heads * rng.choice([1, 2, 3, 4, 7, 16])
    head_size, block_size = rng.choice([16, 64, 72, 128, 192, 256]), rng.choice([1, 8, 16, 32])
    most = 100 if INTERPRETED else rng.choice([40, 500, 3000])
    lengths = [rng.choice([0, 1, rng.randrange(most)]) for _ in range(rng.choice([1, 3, 40]))]
    dtype = rng.choice(DTYPES)
    rows = make_rows(
        lengths, kv_heads=kv_heads, head_size=head_size, block_size=block_size, dtype=dtype, device=DEVICE
    )
    query = torch.randn(len(lengths), heads, head_size, device=DEVICE).to(dtype)
    window, softcap = rng.choice([None, 1, rng.randrange(2, 300)]), rng.choice([None, 5.0, 50.0])
    sinks = _sinks(heads, dtype) if rng.random() < 0.4 else None
    splits = rng.choice([1, 1, 2, 5, 33])
    narrow = dtype == F32 or head_size > 128
    tile, stages = (32, 2) if narrow else (64, rng.choice([2, 3, 4]))
    config = DecodeConfig(tile, splits, 8 if narrow else 4, stages)
    pdl = not INTERPRETED and torch.cuda.get_device_capability() >= (9, 0) and rng.random() < 0.5
    output = paged_decode(
        query,
        rows.keys,
        rows.values,
        rows.block_table,
        rows.kv_lengths,
        scale=0.2,
        workspace=DecodeWorkspace(len(lengths), heads, head_size, splits, torch.device(DEVICE)),
        config=config,
        window=window,
        softcap=softcap,
        sinks=sinks,
        pdl=pdl,
    )
    for row, length in enumerate(lengths):
        if not length:
            assert not output[row].any()
            continue
        expected = attend(
            query[row : row + 1],
            gather_rows(rows.keys, rows.block_table, row, length),
            gather_rows(rows.values, rows.block_table, row, length),
            scale=0.2,
            window=window,
            softcap=softcap,
            sinks=sinks,
        )
        assert relative_error(output[row : row + 1], expected) < _tolerance(dtype, softcap), (
            f"row of length {length}"
        )


def test_paged_decode_refuses_a_small_workspace() -> None:
    from backend.kernels.paged_decode import DecodeConfig, DecodeWorkspace, paged_decode

    rows = make_rows([5, 6], kv_heads=1, head_size=32, block_size=16, dtype=F32, device=DEVICE)
    query = torch.randn(2, 2, 32, device=DEVICE)
    workspace = DecodeWorkspace(2, 2, 32, 1, torch.device(DEVICE))
    with pytest.raises(ValueError, match="workspace"):
        paged_decode(
            query,
            rows.keys,
            rows.values,
            rows.block_table,
            rows.kv_lengths,
            scale=1.0,
            workspace=workspace,
            config=DecodeConfig(32, 2, 4, 2),
        )


# ---------------------------------------------------------------------------------------------------------- prefill


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_size", "block_size"),
    [
        (32, 8, 128, 16),
        (8, 8, 64, 32),
        (9, 3, 32, 8),
        (14, 2, 80, 16),
        (6, 1, 96, 64),
        (8, 1, 256, 16),
        (40, 2, 64, 1),
    ],
)
@pytest.mark.parametrize("long", [False, True])
def test_paged_prefill(
    heads: int,
    kv_heads: int,
    head_size: int,
    block_size: int,
    options: dict[str, object],
    dtype: torch.dtype,
    long: bool,
) -> None:
    # (queries, tokens cached before them)
    chunks = [(1, 0), (0, 0), (17, 0), (64, 3), (1, 250), (5, 61)]
    if not INTERPRETED:
        chunks += [(130, 0), (333, 700), (1000, 0), (2, 5000)]
    _check_prefill(chunks, heads, kv_heads, head_size, block_size, options, dtype, long)


@pytest.mark.parametrize("seed", range(2 if INTERPRETED else 60))
def test_paged_prefill_of_random_shapes(seed: int) -> None:
    rng = random.Random(seed)
    kv_heads = rng.choice([1, 2, 3, 8])
    heads = kv_heads * rng.choice([1, 2, 3, 4, 7])
    most = 40 if INTERPRETED else rng.choice([20, 200, 700])
    chunks = [
        (
            rng.choice([0, 1, rng.randrange(most)]),
            rng.choice([0, rng.randrange(most), rng.randrange(most * 4)]),
        )
        for _ in range(rng.choice([1, 2, 5, 5 if INTERPRETED else 100]))
    ]
    chunks = [(queries, cached if queries else max(cached, 1)) for queries, cached in chunks]
    options = {
        "window": rng.choice([None, 1, rng.randrange(2, 300)]),
        "softcap": rng.choice([None, 5.0, 50.0]),
        "sinks": rng.random() < 0.4,
    }
    shape = (heads, kv_heads, rng.choice([16, 64, 72, 128, 192, 256]), rng.choice([1, 8, 16, 32]))
    _check_prefill(chunks, *shape, options, rng.choice(DTYPES), rng.random() < 0.5)


def test_paged_prefill_with_few_rows_of_queries_among_many() -> None:
    chunks = [(0, 5)] * 40 + [(70, 9), (0, 3), (3, 0)] + [(0, 1)] * 9
    _check_prefill(chunks, 4, 2, 64, 16, OPTIONS[0], F32, True, most_rows=2)


def _check_prefill(
    chunks: list[tuple[int, int]],
    heads: int,
    kv_heads: int,
    head_size: int,
    block_size: int,
    options: dict[str, object],
    dtype: torch.dtype,
    long: bool,
    most_rows: int | None = None,
) -> None:
    """Each row of ``(queries, tokens cached before them)`` against the reference."""
    from backend.kernels.paged_prefill import paged_prefill, prefill_config

    lengths = [queries + cached for queries, cached in chunks]
    rows = make_rows(
        lengths, kv_heads=kv_heads, head_size=head_size, block_size=block_size, dtype=dtype, device=DEVICE
    )
    skipped = 3  # tokens of decode rows before these
    starts = [skipped]
    for queries, _ in chunks:
        starts.append(starts[-1] + queries)
    spare = 6  # a bucket larger than the rows
    fused = torch.randn(starts[-1] + spare, heads + 2 * kv_heads, head_size, device=DEVICE).to(dtype)
    query = fused[:, :heads]
    window, softcap = options["window"], options["softcap"]
    sinks = _sinks(heads, dtype) if options["sinks"] else None
    output = torch.full((len(query), heads, head_size), 7.0, device=DEVICE, dtype=dtype)
    paged_prefill(
        query,
        rows.keys,
        rows.values,
        rows.block_table,
        torch.tensor(starts, device=DEVICE).int(),
        rows.kv_lengths,
        scale=0.3,
        window=window,
        softcap=softcap,
        sinks=sinks,
        output=output,
        config=prefill_config(heads // kv_heads, head_size, dtype, long=long),
        most_rows=most_rows,
    )
    assert (output[:skipped] == 7).all()
    assert (output[starts[-1] :] == 7).all()
    for row, length in enumerate(lengths):
        if starts[row] == starts[row + 1]:
            continue
        span = slice(starts[row], starts[row + 1])
        expected = attend(
            query[span],
            gather_rows(rows.keys, rows.block_table, row, length),
            gather_rows(rows.values, rows.block_table, row, length),
            scale=0.3,
            window=window,
            softcap=softcap,
            sinks=sinks,
        )
        assert relative_error(output[span], expected) < _tolerance(dtype, softcap), f"row {chunks[row]}"
