"""The shipped examples run as they are."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fleet.echo_fleet import echo_fleet
from workers.demo import PROMPTS

EXAMPLES = PROMPTS.parent


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """What a shell would have: the fleet's URLs, and the command on PATH."""
    with echo_fleet(tmp_path_factory.mktemp("fleet")) as fleet:
        yield os.environ | {
            "TOKENMILL_BROKER_URL": fleet.settings.broker_url,
            "TOKENMILL_DATABASE_URL": fleet.settings.database_url,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        }


def run(command: list[str], environment: dict[str, str], folder: Path) -> str:
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_enqueue_submits_waits_and_prints(environment: dict[str, str], tmp_path: Path) -> None:
    printed = run([sys.executable, str(EXAMPLES / "enqueue.py")], environment, tmp_path).splitlines()
    assert printed[0].startswith("Why is the sky blue?")
    assert [line.split("'")[1][:26] for line in printed[1:]] == [
        "Name one thing made of woo",
        "Name one thing made of gla",
        "Name one thing made of iro",
    ]


def test_plain_celery_needs_none_of_our_modules(environment: dict[str, str], tmp_path: Path) -> None:
    script = EXAMPLES / "send_task.py"
    source = script.read_text(encoding="utf-8")
    assert not any(f"import {name}" in source or f"from {name}" in source for name in ("workers", "backend"))
    assert "Name three colours." in run([sys.executable, str(script)], environment, tmp_path)


def test_the_nightly_script_writes_dated_answers(environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_bytes(PROMPTS.read_bytes())
    run([str(EXAMPLES / "nightly.sh"), str(tmp_path)], environment, tmp_path)
    (answers,) = (path for path in tmp_path.glob("answers-*.jsonl") if "errors" not in path.name)
    lines = [json.loads(line) for line in answers.read_text(encoding="utf-8").splitlines()]
    given = [json.loads(line) for line in PROMPTS.read_text(encoding="utf-8").splitlines()]
    assert [(line["custom_id"], line["category"]) for line in lines] == [
        (line["custom_id"], line["category"]) for line in given
    ]
    assert "30/30 done" in (tmp_path / "nightly.log").read_text(encoding="utf-8")
