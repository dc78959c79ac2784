"""Where settings are read from beside keyword overrides: flat variables of the engine's, and the TOML file."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource

from backend.api import ConfigurationError

ENV_PREFIX = "TOKENMILL_"
CONFIG_VARIABLE = "TOKENMILL_CONFIG"
DEFAULT_CONFIG_FILE = "tokenmill.toml"


class _WholeSource(PydanticBaseSettingsSource):
    """One that gives all that it has at once, rather than field by field."""

    def __init__(self, settings_cls: type[BaseSettings], environ: Mapping[str, str]) -> None:
        super().__init__(settings_cls)
        self._environ = environ

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        return None, field_name, False


class FlatEngineEnv(_WholeSource):
    """Reads ``TOKENMILL_ENGINE_BLOCK_SIZE`` beside the nested spelling ``TOKENMILL_ENGINE__BLOCK_SIZE``."""

    def __call__(self) -> dict[str, Any]:
        prefix = f"{ENV_PREFIX}ENGINE_"
        found = {
            name[len(prefix) :].lstrip("_").lower(): value
            for name, value in self._environ.items()
            if name.startswith(prefix)
        }
        return {"engine": {name: value for name, value in found.items() if value != ""}} if found else {}


class TomlFile(_WholeSource):
    """The TOML file, when there is one."""

    def __call__(self) -> dict[str, Any]:
        named = self._environ.get(CONFIG_VARIABLE)
        path = Path(named or DEFAULT_CONFIG_FILE)
        if not named and not path.is_file():
            return {}
        try:
            return tomllib.loads(path.read_text(encoding="utf-8"))
        except OSError as exc:
            raise ConfigurationError(
                f"{CONFIG_VARIABLE}: cannot read {path} ({exc.strerror}). Correct the path or unset it"
            ) from exc
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as exc:
            raise ConfigurationError(f"{path} is not valid TOML: {exc}. Correct that line") from exc
