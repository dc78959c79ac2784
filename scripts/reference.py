"""Write the tables of settings and payload fields into the guides, from the classes that define them.

python scripts/reference.py            rewrites docs/configuration.md, docs/payload.md and payload.schema.json
python scripts/reference.py --check    exits with 1 when they are not up to date
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path

from pydantic.fields import FieldInfo

from backend.config import EngineConfig
from workers.payload import GeneratePayload
from workers.payload_schema import payload_schema
from workers.settings import Settings

DOCS = Path(__file__).resolve().parent.parent / "docs"
_MORE = {  # what a field means where its class leaves that to the name
    "presence_penalty": "subtracted from the logit of every token that was generated before",
    "frequency_penalty": "the same, times how often it was generated",
    "logit_bias": "token id → number from -100 to 100 added to its logit",
    "stop_token_ids": "token ids that end generation",
    "version": "of the payload",
    "model": "one of the models that the fleet serves",
    "prompt": "raw text to continue",
    "messages": "chat turns: objects with role and content",
    "token_ids": "the prompt as token ids",
    "tenant": "whom the job is for; stored with it",
    "custom_id": "your own name for it; unique in its batch",
    "stream": "write the text to a Redis Stream as it comes, see Streams below",
}
_MARKERS = "<!-- {name}: written by scripts/reference.py -->\n", "<!-- end of {name} -->"


def main(arguments: list[str]) -> int:
    """Rewrite or check; returns the exit status."""
    stale = [
        path for path, text in rendered() if not path.exists() or path.read_text(encoding="utf-8") != text
    ]
    for path, text in rendered():
        if path in stale and "--check" not in arguments:
            path.write_text(text, encoding="utf-8")
    for path in stale:
        print(f"{path.name}: {'is out of date' if '--check' in arguments else 'written'}")
    return 1 if stale and "--check" in arguments else 0


def rendered() -> Iterable[tuple[Path, str]]:
    """Each page that holds tables, as it should be."""
    settings = {name: field for name, field in Settings.model_fields.items() if name != "engine"}
    tables = {
        "configuration.md": {
            "settings": settings_table("TOKENMILL_", settings),
            "engine": settings_table("TOKENMILL_ENGINE_", EngineConfig.model_fields),
        },
        "payload.md": {"fields": payload_table()},
    }
    for page, parts in tables.items():
        path = DOCS / page
        text = path.read_text(encoding="utf-8")
        for name, table in parts.items():
            begin, end = (marker.format(name=name) for marker in _MARKERS)
            pattern = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
            text = pattern.sub(lambda _, new=begin + table + end: new, text)
        yield path, text
    yield DOCS / "payload.schema.json", json.dumps(payload_schema(), indent=2, ensure_ascii=False) + "\n"


def settings_table(prefix: str, fields: dict[str, FieldInfo]) -> str:
    """Variable, default, meaning."""
    lines = ["| variable | default | meaning |", "|---|---|---|"]
    lines += [
        f"| `{prefix}{name.upper()}` | {default_of(it)} | {meaning(it)} |" for name, it in fields.items()
    ]
    return "\n".join(lines) + "\n"


def payload_table() -> str:
    """Field, default, limits, meaning; the prompt forms and the version are explained in the text."""
    lines = ["| field | default | limits | meaning |", "|---|---|---|---|"]
    for name, it in GeneratePayload.model_fields.items():
        text = meaning(it) if it.description else _MORE.get(name, "–")
        lines.append(f"| `{name}` | {default_of(it)} | {limits(it)} | {text} |")
    return "\n".join(lines) + "\n"


def default_of(it: FieldInfo) -> str:
    """How the default is shown."""
    if it.is_required():
        return "required"
    if it.default_factory is not None:
        return "–"
    value = it.default
    if value is None or value == ():
        return "–"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def limits(it: FieldInfo) -> str:
    """``1 … 16``, ``> 0``, ``≤ 255 long``."""
    found: dict[str, object] = {}
    for rule in it.metadata:
        for name in ("gt", "ge", "lt", "le", "min_length", "max_length"):
            value = getattr(rule, name, None)
            if value is not None:
                found[name] = f"{value:,}" if isinstance(value, int) else f"{value:g}"
    parts = []
    for name, sign in (("gt", ">"), ("ge", "≥"), ("lt", "<"), ("le", "≤")):
        if name in found:
            parts.append(f"{sign} {found[name]}")
    if "max_length" in found:
        parts.append(f"at most {found['max_length']} long")
    return ", ".join(parts) or "–"


def meaning(it: FieldInfo) -> str:
    """The description on one line."""
    return " ".join((it.description or "").split()).replace("|", "\\|") or "–"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
