"""What the tests of whole files share: input, the command, what came of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from typer.testing import CliRunner, Result

from models_db.batches import BatchProgress
from tests.fleet.fleet import Fleet
from workers.broker import Broker
from workers.bulk import BulkRunner
from workers.bulk_input import LineOptions
from workers.bulk_source import validate_source
from workers.cli import app
from workers.client import Client
from workers.demo import Demo

IDLE = "nobody-serves-this"


def write(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def rows(count: int, **fields: Any) -> list[dict[str, Any]]:
    return [{"custom_id": f"line-{n}", "prompt": f"word{n}", "max_tokens": 1} | fields for n in range(count)]


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def bulk(fleet: Demo | Fleet, *arguments: str | Path) -> Result:
    urls = ["--database-url", fleet.settings.database_url]
    if arguments[0] in ("run", "resume", "retry-failed"):
        urls += ["--broker-url", fleet.settings.broker_url]
    model = {"TOKENMILL_MODEL": fleet.settings.model}
    return CliRunner().invoke(app, ["bulk", *map(str, arguments), *urls], env=model)


def batch_id_of(done: Result) -> str:
    return done.stderr.split("Batch ", 1)[1].split(":", 1)[0]


def run_batch(
    client: Client,
    source: Path,
    report: Callable[[BatchProgress], None] = lambda progress: None,
    *,
    model: str = "smollm2",
    in_flight: int = 1000,
    broker: Broker | None = None,
    sleep: Callable[[float], None] | None = None,
) -> BatchProgress:
    options = LineOptions(defaults={"model": model})
    with source.open("rb") as file:
        made, _ = validate_source(str(source), file, options)
        extra: dict[str, Any] = {} if sleep is None else {"sleep": sleep}
        runner = BulkRunner(client, in_flight=in_flight, report=report, broker=broker, **extra)
        return runner.run(runner.create("test", made), made, file)
