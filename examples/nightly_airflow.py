"""A night's file from Airflow: submit, wait without a slot, collect.

Copy it into the DAGs folder. Tokenmill's settings (TOKENMILL_BROKER_URL, TOKENMILL_DATABASE_URL) come from the
environment of the Airflow workers, which need the light base package with its command on PATH.

The command of "collect" exits with 1 where some lines have no answer. They are in answers.errors.jsonl, each with its
reason, and the task succeeds all the same; any other status but 0 fails it. Where one line without an answer is to fail
the night, leave out what begins with ||.
"""

from __future__ import annotations

import os
from datetime import datetime

from airflow.decorators import dag, task
from airflow.sensors.base import PokeReturnValue

FOLDER = os.environ.get("NIGHTLY_FOLDER", "/data")


@dag(schedule="15 1 * * *", start_date=datetime(2026, 1, 1), catchup=False)
def nightly_prompts() -> None:
    """prompts.jsonl to answers.jsonl."""

    @task.bash
    def submit() -> str:
        return f"tokenmill bulk run {FOLDER}/prompts.jsonl --no-wait --deadline 6h"  # prints the batch's id

    @task.sensor(poke_interval=60, timeout=7 * 3600, mode="reschedule")
    def finished(batch_id: str) -> PokeReturnValue:
        from models_db.batches import open_jobs
        from models_db.session import make_engine, reading
        from models_db.tables import BatchState
        from workers.settings import load_settings

        engine = make_engine(load_settings().database_url)
        try:
            with reading(engine) as connection:
                # Asks whether any is open, and counts none.
                state, unended = open_jobs(connection, batch_id, 1)
        finally:
            engine.dispose()
        done = state.terminal or (not unended and state is not BatchState.VALIDATING)
        return PokeReturnValue(is_done=done, xcom_value=batch_id)

    @task.bash
    def collect(batch_id: str) -> str:
        return f"tokenmill bulk resume {batch_id} -o {FOLDER}/answers.jsonl || [ $? -eq 1 ]"

    collect(finished(submit()))


nightly_prompts()
