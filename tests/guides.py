"""What the guides say, taken apart so that tests can hold them to it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.DOTALL | re.MULTILINE)


def blocks(page: Path, kind: str) -> list[str]:
    """The fenced blocks of one kind (``sh``, ``sql``, ``python``, …)."""
    return [body for found, body in _BLOCK.findall(page.read_text(encoding="utf-8")) if found == kind]


def queries() -> list[tuple[str, str]]:
    """Page and query, for every block of SQL."""
    return [(page.name, sql) for page in PAGES for sql in blocks(page, "sql")]


def commands_in(text: str) -> Iterator[list[str]]:
    """The words after ``tokenmill`` of each line that runs it, without what a shell would do with the rest."""
    for line in text.splitlines():
        try:
            words = shlex.split(line, comments=True)
        except ValueError:
            continue  # a line of prose with an apostrophe
        while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
            words.pop(0)
        if words[:1] != ["tokenmill"]:
            continue
        end = next((at for at, word in enumerate(words) if word in ("|", "||", "&&", "&")), len(words))
        yield [word.rstrip(";") for word in words[1:end]]
