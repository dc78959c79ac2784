"""Drives an ``EngineCore`` by hand, one step at a time, and checks the books after each."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from backend.api import (
    FinishReason,
    GenerationHandle,
    GenerationRequest,
    Prompt,
    SamplingParams,
    TokenLogprob,
    TokenmillError,
)
from backend.assembly import make_core
from backend.attention.sdpa import SdpaKernel
from backend.config import BULK_PRIORITY, EngineConfig
from backend.core import EngineCore
from backend.kv_cache import KVCache, LayerShape
from backend.loading import LoadedModel
from backend.runner import ModelRunner, ModuleForward, Runner, SamplingStage
from backend.scheduler import StepPlan
from backend.sequence import Sequence, Status
from backend.slots import StepLayout

MAX_IDLE_STEPS = 3  # steps in a row in which nothing is launched although there is work


class ManualClock:
    """Time that passes when told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class RecordingSink:
    """What the engine reported, and that it reported each end once."""

    ended: dict[int, Sequence] = field(default_factory=dict)
    errors: dict[int, TokenmillError] = field(default_factory=dict)
    tokens: dict[int, list[int]] = field(default_factory=dict)

    def token(self, sequence: Sequence, token_id: int, logprob: TokenLogprob | None) -> None:
        assert sequence.number not in self.ended
        self.tokens.setdefault(sequence.number, []).append(token_id)

    def finish(self, sequence: Sequence, now: float) -> None:
        assert sequence.number not in self.ended
        assert sequence.finish_reason is not None
        self.ended[sequence.number] = sequence

    def fail(self, sequence: Sequence, error: TokenmillError) -> None:
        assert sequence.number not in self.ended
        self.ended[sequence.number] = sequence
        self.errors[sequence.number] = error


class Driver:
    """One engine core around any runner."""

    def __init__(
        self,
        runner: Callable[[EngineConfig], Runner],
        *,
        num_blocks: int,
        max_model_len: int,
        eos_ids: frozenset[int] = frozenset(),
        layout: Callable[[StepPlan], StepLayout | None] | None = None,
        **config: object,
    ) -> None:
        self.config = EngineConfig(**{"debug_poison": True, "num_kv_blocks": num_blocks, **config})  # type: ignore[arg-type]
        self.clock = ManualClock()
        self.sink = RecordingSink()
        self.max_model_len = max_model_len
        self.num_blocks = num_blocks
        self.eos_ids = eos_ids
        self.core: EngineCore = make_core(
            self.config,
            runner=runner(self.config),
            num_blocks=num_blocks,
            max_model_len=max_model_len,
            device=torch.device("cpu"),
            sink=self.sink,
            clock=self.clock,
            layout=layout,
        )
        self.sequences: list[Sequence] = []
        self._numbers = itertools.count(1)

    # ------------------------------------------------------------------------------------------------ requests

    def fits(self, prompt_tokens: int, max_tokens: int) -> bool:
        """Whether ``AsyncEngine.submit`` would accept such a request."""
        max_new = min(max_tokens, self.max_model_len - prompt_tokens)
        return max_new > 0 and -(-(prompt_tokens + max_new - 1) // self.config.block_size) <= self.num_blocks

    def submit(
        self,
        prompt_ids: list[int],
        *,
        priority: int = 3,
        deadline_s: float | None = None,
        **sampling: object,
    ) -> Sequence:
        params = SamplingParams(**sampling)  # type: ignore[arg-type]
        request = GenerationRequest(
            request_id="same-for-all",
            prompt=Prompt(token_ids=tuple(prompt_ids)),
            sampling=params,
            priority=priority,
            deadline_s=deadline_s,
        )
        sequence = Sequence(
            request,
            GenerationHandle(request, lambda: None),
            list(prompt_ids),
            number=next(self._numbers),
            seed=params.seed or 0,
            eos_ids=self.eos_ids,
            max_new_tokens=min(params.max_tokens, self.max_model_len - len(prompt_ids)),
            arrived_at=self.clock(),
        )
        self.sequences.append(sequence)
        self.core.add(sequence)
        return sequence

    def cancel(self, sequence: Sequence) -> None:
        self.core.end(sequence, FinishReason.CANCELLED)

    # --------------------------------------------------------------------------------------------------- steps

    def step(self) -> None:
        self.core.step()
        self.clock.now += 1.0
        self.check()

    def run(self) -> None:
        """Step until all work is done; fails when the engine stalls or runs on and on."""
        idle = 0
        # Each launched step computes a token at least, and the best sequence is never preempted, so at worst every
        # sequence is recomputed whole for each token of a better one.
        work = sum(len(s.prompt_ids) + s.max_new_tokens for s in self.sequences)
        bound = 100 + work * (1 + len(self.sequences))
        for _ in range(bound):
            if not self.core.has_work():
                break
            before = self.core.steps
            self.step()
            idle = 0 if self.core.steps > before else idle + 1
            assert idle <= MAX_IDLE_STEPS, "the engine has work and does nothing"
        else:
            raise AssertionError(f"not done after {bound} steps")
        self.check_all_gone()

    def check(self) -> None:
        """The books after a step."""
        core, scheduler = self.core, self.core.scheduler
        pending = core._pending
        in_flight = sum(s.in_flight for s in self.sequences)
        assert in_flight == (len(pending.sampled) if pending else 0)
        assert all(s.in_flight in (0, 1) for s in self.sequences)
        if pending is not None and pending.plan is not None:
            assert pending.plan.num_tokens == sum(pending.plan.lengths) <= self.config.max_num_batched_tokens
            assert len(pending.plan.sequences) <= self.config.max_num_seqs
        living = core.living()
        assert {s.number for s in living} == {
            s.number for s in self.sequences if s.status is not Status.FINISHED
        }
        core.allocator.check([s.blocks for s in living])
        running = scheduler.running
        assert all(s.status is Status.RUNNING and not s.finish_reason for s in running)
        assert running == ranked(running, self.config.min_bulk_seqs)
        rows = [s.row for s in running] + scheduler._free_rows
        assert sorted(rows) == list(range(self.config.max_num_seqs))
        waiting = [s for s in living if s.status is Status.WAITING]
        assert len(waiting) == scheduler.num_waiting
        assert all(not s.blocks and s.row == -1 for s in waiting)
        for s in running:
            assert s.num_computed <= s.num_total
            assert len(s.blocks) == -(-s.num_computed // self.config.block_size)
        for s in self.sequences:
            assert len(s.output_ids) <= s.max_new_tokens
            assert s.number in self.sink.ended or s.status is not Status.FINISHED

    def check_all_gone(self) -> None:
        """Nothing is left after the last request."""
        core = self.core
        core.check_idle()
        assert core.allocator.num_free == self.num_blocks
        assert core._pending is None
        assert sorted(core.scheduler._free_rows) == list(range(self.config.max_num_seqs))
        assert core.scheduler.num_waiting == 0
        assert not core._living
        assert set(self.sink.ended) == {s.number for s in self.sequences}
        assert all(s.in_flight == 0 and not s.blocks for s in self.sequences)
        assert all(slot.plan is None and not slot.sampled for slot in core.slots)


def ranked(running: list[Sequence], min_bulk: int) -> list[Sequence]:
    """In the order in which rows are scheduled: the bulk that is kept, the urgent, the other bulk."""
    order = sorted(running, key=lambda s: (s.priority, s.number))
    bulk = [s for s in order if s.priority >= BULK_PRIORITY]
    return bulk[:min_bulk] + [s for s in order if s.priority < BULK_PRIORITY] + bulk[min_bulk:]


def model_driver(
    loaded: LoadedModel,
    layers: list[LayerShape],
    *,
    num_blocks: int = 64,
    eos_ids: frozenset[int] = frozenset(),
    **config: object,
) -> Driver:
    """A driver around the real runner, on a cache that starts full of garbage."""

    def runner(made: EngineConfig) -> Runner:
        cache = KVCache(
            layers,
            num_blocks=num_blocks,
            block_size=made.block_size,
            dtype=loaded.dtype,
            device=loaded.device,
        )
        for tensor in (*cache.keys, *cache.values):
            tensor.fill_(1e3)  # whoever reads what was never written will notice
        return ModelRunner(
            ModuleForward(loaded.model, SdpaKernel()),
            cache,
            SamplingStage(loaded.vocab_size, loaded.device, max_num_seqs=made.max_num_seqs),
        )

    return Driver(
        runner, num_blocks=num_blocks, max_model_len=loaded.max_model_len, eos_ids=eos_ids, **config
    )
