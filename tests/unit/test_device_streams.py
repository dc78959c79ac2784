"""The device streams of a step, and what holds one of them up."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from backend.assembly import make_core
from backend.config import EngineConfig
from backend.streams import STREAM_NAMES, DelayedStreams, InOrderStreams, StreamName, make_streams

CPU = torch.device("cpu")


class LoggingStreams(InOrderStreams):
    """Writes down when a stream's context begins and ends."""

    pin_memory = True

    def __init__(self, log: list[str]) -> None:
        super().__init__()
        self._log = log

    @contextmanager
    def _context(self, name: str) -> Iterator[None]:
        self._log.append(f"enter {name}")
        yield
        self._log.append(f"leave {name}")

    def h2d(self) -> AbstractContextManager[object]:
        return self._context("h2d")

    def compute(self) -> AbstractContextManager[object]:
        return self._context("compute")

    def d2h(self) -> AbstractContextManager[object]:
        return self._context("d2h")

    def join_others(self) -> None:
        self._log.append("join")

    def synchronize(self) -> None:
        self._log.append("synchronize")


@pytest.mark.parametrize("late", STREAM_NAMES)
def test_the_delay_comes_first_on_the_late_stream_and_on_no_other(late: StreamName) -> None:
    log: list[str] = []
    streams = DelayedStreams(LoggingStreams(log), late, lambda: log.append("delay"))
    for name, context in (("h2d", streams.h2d), ("compute", streams.compute), ("d2h", streams.d2h)):
        log.clear()
        with context():
            log.append("work")
        delay = ["delay"] if name == late else []
        assert log == [f"enter {name}", *delay, "work", f"leave {name}"]
    log.clear()
    streams.join_others()
    streams.synchronize()
    assert log == ["join", "synchronize"]
    assert streams.pin_memory


def test_a_configured_delay_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr("backend.streams.time.sleep", slept.append)
    streams = make_streams(CPU, "d2h:300")
    with streams.h2d(), streams.compute():
        pass
    assert slept == []
    with streams.d2h():
        assert slept == [300e-6]
    assert isinstance(make_streams(CPU), InOrderStreams)


@pytest.mark.parametrize("value", ["h2d", "h2d:", "h2d:-1", "copy:10", "h2d:10us", " h2d:10", "h2d:1234567"])
def test_delays_that_cannot_be(value: Any) -> None:
    with pytest.raises(ValidationError, match="debug_delay"):
        EngineConfig(debug_delay=value)


@pytest.mark.parametrize("pinned", [True, False])
def test_pinned_buffers_outlive_an_engine_that_met_a_fault(pinned: bool) -> None:
    """Freeing them would ask a device that may have failed, and abort."""
    streams = InOrderStreams()
    nothing: Any = None
    core = make_core(
        EngineConfig(),
        runner=nothing,
        num_blocks=4,
        max_model_len=32,
        device=CPU,
        sink=nothing,
        streams=streams,
    )
    streams.pin_memory = pinned  # allocated plainly all the same: there may be no device here
    buffers = [buffer for slot in core.slots for buffer in (slot._host_in, slot._host_out)]
    before = [sys.getrefcount(buffer) for buffer in buffers]
    core.abandon()
    assert [sys.getrefcount(buffer) for buffer in buffers] == [count + pinned for count in before]
