"""An SQLite file that is not there is named, and not made by whoever only looks."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from models_db.errors import MissingDatabaseError
from models_db.migrate import upgrade
from models_db.schema import check_schema, current_revision, head_revision
from models_db.session import make_engine
from workers.cli import app
from workers.cli.common import ExitCode
from workers.client import Client

DEAD_REDIS = "redis://127.0.0.1:1/0"


@pytest.mark.parametrize(
    "command",
    [
        ["db", "check"],
        ["db", "current"],
        ["db", "rollup"],
        ["db", "downgrade", "base", "--yes"],
        ["db", "prune", "--older-than", "90d", "--dry-run"],
        ["stats"],
        ["top", "--once"],
        ["callbacks", "list"],
        ["keys", "list"],
    ],
    ids=" ".join,
)
def test_a_missing_file_is_named_and_not_made(command: list[str], tmp_path: Path) -> None:
    path = tmp_path / "missing.db"
    done = CliRunner().invoke(app, [*command, "--database-url", f"sqlite:///{path}"])
    assert done.exit_code == ExitCode.UNAVAILABLE
    assert f"is missing: there is no file {path}" in done.stderr
    assert "tokenmill db upgrade" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_doctor_names_a_missing_file(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'missing.db'}"
    done = CliRunner().invoke(
        app, ["doctor", "--json", "--broker-url", DEAD_REDIS, "--database-url", url, "--model", "echo"]
    )
    found = {finding["check"]: finding for finding in json.loads(done.stdout)}
    assert found["database"]["health"] == "broken"
    assert found["database"]["fix"].startswith("tokenmill db upgrade")
    assert found["schema"]["health"] == "skipped"
    assert list(tmp_path.iterdir()) == []


def test_a_client_makes_no_file(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'missing.db'}"
    with Client(broker_url=DEAD_REDIS, database_url=url) as client, pytest.raises(MissingDatabaseError):
        client.submit("hello")
    assert list(tmp_path.iterdir()) == []


def test_who_listens_to_all_that_is_logged_hears_nothing_of_alembic(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'jobs.db'}"
    upgrade(url)
    script = (
        "import logging; logging.basicConfig(level='INFO')\n"
        "from models_db.session import make_engine\n"
        "import models_db.migrate\n"
        "from models_db.schema import check_schema\n"
        f"check_schema(make_engine({url!r}))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stderr == ""


def test_an_empty_file_was_never_migrated_and_looking_says_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "empty.db"
    path.touch()
    engine = make_engine(f"sqlite:///{path}")
    assert current_revision(engine) is None
    upgrade(f"sqlite:///{path}")
    with caplog.at_level(logging.INFO):
        check_schema(engine)
        assert current_revision(engine) == head_revision()
    engine.dispose()
    assert caplog.records == []
