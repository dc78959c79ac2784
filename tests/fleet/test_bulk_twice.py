"""Two commands that feed one batch: one stops and says why, and no line is in twice."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from models_db.batches import BatchProgress, positions_after
from models_db.session import reading
from workers.bulk import BulkRunner
from workers.bulk_input import LineOptions
from workers.bulk_source import validate_source
from workers.cli import app
from workers.cli.common import ExitCode
from workers.testing import LocalFleet

NOWHERE = "redis://127.0.0.1:1/0"  # what is fed goes through the fleet's own client


@pytest.mark.parametrize("mode", [["--no-wait"], ["-o", "out.jsonl"]])
def test_who_comes_second_stops_and_bad_lines_are_in_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    good = [json.dumps({"custom_id": f"c{n}", "prompt": "a", "max_tokens": 1}) for n in range(10)]
    source = tmp_path / "in.jsonl"
    source.write_text("\n".join([*["{bad"] * 10, *good]))

    def killed(now: BatchProgress) -> None:
        if now.done > 10:
            raise KeyboardInterrupt

    with LocalFleet(broker_url=NOWHERE) as fleet:
        runner = BulkRunner(fleet.client, in_flight=5, report=killed)
        with source.open("rb") as file:
            made, _ = validate_source(str(source), file, LineOptions(defaults={"model": "smollm2"}))
            batch_id = runner.create("test", made)
            with pytest.raises(KeyboardInterrupt):
                runner.run(batch_id, made, file)

        def none_yet(_runner: BulkRunner, _batch_id: str) -> Iterator[int]:
            return iter(())  # as they were before the other command put its lines in

        urls = ["--database-url", fleet.settings.database_url, "--broker-url", NOWHERE]
        with monkeypatch.context() as patch:
            patch.setattr(BulkRunner, "_positions", none_yet)
            done = CliRunner().invoke(app, ["bulk", "resume", batch_id, *mode, *urls])
        with reading(fleet.client.engine()) as conn:
            bad = [position for position in positions_after(conn, batch_id, 0, 100) if position <= 10]
    assert f"another command feeds batch {batch_id}" in " ".join(done.stderr.split())
    assert done.exit_code == ExitCode.UNAVAILABLE
    assert bad == [*range(1, 11)]
