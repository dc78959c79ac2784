"""Which tests may use the device at once, in however many processes: most side by side, some alone."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def device_lock(folder: Path, *, alone: bool) -> Iterator[None]:
    """Hold the device, alone or beside others; ``folder`` is the same for all that share the device.

    Whoever waits to be alone keeps later ones out, so that it need not wait for a moment in which nobody happens to
    run.
    """
    with (folder / "tokenmill-gpu-gate").open("w") as gate, (folder / "tokenmill-gpu-use").open("w") as use:
        fcntl.flock(gate, fcntl.LOCK_EX)
        fcntl.flock(use, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(gate, fcntl.LOCK_UN)
        yield
