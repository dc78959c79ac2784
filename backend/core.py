"""The step loop: plan, fill, launch, retire. No threads in here: whoever calls ``step`` is the engine thread."""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable
from typing import Protocol

from backend.api import FinishReason, RequestError, TokenLogprob, TokenmillError
from backend.blocks import BlockAllocator
from backend.rows import RowTable
from backend.runner import Runner
from backend.scheduler import Scheduler, StepPlan
from backend.sequence import Sequence, Status
from backend.slots import Slot, StepLayout
from backend.streams import Streams


class OutputSink(Protocol):
    """Where retired tokens and ended sequences go; must not block."""

    def token(self, sequence: Sequence, token_id: int, logprob: TokenLogprob | None) -> None:
        """A token of a sequence that streams or watches for stop strings."""

    def finish(self, sequence: Sequence, now: float) -> None:
        """A sequence has ended; its finish reason is set."""

    def fail(self, sequence: Sequence, error: TokenmillError) -> None:
        """A sequence has ended with an error of its own."""


class EngineCore:
    """Two slots, one plan at a time.

    While the device computes step N, ``step`` prepares step N+1 and then retires step N, whose tokens the launched
    step N+1 already carries on. ``sync`` retires each step at once; nothing else differs.
    """

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        allocator: BlockAllocator,
        rows: RowTable,
        slots: tuple[Slot, Slot],
        runner: Runner,
        streams: Streams,
        sink: OutputSink,
        block_size: int,
        sync: bool,
        clock: Callable[[], float] = time.monotonic,
        layout: Callable[[StepPlan], StepLayout | None] = lambda plan: None,
        plan_prefill: Callable[[Slot], None] = lambda slot: None,
    ) -> None:
        self.scheduler = scheduler
        self.allocator = allocator
        self._rows = rows
        self.slots = slots
        self._runner = runner
        self.streams = streams
        self._sink = sink
        self._block_size = block_size
        self._sync = sync
        self._clock = clock
        self._layout = layout  # what a plan is padded to; nothing where no graphs are replayed
        self._plan_prefill = plan_prefill  # sends what a prefill kernel wants planned, with the other inputs
        self._next = 0
        self._pending: Slot | None = None  # launched and not retired
        # Kept apart from the scheduler's lists, so that nobody is forgotten even if a fault leaves those half-changed.
        self._living: dict[int, Sequence] = {}
        self._deadlines: list[tuple[float, int]] = []  # a heap of (moment, sequence number)
        self.steps = 0
        self.generated_tokens = 0
        self.finished = 0
        self.failed = 0
        self.busy_s = 0.0
        self.prepare_s = 0.0

    # ---------------------------------------------------------------------------------------------- sequences

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence."""
        self._living[sequence.number] = sequence
        if sequence.deadline_at is not None:
            heapq.heappush(self._deadlines, (sequence.deadline_at, sequence.number))
        self.scheduler.add(sequence)

    def end(self, sequence: Sequence, reason: FinishReason, stop_reason: str | int | None = None) -> None:
        """End a sequence early with what it has; one that has ended already is left alone."""
        if sequence.status is not Status.FINISHED:
            self._finish(sequence, reason, stop_reason)

    def living(self) -> list[Sequence]:
        """Every sequence that has not ended."""
        return list(self._living.values())

    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return self._pending is not None or self.scheduler.has_work()

    # --------------------------------------------------------------------------------------------------- a step

    def step(self) -> None:
        """Prepare and launch the next step, then retire the one before it."""
        began = time.perf_counter()
        now = self._clock()
        self._expire(now)
        plan = self.scheduler.schedule(now)
        launched: Slot | None = None
        if plan is not None:
            launched = self.slots[self._next]
            self._next ^= 1
            launched.fill(plan, self._rows, self._block_size, self._layout(plan))
            self.prepare_s += time.perf_counter() - began
            self._launch(launched)
        if self._pending is not None:
            self._retire(self._pending)
        self._pending = launched
        if self._sync and launched is not None:
            self._retire(launched)
            self._pending = None

    def _launch(self, slot: Slot) -> None:
        with self.streams.h2d():
            slot.copy_in()
            self._plan_prefill(slot)
            slot.input_ready.record()
        with self.streams.compute():
            slot.input_ready.wait()
            slot.compute_start.record()
            self._runner.execute(slot, self._pending)
            slot.compute_end.record()
        with self.streams.d2h():
            slot.compute_end.wait()
            slot.copy_out()
            slot.output_ready.record()
        self.steps += 1

    def _retire(self, slot: Slot) -> None:
        """Take in a step's tokens. A sequence that has ended meanwhile was computed once too often: discarded."""
        slot.output_ready.synchronize()
        self.busy_s += slot.compute_end.seconds_since(slot.compute_start)
        tokens = slot.read_tokens()
        logprobs = slot.read_logprobs() if slot.num_logprobs >= 0 else None
        now = self._clock()
        for index, sequence in enumerate(slot.sampled):
            sequence.in_flight -= 1
            if sequence.status is Status.FINISHED:
                continue
            token = tokens[index]
            if token < 0:
                self._fail(sequence)
                continue
            sequence.output_ids.append(token)
            self.generated_tokens += 1
            if sequence.first_token_at is None:
                sequence.first_token_at = now
            entry = None
            if logprobs is not None and sequence.logprobs is not None:
                entry = _logprob(token, index, sequence.sampling.logprobs or 0, logprobs)
                sequence.logprobs.append(entry)
            if sequence.needs_text:
                self._sink.token(sequence, token, entry)
            if token in sequence.ending_ids and len(sequence.output_ids) > sequence.sampling.min_tokens:
                self._finish(sequence, FinishReason.STOP, token, now)
            elif len(sequence.output_ids) >= sequence.max_new_tokens:
                self._finish(sequence, FinishReason.LENGTH, None, now)
            elif sequence.status is Status.RUNNING:
                self.scheduler.register_outputs(sequence)
        slot.release()

    # ------------------------------------------------------------------------------------------------------ ends

    def _finish(
        self,
        sequence: Sequence,
        reason: FinishReason,
        stop_reason: str | int | None,
        now: float | None = None,
    ) -> None:
        self._take_out(sequence)
        sequence.finish_reason = reason
        sequence.stop_reason = stop_reason
        self.finished += 1
        self._sink.finish(sequence, self._clock() if now is None else now)

    def _fail(self, sequence: Sequence) -> None:
        self._take_out(sequence)
        self.failed += 1
        index = len(sequence.output_ids)
        self._sink.fail(
            sequence,
            RequestError(
                f"the model gave no usable logits for output token {index} (NaN or no finite value)",
                field="prompt",
                fix="Check logit_bias and the penalties; if they are sane, use a wider dtype",
            ),
        )

    def _take_out(self, sequence: Sequence) -> None:
        self.scheduler.finish(sequence)
        del self._living[sequence.number]
        if len(self._deadlines) > 2 * len(self._living) + 64:
            # Most of them have ended in time: neither memory nor a push grows without bound.
            self._deadlines = [entry for entry in self._deadlines if entry[1] in self._living]
            heapq.heapify(self._deadlines)

    def _expire(self, now: float) -> None:
        while self._deadlines and self._deadlines[0][0] <= now:
            sequence = self._living.get(heapq.heappop(self._deadlines)[1])
            if sequence is not None:
                self._finish(sequence, FinishReason.DEADLINE, None, now)

    def abandon(self) -> list[Sequence]:
        """After a fault: take out every sequence that has not ended, without trusting any of the books."""
        lost = self.living()
        self._living.clear()
        self._deadlines.clear()
        self.scheduler.abandon()
        for slot in self.slots:
            slot.abandon()
        self.failed += len(lost)
        return lost

    def check_idle(self) -> None:
        """Integrity after the last request: nothing held, nothing in flight.

        Raises:
            BlockError: blocks are missing.
            TokenmillError: a sequence is left.
        """
        if self.has_work() or self._living:
            raise TokenmillError(f"the engine is not idle: {len(self._living)} sequences are left")
        self.allocator.check([])


def _logprob(
    token: int, index: int, alternatives: int, output: tuple[list[float], list[list[int]], list[list[float]]]
) -> TokenLogprob:
    chosen, ids, values = output
    pairs = zip(ids[index][:alternatives], values[index][:alternatives], strict=True)
    return TokenLogprob(token, chosen[index], tuple(pair for pair in pairs if pair[0] >= 0))
