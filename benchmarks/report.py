"""What a measurement was made on, and how it is kept: a table for people, JSON for programs."""

from __future__ import annotations

import json
import os
import platform
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).with_name("results")


def environment(packages: tuple[str, ...] = ("tokenmill", "torch", "transformers")) -> dict[str, Any]:
    """The machine and the versions, without names of hosts or people."""
    facts: dict[str, Any] = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "python": platform.python_version(),
    }
    for package in packages:
        try:
            facts[package] = version(package)
        except PackageNotFoundError:
            facts[package] = "not installed"
    return facts


def keep(
    name: str, command: str, tables: list[Table], data: dict[str, Any], folder: Path = RESULTS
) -> list[Path]:
    """Print the tables, and write ``name.txt`` and ``name.json``; the files."""
    facts = environment()
    head = ", ".join(f"{key} {value}" for key, value in facts.items())
    folder.mkdir(parents=True, exist_ok=True)
    text, record = folder / f"{name}.txt", folder / f"{name}.json"
    with text.open("w", encoding="utf-8") as file:
        for console in (Console(), Console(file=file, width=110, color_system=None)):
            console.print(f"$ {command}", highlight=False, markup=False)
            console.print(head, highlight=False, markup=False)
            for table in tables:
                console.print(table)
    record.write_text(
        json.dumps({"command": command, "environment": facts, **data}, indent=1) + "\n", encoding="utf-8"
    )
    return [text, record]


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown"
    )
