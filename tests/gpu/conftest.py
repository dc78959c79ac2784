"""Spies on logits, and ``--record-gpu=FILE``: counts of flips, errors and bounds, as the tests measured them."""

from __future__ import annotations

import gc
import importlib
import platform
import shlex
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest
import torch

from backend import assembly
from backend.config import EngineConfig
from backend.loading import LoadedModel
from tests.gpu.gpu_driver import skinny_products
from tests.gpu.gpu_lock import device_lock
from tests.gpu.gpu_logits import Spy
from tests.gpu.gpu_models import LARGE, save_family, save_large


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--record-gpu", type=Path, metavar="FILE", help="write what the GPU tests measured to this file"
    )


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--record-gpu", default=None)
    # Not in a process that only runs tests for us.
    if path is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder(path), "gpu-recorder")


class Recorder:
    """Collects each test's outcome and properties, and writes them at the end."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._tests: dict[str, tuple[str, list[tuple[str, Any]]]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            self._tests[report.nodeid] = (report.outcome, report.user_properties)

    def pytest_sessionfinish(self) -> None:
        outcomes = [outcome for outcome, _ in self._tests.values()]
        counts = ", ".join(f"{outcomes.count(name)} {name}" for name in ("passed", "failed", "skipped"))
        lines = [f"pytest {shlex.join(sys.argv[1:])}", *environment(), "", counts, ""]
        for nodeid, (outcome, properties) in sorted(self._tests.items()):
            lines.append(f"{nodeid.removeprefix('tests/gpu/')}: {outcome}")
            lines += [f"    {name}: {value}" for name, value in properties]
        self._path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def environment() -> list[str]:
    """The device and the versions that the results depend on."""
    device = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "no CUDA device"
    versions = [f"Python {platform.python_version()}", f"CUDA {torch.version.cuda}"]
    for package in ("torch", "triton", "transformers"):
        try:
            versions.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            versions.append(f"no {package}")
    return [device, ", ".join(versions)]


@pytest.fixture(scope="session", autouse=True)
def _short_collections() -> None:
    """Each capture of a graph collects garbage first: not among all that PyTorch and transformers have loaded."""
    importlib.import_module("transformers.models.auto.modeling_auto")
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[object]:
    """Tests of a module that says ``ALONE`` have the device to themselves, whatever runs in other processes."""
    if not torch.cuda.is_available():
        return (yield)
    with device_lock(
        Path(tempfile.gettempdir()), alone=getattr(getattr(item, "module", None), "ALONE", False)
    ):
        return (yield)


@pytest.fixture
def spied(monkeypatch: pytest.MonkeyPatch) -> list[Spy]:
    """The spies on the logits of the engines that are built from now on, newest last."""
    spies: list[Spy] = []
    original = assembly.verified_forward

    def spied_forward(config: EngineConfig, loaded: LoadedModel, *rest: Any) -> Spy:
        forward = original(config, loaded, *rest)
        spies.append(Spy(forward, config.max_num_seqs, loaded.vocab_size, loaded.dtype))
        return spies[-1]

    monkeypatch.setattr(assembly, "verified_forward", spied_forward)
    return spies


@pytest.fixture(scope="session")
def large_model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of ``LARGE``."""
    folder = save_large(tmp_path_factory.mktemp("large"))
    yield folder
    shutil.rmtree(folder)  # a gigabyte, of which pytest would keep the last three


@pytest.fixture
def save(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[str], Path]:
    """Gives the folder of a family's random model, ``LARGE`` included."""

    def folder_of(family: str) -> Path:
        return request.getfixturevalue("large_model") if family == LARGE else save_family(family, tmp_path)

    return folder_of


@pytest.fixture
def products() -> Iterator[set[tuple[int, int, int]]]:
    """See ``skinny_products``."""
    with skinny_products() as found:
        yield found
