"""Random bytes of the operating system, many at a time.

A call for them lets another thread of the process in. Where that one is busy, as when one thread reads a file of
prompts and another stores them, coming back costs far more than the bytes.
"""

from __future__ import annotations

import os
import threading

_AT_ONCE = 4096


class _Store(threading.local):
    """What is left of the thread's last handful."""

    def __init__(self) -> None:
        self.bytes = b""
        self.used = 0


_store = _Store()


def random_bytes(size: int) -> bytes:
    """So many bytes that nobody can guess and that come once, also beside other threads and after a fork."""
    begin, end = _store.used, _store.used + size
    if end > len(_store.bytes):
        _store.bytes = os.urandom(max(size, _AT_ONCE))
        begin, end = 0, size
    _store.used = end
    return _store.bytes[begin:end]


def _forget() -> None:
    _store.bytes, _store.used = b"", 0


os.register_at_fork(after_in_child=_forget)  # the parent is going to use what it holds
