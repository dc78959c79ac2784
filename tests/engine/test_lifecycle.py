"""Cancels, deadlines, death and shutdown of the ``async`` backend, with the device held up at a gate."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
import threading
from concurrent.futures import CancelledError
from typing import Any

import pytest

from backend.api import (
    EngineDeadError,
    FinishReason,
    GenerationHandle,
    QueueFullError,
    RequestError,
    TokenmillError,
)
from backend.config import EngineConfig
from backend.engine import AsyncEngine
from tests.engine.conftest import MakeEngine, RunningEngine, TinyModel
from tests.engine.engine_driver import ManualClock

LONG: dict[str, Any] = {"max_tokens": 60, "ignore_eos": True}


def hold(running: RunningEngine, prompt: list[int], **options: Any) -> GenerationHandle:
    """Submit a request and hold the engine up before the device, in that request's first step."""
    running.gate.close()
    handle = running.submit(prompt, **{**LONG, **options})
    running.gate.wait_until_reached()
    return handle


# ------------------------------------------------------------------------------------------------------- early ends


def test_cancel_of_a_waiting_request(make_engine: MakeEngine, llama: TinyModel) -> None:
    running = make_engine(max_num_seqs=1)
    first = hold(running, llama.prompts[3], max_tokens=5)
    second = running.submit(llama.prompts[4], **LONG)
    second.cancel()
    running.gate.open()
    result = second.result(30)
    assert result.finish_reason is FinishReason.CANCELLED
    assert result.token_ids == ()
    assert result.text == ""
    assert result.time_to_first_token_s is None
    assert list(first.result(30).token_ids) == llama.greedy(llama.prompts[3], 5)
    running.check_idle()


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_cancel_of_a_running_request(make_engine: MakeEngine, llama: TinyModel, mode: str) -> None:
    running = make_engine(mode=mode)
    running.gate.close(after=4)
    handle = running.submit(llama.prompts[3], stream=True, **LONG)
    neighbour = running.submit(llama.prompts[4], max_tokens=14, ignore_eos=True)
    running.gate.wait_until_reached()
    handle.cancel()
    handle.cancel()
    running.gate.open()
    seen = [token for chunk in handle.stream() for token in chunk.token_ids]
    result = handle.result(30)
    assert result.finish_reason is FinishReason.CANCELLED
    assert list(result.token_ids) == seen == llama.greedy(llama.prompts[3], len(seen))
    assert 3 <= len(seen) <= 5
    assert list(neighbour.result(30).token_ids) == llama.greedy(llama.prompts[4], 14)
    handle.cancel()  # too late, and harmless
    running.check_idle()


def test_deadlines_of_waiting_and_running_requests(make_engine: MakeEngine, llama: TinyModel) -> None:
    clock = ManualClock()
    running = make_engine(clock=clock, max_num_seqs=1)
    first = hold(running, llama.prompts[3], deadline_s=10)
    second = running.submit(llama.prompts[4], deadline_s=5, **LONG)
    third = running.submit(llama.prompts[5], deadline_s=50, max_tokens=3, ignore_eos=True)
    clock.now += 20
    running.gate.open()
    for handle in (first, second):
        result = handle.result(30)
        assert result.finish_reason is FinishReason.DEADLINE
        assert result.latency_s == 20
    assert len(first.result().token_ids) <= 1
    assert second.result().token_ids == ()
    assert second.result().queue_time_s == 20
    assert list(third.result(30).token_ids) == llama.greedy(llama.prompts[5], 3)
    assert third.result().queue_time_s == 20
    running.check_idle()


def test_a_full_queue_refuses_and_later_accepts(make_engine: MakeEngine, llama: TinyModel) -> None:
    running = make_engine(max_num_seqs=1, max_waiting=2)
    handles = [hold(running, llama.prompts[3], max_tokens=3)]
    handles += [running.submit(llama.prompts[i], max_tokens=3, ignore_eos=True) for i in (4, 5)]
    assert running.engine.stats().waiting == 2
    with pytest.raises(QueueFullError, match="2 requests wait already"):
        running.submit(llama.prompts[6], max_tokens=3)
    running.gate.open()
    for handle, i in zip(handles, (3, 4, 5), strict=True):
        assert list(handle.result(30).token_ids) == llama.greedy(llama.prompts[i], 3)
    assert running.submit(llama.prompts[6], max_tokens=3, ignore_eos=True).result(30).completion_tokens == 3
    running.check_idle()


def test_priority_decides_who_goes_first(make_engine: MakeEngine, llama: TinyModel) -> None:
    running = make_engine(max_num_seqs=1)
    ended: list[str] = []
    blocker = hold(running, llama.prompts[3], max_tokens=2, priority=0)
    for name, priority in (("late", 9), ("middle", 5), ("urgent", 1), ("middle too", 5)):
        handle = running.submit(llama.prompts[4], max_tokens=2, ignore_eos=True, priority=priority)
        handle.future.add_done_callback(lambda _future, name=name: ended.append(name))
    running.gate.open()
    blocker.result(30)
    running.check_idle()
    assert ended == ["urgent", "middle", "middle too", "late"]


def test_an_urgent_request_takes_the_slot_of_another_which_comes_back(
    make_engine: MakeEngine, llama: TinyModel
) -> None:
    running = make_engine(max_num_seqs=1)
    slow = hold(running, llama.prompts[3], priority=5, max_tokens=14)
    urgent = running.submit(llama.prompts[4], max_tokens=3, ignore_eos=True, priority=0)
    running.gate.open()
    assert list(urgent.result(30).token_ids) == llama.greedy(llama.prompts[4], 3)
    result = slow.result(30)
    assert list(result.token_ids) == llama.greedy(llama.prompts[3], 14)
    assert result.preemptions == 1
    running.check_idle()


def test_a_future_cancelled_by_its_holder_ends_its_stream(make_engine: MakeEngine, llama: TinyModel) -> None:
    """As asyncio does it, when a task that waits for the wrapped future is cancelled."""
    running = make_engine()
    running.gate.close(after=3)
    handle = running.submit(llama.prompts[3], stream=True, **LONG)
    other = running.submit(llama.prompts[4], max_tokens=14, ignore_eos=True)
    running.gate.wait_until_reached()
    assert handle.future.cancel()
    running.gate.open()
    with pytest.raises(CancelledError):
        list(handle.stream())
    assert other.result(30).completion_tokens == 14
    assert running.engine.stats().generated_tokens <= 14 + 4  # and no more is computed for it
    running.check_idle()


def test_a_failing_done_callback_hurts_nobody(
    make_engine: MakeEngine, llama: TinyModel, caplog: pytest.LogCaptureFixture
) -> None:
    running = make_engine()
    handle = running.submit(llama.prompts[3], max_tokens=2, ignore_eos=True)
    handle.future.add_done_callback(lambda _future: 1 / 0)  # type: ignore[arg-type, return-value]
    handle.result(30)
    assert running.submit(llama.prompts[4], max_tokens=2, ignore_eos=True).result(30).completion_tokens == 2
    running.check_idle()


def test_text_that_cannot_be_decoded_fails_its_request_alone(
    make_engine: MakeEngine, llama: TinyModel
) -> None:
    running = make_engine()
    output = running.engine._output
    assert output is not None
    assert output._decoder is not None
    decode, broken = output._decoder.decode, threading.Event()

    def failing(ids: list[int]) -> str:
        if broken.is_set():
            raise RuntimeError("bad bytes")
        return decode(ids)

    output._decoder.decode = failing  # type: ignore[method-assign]
    broken.set()
    for options in ({"stream": True}, {"stop": "zzzz"}, {}):
        with pytest.raises(TokenmillError, match=r"could not be decoded.*bad bytes"):
            running.submit(llama.prompts[3], **LONG, **options).result(30)
    broken.clear()
    assert running.submit(llama.prompts[3], max_tokens=2, ignore_eos=True).result(30).completion_tokens == 2
    running.check_idle()


# ------------------------------------------------------------------------------------------------------------ death


def check_dead(running: RunningEngine, handles: list[GenerationHandle], told: list[EngineDeadError]) -> None:
    for handle in handles:
        with pytest.raises(EngineDeadError, match="device is on fire"):
            handle.result(30)
    thread = running.engine._thread
    assert thread is not None
    thread.join(30)
    assert not thread.is_alive()
    assert [str(error) for error in told] == [str(told[0])]
    assert "device is on fire" in str(told[0])
    for _ in range(2):
        with pytest.raises(EngineDeadError, match="device is on fire"):
            running.submit([5], max_tokens=1)
    late: list[EngineDeadError] = []
    running.engine.add_death_callback(late.append)
    assert late == told
    running.engine.shutdown(drain=True)
    stats = running.engine.stats()
    assert (stats.running, stats.waiting) == (0, 0)
    assert stats.requests_finished + stats.requests_failed == running.engine._number


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_a_fault_of_the_device_is_told_to_everyone(
    make_engine: MakeEngine, llama: TinyModel, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    running = make_engine(mode=mode, max_num_seqs=2)
    told: list[EngineDeadError] = []

    def clumsy(error: EngineDeadError) -> None:
        raise ValueError("a callback's own fault")

    running.engine.add_death_callback(clumsy)
    running.engine.add_death_callback(told.append)
    handles = [hold(running, llama.prompts[3])]
    handles += [running.submit(llama.prompts[i], stream=i == 4, **LONG) for i in (4, 5, 6)]
    handles[-1].cancel()  # among the commands that the dead engine finds
    running.gate.error = RuntimeError("device is on fire")
    with caplog.at_level(logging.CRITICAL):
        running.gate.open()
        with pytest.raises(EngineDeadError):
            list(handles[1].stream())
        check_dead(running, handles[:3], told)
    assert handles[3].done()


@pytest.mark.parametrize("place", ["allocate", "release", "match"])
def test_a_fault_in_the_accounting_is_told_to_everyone(
    make_engine: MakeEngine,
    llama: TinyModel,
    place: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The scheduler may have a sequence in neither of its lists at that moment; cancels then fail as well."""
    running = make_engine(max_num_seqs=2, num_kv_blocks=20)
    told: list[EngineDeadError] = []
    running.engine.add_death_callback(told.append)
    handles = [hold(running, llama.prompts[3])]
    handles += [running.submit(llama.prompts[i], **LONG) for i in (4, 5, 6)]

    def burn(*_args: object) -> None:
        raise RuntimeError("device is on fire")

    monkeypatch.setattr(running.core.allocator, place, burn)
    if place == "release":
        handles[0].cancel()
    running.gate.open()
    check_dead(running, handles, told)


def test_a_callback_may_shut_the_dead_engine_down(
    make_engine: MakeEngine, llama: TinyModel, caplog: pytest.LogCaptureFixture
) -> None:
    running = make_engine()
    done = threading.Event()

    def shut(_error: EngineDeadError) -> None:
        running.engine.shutdown(drain=False)
        done.set()

    running.engine.add_death_callback(shut)
    handle = hold(running, llama.prompts[3])
    running.gate.error = RuntimeError("device is on fire")
    running.gate.open()
    assert done.wait(30)
    with pytest.raises(EngineDeadError):
        handle.result(30)


# --------------------------------------------------------------------------------------------------------- shutdown


def test_shutdown_with_drain_finishes_what_was_accepted(make_engine: MakeEngine, llama: TinyModel) -> None:
    running = make_engine(max_num_seqs=2)
    handles = [running.submit(prompt, max_tokens=6, ignore_eos=True) for prompt in llama.prompts]
    running.engine.shutdown(drain=True)
    for handle, prompt in zip(handles, llama.prompts, strict=True):
        assert handle.done()
        assert list(handle.result().token_ids) == llama.greedy(prompt, 6)
    with pytest.raises(EngineDeadError, match="shut down"):
        running.submit([5], max_tokens=1)
    running.check_idle()


@pytest.mark.parametrize("drain", [False, True])
def test_shutdown_in_a_hurry_ends_everything_as_cancelled(
    make_engine: MakeEngine, llama: TinyModel, drain: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = make_engine(max_num_seqs=1)
    running.gate.close(after=4)
    started = running.submit(llama.prompts[3], **LONG)
    waiting = running.submit(llama.prompts[4], **LONG)
    running.gate.wait_until_reached()
    thread = running.engine._thread
    assert thread is not None
    join = thread.join

    def patient_join(timeout: float | None = None) -> None:
        if timeout is None:  # all that shutdown has to say has been said
            running.gate.open()
        join(timeout)

    monkeypatch.setattr(thread, "join", patient_join)
    running.engine.shutdown(drain=drain, timeout_s=0.0)
    for handle in (started, waiting):
        assert handle.result(0).finish_reason is FinishReason.CANCELLED
    tokens = list(started.result().token_ids)
    assert 3 <= len(tokens) <= 5
    assert tokens == llama.greedy(llama.prompts[3], len(tokens))
    assert waiting.result().token_ids == ()
    running.check_idle()


def test_shutdown_again_and_from_a_callback(make_engine: MakeEngine, llama: TinyModel) -> None:
    running = make_engine()
    returned = threading.Event()

    def shut(_future: object) -> None:
        running.engine.shutdown(drain=True)
        returned.set()

    handle = running.submit(llama.prompts[3], max_tokens=3, ignore_eos=True)
    handle.future.add_done_callback(shut)
    handle.result(30)
    assert returned.wait(30)
    running.engine.shutdown(drain=False)
    running.engine.shutdown(drain=True, timeout_s=1)
    running.check_idle()


def test_before_the_start() -> None:
    engine = AsyncEngine(EngineConfig(model="smollm2"))
    with pytest.raises(EngineDeadError, match="not been started"):
        engine.info()
    assert engine.stats().running == 0
    engine.shutdown(drain=True)
    from backend.api import GenerationRequest, Prompt

    with pytest.raises(EngineDeadError, match="not been started"):
        engine.submit(GenerationRequest(request_id="r", prompt=Prompt(token_ids=(1,))))


def test_a_second_start_is_refused(make_engine: MakeEngine) -> None:
    running = make_engine()
    with pytest.raises(EngineDeadError, match="started before"):
        running.engine.start()
    with pytest.raises(RequestError):
        running.submit([10_000], max_tokens=1)


@pytest.mark.parametrize("name", ["async", "transformers"])
def test_a_program_that_ends_without_a_shutdown_ends_cleanly(name: str, llama: TinyModel) -> None:
    program = f"""
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever runs the tests may have had it ignored
from backend.api import GenerationRequest, Prompt, SamplingParams
from backend.config import EngineConfig
from backend.registry import create_backend
backend = create_backend({name!r}, EngineConfig(model={str(llama.folder)!r}, device="cpu", num_kv_blocks=64))
backend.start()
sampling = SamplingParams(max_tokens=80, ignore_eos=True)
for _ in range(60):
    request = GenerationRequest(
        request_id="r", prompt=Prompt(token_ids=(5, 6)), sampling=sampling, stream=True
    )
    handle = backend.submit(request)
next(handle.stream())
signal.raise_signal(signal.SIGINT)
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert ended.stderr.rstrip().endswith("KeyboardInterrupt"), ended.stderr
    assert ended.returncode == -signal.SIGINT
