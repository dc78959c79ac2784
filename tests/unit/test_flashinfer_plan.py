"""What FlashInfer's planner is told of a step; a GPU's tests run its kernels."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Literal

import pytest
import torch

from backend.api import ConfigurationError
from backend.attention import flashinfer_prefill
from backend.attention.flashinfer_prefill import FlashInferPrefill, find_flashinfer
from backend.attention.interface import AttentionParams
from backend.slots import LONG_PREFILL_ROWS, StepShape


class Planner:
    """Keeps what it is given, and lays out nothing."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def plan(self, *arguments: Any) -> list[int]:
        lists = [a.tolist() for a in arguments[3:6]]
        self.calls.append((*arguments[:3], *lists, *arguments[6:]))
        return [0, 16, 32]


@pytest.fixture
def planner() -> Planner:
    return Planner()


@pytest.fixture
def prefill(planner: Planner) -> FlashInferPrefill:
    return FlashInferPrefill(
        planner,
        num_heads=8,
        num_kv_heads=2,
        head_size=128,
        block_size=16,
        max_tokens=512,
        max_blocks=40,
        device=torch.device("cpu"),
    )


def test_rows_after_the_decode_rows_are_planned(prefill: FlashInferPrefill, planner: Planner) -> None:
    prefill.plan(1, StepShape(2, True, True, 1, [1, 1, 300, 7], [9, 600, 310, 7]))
    _, device, host, starts, pages, lengths, *rest = planner.calls[0]
    assert device is prefill._on_device[1]
    assert host is prefill._host[1]
    rows = LONG_PREFILL_ROWS
    assert starts == [2, 302, 309] + [309] * (rows - 2)
    assert pages[:2] == [2 * 40, 3 * 40]  # where the rows of the block table begin
    assert lengths == [310, 7] + [0] * (rows - 2)
    assert rest == [512, rows, 8, 2, 16, True, 128, 128, True, -1]


def test_a_plan_forgets_the_one_before(prefill: FlashInferPrefill, planner: Planner) -> None:
    prefill.plan(0, StepShape(0, True, True, 0, [20] * LONG_PREFILL_ROWS, [30] * LONG_PREFILL_ROWS))
    prefill.plan(0, StepShape(3, True, True, 0, [1, 1, 1, 256], [5, 5, 5, 256]))
    prefill.plan(0, StepShape(num_decode=64))
    *_, (starts, _, lengths) = (call[3:6] for call in planner.calls[:2])
    assert starts == [3] + [259] * LONG_PREFILL_ROWS
    assert lengths == [256] + [0] * (LONG_PREFILL_ROWS - 1)
    assert set(planner.calls[2][3]) == {64}
    assert not any(planner.calls[2][5])


def test_nothing_runs_that_was_not_planned(prefill: FlashInferPrefill) -> None:
    tensor = torch.zeros(1, 8, 128)
    with pytest.raises(AssertionError, match="planned"):
        prefill.run(tensor, tensor, tensor, torch.zeros(1, 40), slot=0, scale=1.0, output=tensor)


# ------------------------------------------------------------------------------------ an installation that does not fit


class Spec:
    """A kernel's recipe that is built already."""

    is_compiled = True

    def build_and_load(self) -> Planner:
        return Planner()


class Stranger(Planner):
    """A planner of another version."""

    def plan(self, *arguments: Any) -> list[int]:
        raise TypeError(f"plan() takes 3 arguments but {len(arguments)} were given")


class StrangeSpec(Spec):
    def build_and_load(self) -> Planner:
        return Stranger()


@contextmanager
def a_device(*_: Any) -> Iterator[None]:
    yield


def find(wanted: Literal["auto", "flashinfer"]) -> FlashInferPrefill | None:
    return find_flashinfer(
        wanted,
        params=[AttentionParams(1.0, None, None, None)],
        num_heads=8,
        num_kv_heads=2,
        head_size=128,
        block_size=16,
        max_tokens=512,
        max_blocks=40,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
    )


@pytest.mark.parametrize(
    ("names", "same", "message"),
    [
        ({}, True, "has no such kernels: ImportError"),
        ({"gen_batch_prefill_module": lambda: Spec()}, True, "has no such kernels: TypeError"),
        ({"gen_batch_prefill_module": lambda *_: StrangeSpec()}, None, "cannot be called: TypeError"),
        ({"gen_batch_prefill_module": lambda *_: Spec()}, False, "computes another attention"),
    ],
)
def test_a_flashinfer_that_does_not_fit_is_left_alone_unless_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    names: dict[str, Any],
    same: bool | None,
    message: str,
) -> None:
    package, jit = ModuleType("flashinfer"), ModuleType("flashinfer.jit")
    package.__path__ = []
    package.__spec__ = ModuleSpec("flashinfer", None)
    vars(jit).update(names)
    monkeypatch.setitem(sys.modules, "flashinfer", package)
    monkeypatch.setitem(sys.modules, "flashinfer.jit", jit)
    monkeypatch.setattr(flashinfer_prefill, "version", lambda _: "9.9")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (9, 0))
    monkeypatch.setattr(torch.cuda, "device", a_device)

    def compare(found: FlashInferPrefill, _dtype: torch.dtype) -> bool:
        if same is None:
            found.plan(0, StepShape(0, True, True, 0, [20], [30]))
        return bool(same)

    monkeypatch.setattr(flashinfer_prefill, "computes_the_same", compare)
    assert find("auto") is None
    assert f"FlashInfer 9.9 {message}" in caplog.text
    with pytest.raises(ConfigurationError, match=message):
        find("flashinfer")
