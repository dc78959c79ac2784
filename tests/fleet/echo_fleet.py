"""A small fleet of its own for tests of clients: private Redis, SQLite file, one worker with the echo backend."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from workers.demo import Demo


@contextmanager
def echo_fleet(folder: Path, **variables: str) -> Iterator[Demo]:
    """A running fleet; ``variables`` are settings of its worker, such as ``ENGINE_ECHO_TOKENS_PER_S="20"``."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(f"TOKENMILL_{name}", value)
        with Demo(folder, backend="echo") as fleet:
            fleet.start_services()
            fleet.start_worker()
            fleet.wait_for_worker()
            yield fleet
