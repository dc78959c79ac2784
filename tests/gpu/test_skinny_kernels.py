"""Linear layers for few rows against plain PyTorch: over odd sizes, and with each of the constants that engines use.

On a machine without a GPU the first of them run in Triton's interpreter with ``TRITON_INTERPRET=1``, some slowly.
"""

from __future__ import annotations

import zlib

import pytest
import torch

from tests.gpu.interpreter import BF16, DEVICE, F16, INTERPRETED, KERNEL_MARKS
from tests.gpu.kernel_references import relative_error
from tests.gpu.paged_rows import make_rows

pytestmark = KERNEL_MARKS
TOLERANCE = {F16: 2e-3, BF16: 1e-2}  # relative error, as in test_kernels.py


def _hopper() -> bool:
    return not INTERPRETED and torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


@pytest.fixture(autouse=True)
def _seeded(request: pytest.FixtureRequest) -> None:
    torch.manual_seed(zlib.crc32(request.node.name.encode()))


@pytest.mark.parametrize("dtype", [F16] if INTERPRETED else [BF16, F16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tiles", [(128, 64, 1), (64, 128, 3), (64, 64, 8)])
@pytest.mark.parametrize(
    ("rows", "outputs", "inputs"), [(1, 128, 64), (5, 600, 264), (32, 1000, 1024), (64, 64, 4096)]
)
def test_skinny_linear(
    rows: int, outputs: int, inputs: int, tiles: tuple[int, int, int], bias: bool, dtype: torch.dtype
) -> None:
    from backend.kernels.skinny_linear import LinearConfig, LinearWorkspace, partial_linear, skinny_linear

    x = torch.randn(rows, inputs, device=DEVICE).to(dtype)
    weight = torch.randn(outputs, inputs, device=DEVICE).to(dtype)
    offset = torch.randn(outputs, device=DEVICE).to(dtype) if bias else None
    workspace = LinearWorkspace(torch.device(DEVICE))
    config = LinearConfig(*tiles, warps=4, stages=3)
    output = skinny_linear(x, weight, offset, workspace=workspace, config=config)
    again = skinny_linear(x, weight, offset, workspace=workspace, config=config)
    assert torch.equal(output, again)
    assert not workspace.counters.any()
    expected = x.double() @ weight.double().T
    parts = partial_linear(x, weight, config=config)
    assert parts.shape == (config.splits, rows, outputs)
    assert relative_error(parts.double().sum(0), expected) < 1e-5
    if offset is not None:
        expected += offset.double()
    assert relative_error(output, expected) < TOLERANCE[dtype]


# ----------------------------------------------------------------------------------------- dependent launch, graphs


@pytest.mark.skipif(INTERPRETED, reason="needs a GPU")
@pytest.mark.parametrize("splits", [1, 4])
def test_a_chain_with_dependent_launches_in_a_graph_equals_the_plain_chain(splits: int) -> None:
    from backend.kernels.activation import silu_and_mul
    from backend.kernels.norm import add_rms_norm
    from backend.kernels.paged_decode import DecodeConfig, DecodeWorkspace, paged_decode
    from backend.kernels.rope_cache import rope_and_cache
    from backend.kernels.skinny_linear import LinearConfig, LinearWorkspace, partial_linear, skinny_linear

    heads, kv_heads, size, hidden, inner, layers = 8, 2, 64, 512, 1024, 6
    lengths = [1, 100, 700, 16, 17]
    cache = make_rows(lengths, kv_heads=kv_heads, head_size=size, block_size=16, dtype=BF16, device="cuda")
    positions = cache.kv_lengths - 1
    slots = cache.block_table.gather(1, (positions // 16).long()[:, None])[:, 0] * 16 + positions % 16
    cos_sin = torch.randn(1000, size, device="cuda")
    weights = [
        [
            (torch.randn(n, k, device="cuda") * 0.05).to(BF16)
            for n, k in (((heads + 2 * kv_heads) * size, hidden), (hidden, heads * size), (2 * inner, hidden))
        ]
        + [(torch.randn(hidden, inner, device="cuda") * 0.05).to(BF16)]
        for _ in range(layers)
    ]
    gain = torch.ones(hidden, device="cuda", dtype=BF16)
    device = torch.device("cuda")
    linear_config = LinearConfig(64, 64, splits, 4, 3)
    sums = LinearWorkspace(device)
    workspace = DecodeWorkspace(len(lengths), heads, size, splits, device)
    first = torch.randn(len(lengths), hidden, device="cuda").to(BF16)

    def chain(pdl: bool) -> torch.Tensor:
        x, residual = first, first
        for qkv_weight, o, gate_up, down in weights:
            h, residual = add_rms_norm(x, residual, gain, 1e-5, pdl=pdl)
            qkv = skinny_linear(h, qkv_weight, workspace=sums, config=linear_config, pdl=pdl)
            query = rope_and_cache(
                qkv, positions, cos_sin, slots, cache.keys, cache.values, num_heads=heads, pdl=pdl
            )
            mixed = paged_decode(
                query,
                cache.keys,
                cache.values,
                cache.block_table,
                cache.kv_lengths,
                scale=0.125,
                workspace=workspace,
                config=DecodeConfig(64, splits, 4, 3),
                pdl=pdl,
            )
            parts = partial_linear(mixed.flatten(1), o, config=linear_config, pdl=pdl)
            h, residual = add_rms_norm(parts, residual, gain, 1e-5, pdl=pdl)
            gated = silu_and_mul(
                skinny_linear(h, gate_up, workspace=sums, config=linear_config, pdl=pdl), pdl=pdl
            )
            x = skinny_linear(gated, down, workspace=sums, config=linear_config, pdl=pdl)
        return x

    expected = chain(False)
    assert expected.isfinite().all()
    graph = torch.cuda.CUDAGraph()
    chain(True)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        output = chain(True)
    for _ in range(20):
        output.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(output, expected)


# ----------------------------------------------------------------------------------------- the constants of engines

HIDDEN, VOCAB = 4096, 128256  # of Llama 3.1 8B
# (outputs, inputs) of a product, and the padded row counts for which a kernel of ours computes it.
PRODUCTS = {
    (HIDDEN, HIDDEN): (16, 32),  # attention's output
    (HIDDEN, 14336): (16, 32),  # down
    (28672, HIDDEN): (32, 64),  # gate and up
    (VOCAB, HIDDEN): (32, 64),  # logits
}
# Those of decode graphs, and the ends of each padding. Below a padding's first row the next smaller one is used.
ROWS = {16: (1, 2, 4, 8, 15, 16), 32: (17, 24, 31, 32), 64: (33, 40, 48, 56, 63, 64)}


@pytest.mark.skipif(not _hopper(), reason="needs a Hopper GPU, for which alone there are such constants")
def test_each_row_count_gets_the_constants_of_its_padding() -> None:
    from backend.kernels.skinny_linear import _FASTER, linear_config

    assert set(_FASTER) == {(pad, *shape) for shape, pads in PRODUCTS.items() for pad in pads}
    device = torch.device("cuda")
    for shape, pads in PRODUCTS.items():
        for rows in range(1, 67):
            pad = next(pad for pad in (16, 32, 64, 128) if rows <= pad)
            expected = _FASTER[pad, *shape] if pad in pads else None
            assert linear_config(rows, *shape, device) is expected, f"{rows} rows of {shape}"


@pytest.mark.skipif(not _hopper(), reason="needs a Hopper GPU, for which alone there are such constants")
@pytest.mark.parametrize(
    ("outputs", "inputs", "rows"),
    [(*shape, rows) for shape, pads in PRODUCTS.items() for pad in pads for rows in ROWS[pad]],
)
def test_the_products_of_engines(outputs: int, inputs: int, rows: int) -> None:
    """As a step runs them: in parts where the next norm adds those up, and in a graph between kernels that start
    early, as this one does; what such a kernel read too early would be the replay's before it."""
    from backend.kernels.activation import silu_and_mul
    from backend.kernels.norm import add_rms_norm
    from backend.kernels.skinny_linear import LinearWorkspace, linear_config, partial_linear, skinny_linear

    config = linear_config(rows, outputs, inputs, torch.device("cuda"))
    assert config is not None
    weight = torch.randn(outputs, inputs, device="cuda", dtype=BF16)
    source = torch.empty(rows, 2 * inputs, device="cuda", dtype=BF16)
    workspace = LinearWorkspace(torch.device("cuda"))
    buffer = torch.full((rows + 1, outputs), 7.0, device="cuda", dtype=BF16)  # as the graphs' own for logits
    residual = torch.randn(rows, outputs, device="cuda", dtype=BF16)
    gain = torch.ones(outputs, device="cuda", dtype=BF16)
    in_parts = config.splits > 1 and outputs == HIDDEN

    def step(pdl: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        x = silu_and_mul(source, pdl=pdl)
        if in_parts:
            product = partial_linear(x, weight, config=config, pdl=pdl)
            return x, product, add_rms_norm(product, residual, gain, 1e-5, pdl=pdl)[0]
        product = skinny_linear(x, weight, workspace=workspace, config=config, output=buffer[:rows], pdl=pdl)
        return x, product, silu_and_mul(product, pdl=pdl)

    def check(x: torch.Tensor, product: torch.Tensor) -> None:
        expected = x.float() @ weight.float().T
        size = expected.pow(2).mean().sqrt().item()
        if in_parts:
            assert product.shape == (config.splits, rows, outputs)
            assert product.dtype == torch.float32
            product = product.sum(0)
            assert relative_error(product, expected) < 2e-5  # either's rounding
        else:
            assert relative_error(product, expected) < TOLERANCE[BF16]
        # No element is off by more than a bfloat16 is by nature: a lost row or tile would hide in the norm of all.
        torch.testing.assert_close(product.float(), expected, rtol=2**-8, atol=1e-3 * size)
        assert (buffer[rows] == 7).all()
        assert not workspace.counters.any()

    source.normal_()
    check(*step(pdl=False)[:2])
    step(pdl=True)  # compiles it
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        captured = step(pdl=True)
    for _ in range(5):
        source.normal_()
        expected = [tensor.clone() for tensor in step(pdl=False)]
        if not in_parts:
            buffer[:rows].fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        for tensor, other in zip(captured, expected, strict=True):
            assert torch.equal(tensor, other)
    check(*captured[:2])


@pytest.mark.skipif(not _hopper(), reason="needs a Hopper GPU, for which alone there are such constants")
@pytest.mark.parametrize("rows", [1, 16, 31])
def test_the_products_of_engines_in_one_part(rows: int) -> None:
    """Where no norm follows, the last split adds the sums up, by the same constants."""
    from backend.kernels.skinny_linear import LinearWorkspace, linear_config, skinny_linear

    workspace = LinearWorkspace(torch.device("cuda"))
    for outputs, inputs in ((HIDDEN, HIDDEN), (HIDDEN, 14336)):
        config = linear_config(rows, outputs, inputs, torch.device("cuda"))
        assert config is not None
        assert config.splits > 1
        x = torch.randn(rows, inputs, device="cuda", dtype=BF16)
        weight = torch.randn(outputs, inputs, device="cuda", dtype=BF16)
        expected = x.float() @ weight.float().T
        size = expected.pow(2).mean().sqrt().item()
        for pdl in (False, True):
            for _ in range(3):
                output = skinny_linear(x, weight, workspace=workspace, config=config, pdl=pdl)
                torch.testing.assert_close(output.float(), expected, rtol=2**-8, atol=1e-3 * size)
                assert not workspace.counters.any()
