"""Requests for backends of any kind, and waiting until nothing is left of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from backend.api import (
    Backend,
    GenerationHandle,
    GenerationRequest,
    GenerationResult,
    Prompt,
    SamplingParams,
)

WAIT_S = 60.0
LONG = 4000  # tokens: seconds of work for each backend

Start = Callable[..., Backend]


def ask(
    *token_ids: int,
    max_tokens: int = 8,
    stream: bool = False,
    priority: int = 3,
    deadline_s: float | None = None,
    request_id: str = "r",
    **sampling: Any,
) -> GenerationRequest:
    return GenerationRequest(
        request_id=request_id,
        prompt=Prompt(token_ids=token_ids or (1, 2, 3)),
        sampling=SamplingParams(max_tokens=max_tokens, ignore_eos=True, **sampling),
        priority=priority,
        deadline_s=deadline_s,
        stream=stream,
    )


def eventually(condition: Callable[[], bool], what: str) -> None:
    """Wait for something that has no event to wait for: gauges are read, not announced."""
    limit = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < limit, f"never came true: {what}"
        time.sleep(0.002)


def assert_idle(backend: Backend) -> None:
    def idle() -> bool:
        stats = backend.stats()
        return stats.running == stats.waiting == 0 and stats.kv_blocks_free == stats.kv_blocks_total

    eventually(idle, "nothing runs, waits or holds a block")


def run_long(backend: Backend, count: int = 1) -> list[GenerationHandle]:
    """Requests that run until they are cancelled, each of which has produced its first token."""
    handles = [
        backend.submit(ask(5 + number, max_tokens=LONG, stream=True, priority=0)) for number in range(count)
    ]
    for handle in handles:
        next(handle.stream())
    return handles


def end(handles: list[GenerationHandle]) -> list[GenerationResult]:
    """Cancel requests, and wait until that is done."""
    for handle in handles:
        handle.cancel()
    return [handle.result(WAIT_S) for handle in handles]
