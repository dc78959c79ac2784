"""Backends by name: the entry-point group ``tokenmill.backends``, where a plug-in can add its own."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from typing import cast

from backend.api import Backend, ConfigurationError
from backend.config import EngineConfig

GROUP = "tokenmill.backends"
BackendFactory = Callable[[EngineConfig], Backend]

# Top-level modules that only the "worker" extra brings.
_WORKER_MODULES = frozenset({"torch", "transformers", "numpy", "gguf", "psutil", "safetensors"})


def backend_names() -> list[str]:
    """The names that ``create_backend`` knows, sorted."""
    return sorted(_entry_points())


def create_backend(name: str, config: EngineConfig) -> Backend:
    """Build the backend called ``name``; it still has to be started.

    ``name`` is one of ``backend_names()``, or ``module:factory`` for a factory
    ``(EngineConfig) -> Backend`` of one's own that is not installed as an entry point.

    Raises:
        ConfigurationError: the name is unknown, or the backend needs packages that are not installed.
    """
    entry = _find(name)
    try:
        factory = cast(BackendFactory, entry.load())
    except ModuleNotFoundError as exc:
        raise _missing(name, exc) from exc
    except AttributeError as exc:
        raise ConfigurationError(
            f"backend {name!r}: {entry.module!r} has no {entry.attr!r}. Correct its entry point or reference"
        ) from exc
    try:
        backend = factory(config)
    except ModuleNotFoundError as exc:  # a factory may import its heavy parts late
        raise _missing(name, exc) from exc
    if not isinstance(backend, Backend):
        raise ConfigurationError(
            f"backend {name!r}: its factory returned {type(backend).__name__}, which lacks a part of the "
            "Backend protocol (see backend.api). Complete it"
        )
    return backend


def _entry_points() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=GROUP)}


def _find(name: str) -> EntryPoint:
    known = _entry_points()
    if name in known:
        return known[name]
    module, _, attribute = name.partition(":")
    if module and attribute:
        return EntryPoint(name=name, value=name, group=GROUP)
    names = ", ".join(sorted(known)) or "none: install tokenmill itself, e.g. pip install -e ."
    raise ConfigurationError(f"backend {name!r} is unknown. Use one of: {names}")


def _missing(name: str, exc: ModuleNotFoundError) -> ConfigurationError:
    top = (exc.name or "").partition(".")[0]
    if top in _WORKER_MODULES:
        return ConfigurationError(
            f"backend {name!r} needs {top}, which is not installed. "
            "Run: pip install 'tokenmill[worker]' (or 'tokenmill[cuda]' on a GPU host)"
        )
    return ConfigurationError(f"backend {name!r} cannot be loaded: {exc}. Install what provides {exc.name!r}")
