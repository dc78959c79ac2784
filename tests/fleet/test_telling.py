"""Telling Celery how jobs ended: its links run once for all deliveries, and its backend's outage starves nobody."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from celery.exceptions import Ignore
from sqlalchemy import Engine

from backend.api import RequestError
from models_db.jobs import retry_failed
from models_db.tables import JobState
from tests.fleet.rows import accept
from tests.fleet.table_world import Clock, FakeRequest, TestWorker, World
from tests.fleet.test_round_trips import Later
from workers.breaker import Breaker
from workers.endings import Telling
from workers.finaliser import MOST_TOGETHER, Finaliser
from workers.intake import Call


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


class Refused(SlowTracer):
    """Celery's result backend takes nothing until ``takes``."""

    def __init__(self, worker: TestWorker) -> None:
        real = worker.tracer.trace
        self.takes, self.asked = False, 0

        def trace(delivery: Any, outcome: Any, runtime_s: float | None, then: Telling) -> None:
            self.asked += 1
            if self.takes:
                real(delivery, outcome, runtime_s, then)
            else:
                worker.mail.append(then.later)

        worker.tracer.trace = trace  # type: ignore[method-assign, assignment]


def test_an_outcome_that_celery_s_backend_does_not_take_comes_again_after_a_while(engine: Engine) -> None:
    world = World(engine)
    worker = world.worker()
    tracer = Refused(worker)
    first, joined = worker.deliver("j"), worker.deliver("j")
    world.run()
    worker.backend.finish("j")
    world.run()
    assert logs(first, joined) == [["accepted"], ["acknowledged"]], "it does not go round and round"
    again = worker.deliver("j")
    world.run()
    other = worker.deliver("other")
    world.run()
    assert worker.backend.submitted == ["j", "other"], "others go on meanwhile"
    world.clock.seconds += 4
    world.run()
    assert first.log == ["accepted"]
    assert tracer.asked == 2
    world.clock.seconds += 1.1
    world.run()
    assert logs(first, again) == [["back"], ["back"]]
    tracer.takes = True
    last = worker.deliver("j")
    world.run()
    assert last.log[-1] == "acknowledged"
    tracer.takes = False
    worker.backend.finish("other")
    world.run()
    assert worker.table.pending == 1
    worker.table.close()
    world.run()
    assert other.log[-1] == "back", "a shutdown waits for no backend"
    assert worker.table.pending == 0


def test_a_delivery_that_celery_cancels_while_it_waits_for_the_backend_is_left(engine: Engine) -> None:
    world = World(engine)
    worker = world.worker()
    Refused(worker)
    request = worker.deliver("j")
    world.run()
    worker.backend.finish("j")
    world.run()
    request.abandon()
    world.run()
    assert request.log == ["accepted"]
    assert worker.table.pending == 0


class Told:
    """A finaliser whose tracer does what the test says, with Celery's backend under its hand."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.threads = Later()
        self.posted: list[Callable[[], None]] = []
        self.marked: list[str] = []
        self.called: list[str] = []
        self.ends: list[tuple[str, str]] = []
        self.away: set[str] | None = set()  # jobs that the backend does not take; ``None``: all of them
        task = SimpleNamespace(backend=None, outcome=lambda *_, **__: nullcontext())
        self.finaliser = Finaliser(task, self.threads, self.posted.append, self._mark, Breaker(self.clock))  # type: ignore[arg-type]

    def _mark(self, job_id: str) -> Future[None]:
        self.marked.append(job_id)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def end(self, *job_ids: str, error: BaseException | None = None, ignored: bool = False) -> None:
        """These jobs have ended, at the same moment."""
        for job_id in job_ids:
            self._trace(job_id, error, ignored)
        while self.threads.work:
            self.threads.work.pop(0)()
        posted, self.posted[:] = list(self.posted), []
        for action in posted:
            action()

    def _trace(self, job_id: str, error: BaseException | None, ignored: bool) -> None:
        def tracer() -> tuple[int, Any, float]:
            self.called.append(job_id)
            if not ignored and (self.away is None or job_id in self.away):
                return 1, SimpleNamespace(exception=ConnectionError("away")), 0.0
            return (0, "", 0.0) if error is None else (1, SimpleNamespace(exception=error), 0.0)

        def note(what: str) -> Callable[..., None]:
            return lambda *_: self.ends.append((job_id, what))

        request = SimpleNamespace(
            ignore_result=ignored, has_callbacks=not ignored, beginning=None, settle=lambda: None
        )
        delivery = SimpleNamespace(
            job_id=job_id,
            request=request,
            abandoned=False,
            accepted=False,
            call=Call(tracer, (), {}),
            callback=note("called back"),
            error_callback=None,
        )
        outcome = SimpleNamespace(job_id=job_id, result=None)
        self.finaliser.trace(delivery, outcome, 0.1, Telling(note("told"), note("later")))  # type: ignore[arg-type]

    def whose(self, what: str) -> list[str]:
        return [job_id for job_id, how in self.ends if how == what]


def test_a_backend_that_is_away_is_tried_with_one_outcome_now_and_then() -> None:
    told = Told()
    told.away = None
    many = [f"j{n}" for n in range(MOST_TOGETHER)]
    told.end(*many)
    assert told.called == many[:2], "each try may cost a thread many seconds"
    assert told.whose("later") == many
    told.end("x", "y")
    assert told.called == many[:2]
    told.end("silent", ignored=True)
    assert told.whose("told") == ["silent"], "it needs no backend"
    told.clock.seconds += 5.1
    told.end(many[0], "x", "y")
    assert told.called == [*many[:2], "silent", "x"], "one that has not failed before"
    told.away = set()
    told.end("y")
    assert told.called[-1] == "x", "only now and then"
    told.clock.seconds += 5.1
    told.end("x", "y")
    assert told.whose("told") == ["silent", "y"]
    told.end("x", *many)
    assert told.whose("told") == ["silent", "y", "x", *many], "it answers again"
    assert set(told.marked) == {"x", "y", *many}


def test_one_outcome_that_the_backend_never_takes_holds_up_no_other() -> None:
    told = Told()
    told.away = {"bad"}
    for n in range(4):
        told.end("bad")
        told.end(f"j{n}")
        told.end(f"k{n}", "bad", f"l{n}")
    assert len(told.whose("told")) == 12
    assert set(told.whose("later")) == {"bad"}
    assert "bad" not in told.marked


@pytest.mark.parametrize(
    ("error", "marked"),
    [
        (None, True),
        (RequestError("is too long", field="prompt"), True),
        (Ignore(), True),  # as a cancelled job ends
        (RuntimeError("the tracer broke"), False),
    ],
)
def test_links_and_errbacks_that_have_run_are_noted(error: BaseException | None, marked: bool) -> None:
    told = Told()
    told.end("j", error=error)
    assert told.marked == ["j"] * marked
    assert told.whose("told") == ["j"]
