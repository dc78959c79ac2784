"""Everything at once: short runs with fixed seeds here, a long one by ``make chaos MINUTES=10 SEED=…``."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.chaos.combined import run_combined
from tests.chaos.plan import FAULTS, make_plan
from tests.servers import Kind, ServerUnavailableError, skip_or_fail

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(280)]

SECONDS = 15.0


@pytest.mark.parametrize(
    ("kind", "seed", "real"),
    [
        pytest.param("postgresql", 20, False, marks=pytest.mark.postgres),
        pytest.param("mariadb", 21, False, marks=[pytest.mark.mysql, pytest.mark.chaos_long]),
        pytest.param("sqlite", 22, False, marks=pytest.mark.chaos_long),
        pytest.param("postgresql", 23, True, marks=[pytest.mark.postgres, pytest.mark.chaos_long]),
    ],
)
def test_two_workers_under_every_fault_at_random_moments(
    tmp_path: Path, kind: Kind, seed: int, real: bool
) -> None:
    try:
        verdict = run_combined(
            tmp_path / "world", seed=seed, seconds=SECONDS, jobs=160, database=kind, real=real, say=print
        )
    except ServerUnavailableError as exc:
        skip_or_fail(exc)
    print(*verdict.tally.lines(), sep="\n")
    verdict.assert_ok(may_blame=True)
    assert verdict.jobs >= 160
    tally = verdict.tally
    names = {name for name in FAULTS if kind != "sqlite" or not name.startswith("database")}
    planned = Counter(step.kind for step in make_plan(seed, SECONDS, 160, names).steps)
    assert tally.done + Counter({name: len(whys) for name, whys in tally.undone.items()}) == planned
    assert len(planned) >= 5
    assert tally.done["kill_one"], "the first of a short run, which nothing else can prevent"
    assert verdict.recovery_max_s is None or verdict.recovery_max_s < 10
