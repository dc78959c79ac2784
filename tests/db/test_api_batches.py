"""Which server feeds a batch of the API, on every database."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import Engine

from models_db.api_batches import (
    add_api_batch,
    beat_feeding,
    ended_at,
    open_api_batches,
    set_output,
    take_feeding,
)
from models_db.batches import create_batch, finish_batch_if_done, set_batch_state
from models_db.jobs import insert_jobs, request_cancel, retry_failed
from models_db.session import transaction
from models_db.tables import BatchState, JobState
from tests.db.helpers import new_job


@pytest.fixture
def batch(db: Engine) -> Engine:
    with db.begin() as conn:
        create_batch(conn, name="nightly", batch_id="b")
        add_api_batch(
            conn,
            "b",
            tenant="",
            endpoint="/v1/completions",
            completion_window="24h",
            input_file_id="f",
            labels=None,
        )
        assert take_feeding(conn, "b", "one", 0)
    return db


def test_a_batch_goes_to_another_feeder_only_while_its_counter_stands_still(batch: Engine) -> None:
    with batch.begin() as conn:
        assert beat_feeding(conn, "b", "one")
        (record,) = open_api_batches(conn)
        assert (record.feeder, record.feeder_beat) == ("one", 2)
        assert not take_feeding(conn, "b", "two", 1), "it has moved since"
        assert take_feeding(conn, "b", "two", 2)
        assert not beat_feeding(conn, "b", "one")


def test_a_batch_that_has_failed_is_done_with(batch: Engine) -> None:
    with batch.begin() as conn:
        assert set_batch_state(conn, "b", BatchState.FAILED, error="no good line")
        assert open_api_batches(conn) == []


def test_a_batch_whose_files_are_being_written_is_passed_over(batch: Engine) -> None:
    def take() -> bool:
        return transaction(batch, lambda conn: take_feeding(conn, "b", "two", 1))

    with ThreadPoolExecutor(1) as beside:
        with batch.begin() as writing:
            assert beat_feeding(writing, "b", "one")
            looking = beside.submit(take)
            if batch.dialect.name != "sqlite":  # which has one writer at a time: the other waits for it
                assert not looking.result(60), "it did not wait for the files"
        assert not looking.result(60)
    with batch.begin() as conn:
        (record,) = open_api_batches(conn)
    assert (record.feeder, record.feeder_beat) == ("one", 2)


def test_what_runs_again_waits_for_the_files_and_then_has_none(batch: Engine) -> None:
    with batch.begin() as conn:
        insert_jobs(conn, [new_job("j", batch_id="b", position=0, custom_id="q")])
        set_batch_state(conn, "b", BatchState.IN_PROGRESS, total=1)
        assert ended_at(conn, "b", lock=True) is None
        request_cancel(conn, ["j"])
        assert finish_batch_if_done(conn, "b") is BatchState.COMPLETED

    def retry() -> list[str]:
        return transaction(batch, lambda conn: retry_failed(conn, batch_id="b", states=[JobState.CANCELLED]))

    with ThreadPoolExecutor(1) as beside:
        with batch.begin() as writing:
            assert ended_at(writing, "b", lock=True) is not None
            again = beside.submit(retry)
            assert beat_feeding(writing, "b", "one")
            files = {"output_file_id": "file-1", "error_file_id": "file-2", "answered": 0, "unanswered": 1}
            assert set_output(writing, "b", "one", **files)
        assert again.result(60) == ["j"]
    with batch.begin() as conn:
        (record,) = open_api_batches(conn)
        assert (record.output_file_id, record.error_file_id, record.answered) == (None, None, None)
        assert ended_at(conn, "b") is None
