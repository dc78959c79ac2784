"""A folder on a small disk, which can be full."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


class NoFullDiskError(Exception):
    """A small file system cannot be mounted here."""


@dataclass(frozen=True, slots=True)
class SmallDisk:
    """A file system of its own under ``folder``."""

    folder: Path

    @property
    def full(self) -> bool:
        """Whether there is room for nothing more."""
        found = os.statvfs(self.folder)
        return found.f_bavail * found.f_frsize < 4096

    def fill(self) -> None:
        """Leave no room: writes end with ``ENOSPC``."""
        with contextlib.suppress(OSError), (self.folder / "ballast").open("wb", buffering=0) as file:
            while file.write(os.urandom(4096)):
                pass

    def clear(self) -> None:
        """Make room again."""
        (self.folder / "ballast").unlink(missing_ok=True)


@contextlib.contextmanager
def small_disk(at: Path, size_kib: int = 64) -> Iterator[SmallDisk]:
    """An empty one.

    Raises:
        NoFullDiskError: only root may mount one.
    """
    at.mkdir(parents=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={size_kib}k", "tmpfs", str(at)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as exc:
        raise NoFullDiskError(str(exc)) from None
    if done.returncode:
        raise NoFullDiskError(f"{' '.join(command)}: {done.stderr.strip()}")
    try:
        yield SmallDisk(at)
    finally:
        subprocess.run(["umount", "-l", str(at)], check=False)
