"""``tokenmill doctor``."""

from __future__ import annotations

import json

import typer

from workers.cli.common import (
    BrokerOption,
    DatabaseOption,
    ExitCode,
    JsonOption,
    ModelOption,
    console,
    settings_from,
)


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    app.command()(doctor)


def doctor(
    model: ModelOption = None,
    as_json: JsonOption = False,
    broker_url: BrokerOption = None,
    database_url: DatabaseOption = None,
) -> None:
    """Check settings, Redis, database, schema, workers, model and device, and say how to mend what is broken.

    Exits with 1 when something is broken; warnings alone leave 0.

    [bold]Examples[/bold]

      tokenmill doctor

      tokenmill doctor --json | jq '.[] | select(.health == "broken")'
    """
    settings = settings_from(broker_url=broker_url, database_url=database_url, model=model)
    from workers.doctor import Health, examine

    findings = []
    out = console()
    styles = {Health.OK: "green", Health.WARNING: "yellow", Health.BROKEN: "red", Health.SKIPPED: "dim"}
    for finding in examine(settings):
        findings.append(finding)
        if not as_json:
            style = styles[finding.health]
            out.print(f"[{style}]{finding.health.upper():8}[/{style}]", f"{finding.check:18}", end="")
            out.print(finding.found, markup=False)
            if finding.fix:
                out.print(" " * 27 + f"→ {finding.fix}", markup=False)
    if as_json:
        typer.echo(json.dumps([finding.to_dict() for finding in findings], ensure_ascii=False))
    if any(finding.health is Health.BROKEN for finding in findings):
        raise typer.Exit(ExitCode.FAILED)
