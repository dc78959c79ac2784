"""Chaos tests: each in a world of its own, with real servers that are killed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.world import World, world
from tests.servers import Kind, ServerUnavailableError, skip_or_fail

MakeWorld = Callable[..., World]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the tests that take long to ``make chaos``, which sets ``CHAOS=all``; pytest counts them as deselected."""
    if os.environ.get("CHAOS") == "all":
        return
    long = [item for item in items if item.get_closest_marker("chaos_long") is not None]
    if long:
        config.hook.pytest_deselected(items=long)
        items[:] = [item for item in items if item not in long]


@pytest.fixture
def make_world(tmp_path: Path) -> Iterator[MakeWorld]:
    """Makes a world: ``make_world(kind, persistent=…, **settings of its workers)``."""
    with ExitStack() as stack:

        def make(kind: Kind = "postgresql", **options: Any) -> World:
            try:
                return stack.enter_context(world(tmp_path / "world", kind, **options))
            except ServerUnavailableError as exc:
                skip_or_fail(exc)

        yield make
