"""What every backend must hold at its end: shutdowns, drains, and the death of its engine."""

from __future__ import annotations

import threading
import time

import pytest

from backend.api import (
    EngineDeadError,
    FinishReason,
    GenerationHandle,
)
from tests.engine.backend_kinds import Fault
from tests.engine.backend_requests import LONG, WAIT_S, Start, ask, assert_idle, run_long


def test_shutdown_without_drain_answers_everyone(start: Start) -> None:
    backend = start()
    running = run_long(backend, 4)
    waiting = [backend.submit(ask()) for _ in range(5)]
    calls: list[object] = []
    for handle in (*running, *waiting):
        handle.future.add_done_callback(calls.append)
    backend.shutdown(drain=False)
    assert [handle.result(0).finish_reason for handle in (*running, *waiting)] == [FinishReason.CANCELLED] * 9
    assert all(handle.result(0).completion_tokens >= 1 for handle in running)
    assert all(handle.result(0).completion_tokens == 0 for handle in waiting)
    assert len(calls) == 9
    assert_idle(backend)


def test_shutdown_with_drain_finishes_what_was_accepted(start: Start) -> None:
    backend = start(max_num_seqs=2)
    running = [backend.submit(ask(max_tokens=300, stream=True)) for _ in range(2)]
    for handle in running:
        next(handle.stream())
    waiting = [backend.submit(ask(max_tokens=5)) for _ in range(3)]
    backend.shutdown(drain=True, timeout_s=WAIT_S)
    assert [handle.result(0).completion_tokens for handle in (*running, *waiting)] == [300, 300, 5, 5, 5]
    assert_idle(backend)


def test_a_drain_ends_at_its_timeout(start: Start) -> None:
    backend = start()
    running = run_long(backend, 4)
    waiting = backend.submit(ask())
    began = time.monotonic()
    backend.shutdown(drain=True, timeout_s=0.2)
    assert 0.2 <= time.monotonic() - began < WAIT_S
    assert waiting.result(0).finish_reason is FinishReason.CANCELLED
    for handle in running:
        result = handle.result(0)
        assert result.finish_reason is FinishReason.CANCELLED
        assert 1 <= result.completion_tokens < LONG


def test_after_a_shutdown_nothing_is_accepted(start: Start) -> None:
    backend = start()
    backend.submit(ask()).result(WAIT_S)
    stoppers = [threading.Thread(target=backend.shutdown, kwargs={"drain": True}) for _ in range(3)]
    for thread in stoppers:
        thread.start()
    for thread in stoppers:
        thread.join(WAIT_S)
        assert not thread.is_alive()
    with pytest.raises(EngineDeadError):
        backend.submit(ask())
    backend.shutdown(drain=False)
    assert backend.stats().requests_finished == 1


def test_a_shutdown_races_with_submissions(start: Start) -> None:
    backend = start()
    handles: list[GenerationHandle] = []
    going = threading.Event()

    def submit_until_refused() -> None:
        for number in range(100_000):
            try:
                handles.append(backend.submit(ask(max_tokens=3)))
            except EngineDeadError:
                return
            if number == 5:
                going.set()

    thread = threading.Thread(target=submit_until_refused)
    thread.start()
    assert going.wait(WAIT_S)
    backend.shutdown(drain=False)
    thread.join(WAIT_S)
    assert not thread.is_alive()
    for handle in handles:
        assert handle.result(WAIT_S).finish_reason in (FinishReason.LENGTH, FinishReason.CANCELLED)


def test_a_fault_is_told_to_everyone_once(start: Start) -> None:
    fault = Fault()
    backend = start(fault)
    deaths: list[EngineDeadError] = []
    told = threading.Event()
    backend.add_death_callback(deaths.append)
    backend.add_death_callback(lambda _: told.set())
    running = run_long(backend, 4)
    waiting = [backend.submit(ask()) for _ in range(3)]
    fault.armed = True
    for handle in (*running, *waiting):
        with pytest.raises(EngineDeadError, match="injected fault"):
            handle.result(WAIT_S)
    with pytest.raises(EngineDeadError):
        list(running[0].stream())
    assert told.wait(WAIT_S)
    with pytest.raises(EngineDeadError):
        backend.submit(ask())
    backend.shutdown(drain=True, timeout_s=WAIT_S)
    assert len(deaths) == 1
    late: list[EngineDeadError] = []
    backend.add_death_callback(late.append)
    assert len(late) == 1
    stats = backend.stats()
    assert (stats.running, stats.waiting, stats.requests_failed) == (0, 0, 7)
