"""The benchmark of token streams goes through a real worker, and keeps what it found."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks import streaming


def test_tokens_are_followed_from_a_worker_process_to_a_client(tmp_path: Path) -> None:
    assert streaming.main(["--streams", "3", "--seconds", "0.5", "--output", str(tmp_path)]) == 0
    kept = json.loads((tmp_path / "streaming.json").read_text(encoding="utf-8"))
    through_worker, alone = kept["delays"].values()
    for found in (through_worker, alone):
        assert 10 < found["chunks"] <= 45
        assert 0 < found["median_ms"] <= found["p99_ms"] <= found["worst_ms"] < 5000
    assert "a worker process" in (tmp_path / "streaming.txt").read_text(encoding="utf-8")
