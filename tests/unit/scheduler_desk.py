"""A scheduler with everything around it played by hand: tokens are retired when a test says so."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from backend.api import GenerationHandle, GenerationRequest, Prompt, SamplingParams
from backend.blocks import BlockAllocator
from backend.config import BULK_PRIORITY
from backend.scheduler import Scheduler, StepPlan
from backend.sequence import Sequence, Status

BULK, URGENT = 6, 3  # priorities


class Desk:
    """A scheduler with everything around it played by hand."""

    def __init__(
        self,
        *,
        blocks: int = 100,
        block_size: int = 4,
        slots: int = 4,
        tokens: int = 32,
        penalty_tokens: int | None = None,
        prefix_cache: bool = False,
        min_bulk: int = 0,
    ) -> None:
        self.allocator = BlockAllocator(blocks, prefix_cache=prefix_cache)
        self.scheduler = Scheduler(
            self.allocator,
            block_size=block_size,
            max_num_seqs=slots,
            max_num_batched_tokens=tokens,
            max_penalty_tokens=penalty_tokens,
            prefix_cache=prefix_cache,
            min_bulk_seqs=min_bulk,
        )
        self._numbers = itertools.count(1)
        self._next_token = itertools.count(1000)

    def add(
        self, length: int, *, max_tokens: int = 50, priority: int = 3, first: int = 0, penalty: float = 1.0
    ) -> Sequence:
        """Queue a prompt of ``length`` tokens that count up from ``first``."""
        request = GenerationRequest(
            request_id="r",
            prompt=Prompt(token_ids=tuple(range(first, first + length))),
            sampling=SamplingParams(max_tokens=max_tokens, repetition_penalty=penalty),
            priority=priority,
        )
        sequence = Sequence(
            request,
            GenerationHandle(request, lambda: None),
            list(range(first, first + length)),
            number=next(self._numbers),
            seed=0,
            eos_ids=frozenset(),
            max_new_tokens=max_tokens,
            arrived_at=0.0,
        )
        self.scheduler.add(sequence)
        return sequence

    def plan(self) -> StepPlan:
        """Plan and launch a step."""
        plan = self.try_plan()
        assert plan is not None
        return plan

    def try_plan(self) -> StepPlan | None:
        """Plan and launch a step, if anything can run."""
        plan = self.scheduler.schedule(0.0)
        for index in plan.sampled if plan is not None else ():
            plan.sequences[index].in_flight += 1
        return plan

    def retire(self, plan: StepPlan) -> None:
        for index in plan.sampled:
            sequence = plan.sequences[index]
            sequence.in_flight -= 1
            if sequence.status is Status.FINISHED:
                continue
            sequence.output_ids.append(next(self._next_token))
            if len(sequence.output_ids) == sequence.max_new_tokens:
                self.scheduler.finish(sequence)
            elif sequence.status is Status.RUNNING:
                self.scheduler.register_outputs(sequence)

    def step(self) -> StepPlan:
        """A step that is retired at once."""
        plan = self.plan()
        self.retire(plan)
        return plan


def is_bulk(sequence: Sequence) -> bool:
    return sequence.priority >= BULK_PRIORITY


def bulk_running(desk: Desk) -> int:
    return sum(map(is_bulk, desk.scheduler.running))


def run_ahead(desk: Desk, steps: int, arrive: Callable[[int], None] = lambda step: None) -> int:
    """Steps planned one ahead, as the engine does; the tokens that they computed."""
    pending, computed = None, 0
    for step in range(steps):
        arrive(step)
        plan = desk.try_plan()
        computed += plan.num_tokens if plan is not None else 0
        if pending is not None:
            desk.retire(pending)
        pending = plan
    if pending is not None:
        desk.retire(pending)
    return computed
