"""The guides are true: commands, settings, fields, files and links in them exist."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from tests.guides import PAGES, ROOT, blocks, commands_in
from workers.cli import app


def help_texts(group: typer.Typer) -> Iterator[str]:
    """The docstring of every command, which teaches by example."""
    for command in group.registered_commands:
        yield inspect.getdoc(command.callback) or ""
    for inner in group.registered_groups:
        if inner.typer_instance is not None:
            yield from help_texts(inner.typer_instance)


TEXTS = ["\n".join(blocks(page, "sh")) for page in PAGES] + list(help_texts(app))
DOCUMENTED = [words for text in TEXTS for words in commands_in(text)]


@pytest.mark.parametrize("words", DOCUMENTED, ids=" ".join)
def test_every_documented_command_exists_with_its_options(words: list[str]) -> None:
    done = CliRunner().invoke(app, [*words, "--help"])
    assert done.exit_code == 0, done.output
    assert "Usage: " in done.stdout


def test_commands_were_found_in_guides_and_in_help() -> None:
    assert len(DOCUMENTED) >= 40


def test_the_tables_of_settings_and_fields_are_up_to_date() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "reference.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}Run: .venv/bin/python scripts/reference.py"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_named_files_exist(page: Path) -> None:
    content = page.read_text(encoding="utf-8")
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", content)
    named = re.findall(
        r"`((?:backend|workers|models_db|migrations|scripts|tests|examples)/[\w./-]*)`", content
    )
    for target in links:
        assert (page.parent / target).exists(), target
    for target in named:
        assert (ROOT / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_in_the_guides_compiles(page: Path) -> None:
    for code in blocks(page, "python"):
        compile(code, page.name, "exec")
