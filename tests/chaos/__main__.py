"""``make chaos``: every fault by itself and a short combined run, or (``--minutes``) a long combined run.

The last line is ``chaos: jobs=… lost=0 double=0 duplicates=… unacked=0 recovery_max_s=… blamed=…``; the exit code is
0 only when nothing was lost, nothing ended twice, nothing stayed unacknowledged and every answer was right.
"""

from __future__ import annotations

import argparse
import os
import secrets
import shutil
import subprocess
import sys
from pathlib import Path

from tests.chaos.combined import run_combined
from tests.chaos.seats import ROOT
from tests.chaos.verdict import Verdict, add_figures, line, read_figures
from tests.chaos.world import FIGURES_VARIABLE

_AT_ONCE = 4
# What this module runs itself, and for longer.
_NOT_HERE = [
    "tests/chaos/test_combined.py::test_two_workers_under_every_fault_at_random_moments[postgresql-20-False]",
]
SHORT_SECONDS = 60.0
RUN = Path(ROOT) / "chaos-run"  # what a run leaves behind


def main() -> int:
    """Parse, run, report."""
    parser = argparse.ArgumentParser(prog="make chaos", description=__doc__)
    parser.add_argument(
        "--minutes", type=float, help="length of the combined run; without it the short suite runs"
    )
    parser.add_argument("--seed", type=int, help="of the combined run; drawn when not given")
    options = parser.parse_args()
    seed = secrets.randbelow(1 << 31) if options.seed is None else options.seed
    shutil.rmtree(RUN, ignore_errors=True)
    RUN.mkdir()
    figures = []
    passed = True
    if options.minutes is None:
        passed = run_tests(RUN / "figures")
        figures += read_figures(RUN / "figures")
    seconds = SHORT_SECONDS if options.minutes is None else 60 * options.minutes
    tell(f"combined run of {seconds:g}s, SEED={seed}")
    verdict = run_combined(RUN / "combined", seed=seed, seconds=seconds, say=tell)
    figures.append(verdict.figures())
    report(verdict, seed)
    total = add_figures(figures)
    print(line(total), flush=True)
    return (
        0
        if passed and verdict.ok and not any(total[name] for name in ("lost", "double", "wrong", "unacked"))
        else 1
    )


def run_tests(figures: Path) -> bool:
    """Every fault by itself, some tests at once: they wait most of the time. The numbers go to the file."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "--no-header",
        "-n",
        str(_AT_ONCE),
        "--dist",
        "worksteal",
    ]
    left_out = [f"--deselect={test}" for test in _NOT_HERE]
    environment = {**os.environ, "CHAOS": "all", FIGURES_VARIABLE: str(figures)}
    done = subprocess.run([*command, *left_out, "tests/chaos"], cwd=ROOT, env=environment, check=False)
    return done.returncode == 0


def tell(text: str) -> None:
    """Show progress as it happens."""
    print(text, flush=True)


def report(verdict: Verdict, seed: int) -> None:
    """What the combined run did and found, before the one line."""
    for told in verdict.tally.lines():
        tell(told)
    for recovery in verdict.recoveries:
        note = ", while something else was wrong, too" if recovery.disturbed else ""
        tell(f"recovery: {recovery.seconds:.1f}s from the kill to the first claim{note}")
    tell(
        "attempts: " + ", ".join(f"{count} {outcome}" for outcome, count in sorted(verdict.attempts.items()))
    )
    for job_id, why in verdict.blamed.items():
        tell(f"blamed though innocent: job {job_id}: {why}")
    for worker, count in verdict.tracebacks.items():
        tell(f"{worker}: {count} tracebacks in its log")
    for complaint in verdict.complaints():
        tell(complaint)
    if not verdict.ok:
        tell(f"the logs of its workers lie in {RUN.name}/combined; the same schedule again: SEED={seed}")


if __name__ == "__main__":
    sys.exit(main())
