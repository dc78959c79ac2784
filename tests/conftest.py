"""How ``pytest -n 2``, which ``make test`` runs, spreads the suite over processes."""

from __future__ import annotations

import gc
import os
import sys
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from xdist.scheduler import LoadScopeScheduling

# What waits for deaths within a second or two, and what measures a GPU's memory: two of a kind at once would disturb
# each other. Anything else may run beside them. The longest comes first.
ONE_AT_A_TIME = ("tests/fleet/", "tests/chaos/", "tests/gpu/")


def lane(nodeid: str) -> str:
    """What goes to one process as a whole: a file, with what its fixtures made, or all that runs one at a time."""
    return next((folder for folder in ONE_AT_A_TIME if nodeid.startswith(folder)), nodeid.split("::", 1)[0])


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling | None:
    """Whole lanes in the order of the tests; another distribution is made if ``--dist`` names one."""
    from xdist.scheduler import LoadScopeScheduling

    class ByLane(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return lane(nodeid)

    if config.getoption("dist") != "load":
        return None
    config.option.loadscopereorder = False
    return ByLane(config, log)


def pytest_configure(config: pytest.Config) -> None:
    """Processes that share cores compute in one thread each: PyTorch's threads spin while they wait for a core."""
    if hasattr(config, "workerinput"):
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        if "torch" in sys.modules:
            sys.modules["torch"].set_num_threads(1)


def pytest_collection_finish() -> None:
    """Spare what the modules imported from every later look for garbage: a million objects that stay to the end.

    Backends, fleets and tests look for it on purpose, hundreds of times.
    """
    gc.collect()
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Let the long lanes begin first, or the other processes would wait for them at the end."""
    if hasattr(config, "workerinput"):
        order = {name: place for place, name in enumerate(ONE_AT_A_TIME)}
        items.sort(key=lambda item: order.get(lane(item.nodeid), len(order)))
