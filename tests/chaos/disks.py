"""A folder on a disk without room."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path


class NoFullDiskError(Exception):
    """A small file system cannot be mounted here."""


@contextlib.contextmanager
def full_disk(at: Path) -> Iterator[Path]:
    """A folder of a full file system of 64 KiB, which writes to end with ``ENOSPC``.

    Raises:
        NoFullDiskError: only root may mount one.
    """
    at.mkdir(parents=True)
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(at)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NoFullDiskError(f"{' '.join(command)}: {done.stderr.strip()}")
    try:
        with contextlib.suppress(OSError), (at / "ballast").open("wb", buffering=0) as file:
            while file.write(os.urandom(4096)):
                pass
        yield at
    finally:
        subprocess.run(["umount", "-l", str(at)], check=False)
