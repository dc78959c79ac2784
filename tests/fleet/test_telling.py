"""Deliveries that come while Celery is told how their job ended: its links run once for all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine

from models_db.jobs import retry_failed
from models_db.migrate import upgrade
from models_db.session import make_engine
from models_db.tables import JobState
from tests.fleet.table_world import FakeRequest, TestWorker, World
from tests.fleet.test_suspects import accept


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    url = f"sqlite:///{tmp_path / 'table.db'}"
    upgrade(url)
    engine = make_engine(url)
    yield engine
    engine.dispose()


class SlowTracer:
    """Tells Celery when the test says so, on the worker's own tracer."""

    def __init__(self, worker: TestWorker) -> None:
        self.waiting: list[Callable[[], None]] = []
        real = worker.tracer.trace
        worker.tracer.trace = lambda *call: self.waiting.append(lambda: real(*call))  # type: ignore[method-assign]

    def tell(self) -> None:
        waiting, self.waiting = self.waiting, []
        for call in waiting:
            call()


def logs(*requests: FakeRequest) -> list[Any]:
    return [request.log[-1:] for request in requests]


def test_further_deliveries_wait_for_it_and_are_acknowledged_then(engine: Engine) -> None:
    world = World(engine)
    worker = world.worker()
    slow = SlowTracer(worker)
    first = worker.deliver("j")
    world.run()
    worker.backend.finish("j")
    world.run()
    second, third = worker.deliver("j"), worker.deliver("j")
    world.run()
    assert len(slow.waiting) == 1
    assert logs(second, third) == [[], []]
    slow.tell()
    world.run()
    assert logs(first, second, third) == [["acknowledged"]] * 3
    assert worker.tracer.traced == ["j"]
    assert worker.table.pending == 0
    later = worker.deliver("j")
    world.run()
    slow.tell()
    world.run()
    assert worker.tracer.traced == ["j", "j"], "without links nobody notes that Celery knows"
    assert later.log[-1] == "acknowledged"


def test_a_retried_job_s_new_end_is_told_for_itself(engine: Engine) -> None:
    world = World(engine)
    worker = world.worker()
    slow = SlowTracer(worker)
    accept(engine, ["j"])
    worker.deliver("j")
    world.run()
    worker.table.cancel(["j"])
    world.run()
    assert world.state("j") is JobState.CANCELLED
    with engine.begin() as conn:
        retry_failed(conn, ids=["j"], states=[JobState.CANCELLED])
    worker.deliver("j")
    world.run()
    worker.backend.finish("j")
    world.run()
    assert world.state("j") is JobState.SUCCEEDED
    assert len(slow.waiting) == 2
    slow.tell()
    world.run()
    assert worker.tracer.traced == ["j", "j"]
    assert worker.table.pending == 0
