"""Keeps worker processes running: one for each GPU, restarted when they die, with the reason shown."""

from __future__ import annotations

import logging
import os
import queue
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from workers.callbacks.service import start_sender
from workers.exits import EXIT_CONFIGURATION, EXIT_TRY_AGAIN, REASONS
from workers.settings import Settings

logger = logging.getLogger("tokenmill.supervisor")

STABLE_AFTER_S = 60.0  # a process that lived so long starts its back-off anew
_POLL_S = 0.2
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGQUIT, signal.SIGKILL)  # warm, cold, by force


def run_worker(settings: Settings, *, once: bool = False) -> int:
    """Run workers until told to stop by SIGTERM, SIGINT or SIGQUIT; returns the exit code.

    The first signal lets running jobs finish (``shutdown_grace_s``), the second, or a SIGQUIT, hands them back at
    once, the next one kills. With ``once`` a worker that ends is not restarted and its exit code is returned. Must
    be called on the main thread, because it handles signals.

    Callbacks are sent from here, too: one sender a host, which no engine holds up or takes along when it dies.

    Raises:
        ConfigurationError: callbacks are to be sent and cannot be.
    """
    callbacks = start_sender(settings)
    supervisor = Supervisor(settings, once=once)
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT)
    previous = {number: signal.getsignal(number) for number in numbers}
    for number in previous:
        signal.signal(number, lambda number, _: supervisor.stop(cold=number == signal.SIGQUIT))
    try:
        return supervisor.run()
    finally:
        if callbacks is not None:
            callbacks.stop()
        for number, handler in previous.items():
            signal.signal(number, handler)


@dataclass
class _Seat:
    """A place for one worker process, and who sits there now."""

    label: str
    number: int = 0
    environment: Mapping[str, str] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None
    started_at: float = 0.0
    failures: int = 0
    start_again_at: float = 0.0
    exit_code: int | None = None
    finished: bool = False


class Supervisor:
    """See ``run_worker``. Processes, clock and waiting can be replaced for tests."""

    def __init__(
        self,
        settings: Settings,
        *,
        once: bool = False,
        spawn: Callable[[Settings, Mapping[str, str]], Any] | None = None,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[float], None] | None = None,
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        self._settings = settings
        self._once = once
        self._spawn = spawn or start_process
        self._clock = clock
        self._wait = wait or self._wait_for_stop
        # No event: a handler that runs while this thread holds the event's lock would wait for it for ever.
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._stops = 0
        self._forwarded = 0
        devices = visible_gpus(environ) if wants_every_gpu(settings) else []
        self._seats = [
            _Seat(f"GPU {device}", number, {"CUDA_VISIBLE_DEVICES": device})
            for number, device in enumerate(devices)
        ]
        self._seats = self._seats or [_Seat("worker")]

    def stop(self, *, cold: bool = False) -> None:
        """Ask for a stop, each further time with more force; ``cold`` skips the first. Safe in a signal handler."""
        self._stops = max(self._stops, int(cold)) + 1
        self._wake.put(None)

    def run(self) -> int:
        """Run until every seat is finished; the first exit code that is not zero, else zero."""
        while any(not seat.finished for seat in self._seats):
            for seat in self._seats:
                self._tend(seat)
            self._forward_stops()
            self._wait(_POLL_S)
        codes = [seat.exit_code or 0 for seat in self._seats]
        return next((code for code in codes if code), 0)

    def _wait_for_stop(self, timeout_s: float) -> None:
        with suppress(queue.Empty):
            self._wake.get(timeout=timeout_s)

    def _tend(self, seat: _Seat) -> None:
        if seat.finished:
            return
        if seat.process is None:
            if self._stops:
                seat.finished = True
            elif self._clock() >= seat.start_again_at:
                self._start(seat)
            return
        code = seat.process.poll()
        if code is None:
            return
        seat.process = None
        seat.exit_code = code if code >= 0 else 128 - code
        self._after_exit(seat, code)

    def _start(self, seat: _Seat) -> None:
        seat.started_at = self._clock()
        try:
            seat.process = self._spawn(self._settings_of(seat), seat.environment)
        except OSError as exc:  # no memory, no process or no file more: for now
            seat.exit_code = EXIT_TRY_AGAIN
            if self._once:
                seat.finished = True
                logger.error("%s could not be started (%s)", seat.label, exc)
            else:
                self._pause(seat, f"could not be started ({exc})")

    def _settings_of(self, seat: _Seat) -> Settings:
        """The settings, with a port for metrics that no other seat has."""
        port = self._settings.metrics_port
        if port is None or seat.number == 0:
            return self._settings
        return self._settings.model_copy(update={"metrics_port": port + seat.number})

    def _after_exit(self, seat: _Seat, code: int) -> None:
        why = describe_exit(code)
        if self._stops or self._once or code == 0 or code == EXIT_CONFIGURATION:
            seat.finished = True
            if code:
                logger.error("%s %s", seat.label, why)
            return
        if self._clock() - seat.started_at >= STABLE_AFTER_S:
            seat.failures = 0
        self._pause(seat, why)

    def _pause(self, seat: _Seat, why: str) -> None:
        pause = min(self._settings.restart_backoff_s * 2**seat.failures, self._settings.restart_backoff_max_s)
        seat.failures += 1
        seat.start_again_at = self._clock() + pause
        logger.error("%s %s; starting again in %gs (failure %d)", seat.label, why, pause, seat.failures)

    def _forward_stops(self) -> None:
        stops = self._stops  # a signal may come at any moment
        if stops == self._forwarded:
            return
        self._forwarded = stops
        number = _STOP_SIGNALS[min(stops, len(_STOP_SIGNALS)) - 1]
        for seat in self._seats:
            if seat.process is not None:
                seat.process.send_signal(number)


def start_process(settings: Settings, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start ``workers.process`` in a session of its own, so that Ctrl-C reaches it only through us, in order.

    Raises:
        OSError: it cannot be started.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "workers.process"],
        stdin=subprocess.PIPE,
        env={**os.environ, **environment},
        start_new_session=True,
    )
    assert process.stdin is not None
    # One that dies before it has read them tells more by how it ended.
    with suppress(BrokenPipeError), process.stdin as pipe:
        pipe.write(settings.model_dump_json(exclude_unset=True).encode())
    return process


def describe_exit(code: int) -> str:
    """An exit status of ``Popen`` in words."""
    if code < 0:
        try:
            return f"was killed by {signal.Signals(-code).name}"
        except ValueError:
            return f"was killed by signal {-code}"
    return f"ended with exit code {code}" + (f" ({REASONS[code]})" if code in REASONS else "")


def wants_every_gpu(settings: Settings) -> bool:
    """Whether the settings leave the device open, for a backend that computes on one."""
    return settings.backend != "echo" and settings.engine.device in ("auto", "cuda")


def visible_gpus(
    environ: Mapping[str, str], devices: Path = Path("/proc/driver/nvidia/gpus")
) -> Sequence[str]:
    """The GPUs this process may use, as values for ``CUDA_VISIBLE_DEVICES``. Found without touching CUDA."""
    chosen = environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return [device.strip() for device in chosen.split(",") if device.strip() not in ("", "-1")]
    try:
        return [str(index) for index, _ in enumerate(sorted(devices.iterdir()))]
    except OSError:
        return []
