"""The three streams of a step and the events that tie them.

A step runs host-to-device copy → compute → device-to-host copy, each on its own stream, so that the copies and
the CPU's work of one step hide behind the computation of another. On a CPU the same calls run in order.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Literal, Protocol, get_args

import torch

StreamName = Literal["h2d", "compute", "d2h"]
STREAM_NAMES: tuple[StreamName, ...] = get_args(StreamName)
# Of a spinning kernel. GPUs run at 1.4 to 2 GHz, so it spins a little longer than asked for.
_CYCLES_PER_US = 2000


class Mark(Protocol):
    """A point on a stream."""

    def record(self) -> None:
        """Set the mark at the current end of the stream in whose context this is called."""

    def wait(self) -> None:
        """Let the stream in whose context this is called continue only after the mark."""

    def synchronize(self) -> None:
        """Block the calling thread until the mark has been reached."""

    def seconds_since(self, earlier: Mark) -> float:
        """Time on the device between two reached marks."""


class Streams(Protocol):
    """Where the parts of a step run."""

    pin_memory: bool  # whether host buffers must be page-locked for their copies to be asynchronous

    def h2d(self) -> AbstractContextManager[object]:
        """Context of the host-to-device copy stream."""

    def compute(self) -> AbstractContextManager[object]:
        """Context of the compute stream."""

    def d2h(self) -> AbstractContextManager[object]:
        """Context of the device-to-host copy stream."""

    def mark(self, *, timed: bool = False) -> Mark:
        """A new mark; only timed ones can be subtracted."""

    def join_others(self) -> None:
        """Block until the device has done whatever other streams were given; ours do not wait for those."""

    def synchronize(self) -> None:
        """Block until everything submitted so far is done."""


class InOrderMark:
    """A mark where everything runs in order: reached as soon as it is set."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._at = 0.0

    def record(self) -> None:
        self._at = self._clock()

    def wait(self) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def seconds_since(self, earlier: Mark) -> float:
        assert isinstance(earlier, InOrderMark)
        return self._at - earlier._at


class InOrderStreams:
    """The CPU's streams: each call is done when it returns."""

    pin_memory = False

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock

    def h2d(self) -> AbstractContextManager[object]:
        return nullcontext()

    def compute(self) -> AbstractContextManager[object]:
        return nullcontext()

    def d2h(self) -> AbstractContextManager[object]:
        return nullcontext()

    def mark(self, *, timed: bool = False) -> Mark:
        return InOrderMark(self._clock)

    def join_others(self) -> None:
        pass

    def synchronize(self) -> None:
        pass


class CudaMark:
    """A CUDA event."""

    def __init__(self, *, timed: bool) -> None:
        self._event = torch.cuda.Event(enable_timing=timed)

    def record(self) -> None:
        self._event.record()

    def wait(self) -> None:
        self._event.wait()

    def synchronize(self) -> None:
        self._event.synchronize()

    def seconds_since(self, earlier: Mark) -> float:
        assert isinstance(earlier, CudaMark)
        return float(earlier._event.elapsed_time(self._event)) / 1e3


class CudaStreams:
    """Three non-blocking CUDA streams of our own; no step runs anything on the default stream."""

    pin_memory = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._h2d = torch.cuda.Stream(device)
        self._compute = torch.cuda.Stream(device)
        self._d2h = torch.cuda.Stream(device)

    def h2d(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._h2d)

    def compute(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._compute)

    def d2h(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._d2h)

    def mark(self, *, timed: bool = False) -> Mark:
        return CudaMark(timed=timed)

    def join_others(self) -> None:
        torch.cuda.synchronize(self._device)

    def synchronize(self) -> None:
        for stream in (self._h2d, self._compute, self._d2h):
            stream.synchronize()


class DelayedStreams:
    """Streams one of which is late in each step, so that a missing wait shows. For debugging and tests."""

    def __init__(self, streams: Streams, late: StreamName, delay: Callable[[], None]) -> None:
        """``delay`` is called in the context of the stream named ``late``, before the work of each step there."""
        self._streams = streams
        self._late = late
        self._delay = delay
        self.pin_memory = streams.pin_memory

    def h2d(self) -> AbstractContextManager[object]:
        return self._enter("h2d", self._streams.h2d())

    def compute(self) -> AbstractContextManager[object]:
        return self._enter("compute", self._streams.compute())

    def d2h(self) -> AbstractContextManager[object]:
        return self._enter("d2h", self._streams.d2h())

    @contextmanager
    def _enter(self, name: StreamName, stream: AbstractContextManager[object]) -> Iterator[None]:
        with stream:
            if name == self._late:
                self._delay()
            yield

    def mark(self, *, timed: bool = False) -> Mark:
        return self._streams.mark(timed=timed)

    def join_others(self) -> None:
        self._streams.join_others()

    def synchronize(self) -> None:
        self._streams.synchronize()


def make_streams(device: torch.device, delay: str | None = None) -> Streams:
    """The streams of a device; ``delay`` as ``EngineConfig.debug_delay``, 'stream:microseconds'."""
    streams: Streams = CudaStreams(device) if device.type == "cuda" else InOrderStreams()
    if delay is None:
        return streams
    name, microseconds = delay.split(":")
    late = next(known for known in STREAM_NAMES if known == name)
    if device.type == "cuda":
        cycles = int(microseconds) * _CYCLES_PER_US
        return DelayedStreams(streams, late, lambda: torch.cuda._sleep(cycles))
    return DelayedStreams(streams, late, lambda: time.sleep(int(microseconds) / 1e6))
