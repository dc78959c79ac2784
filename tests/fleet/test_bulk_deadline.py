"""A run whose deadline passes while no worker takes its lines: it ends all the same."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from workers.cli import app
from workers.cli.common import ExitCode
from workers.testing import LocalFleet

NOWHERE = "redis://127.0.0.1:1/0"  # nothing that is published arrives


def test_what_no_worker_has_taken_by_the_deadline_is_in_the_errors_file(tmp_path: Path) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(
        "".join(json.dumps({"custom_id": f"c{n}", "prompt": "a", "max_tokens": 1}) + "\n" for n in range(5))
    )
    with LocalFleet(broker_url=NOWHERE) as fleet:
        urls = ["--database-url", fleet.settings.database_url, "--broker-url", NOWHERE]
        # Two at once, so that three lines come after the deadline.
        command = ["bulk", "run", str(source), "-o", str(output), "--deadline", "1s", "--in-flight", "2"]
        done = CliRunner().invoke(app, [*command, *urls])
    assert done.exit_code == ExitCode.FAILED, done.output
    failures = [json.loads(line) for line in (tmp_path / "out.errors.jsonl").read_text().splitlines()]
    assert [(line["custom_id"], line["state"]) for line in failures] == [
        (f"c{n}", "expired") for n in range(5)
    ]
    assert output.read_bytes() == b""
    assert json.loads((tmp_path / "out.manifest.json").read_text())["state"] == "expired"
