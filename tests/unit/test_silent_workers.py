"""What ``doctor``, ``top`` and a bulk run say of workers that were killed, with nobody left to find them dead."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from sqlalchemy import Engine
from typer.testing import CliRunner, Result

from models_db.base import utcnow
from models_db.migrate import upgrade
from models_db.session import make_engine
from models_db.tables import WorkerState
from models_db.workers import NewWorker, heartbeat, register_worker, set_worker_state
from workers.cli import app
from workers.cli.bulk_work import _workers
from workers.client import Client

DEAD_REDIS = "redis://127.0.0.1:1/0"


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    url = f"sqlite:///{tmp_path / 'fleet.db'}"
    upgrade(url)
    engine = make_engine(url)
    yield engine
    engine.dispose()


def add(engine: Engine, name: str, silent_s: float, state: WorkerState = WorkerState.ONLINE) -> None:
    row = NewWorker(id=name, name=name, host="node-1", pid=1, version="0", backend="echo", model="m")
    with engine.begin() as conn:
        register_worker(conn, row)
        set_worker_state(conn, name, state)
        heartbeat(conn, name, 1, at=utcnow() - timedelta(seconds=silent_s))


def run(engine: Engine, *arguments: str) -> Result:
    return CliRunner().invoke(app, [*arguments, "--database-url", str(engine.url)], env={"COLUMNS": "200"})


def findings(engine: Engine) -> list[tuple[str, str]]:
    done = run(engine, "doctor", "--json", "--model", "m", "--broker-url", DEAD_REDIS)
    return [(each["health"], each["found"]) for each in json.loads(done.stdout) if each["check"] == "workers"]


def test_a_fleet_that_was_killed_is_broken(engine: Engine) -> None:
    add(engine, "gpu-a", 3000)
    add(engine, "cleanly", 3000, WorkerState.STOPPED)
    ((health, found),) = findings(engine)
    assert health == "broken"
    assert "gpu-a on node-1 for 3,0" in found
    top = run(engine, "top", "--once").stdout
    assert "0 workers, 1 more silent" in top
    assert "silent 50m" in top or "silent 51m" in top
    assert "online" not in top
    assert "No worker is alive" in top
    with Client(broker_url=DEAD_REDIS, database_url=str(engine.url)) as client:
        assert _workers(client) == 0


def test_one_that_is_silent_beside_others_is_a_warning(engine: Engine) -> None:
    add(engine, "gpu-a", 3000)
    add(engine, "gpu-b", -60)  # however slow this test is
    add(engine, "loads", 65, WorkerState.STARTING)
    (serving, silent) = findings(engine)
    assert serving == ("ok", "2 for m: gpu-b (online), loads (starting)")
    assert silent[0] == "warning"
    assert "gpu-a" in silent[1]
    top = run(engine, "top", "--once").stdout
    assert "2 workers, 1 more silent" in top
    assert "No worker is alive" not in top
