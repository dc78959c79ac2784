"""What every backend must hold among many requests: order, concurrency, counters, any mixture."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from backend.api import (
    Backend,
    BackendStats,
    FinishReason,
    GenerationHandle,
)
from tests.engine.backend_kinds import Kind
from tests.engine.backend_requests import WAIT_S, Start, ask, assert_idle, end, eventually, run_long

COUNTERS = (
    "steps",
    "prompt_tokens",
    "cached_tokens",
    "generated_tokens",
    "requests_finished",
    "requests_failed",
    "preemptions",
    "busy_s",
    "prepare_s",
    "wall_s",
)


# ------------------------------------------------------------------------------------------- order and concurrency


def test_priority_then_arrival(start: Start) -> None:
    backend = start(max_num_seqs=1)
    blocker = run_long(backend)
    order: list[int] = []
    priorities = [9, 3, 0, 3, 9, 0, 5]
    handles = []
    for number, priority in enumerate(priorities):
        handle = backend.submit(ask(max_tokens=1, priority=priority))
        handle.future.add_done_callback(lambda _, number=number: order.append(number))  # type: ignore[misc]
        handles.append(handle)
    assert backend.stats().waiting == len(priorities)
    end(blocker)
    for handle in handles:
        handle.result(WAIT_S)
    assert order == sorted(range(len(priorities)), key=lambda number: (priorities[number], number))
    assert_idle(backend)


def test_bulk_gets_the_slot_that_it_keeps(start: Start) -> None:
    backend = start(max_num_seqs=2, bulk_min_share=0.5)
    blockers = run_long(backend, 2)
    order: list[int] = []
    handles = []
    for priority in (0, 6, 3, 6, 0):
        handle = backend.submit(ask(max_tokens=2, priority=priority))
        handle.future.add_done_callback(lambda _, priority=priority: order.append(priority))  # type: ignore[misc]
        handles.append(handle)
    end(blockers[:1])
    for handle in handles:
        handle.result(WAIT_S)
    assert order == [6, 6, 0, 0, 3]
    end(blockers[1:])
    assert_idle(backend)


def test_submit_from_many_threads(backend: Backend) -> None:
    expected = {n: backend.submit(ask(n, max_tokens=6)).result(WAIT_S).token_ids for n in range(1, 9)}
    gate = threading.Barrier(8)

    def submit_some(first: int) -> list[tuple[int, tuple[int, ...]]]:
        gate.wait(WAIT_S)
        numbers = [1 + (first + step) % 8 for step in range(12)]
        handles = [(n, backend.submit(ask(n, max_tokens=6))) for n in numbers]
        return [(n, handle.result(WAIT_S).token_ids) for n, handle in handles]

    with ThreadPoolExecutor(8) as threads:
        outcomes = [pair for pairs in threads.map(submit_some, range(8)) for pair in pairs]
    assert len(outcomes) == 96
    assert all(tokens == expected[n] for n, tokens in outcomes)


def test_done_callbacks_run_once_and_may_use_the_backend(backend: Backend) -> None:
    calls: list[int] = []
    follow_ups: list[GenerationHandle] = []

    def done(_: object) -> None:
        calls.append(backend.stats().running)
        follow_ups.append(backend.submit(ask(max_tokens=2)))

    handles = [backend.submit(ask(max_tokens=3)) for _ in range(6)]
    for handle in handles:
        handle.future.add_done_callback(done)
    wait([handle.future for handle in handles], WAIT_S)
    eventually(lambda: len(follow_ups) == 6, "each callback has run")
    assert [handle.result(WAIT_S).completion_tokens for handle in follow_ups] == [2] * 6
    assert len(calls) == 6


def test_counters_only_grow_and_add_up(backend: Backend) -> None:
    before = backend.stats()
    seen = [before]
    stop = threading.Event()

    def watch() -> None:
        while not stop.is_set():
            seen.append(backend.stats())
            stop.wait(0.001)

    watcher = threading.Thread(target=watch)
    watcher.start()
    handles = [backend.submit(ask(*range(1, 2 + n), max_tokens=5 + n)) for n in range(20)]
    handles[7].cancel()
    results = [handle.result(WAIT_S) for handle in handles]
    assert_idle(backend)
    stop.set()
    watcher.join(WAIT_S)
    after = backend.stats()
    for earlier, later in zip(seen, [*seen[1:], after], strict=True):
        for name in COUNTERS:
            assert getattr(earlier, name) <= getattr(later, name), name
    assert max(stats.running for stats in seen) <= backend.info().slots
    assert after.requests_finished - before.requests_finished == 20
    assert after.requests_failed == before.requests_failed
    assert after.generated_tokens - before.generated_tokens == sum(r.completion_tokens for r in results)
    assert after.wall_s > before.wall_s


def test_stats_of_an_idle_backend_are_still(backend: Backend) -> None:
    assert_idle(backend)

    def work_done(stats: BackendStats) -> tuple[int, ...]:
        return (stats.steps, stats.generated_tokens, stats.prompt_tokens, stats.requests_finished)

    backend.submit(ask()).result(WAIT_S)
    assert_idle(backend)
    eventually(
        lambda: work_done(backend.stats()) == work_done(backend.stats()), "an idle backend does nothing"
    )


# ----------------------------------------------------------------------------------------------------- any mixture

JOB = st.fixed_dictionaries(
    {
        # Around the blocks of 16. Few, because what each leads to alone is computed once.
        "prompt": st.sampled_from((1, 2, 15, 16, 17, 32, 33, 40)),
        "first": st.integers(1, 3),
        "max_tokens": st.integers(1, 60),
        "priority": st.integers(0, 9),
        "cancel": st.sampled_from([None, None, "at once", "later"]),
        "deadline_s": st.sampled_from([None, None, None, 0.001, 0.02]),
        "stream": st.booleans(),
    }
)


@settings(
    max_examples=12,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(jobs=st.lists(JOB, min_size=1, max_size=16))
def test_any_mixture_ends_and_each_answer_is_a_beginning_of_its_own(
    backend: Backend, solo: dict[tuple[int, ...], tuple[int, ...]], jobs: list[dict[str, Any]]
) -> None:
    handles = []
    for job in jobs:
        prompt = tuple((job["first"] + n) % 50 for n in range(job["prompt"]))
        request = ask(
            *prompt,
            max_tokens=job["max_tokens"],
            priority=job["priority"],
            deadline_s=job["deadline_s"],
            stream=job["stream"],
        )
        handle = backend.submit(request)
        if job["cancel"] == "at once":
            handle.cancel()
        handles.append((job, prompt, handle))
    for job, _, handle in handles:
        if job["cancel"] == "later":
            handle.cancel()
    for job, prompt, handle in handles:
        result = handle.result(WAIT_S)
        if prompt not in solo:
            solo[prompt] = backend.submit(ask(*prompt, max_tokens=60)).result(WAIT_S).token_ids
        assert result.token_ids == solo[prompt][: result.completion_tokens]
        if result.finish_reason is FinishReason.LENGTH:
            assert result.completion_tokens == job["max_tokens"]
        elif result.finish_reason is FinishReason.CANCELLED:
            assert job["cancel"] is not None
        else:
            assert job["deadline_s"] is not None
        if job["stream"]:
            chunks = list(handle.stream())
            assert tuple(token for chunk in chunks for token in chunk.token_ids) == result.token_ids
            assert "".join(chunk.text for chunk in chunks) == result.text
    assert_idle(backend)


@pytest.fixture(scope="module")
def solo(kind: Kind) -> dict[tuple[int, ...], tuple[int, ...]]:
    """What each prompt leads to when it runs alone, for one kind of backend."""
    return {}
