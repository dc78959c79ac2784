"""Ctrl-C and SIGTERM at moments of our own choosing.

An exception out of a signal handler can land anywhere, also in a destructor or in a driver, where it is
swallowed. Here the first signal only leaves a note, and the work stops where it next pauses; the second signal
raises at once.
"""

from __future__ import annotations

import os
import select
import signal
import threading
from types import FrameType, TracebackType
from typing import Self, TypeAlias

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

_Handlers: TypeAlias = "dict[signal.Signals, signal._HANDLER]"


def _handle(by: signal._HANDLER) -> _Handlers:
    """Handle the signals so, and return how they were handled before; nothing outside of the main thread."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    return {number: signal.signal(number, by) for number in _SIGNALS}


def _put_back(before: _Handlers) -> None:
    for number, handler in before.items():
        signal.signal(number, handler)


class Interruptible:
    """A ``with`` block in which a signal is noted. ``sleep`` and ``check`` raise once one has come.

    Outside the main thread no handler can be installed, and signals stay what they were.
    """

    def __init__(self) -> None:
        self.requested = False
        self._before: _Handlers = {}
        self._wake_read, self._wake_write = -1, -1

    def check(self) -> None:
        """Raise ``KeyboardInterrupt`` when a signal has come."""
        if self.requested:
            raise KeyboardInterrupt

    def sleep(self, seconds: float) -> None:
        """``time.sleep`` that a signal cuts short with ``KeyboardInterrupt``."""
        if not self.requested:
            # A pipe, because a handler that ran while this thread held an event's lock would wait for ever.
            select.select([self._wake_read], [], [], seconds)
        self.check()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        os.write(self._wake_write, b"!")

    def __enter__(self) -> Self:
        self._wake_read, self._wake_write = os.pipe()
        self._before = _handle(self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _put_back(self._before)
        self._before = {}
        os.close(self._wake_read)
        os.close(self._wake_write)


class Undisturbed:
    """A ``with`` block that no Ctrl-C, SIGTERM or SIGHUP ends: for stopping what was started."""

    def __init__(self) -> None:
        self._before: _Handlers = {}

    def __enter__(self) -> Self:
        self._before = _handle(signal.SIG_IGN)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _put_back(self._before)
