"""Backends are found by name, and what is missing is named with its remedy."""

from __future__ import annotations

import sys
from importlib.metadata import EntryPoint

import pytest

from backend import registry
from backend.api import Backend, ConfigurationError
from backend.config import EngineConfig
from backend.echo import EchoBackend


def not_a_backend(config: EngineConfig) -> object:
    """A factory that breaks the protocol."""
    return object()


def needs_torch(config: EngineConfig) -> Backend:
    """A factory on a machine without the worker extra."""
    raise ModuleNotFoundError("No module named 'torch.nn'", name="torch.nn")


def needs_other(config: EngineConfig) -> Backend:
    """A plug-in whose own dependency is missing."""
    raise ModuleNotFoundError("No module named 'frobnicate'", name="frobnicate")


def broken(config: EngineConfig) -> Backend:
    """A factory with a fault of its own, which must not look like a wrong name."""
    missing: str = config.no_such_setting  # type: ignore[attr-defined]
    raise AssertionError(missing)


def test_the_three_backends_are_registered() -> None:
    assert {"async", "transformers", "echo"} <= set(registry.backend_names())
    assert registry.backend_names() == sorted(registry.backend_names())


def test_echo_needs_no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    config = EngineConfig(max_num_seqs=3)
    backend = registry.create_backend("echo", config)
    assert isinstance(backend, EchoBackend)
    backend.start()
    assert backend.info().slots == 3
    backend.shutdown(drain=False)


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(
        ConfigurationError, match=r"'vllm' is unknown\. Use one of: .*async.*echo.*transformers"
    ):
        registry.create_backend("vllm", EngineConfig())


@pytest.mark.parametrize("name", ["", ":", "module:", ":factory"])
def test_half_a_reference_is_an_unknown_name(name: str) -> None:
    with pytest.raises(ConfigurationError, match="is unknown"):
        registry.create_backend(name, EngineConfig())


def test_a_factory_of_ones_own_by_reference() -> None:
    backend = registry.create_backend("backend.echo:create_backend", EngineConfig())
    assert isinstance(backend, EchoBackend)


def test_a_reference_to_nothing_names_what_is_missing() -> None:
    with pytest.raises(ConfigurationError, match=r"'backend\.echo' has no 'nothing'"):
        registry.create_backend("backend.echo:nothing", EngineConfig())
    with pytest.raises(ConfigurationError, match="no_such_module"):
        registry.create_backend("no_such_module:factory", EngineConfig())


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        ("needs_torch", r"needs torch, which is not installed\. Run: pip install 'tokenmill\[worker\]'"),
        ("needs_other", "cannot be loaded: No module named 'frobnicate'"),
        ("not_a_backend", "returned object, which lacks a part of the Backend protocol"),
    ],
)
def test_a_factory_that_fails_is_a_configuration_error(
    factory: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = EntryPoint(name="mine", value=f"{__name__}:{factory}", group=registry.GROUP)
    monkeypatch.setattr(registry, "entry_points", lambda group: [entry])
    with pytest.raises(ConfigurationError, match=message):
        registry.create_backend("mine", EngineConfig())


def test_a_fault_inside_a_factory_is_not_disguised() -> None:
    with pytest.raises(AttributeError, match="no_such_setting"):
        registry.create_backend(f"{__name__}:broken", EngineConfig())
