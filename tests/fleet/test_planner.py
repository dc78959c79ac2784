"""A worker on PostgreSQL makes the statistics that nobody else makes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from sqlalchemy import text

from models_db.jobs import insert_jobs
from models_db.planner import LEAST_CHANGES
from models_db.records import NewJob
from tests.fleet.conftest import MakeFleet
from tests.fleet.fleet import PATIENCE_S
from tests.servers import Kind, Server, fresh_database


@pytest.mark.postgres
def test_a_worker_analyses_tables_that_a_bulk_load_has_filled(
    make_fleet: MakeFleet, database_servers: Callable[[Kind], Server]
) -> None:
    with fresh_database(database_servers("postgresql")) as url:
        fleet = make_fleet(url)
        with fleet.engine.begin() as conn:
            conn.execute(text("ALTER TABLE job SET (autovacuum_enabled = false)"))
            rows = [
                NewJob(id=f"{n:05}", model="other", queue="of nobody", params={}, prompt={}, message={})
                for n in range(LEAST_CHANGES + 1)
            ]
            insert_jobs(conn, rows)
        fleet.engine.dispose()  # the server counts what a connection has changed at its end
        worker = fleet.worker()
        worker.wait_for("analysed job", PATIENCE_S)
        assert fleet.send().get(timeout=20)["finish_reason"] == "length"
        assert worker.stop() == 0
        fleet.close()
