"""Everything at once: a short run with a fixed seed here, a long one by ``make chaos MINUTES=10 SEED=…``."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.combined import run_combined

pytestmark = [pytest.mark.chaos, pytest.mark.postgres, pytest.mark.timeout(280)]


def test_two_workers_under_every_fault_at_random_moments(tmp_path: Path) -> None:
    verdict = run_combined(tmp_path / "world", seed=20, seconds=20, jobs=160, say=print).assert_ok()
    assert verdict.jobs >= 160
    assert verdict.recovery_max_s is None or verdict.recovery_max_s < 10
